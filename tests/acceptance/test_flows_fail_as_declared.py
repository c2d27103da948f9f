"""Failure policies, retries, fail_fast, cancels and removals in flows, with real workers.

The tests share two workers. Each test has a flow of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mtask import Client, Flow, FlowState, TaskRunning
from mtask.kernel.driver.stores import SyncStore
from mtask.local import ReplicaSet
from mtask.search.findings import Level
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, eventually
from tests.security import accounts, is_secure
from tests.workers import Stage, open_stage


@pytest.fixture(scope="module")
def stage(
    mongo_server: ReplicaSet, module_store: SyncStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """Give all tests of this file one database and two workers."""
    folder, database = tmp_path_factory.mktemp("flows"), module_store.database.name
    users = accounts(mongo_server, database) if is_secure() else None
    with open_stage(mongo_server.uri, database, folder, users) as opened:
        opened.start_all(["w1", "w2"])
        yield opened


def statuses(found: FlowState) -> dict[str, str]:
    return {step.step: step.status for step in found.steps}


def ended(client: Client, key: str) -> FlowState:
    """Wait for the flow's end, and return the flow."""
    found = client.wait_flow(key, timeout=PATIENCE)
    assert found.is_ended
    return found


def assert_in_order(found: FlowState) -> None:
    """Check that no step began before the steps on which it depends had ended, by the server's clock."""
    ends = {step.task_id: step.finish_time for step in found.steps}
    for step in found.steps:
        for end in (ends[other] for other in step.after):
            if step.run is not None:
                assert end is not None
                assert step.release_time is not None
                assert step.run.claim_time is not None
                assert end <= step.release_time <= step.run.claim_time


def test_each_policy_does_what_it_says(stage: Stage) -> None:
    flow = Flow("policies", max_retries=0)
    bad, good = flow.add("bad", "fail"), flow.add("good", "noop", {"value": 1})
    canceled = flow.add("canceled", "noop", after=[bad, good])
    flow.add("canceled-too", "noop", after=[canceled])
    failed = flow.add("failed", "noop", after=[bad], on_failed="fail")
    flow.add("failed-too", "noop", after=[failed], on_failed="fail")
    runs = flow.add("runs", "noop", after=[canceled, failed], on_failed="run")
    flow.add("after-runs", "noop", after=[runs])
    flow.add("beside", "noop", after=[good])
    stage.client.publish_flow(flow)
    found = ended(stage.client, "policies")
    assert_in_order(found)
    assert statuses(found) == {
        "bad": "FAIL", "good": "SUCCESS", "canceled": "CANCELED", "canceled-too": "CANCELED", "failed": "FAIL",
        "failed-too": "FAIL", "runs": "SUCCESS", "after-runs": "SUCCESS", "beside": "SUCCESS",
    }  # fmt: skip
    assert "no luck" in (found["bad"].reason or "")
    for step in ("canceled", "failed"):
        assert found[step].held_by == "fail:policies/bad"
        assert "fail:policies/bad" in (found[step].reason or "")
    assert found["canceled-too"].held_by == "noop:policies/canceled"


def test_a_dependency_with_retries_left_has_not_ended(stage: Stage) -> None:
    flow = Flow("retries", max_retries=2, retry_delay=0)
    shaky = flow.add("shaky", "fail_times", {"times": 2})
    flow.add("next", "noop", after=[shaky])
    stage.client.publish_flow(flow)
    found = ended(stage.client, "retries")
    assert statuses(found) == {"shaky": "SUCCESS", "next": "SUCCESS"}
    assert found["shaky"].run is not None
    assert found["shaky"].run.attempt == 3


def test_a_retry_opens_exactly_what_the_failure_canceled(stage: Stage) -> None:
    flow = Flow("retried", max_retries=0)
    shaky, other = flow.add("shaky", "fail_times", {"times": 1}), flow.add("other", "fail")
    after_shaky = flow.add("after-shaky", "noop", after=[shaky])
    flow.add("deep", "noop", after=[after_shaky])
    flow.add("after-other", "noop", after=[other])
    held = flow.add("held", "hold", {"gate": stage.gate("retried")})
    flow.add("by-hand", "noop", after=[held])
    flow.add("clean", "noop", after=[shaky], on_failed="run")
    stage.client.publish_flow(flow)
    stage.client.cancel("noop", "retried/by-hand")
    stage.open_gate("retried")
    before = ended(stage.client, "retried")
    assert before.counts == {"SUCCESS": 2, "FAIL": 2, "CANCELED": 4}
    stage.client.retry("fail_times", "retried/shaky")
    after = ended(stage.client, "retried")
    assert statuses(after) == {
        "shaky": "SUCCESS", "after-shaky": "SUCCESS", "deep": "SUCCESS", "clean": "SUCCESS", "held": "SUCCESS",
        "other": "FAIL", "after-other": "CANCELED", "by-hand": "CANCELED",
    }  # fmt: skip
    unchanged = ("clean", "held", "other", "after-other", "by-hand")
    assert [after[step].finish_time for step in unchanged] == [before[step].finish_time for step in unchanged]
    stage.client.retry_flow("retried")
    last = ended(stage.client, "retried")
    assert last.counts == {"SUCCESS": 6, "FAIL": 1, "CANCELED": 1}
    assert statuses(last)["by-hand"] == "SUCCESS"


def test_fail_fast_cancels_what_is_open(stage: Stage) -> None:
    flow = Flow("fast", fail_fast=True, max_retries=0)
    running = flow.add("running", "hold", {"gate": stage.gate("never")})
    flow.add("after-running", "noop", after=[running])
    flow.add("later", "noop", delay=3600)
    bad = flow.add("bad", "fail", after=[flow.add("gate", "hold", {"gate": stage.gate("fast")})])
    flow.add("clean", "noop", after=[bad], on_failed="run")
    stage.client.publish_flow(flow)
    stage.wait_run("hold:fast/running")
    stage.open_gate("fast")
    found = ended(stage.client, "fast")
    assert_in_order(found)
    assert statuses(found) == {
        "running": "CANCELED", "after-running": "CANCELED", "later": "CANCELED", "gate": "SUCCESS", "bad": "FAIL",
        "clean": "SUCCESS",
    }  # fmt: skip
    assert found["later"].held_by == "fail:fast/bad"
    assert stage.events.all("cancelled", task_id="hold:fast/running")


def test_a_cancel_ends_running_steps_and_leaves_the_clean_up(stage: Stage, report: Report) -> None:
    flow = Flow("canceled")
    held = [flow.add(f"held-{number}", "hold", {"gate": stage.gate("never")}) for number in range(3)]
    after = flow.add("after", "noop", after=held)
    flow.add("clean", "noop", after=[after], on_failed="run")
    stage.client.publish_flow(flow)
    for number in range(3):
        stage.wait_run(f"hold:canceled/held-{number}")
    assert len(stage.client.cancel_flow("canceled").task_ids) == 4
    found = ended(stage.client, "canceled")
    assert_in_order(found)
    assert found.counts == {"SUCCESS": 1, "CANCELED": 4}
    assert found["clean"].status == "SUCCESS"
    assert {noted.task_id for noted in stage.events.all("cancelled")} >= {f"hold:canceled/held-{n}" for n in range(3)}
    asked, last = found["after"].finish_time, max(step.finish_time for step in found.steps if step.finish_time)
    assert asked is not None
    report("canceled flow with running steps ends after, ms", round((last - asked).total_seconds() * 1000))


def test_a_removed_dependency_counts_as_canceled(stage: Stage) -> None:
    flow = Flow("removed")
    gone, held = flow.add("gone", "noop", delay=3600), flow.add("held", "hold", {"gate": stage.gate("removed")})
    flow.add("after", "noop", after=[gone, held])
    flow.add("clean", "noop", after=[gone, held], on_failed="run")
    stage.client.publish_flow(flow)
    stage.wait_run("hold:removed/held")
    other = Flow("removed-running")
    other.add("deaf", "hold_deaf", {"gate": stage.gate("deaf")})
    stage.client.publish_flow(other)
    stage.wait_run("hold_deaf:removed-running/deaf")
    with pytest.raises(TaskRunning):
        stage.client.remove("hold_deaf", "removed-running/deaf")
    stage.open_gate("deaf")
    assert stage.client.remove("noop", "removed/gone")
    assert statuses(stage.client.flow("removed"))["after"] == "WAITING"
    stage.open_gate("removed")
    found = ended(stage.client, "removed")
    assert statuses(found) == {"held": "SUCCESS", "after": "CANCELED", "clean": "SUCCESS"}
    ended(stage.client, "removed-running")


def test_none_of_these_flows_worries_the_doctor(stage: Stage) -> None:
    eventually(
        lambda: not [f for f in stage.client.diagnose() if f.check == "flows" and f.level is Level.FAIL],
        PATIENCE,
        "the doctor finds no flow that cannot end",
    )
    listed = {row.key for row in stage.client.flows(limit=0)}
    assert {"policies", "retries", "retried", "fast", "canceled", "removed-running"} <= listed
