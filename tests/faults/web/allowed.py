"""The rules of the API that a JSON schema cannot say: schemathesis may send what breaks them.

schemathesis loads this module as its hooks. A request that fits the schema and is refused is a failure, except for
these reasons. Each is a part of a message with which mtask refuses it, so nothing else passes under its name.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import schemathesis

#: What the detail of a refusal matches, and why the schema cannot say it.
REASONS: dict[str, str] = {
    r"it has \d+ bytes|at most \d+ bytes|use at most \d+ bytes": "bounds count bytes of UTF-8, a schema characters",
    r"use non-empty printable text|holds a lone surrogate": "which characters are printable changes with Unicode",
    r"cursor: |use the next_cursor|is no token: ": "a cursor is what an earlier answer gave",
    r"plan: ": "a plan is what an earlier answer gave, signed",
    r"a bulk (cancel|retry|remove) takes tasks that are|a bulk change of all tasks": "it depends on the action",
    r"drop `?if_exists|leaves an existing task alone": "ways to gather exclude each other",
    r"max_wait|window keeps the first call|call_id (is|belongs)|set the start themselves": "they depend on each other",
    r"give key, too|give start_time or delay|retain_success_ms is shorter": "they depend on each other",
    r"worker_timeout_ms \(\d+\) must exceed ping_interval_ms": "one option bounds the other",
    r"is no step of the flow|names a dependency twice|was added already|in a circle": "steps name each other",
    r"these are \d+ values": "the values of all lookups are counted together",
    r"^when .*: |timezone belongs|^schedule .*: ": "a crontab, its zone and its bounds are computed",
    r"no MongoDB extended JSON|more than 64 bits|more than \d+ levels": "extended JSON has rules of its own",
    r"lies outside of the years|outside of the years 1 to 9999|year 0 is out|isoformat": "dates of other calendars",
    r"cannot be stored|its host or port cannot be read|it names no host": "what BSON and URLs can hold",
    r"each once|no query parameter": "a parameter is given twice",
    r"^The Idempotency-Key belongs to ": "it depends on the tasks that exist",
    r"If-Match: send one ETag": "the schema does say it; schemathesis also sends 0, which its pattern excludes",
}
#: The variable with the file that takes a line for each failure that was dropped: the reason and the detail.
DROPPED = "MTASK_FUZZ_DROPPED"


def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Drop the failure of a request that fits the schema and breaks another rule."""
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


def _kept(reason: str, detail: str) -> bool:
    """Count a failure that is dropped. Returns False: it is not kept."""
    if os.environ.get(DROPPED):
        with Path(os.environ[DROPPED]).open("a") as file:
            file.write(f"{reason}\t{detail!r}\n")
    return False
