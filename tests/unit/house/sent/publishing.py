"""What is sent to publish: once, again, many, by calls that gather, by schedules, and to tell ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import get_args

from mtask.errors import DuplicateKey
from mtask.features.callbacks import operations as callbacks
from mtask.features.callbacks import statements as owed
from mtask.features.gathering import publish as gathering
from mtask.features.gathering import statements as gathered
from mtask.features.gathering.publish import GatherPolicy
from mtask.features.schedules import operations as schedules
from mtask.features.schedules.operations import Firing, PageEnd
from mtask.features.schedules.rules import Pending, Plan, Schedule
from mtask.kernel.document.parts import OwedCallback
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.operation import server_time
from mtask.kernel.operations import publish as publishing
from mtask.kernel.operations import workers
from mtask.kernel.operations.publish import IfExists, Policy
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements import rounds
from tests.unit.house.sent.conversation import NOW, Written, told
from tests.unit.house.sent.parts import (
    DELAYED,
    FULL,
    LATER,
    PLAIN,
    TIMED,
    TWO,
    Document,
    stored,
)
from tests.unit.house.sent.parts import gathering as call

_ALL = [PLAIN, DELAYED, TIMED, FULL]
_MADE = Written(upserted_id="task:k")


def cases() -> dict[str, object]:
    """Return the cases, by name."""
    return {**_publishes(), **_gathers(), **_schedules(), **_callbacks()}


def _publishes() -> dict[str, object]:
    clean = Policy("update", clean_failed=True, clean_success=True, not_update_running=True)
    found: dict[str, object] = {
        f"publish {task.task_id}": told(publishing.publish(task, Policy()), _MADE) for task in _ALL
    }
    found |= {
        f"publish, if exists: {if_exists}": told(publishing.publish(PLAIN, Policy(if_exists)), ..., Written(1))
        if if_exists == "update"
        else told(publishing.publish(PLAIN, Policy(if_exists)))
        for if_exists in get_args(IfExists)
    }
    return found | {
        "publish that tells the time": told(
            publishing.publish(replace(PLAIN, tells_time=True), Policy()), {"task_state": {"create_time": NOW}}
        ),
        "publish after a race": told(publishing.publish(PLAIN, Policy()), DuplicateKey("k"), _MADE),
        "publish of a tenant that exists": told(
            publishing.publish(FULL, clean), ..., [{"_id": FULL.task_id, "tenant": "acme"}], Written(1)
        ),
        "publish anew, unless it runs": told(publishing.publish(DELAYED, clean), ..., ..., {"_id": "task:d"}),
        "publish anew after failures": told(publishing.publish(PLAIN, Policy(clean_failed=True)), ..., Written(1)),
        "publish anew after successes": told(publishing.publish(PLAIN, Policy(clean_success=True)), ..., Written(1)),
        "republish at an instant": requests.republish(
            replacement=None, start=NOW, clean_failed=True, clean_success=False, now=NOW
        ),
        "publish many": told(publishing.publish_many(_ALL, Policy(), in_session=False)),
        "publish many in a session": told(publishing.publish_many(_ALL, Policy(), in_session=True), {0, 1, 2, 3}),
        "publish many that exist": told(
            publishing.publish_many([PLAIN, PLAIN], Policy("update"), in_session=False),
            ...,
            {0},
            Written(1),
            Written(1),
        ),
    }


def _gathers() -> dict[str, object]:
    latest = GatherPolicy("latest", timedelta(seconds=5), timedelta(minutes=1), "call")
    collecting = GatherPolicy("calls", timedelta(seconds=5), None, "call")
    again = GatherPolicy("latest", call_id="call")
    verdict = {"is_in": True, "has_flow": False, "is_of_kind": True}
    asked = {"_id": "task:k", "last": NOW, "now": NOW, "is_untouched": False}
    found: dict[str, object] = {}
    for name, policy in {"latest": latest, "calls": collecting, "again": again}.items():
        found |= {
            f"gather {name}, first": told(gathering.publish([PLAIN], policy, in_session=False), [], ..., _MADE),
            f"gather {name}, more": told(gathering.publish([PLAIN], policy, in_session=False), [asked], verdict),
            f"gather {name}, untouched": told(
                gathering.publish([PLAIN], policy, in_session=False),
                [{**asked, "is_untouched": True}],
                {"_id": "task:k"},
                verdict,
            ),
            f"gather {name}, in a session": told(
                gathering.publish([FULL], policy, in_session=True), ..., Written(), verdict
            ),
        }
    for kind in ("latest", "calls"):
        one = call(kind=kind, start=LATER, debounce_ms=None, max_wait_ms=9_000)
        found[f"gathered {kind}, without an id of its own"] = [
            gathered.add(one),
            gathered.add_untouched(one),
            gathered.reopen(one),
            gathered.verdict(one),
            list(gathered.first_round(one)),
        ]
        found[f"gathered {kind}, at an instant"] = [
            gathered.add(one, NOW),
            gathered.reopen(one, NOW),
            gathered.first_round(one, NOW),
            gathered.asked_time(NOW),
            rounds.open_next(NOW),
        ]
    hour = timedelta(hours=1)
    return found | {
        "gather several": told(
            gathering.publish([PLAIN, FULL], latest, in_session=False), [asked], ..., verdict, _MADE
        ),
        "once a window": told(gathering.publish_once_a_window(PLAIN, hour), ..., Written(), {"_id": "task:k"}),
        "once a window, full": told(gathering.publish_each_once_a_window([FULL], hour), ..., Written(1)),
    }


def _schedules() -> dict[str, object]:
    schedule = Schedule.model_validate(
        {
            "_id": "nightly",
            "name": "task",
            "queue": "default",
            "params": {"a": 1},
            "task_option": PLAIN.task_option,
            "trigger": {"kind": "interval", "interval_ms": 60_000},
            "overlap": "skip",
            "create_time": NOW,
            "update_time": NOW,
            "revision": 4,
            "schedule_state": {"next_fire_time": NOW, "last_task_id": "task:k"},
            "schema_version": 1,
        }
    )
    plan = Plan((NOW,), LATER, False)
    pending = Pending(fire_time=NOW, start_time=LATER)
    firings = [Firing(pending, PLAIN), Firing(pending, DELAYED)]
    document: Document = {"_id": "nightly", "tenant": "acme", "queue": "mail", "revision": 3}
    return {
        "schedule put": told(schedules.put("nightly", lambda *_: {**document}, must_be_new=True)),
        "schedule changed": told(
            schedules.change("nightly", lambda *_: {**document}),
            *[...] * 4,
            document,
            Written(1),
        ),
        "schedule time": told(server_time()),
        "schedule read": told(schedules.get("nightly")),
        "schedule tenant": told(schedules.tenant_of("nightly")),
        "schedules": told(schedules.every()),
        "schedule removed": told(schedules.remove("nightly")),
        "schedules coming": told(schedules.coming(60_000, 10)),
        "schedules coming, declared": told(schedules.coming(60_000, 10, ["nightly"], ["weekly"])),
        "schedules coming, second page": told(
            schedules.coming(60_000, 10, ["nightly"], ["weekly"], PageEnd((NOW, "nightly"), "monthly"))
        ),
        "schedule task finished": told(schedules.is_finished("task:k")),
        "schedule advanced": told(schedules.advance(schedule, plan, firings), None, Written(1)),
        "schedule published": told(schedules.publish("nightly", firings)),
        "schedule published, full": told(schedules.publish("nightly", [Firing(pending, FULL)])),
    }


def _callbacks() -> dict[str, object]:
    end = OwedCallback.model_validate(
        {"number": 1, "status": "FAIL", "time": NOW, "url": "https://example.org", "secret": "default"}
    ).model_dump()
    row = stored(callback_owed=[end, {**end, "number": 2, "tenant": "acme", "secret": None}])
    return {
        "callbacks: workers": told(workers.without_field("callback")),
        "callbacks: fields": told(publishing.check_fields([FULL])),
        "callbacks owed for long": told(callbacks.owed_for(timedelta(minutes=5), 10)),
        "callbacks under way": told(callbacks.deliveries(TaskStatus.RUNNING, 10)),
        "callbacks due": told(callbacks.deliveries(TaskStatus.INIT, 10, is_due=True)),
        "callbacks: any": told(callbacks.is_any()),
        "callbacks found": told(callbacks.find()),
        "callbacks found besides": told(callbacks.find(TWO)),
        "callbacks settled": told(callbacks.settle_all(TWO), [row, stored("bad:b", callback_owed=7)]),
        "callbacks crossed off at an instant": [owed.cross_off({"task:k": (NOW, [1, 2])}, NOW), owed.forget(NOW)],
    }
