"""What is sent about flows: to publish and settle them, to add children, and to read, change and end whole flows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from bson import Timestamp

from mtask.errors import OperationFailed
from mtask.features.flows import change as operating
from mtask.features.flows import doctor, retention
from mtask.features.flows import publish as publishing
from mtask.features.flows import read as reading
from mtask.features.flows import settle as settling
from mtask.features.flows import statements as flows
from mtask.features.flows.publish import NewFlow, NewStep
from mtask.features.flows.rules import Verdict
from mtask.kernel.statements import outbox
from tests.unit.house.sent.conversation import NOW, Written, told
from tests.unit.house.sent.parts import (
    CHILD,
    DELAYED,
    FULL,
    NEXT_TASK,
    ONE,
    PLAIN,
    TIMED,
    TWO,
    Document,
    cursor,
    stored,
)

_AT = Timestamp(1_893_553_445, 1)
_SECOND = timedelta(seconds=1)
_OWN = (settling.RELAY,)


def cases() -> dict[str, object]:
    """Return the cases, by name."""
    return {**_publishes(), **_settles(), **_reads(), **_changes(), **_statements()}


def _step(task_id: str, status: str, flow: Mapping[str, Any] | None = None, **fields: Any) -> Document:
    part = {"key": "flow", "step": "a", "after": [], "on_failed": "cancel", **(flow or {})}
    return stored(task_id, status, flow=part, **fields)


def _awaited(task_id: str, status: str, **flow: Any) -> Document:
    return {"_id": task_id, "task_state": {"status": status}, "owes": False, "flow": flow}


def _moment(*rows: Document) -> Document:
    return cursor(*rows, atClusterTime=_AT)


def _publishes() -> dict[str, object]:
    steps = [
        NewStep(PLAIN, "a", [], "cancel"),
        NewStep(DELAYED, "b", ["task:k"], "fail"),
        NewStep(TIMED, "c", ["task:k"], "run"),
        NewStep(replace(PLAIN, task_id="task:z"), "z", [], "cancel"),
    ]
    head = {"flow": {"head": "flow"}, "task_state": {"create_time": NOW}}
    made: list[Any] = [[], [], [], ..., head]
    alone = NewFlow("flow", [NewStep(FULL, "a", [], "cancel")])
    return {
        "flow published": told(publishing.publish(NewFlow("flow", steps, fail_fast=True)), *made),
        "flow of one step published": told(publishing.publish(alone), *made),
        "flow that exists": told(publishing.publish(alone), [_step(FULL.task_id, "INIT", tenant="acme")]),
        "flow children: room": told(publishing.make_room("flow", "task:k", [CHILD]), [], Written(1)),
        "flow children added": told(
            publishing.add("task:k", "token-0", [CHILD], lambda: True, _OWN),
            [],
            {"owed_tasks": [{"_id": CHILD.task_id}], "owed_since": NOW},
        ),
        "flow children, if a change is to be settled": told(
            publishing.add("task:k", "token-0", [CHILD], lambda: True, _OWN),
            [],
            None,
            {"task_state": {"cancel_requested": False}},
            ...,
            {"owed_tasks": [], "owed_since": NOW},
            {0},
        ),
        "flow children, lost lease": told(
            publishing.add("task:k", "token-0", [CHILD], lambda: True, _OWN), [], None, None
        ),
        "flow descendants": told(publishing.descendants(TWO)),
        "flow results": told(publishing.results(TWO)),
        "flow result of a run": told(publishing.result_of_run("task:k", "token-0")),
        "flow parents": told(publishing.parents(TWO)),
        "flow room": told(publishing.take("flow", 2), Written(), None, 7, set(), Written(1)),
        "flow room, counted anew": told(
            publishing.take("flow", 2), Written(), {"is_old": True, "task_cnt": 9_999}, 7, Written(1), Written(1)
        ),
        "flow room for a next task": told(publishing.take(CHILD.fixed["flow"]["key"], 1), Written(1)),
        "owed tasks": [
            flows.add([CHILD, NEXT_TASK], NOW),
            outbox.go_on(TWO, [CHILD, NEXT_TASK], NOW),
            outbox.go_on(ONE, [NEXT_TASK]),
        ],
    }


def _settles() -> dict[str, object]:
    waits = {"after": ["task:k"], "held_by": "task:k"}
    waiting = _step("other:l", "WAITING", waits)
    two_waiting = [waiting, _step("other:m", "WAITING", {"after": ["task:n"], "held_by": "task:n"}, owed_since=NOW)]
    ended = _step("task:k", "SUCCESS", owed_since=NOW)
    failed = _step("task:k", "FAIL", {"fail_fast": True, "held_by": "task:j"}, owed_since=NOW)
    owes_tasks = {"owed_tasks": [{"_id": CHILD.task_id, "task_state": {"create_time": NOW}}]}
    alone = stored("task:k", "SUCCESS", owed_since=NOW)
    return {
        "flow decides: releases": told(
            settling.decide(["other:l"]), _moment(waiting), _moment(_awaited("task:k", "SUCCESS")), Written(1)
        ),
        "flow decides: releases by the general form": told(
            settling.decide(["other:l", "other:m"]),
            _moment(*two_waiting),
            _moment(_awaited("task:k", "SUCCESS"), _awaited("task:n", "SUCCESS")),
            Written(1),
            Written(1),
            has_sets=True,
        ),
        "flow decides: cancels": told(
            settling.decide(["other:l"]), _moment(waiting), _moment(_awaited("task:k", "FAIL")), Written(1)
        ),
        "flow decides: fails": told(
            settling.decide(["other:l"]),
            _moment(_step("other:l", "WAITING", {**waits, "on_failed": "fail"})),
            _moment(_awaited("task:k", "CANCELED")),
            Written(1),
        ),
        "flow decides: moves": told(
            settling.decide(["other:l", "other:m"]),
            _moment(
                _step("other:l", "WAITING", {"after": ["task:k", "task:n"], "held_by": "task:k"}),
                _step("other:m", "WAITING", {"after": ["task:o", "task:p"], "held_by": "task:o"}),
            ),
            _moment(
                *(_awaited(task_id, "SUCCESS") for task_id in ("task:k", "task:o")),
                *(_awaited(task_id, "INIT") for task_id in ("task:n", "task:p")),
            ),
            Written(2),
            cursor(
                {"_id": "other:l", "flow": {"held_by": "task:n"}, "owed_since": NOW},
                {"_id": "other:m", "flow": {"held_by": "task:n"}, "owed_since": NOW + _SECOND},
            ),
            Written(1),
            has_sets=True,
        ),
        "flow decides: watches": told(
            settling.decide(["other:l"]), _moment(waiting), _moment(_awaited("task:k", "INIT", unwatched=True))
        ),
        "flow decides with descendants": told(
            settling.decide(["other:l"]),
            _moment(waiting),
            _moment(_awaited("task:k", "SUCCESS", has_children=True)),
            _moment(_awaited("task:c", "INIT", ancestors=["task:k"])),
        ),
        "flow decides with descendants that have succeeded": told(
            settling.decide(["other:l"]), _moment(waiting), _moment(_awaited("task:k", "SUCCESS", has_children=True))
        ),
        "flow decides on too much": told(
            reading.look(["other:l", "other:m"]), {"cursor": {"id": 7, "firstBatch": [], "atClusterTime": _AT}}
        ),
        "flow settles the end of a step": told(
            settling.settle(ONE),
            cursor(ended),
            cursor({"_id": "other:l", "task_state": {"status": "WAITING"}, "flow": waits}),
        ),
        "flow settles a failure": told(
            settling.settle(ONE),
            cursor(failed),
            cursor(_step("task:j", "INIT")),
            Written(1),
            cursor({"_id": "other:l"}),
            Written(1),
        ),
        "flow settles a step that is open again": told(
            settling.settle(ONE),
            cursor(_step("task:k", "INIT", owed_since=NOW)),
            {"_id": "task:h", "flow": {"end_time": NOW}},
            Written(1),
            [{"_id": "task:h"}],
        ),
        "flow settles a step of a flow without a head": told(
            settling.settle(ONE), cursor(_step("task:k", "INIT", owed_since=NOW)), None, {"_id": "task:h"}
        ),
        "flow settles a task that owes tasks": told(
            settling.settle(ONE),
            cursor({**failed, **owes_tasks}),
            {0},
            [{"_id": CHILD.task_id, "task_state": {"create_time": None}}],
            ...,
            failed,
        ),
        "flow settles tasks of none": told(
            settling.settle(TWO), cursor(alone, {**alone, "_id": "other:l"}), Written(2)
        ),
        "flow settles all": told(settling.settle_all(TWO)),
        "flow change of tasks apart": told(
            settling.change(flows.waiting({"task:k": None}), flows.disown()),
            OperationFailed("malformed", 2),
            OperationFailed("malformed", 2),
            {"_id": "task:k"},
        ),
    }


def _reads() -> dict[str, object]:
    return {
        "flow steps": told(reading.steps("flow")),
        "flow, first open step": told(reading.first_open("flow")),
        "flow counts": told(reading.counts(["flow", "other"])),
        "flow heads": told(reading.heads(None, 10)),
        "flow heads by prefix": told(reading.heads("fl.o\0w", 10)),
        "flow, for whom a step waits": told(
            reading.waits("other:l", 3), _step("other:l", "WAITING", {"after": TWO, "held_by": "task:k"})
        ),
        "flow: any": told(reading.is_any()),
        "flow owed": told(reading.owed(_SECOND)),
        "flow owed besides": told(reading.owed(_SECOND, 10, TWO)),
        "flow orphans": told(reading.orphans(), [{"_id": "task:gone"}]),
        "flow without holder": told(doctor.without_holder(10)),
        "flow with an ended holder": told(doctor.with_ended_holder(10), [{"_id": "other:l"}]),
        "flow held though released": told(doctor.held_though_released(10)),
        "flow owed for long": told(doctor.owed_for(_SECOND, 10)),
        "flow without head": told(doctor.headless(10)),
    }


def _changes() -> dict[str, object]:
    return {
        "flow canceled": told(
            operating.cancel("flow", _OWN, everything=True), {"_id": "x"}, [{"_id": "task:k"}], Written(1)
        ),
        "flow canceled but the clean-up": told(
            operating.cancel("flow", _OWN, everything=False),
            {"_id": "x"},
            [{"_id": "task:k"}],
            Written(1),
            [],
            [{"_id": "other:l"}],
            cursor(),
            [{"_id": "other:m"}],
        ),
        "flow steps canceled": told(
            operating.cancel_steps("flow", _OWN, {"queue": "mail"}, {"queue": {"$in": ["mail"]}}),
            [{"_id": "task:k"}],
            Written(1),
            [],
            cursor(),
            [{"_id": "other:m"}],
        ),
        "flow retried": told(
            operating.retry("flow", _OWN),
            {"_id": "x"},
            [
                _step("task:k", "FAIL"),
                _step("other:l", "CANCELED", {"after": ["task:k"]}),
                _step("task:c", "FAIL", {"after": ["task:k"], "on_failed": "run"}),
            ],
            _moment(_awaited("task:k", "FAIL")),
        ),
        "flow steps retried": told(operating.retry_steps("flow", _OWN, {"queue": "mail"}), [_step("task:k", "FAIL")]),
        "flow dependencies": told(
            operating.check_dependencies("other:l"), [_step("other:l", "FAIL", {"after": ["task:k"]})]
        ),
        "flows ended": told(
            retention.end_flows(), [_step("task:k", "SUCCESS")], [{"_id": "task:k"}, {"_id": "other:l"}]
        ),
        "flows ended, and one opened again": told(
            retention.end_flows(),
            [_step("task:k", "SUCCESS")],
            [{"_id": "task:k"}],
            ...,
            ...,
            None,
            None,
            {"_id": "other:l"},
            ...,
            [{"_id": "task:k"}],
        ),
    }


def _statements() -> dict[str, object]:
    """Return what depends on more than one parameter, and statements at an instant, as tests send them."""
    marks, culprits = {"task:k": NOW, "other:l": NOW + _SECOND}, {"task:k": "a:1", "other:l": "a:2"}
    return {
        "flow filters": [
            flows.ended_by(culprits),
            flows.ended_by({"task:k": "a:1"}),
            flows.owed_as_read(marks, dict.fromkeys(marks, "FAIL")),
            flows.waiting({"task:k": None, "other:l": "a:1"}),
            flows.read_at(NOW, 2),
            flows.watched(TWO),
        ],
        "flow ends": [flows.end(outcome, culprits) for outcome in (Verdict.CANCEL, Verdict.FAIL)],
        "flow pipelines at an instant": [
            flows.move(culprits, NOW),
            flows.cross_off_alone(NOW),
            flows.watch(NOW),
            flows.release_unbegun(NOW),
            flows.release(NOW),
            flows.reopen(NOW),
            flows.hold_again(NOW),
            flows.fail_fast("a:1", NOW),
            flows.begin_retention(NOW),
            flows.end_flow(NOW),
        ],
    }
