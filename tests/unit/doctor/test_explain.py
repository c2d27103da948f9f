"""What a task waits for, and why; and what the doctor makes of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask.doctor import checks as doctor
from mtask.doctor.backlog import DueGroup, due_tasks
from mtask.doctor.explain import waits_for
from mtask.errors import AccessDenied, DatabaseUnavailable
from mtask.features.controls.rules import Control
from mtask.kernel.document.options import option_of
from mtask.kernel.document.task import Task, WorkerDocument
from mtask.kernel.driver import roles as rights
from mtask.kernel.driver.operation import Operation
from mtask.search.findings import Level, rough
from tests import build

NOW = datetime(2030, 1, 1, tzinfo=UTC)
EVERYTHING = sorted({action for allowed in rights.PRIVILEGES.values() for each in allowed.values() for action in each})


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def worker(worker_id: str = "w1", **other: Any) -> WorkerDocument:
    made = build.worker(worker_id, after(-1), heartbeat_expire_time=after(10), concurrency=2)
    return WorkerDocument.model_validate(made | other)


def run(worker_id: str, status: str, **other: Any) -> dict[str, Any]:
    return build.run(status, after(-5), after(30), run_id=f"r-{worker_id}", worker_id=worker_id) | other


def task(*runs: dict[str, Any], status: str = "INIT", state: dict[str, Any] | None = None, **options: Any) -> Task:
    made = {"status": status, "create_time": after(-60)} | (state or {})
    option = option_of({}, options).model_dump()
    return Task.model_validate(build.task("a:b", *runs, time=NOW, option=option, state=made))


def codes(of: Task, *workers: WorkerDocument) -> list[str]:
    return [reason.code for reason in waits_for(of, workers, NOW)]


def test_a_finished_task_waits_for_nothing() -> None:
    assert codes(task(status="SUCCESS"), worker()) == []


def test_a_task_that_is_not_due_says_until_when() -> None:
    reasons = waits_for(task(state={"start_time": after(60)}), [worker()], NOW)
    assert [(reason.code, reason.until) for reason in reasons] == [("not_due", after(60))]


def test_a_retry_delay_says_until_when() -> None:
    failed = run("w1", "FAIL", fail_time=after(-1), retry_time=after(9))
    reasons = waits_for(task(failed, state={"failed_cnt": 1}), [worker()], NOW)
    assert [(reason.code, reason.until) for reason in reasons] == [("retry_delay", after(9))]


def test_a_due_task_without_any_worker_waits_for_one() -> None:
    assert codes(task()) == ["no_worker"]
    assert codes(task(), worker(status="stopped")) == ["no_worker"]
    assert codes(task(), worker(heartbeat_expire_time=after(-1))) == ["no_worker"]


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ({"queues": ["mail"]}, "queue_unserved"),
        ({"names": ["b"]}, "name_unserved"),
        ({"concurrency": 0}, "workers_paused"),
        ({"control": {"concurrency": 0}}, "workers_paused"),
        ({"running_cnt": 2}, "workers_busy"),
        ({"status": "stopping"}, "workers_stopping"),
    ],
)
def test_what_keeps_the_only_worker_from_it_is_told(other: dict[str, Any], code: str) -> None:
    assert codes(task(), worker(**other)) == [code]


def test_absent_named_workers_are_named() -> None:
    reasons = waits_for(task(specific_worker_ids=["w8", "w9"]), [worker()], NOW)
    assert [reason.code for reason in reasons] == ["named_absent"]
    assert "w8, w9" in reasons[0].message


def test_a_second_success_needs_another_worker() -> None:
    done = run("w1", "SUCCESS", success_time=after(-1))
    assert codes(task(done, concurrent_worker_cnt=2), worker()) == ["other_worker_needed"]


def test_taken_places_are_told() -> None:
    held = [run("w1", "RUNNING"), run("w2", "RUNNING")]
    found = codes(task(*held, status="RUNNING", concurrent_worker_cnt=2), worker(), worker("w2"), worker("w3"))
    assert found == ["running", "running", "places_taken"]


def test_a_silent_holder_is_told_from_a_live_one() -> None:
    assert codes(task(run("w1", "RUNNING"), status="RUNNING"), worker()) == ["running"]
    assert codes(task(run("w1", "RUNNING"), status="RUNNING")) == ["holder_silent"]


def test_a_requested_cancel_waits_for_the_holder() -> None:
    held = task(run("w1", "RUNNING"), status="RUNNING", state={"cancel_requested": True})
    assert codes(held, worker()) == ["cancel_requested"]


def test_a_lapsed_run_waits_to_be_preempted() -> None:
    lapsed = task(run("w1", "RUNNING", ping_expire_time=after(-1)), status="RUNNING")
    assert codes(lapsed, worker())[0] == "lapsed"


def test_a_used_up_limit_waits_to_be_settled() -> None:
    lapsed = run("w1", "RUNNING", ping_expire_time=after(-1))
    assert codes(task(lapsed, status="RUNNING", max_retries=0), worker()) == ["to_be_settled"]


def test_a_task_that_could_be_taken_is_due_and_later_conspicuous() -> None:
    assert codes(task(state={"create_time": after(-1)}), worker()) == ["due"]
    assert codes(task(), worker()) == ["not_taken"]


def group(**other: Any) -> DueGroup:
    made: dict[str, Any] = {
        "queue": "default",
        "name": "a",
        "worker_ids": [],
        "count": 3,
        "oldest": after(-60),
        "task_id": "a:b",
    }
    return DueGroup(**(made | other))


@pytest.mark.parametrize(
    ("of", "workers", "expected"),
    [
        (group(), [], "no worker is live"),
        (group(worker_ids=["w9"]), [worker()], "no such worker is live"),
        (group(queue="mail"), [worker()], "serves the queue"),
        (group(name="b"), [worker()], "no handler for it in w1"),
        (group(), [worker(concurrency=0)], "paused"),
    ],
)
def test_the_doctor_says_why_due_tasks_wait_and_what_to_do(
    of: DueGroup, workers: list[WorkerDocument], expected: str
) -> None:
    for patience, level in ((timedelta(minutes=5), Level.WARN), (timedelta(seconds=30), Level.FAIL)):
        found = due_tasks([of], workers, NOW, patience)
        assert [finding.level for finding in found] == [level]
        assert expected in found[0].message
        assert found[0].remedy


def test_the_doctor_is_content_with_due_tasks_that_have_a_worker() -> None:
    assert due_tasks([group()], [worker()], NOW, timedelta(minutes=5)) == []


def answers(operation: Operation[list[doctor.Finding]], *given: Any) -> list[doctor.Finding]:
    """Run an operation on answers that no server gave."""
    try:
        next(operation)
        for answer in given:
            if isinstance(answer, Exception):
                operation.throw(answer)
            else:
                operation.send(answer)
    except StopIteration as stop:
        found: list[doctor.Finding] = stop.value
        return found
    raise AssertionError("it asks for more")


def test_a_standalone_server_is_a_fail_with_the_two_commands() -> None:
    hello = {"localTime": datetime.now(UTC), "isWritablePrimary": True}
    found = answers(doctor._server(), hello, hello, {"version": "7.0.1"})
    finding = next(finding for finding in found if finding.check == "replica set")
    assert finding.level is Level.FAIL
    assert finding.remedy is not None
    assert "--replSet" in finding.remedy
    assert "rs.initiate()" in finding.remedy


def test_a_secondary_names_the_primary() -> None:
    hello = {
        "localTime": datetime.now(UTC),
        "setName": "rs0",
        "me": "b:1",
        "primary": "a:1",
        "isWritablePrimary": False,
    }
    found = answers(doctor._server(), hello, hello, {"version": "7.0.1"})
    assert any(finding.level is Level.FAIL and "a:1 is" in finding.message for finding in found)


def test_a_server_that_is_too_old_is_a_fail() -> None:
    hello = {"localTime": datetime.now(UTC), "setName": "rs0", "isWritablePrimary": True}
    found = answers(doctor._server(), hello, hello, {"version": "5.0.9"})
    assert [finding.level for finding in found if finding.check == "version"] == [Level.FAIL]


@pytest.mark.parametrize(("offset", "level"), [(0, Level.OK), (1.5, Level.OK), (600, Level.WARN), (-600, Level.WARN)])
def test_a_clock_that_is_off_is_worth_knowing(offset: float, level: Level) -> None:
    finding = doctor._clock(after(offset - 0.01), NOW, after(offset + 0.01))
    assert finding.level is level
    assert finding.fields["offset_ms"] == round(offset * 1000)


@pytest.mark.parametrize(
    ("granted", "may", "lacking"),
    [
        ([{"resource": {"anyResource": True}, "actions": EVERYTHING}], list(rights.ROLES), None),
        (rights.privileges("shop", "publisher"), ["publisher"], None),
        (rights.privileges("shop", "worker"), ["publisher", "worker"], None),
        (rights.privileges("shop", "operator"), ["publisher", "operator"], None),
        (rights.privileges("shop", "deployer"), ["deployer"], None),
        (
            rights.privileges("shop", "publisher")[:2],
            [],
            [
                *("find on workers", "listIndexes on workers", "insert on actions", "listIndexes on actions"),
                *("find on logs", "listIndexes on logs"),
                *("find on handlers", "listIndexes on handlers"),
            ],
        ),
        (
            [{"resource": {"db": "", "collection": ""}, "actions": EVERYTHING}],
            ["publisher", "worker", "deployer"],
            None,
        ),
        (rights.privileges("another", "worker"), [], rights.lacking("publisher", "shop", [])),
    ],
)
def test_the_roles_that_a_user_has_the_rights_of_are_told_and_for_one_without_any_what_is_lacking(
    granted: list[dict[str, Any]], may: list[str], lacking: list[str] | None
) -> None:
    users = [{"user": "ann", "db": "admin"}]
    told = {"authInfo": {"authenticatedUsers": users, "authenticatedUserPrivileges": granted}}
    (found,) = answers(doctor._rights("shop"), told, None, None)
    assert found.fields.get("roles", []) == may
    assert found.level is (Level.OK if may else Level.FAIL)
    assert found.fields.get("lacking") == lacking


def test_a_user_who_may_not_ask_for_the_status_is_told_who_may() -> None:
    refused = AccessDenied("not authorized", is_unauthorized=True, need="serverStatus", roles=["mtask_shop_operator"])
    (found,) = answers(doctor._guarded("server status", doctor._status()), refused)
    assert (found.level, found.remedy) == (Level.WARN, "Ask as a user with the role mtask_shop_operator.")


def test_a_check_without_an_answer_does_not_keep_the_others_from_it() -> None:
    found = answers(doctor._guarded("documents", doctor._documents()), DatabaseUnavailable("too slow"))
    assert [finding.level for finding in found] == [Level.WARN]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.25, "250 ms"), (12, "12 s"), (200, "3.3 min"), (18_000, "5.0 h"), (300_000, "3 days")]
)
def test_rough_lengths_of_time(seconds: float, expected: str) -> None:
    assert rough(seconds) == expected


def control(kind: str, target: str, **fields: Any) -> Control:
    made = {"_id": f"{kind}:{target}", "kind": kind, "target": target, "revision": 1, "update_time": NOW}
    return Control.model_validate({**made, "schema_version": 1, **fields})


@pytest.mark.parametrize(
    ("holds", "code", "words"),
    [
        (
            [control("tenant", "acme", paused=True)],
            "paused",
            "the tenant 'acme' is paused: `mtask resume` with --tenant",
        ),
        ([control("queue", "default", fair=True)], "turn", "the tenant 'acme' may have more tasks before this one"),
        ([control("tenant", "beta", paused=True, limit={"concurrency": 5})], "not_taken", "it could be taken"),
        ([control("queue", "other", fair=True)], "not_taken", "it could be taken"),
    ],
)
def test_task_tells_what_its_tenant_waits_for(holds: list[Control], code: str, words: str) -> None:
    found = task().model_copy(update={"tenant": "acme", "key": "acme:k", "id": "a:acme:k"})
    reasons = waits_for(found, [worker()], NOW, holds)
    assert reasons[0].code == code
    assert words in reasons[0].message
