"""The rules of the API that a JSON schema cannot say: schemathesis may send what breaks them, and mostly does not.

schemathesis loads this module as its hooks. A request that fits the schema and is refused is a failure, except for
these reasons. Each is a part of a message with which mtask refuses it, so nothing else passes under its name.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import schemathesis

from tests.faults.web.texts import without_own_error

#: What the detail of a refusal matches, and why the schema cannot say it.
REASONS: dict[str, str] = {
    r"it has \d+ bytes|: at most \d+ bytes|use at most \d+ bytes": "bounds count bytes of UTF-8, a schema characters",
    r"use non-empty printable text|holds a lone surrogate": "which characters are printable changes with Unicode",
    r"cursor: |use the next_cursor|is no token: ": "a cursor is what an earlier answer gave",
    r"plan: ": "a plan is what an earlier answer gave, signed",
    r"a bulk (cancel|retry|remove) takes tasks that are|a bulk change of all tasks": "it depends on the action",
    r"drop `?if_exists|leaves an existing task alone": "ways to gather exclude each other",
    r"max_wait|window keeps the first call|call_id (is|belongs)|set the start themselves": "they depend on each other",
    r"give key, too|give start_time or delay|retain_success_ms is shorter": "they depend on each other",
    r"worker_timeout_ms \(\d+\) must exceed ping_interval_ms": "one option bounds another",
    r"are more than the \d+ that fit|specific_worker_ids allows only": "one option bounds another",
    r"give for or until, not both|expires is of one task": "they depend on each other",
    r"^params of '.*': give a mapping": "what the params of a handler are, its own schema says",
    r"is a task of mtask's own": "one name is mtask's own",
    r"is no step of the flow|names a dependency twice|was added already|in a circle": "steps name each other",
    r"these are \d+ values": "the values of all lookups are counted together",
    r"^when .*: |timezone belongs|^schedule .*: ": "a crontab, its zone and its bounds are computed",
    r"no MongoDB extended JSON|more than 64 bits|more than \d+ levels": "extended JSON has rules of its own",
    r"lies outside of the years|outside of the years 1 to 9999|year 0 is out|isoformat": "dates of other calendars",
    r"cannot be stored|its host or port cannot be read|it names no host": "what BSON and URLs can hold",
    r"each once": "a parameter is given twice",
    r"the name of a secret has no slash": "a secret of a tenant has no slash, another one may",
    r"queue .*: a comma separates entries": "an answer shows a queue that a foreign writer has named",
    r"^The Idempotency-Key belongs to ": "it depends on the tasks that exist",
    r"If-Match: send one ETag": "schemathesis also sends 0, which the pattern in the schema excludes",
}
#: The variable with the secrets that no answer may hold, separated by commas.
SECRETS = "MTASK_FUZZ_SECRETS"
#: The variable with the file that takes a line for each failure that was dropped: the reason and the detail.
DROPPED = "MTASK_FUZZ_DROPPED"


def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Drop the failure of a request that fits the schema and breaks another rule."""
    if type(failure).__name__ == "AcceptedNegativeData" and case.path == "/v1/tasks:batch":
        # A batch is answered item by item: each item that breaks the schema has its own problem.
        return _kept("a batch is answered item by item", "") if b'"problem":{"type":' in response.content else True
    if type(failure).__name__ != "RejectedPositiveData":
        return True
    try:
        problem = json.loads(response.content)
        kind, detail = str(problem["type"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        return True
    if kind == "/v1/problems/precondition-failed":
        return _kept("an ETag is what an earlier answer gave", detail)
    for pattern, reason in REASONS.items():
        if response.status_code == 422 and re.search(pattern, detail):
            return _kept(reason, detail)
    return True


schemathesis.hook(filter_failure)


def nothing_inner(context: Any, response: Any, case: Any) -> None:
    """Check that an answer holds no secret, no traceback and nothing that MongoDB or its driver says."""
    text = without_own_error(response.content.decode("utf-8", "replace"))
    found = [sign for sign in ("Traceback (most", "pymongo", "errmsg", "codeName", "mongodb://") if sign in text]
    assert not found, f"inner text {found} in an answer"
    assert not any(one and one in text for one in os.environ.get(SECRETS, "").split(",")), "a secret in an answer"


schemathesis.check(nothing_inner)


# --- requests that keep the rules -------------------------------------------------------------------------

_IF_THERE = ("if_exists", "clean_failed", "clean_success", "not_update_running")
_GATHERING = ("debounce", "max_wait", "collect", "if_running", "call_id")


def map_case(context: Any, case: Any) -> Any:
    """Let most requests that fit the schema keep the other rules, too: else they never come further than these."""
    is_valid = case.meta is not None and case.meta.generation.mode.is_positive
    if is_valid and isinstance(case.body, dict) and random.random() < 0.8:
        case.body = mended(copy.deepcopy(case.body), case.path)
    return case


schemathesis.hook(map_case)


def mended(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a body that keeps the rules between its members."""
    _mend_gathering(body)
    known: list[str] = []
    for each in (body, *_dicts(body.get("tasks")), *_dicts(body.get("steps"))):
        if each.get("start_time") is not None:
            each.pop("delay", None)
        option = each.get("options")
        if isinstance(option, dict) and {"ping_interval_ms", "worker_timeout_ms"} & option.keys():
            for name in ("ping_interval_ms", "worker_timeout_ms"):
                option.pop(name, None)
    steps = {str(step.get("step")): step for step in _dicts(body.get("steps"))}
    for name, step in steps.items():
        step["after"] = [one for one in known if one in step.get("after", ())] or known[-1:]
        known.append(name)
    if steps:
        body["steps"] = list(steps.values())
    if isinstance(body.get("filter"), dict) and "/bulk/" in path:
        body["filter"].pop("status", None)
        body["filter"].setdefault("queue", ["none"])
    return body


def _mend_gathering(body: dict[str, Any]) -> None:
    gathers = body.get("debounce") is not None or body.get("collect") is True or body.get("if_running") == "again"
    if body.get("window") is not None:
        dropped: tuple[str, ...] = (*_IF_THERE, *_GATHERING)
    elif gathers:
        dropped = (*_IF_THERE, "max_wait", "start_time", "delay")
    else:
        dropped = ("max_wait", "call_id", *(_IF_THERE[1:3] if body.get("if_exists") == "reject" else ()))
    for name in dropped:
        body.pop(name, None)
    if "name" in body and (gathers or body.get("window") is not None):
        body["key"] = body.get("key") or "of-calls"


def _dicts(several: Any) -> list[dict[str, Any]]:
    return [one for one in several if isinstance(one, dict)] if isinstance(several, list) else []


def _kept(reason: str, detail: str) -> bool:
    """Count a failure that is dropped. Returns False: it is not kept."""
    if os.environ.get(DROPPED):
        with Path(os.environ[DROPPED]).open("a") as file:
            file.write(f"{reason}\t{detail!r}\n")
    return False
