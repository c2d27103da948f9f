"""The checker of the fault tests finds all that the design allows clean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtask.kernel.document.status import RunStatus
from tests.chaos.selftests.scenes import Scene, verdict_on
from tests.chaos.selftests.story import Story

FAIL, CANCELED = RunStatus.FAIL, RunStatus.CANCELED


# --- what is legal ------------------------------------------------------------------------------------------------


def a_success(story: Story) -> None:
    story.done()


def a_delayed_task(story: Story) -> None:
    task_id = story.publish(delay=2.0)
    story.wait(2.0)
    story.finish(task_id, story.claim(task_id))


def failures_until_a_success(story: Story) -> None:
    task_id = story.publish("flaky", max_retries=3, retry_backoff=2.0)
    for _ in range(3):
        story.finish(task_id, story.claim(task_id), FAIL)
        story.wait(2.0)
    story.finish(task_id, story.claim(task_id))


def failures_until_the_limit(story: Story) -> None:
    task_id = story.publish("doomed", max_retries=1, retain_fail=3600)
    for _ in range(2):
        story.finish(task_id, story.claim(task_id), FAIL)
        story.wait(0.3)


def a_final_failure(story: Story) -> None:
    task_id = story.publish("doomed")
    story.finish(task_id, story.claim(task_id), FAIL, final=True)


def a_retry_that_the_handler_asked_for(story: Story) -> None:
    task_id = story.publish("flaky")
    story.finish(task_id, story.claim(task_id), CANCELED, note="raised", delay=0.5)
    story.wait(0.5)
    story.finish(task_id, story.claim(task_id, "w2"))


def a_hand_back(story: Story) -> None:
    task_id = story.publish("slow", max_retries=0)
    story.finish(task_id, story.claim(task_id), CANCELED)
    story.finish(task_id, story.claim(task_id, "w2"))


def a_rescue_after_pings(story: Story) -> None:
    task_id = story.publish("slow")
    run_id = story.claim(task_id)
    for _ in range(3):
        story.wait(1.0)
        story.ping(task_id, run_id)
    story.wait(4.2)
    story.finish(task_id, story.claim(task_id, "w2"))


def a_task_that_kills_its_worker_every_time(story: Story) -> None:
    task_id = story.publish("killer", max_retries=1)
    for worker_id in ("w1", "w2"):
        story.claim(task_id, worker_id)
        story.wait(4.0)
    story.settle(task_id)


def two_places(story: Story) -> None:
    task_id = story.publish("team", concurrent_worker_cnt=2)
    first, second = story.claim(task_id, "w1"), story.claim(task_id, "w2")
    story.finish(task_id, first)
    story.wait(4.5)
    third = story.claim(task_id, "w3")
    story.finish(task_id, third)
    assert story.run(task_id, second) is not None


def a_limit_for_each_worker(story: Story) -> None:
    task_id = story.publish(
        "team",
        concurrent_worker_cnt=2,
        specific_worker_ids=["w1", "w2"],
        retry_scope="worker",
        max_retries=1,
    )
    story.finish(task_id, story.claim(task_id, "w1"), FAIL)
    story.finish(task_id, story.claim(task_id, "w2"), FAIL)
    story.wait(0.3)
    story.finish(task_id, story.claim(task_id, "w1"), FAIL)
    story.finish(task_id, story.claim(task_id, "w2"))


def a_cancel_of_what_waits(story: Story) -> None:
    story.cancel(story.publish())


def a_cancel_of_what_runs(story: Story) -> None:
    task_id = story.publish("slow")
    run_id = story.claim(task_id)
    story.wait(1.0)
    story.cancel(task_id)
    story.ping(task_id, run_id)
    story.finish(task_id, run_id, CANCELED)


def a_cancel_that_comes_too_late(story: Story) -> None:
    task_id = story.publish("slow")
    run_id = story.claim(task_id)
    story.cancel(task_id)
    story.finish(task_id, run_id)


def a_cancel_whose_holder_has_died(story: Story) -> None:
    task_id = story.publish("slow")
    story.claim(task_id)
    story.cancel(task_id)
    story.wait(6.0)
    story.settle(task_id)


def a_retry_of_a_failed_task(story: Story) -> None:
    task_id = story.publish("flaky", max_retries=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(1.0)
    story.again(task_id)
    story.finish(task_id, story.claim(task_id))


def a_retry_of_a_canceled_task(story: Story) -> None:
    task_id = story.publish()
    story.cancel(task_id)
    story.wait(1.0)
    story.again(task_id)
    story.finish(task_id, story.claim(task_id))


def a_rerun_of_a_success(story: Story) -> None:
    task_id = story.done(retain_success=3600)
    story.again(task_id, "rerun")
    story.finish(task_id, story.claim(task_id))


def many_reruns(story: Story) -> None:
    task_id = story.done()
    for _ in range(25):
        story.again(task_id, "rerun")
        story.finish(task_id, story.claim(task_id))
        story.wait(1.0)


def more_failures_than_a_document_keeps(story: Story) -> None:
    task_id = story.publish("flaky", max_retries=-1)
    for _ in range(24):
        story.finish(task_id, story.claim(task_id), FAIL)
        story.wait(0.3)
    story.finish(task_id, story.claim(task_id))


def closed_runs_that_are_cleaned(story: Story) -> None:
    task_id = story.publish("doomed", max_retries=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(1.0)
    story.clean(task_id)
    story.finish(task_id, story.claim(task_id))
    story.wait(1.0)
    story.clean(task_id, success=True)
    story.finish(task_id, story.claim(task_id))


def an_oplog_whose_clock_lies_a_little_behind(story: Story) -> None:
    story.log_lag = 0.04
    story.done()
    story.log_lag = 0.0


def a_lapsed_run_that_is_cleaned(story: Story) -> None:
    task_id = story.publish("slow")
    story.claim(task_id)
    story.wait(5.0)
    story.clean(task_id)
    story.finish(task_id, story.claim(task_id, "w2"))


def options_that_change_while_it_runs(story: Story) -> None:
    task_id = story.publish("slow", concurrent_worker_cnt=2)
    first, second = story.claim(task_id, "w1"), story.claim(task_id, "w2")
    story.update_option(task_id, worker_timeout=8)
    story.wait(1.0)
    story.ping(task_id, first)
    story.finish(task_id, first)
    story.update_option(task_id, concurrent_worker_cnt=1)
    story.ping(task_id, second)
    story.finish(task_id, second)
    story.wait(1.0)
    story.update_option(task_id, retain_success=3600)


def a_removal_while_it_runs(story: Story) -> None:
    task_id = story.publish("slow", concurrent_worker_cnt=2)
    run_id = story.claim(task_id)
    story.wait(1.0)
    story.remove(task_id)
    story.note("cancelled", task_id, run_id)
    story.wait(1.0)
    story.publish_again(task_id)
    story.finish(task_id, story.claim(task_id))


def a_task_that_expired(story: Story) -> None:
    task_id = story.done(retain_success=1)
    story.wait(2.0)
    story.remove(task_id, is_asked=False)


def deposits(story: Story) -> None:
    story.done("deposit")
    story.done("deposit_plain")
    task_id = story.publish("deposit")
    story.claim(task_id)
    story.wait(4.1)
    story.deposit(task_id, story.claim(task_id, "w2"))


def a_deposit_begun_at_the_instant_of_its_claim(story: Story) -> None:
    task_id = story.publish("deposit")
    story.wait(0.02)
    story.deposit(task_id, story.claim(task_id))


def a_deposit_whose_worker_died_behind_its_commit(story: Story) -> None:
    task_id = story.publish("deposit")
    run_id = story.claim(task_id)
    story.note("written", task_id, run_id)
    story.effects.append({"task_id": task_id, "run_id": run_id, "worker_id": "w1"})
    story.finish(task_id, run_id, note=None)


def a_publish_that_was_never_answered(story: Story) -> None:
    story.call("publish", "quick:never", "unknown")
    task_id = story.publish(answer=None)
    story.call("publish", task_id, "kept")
    story.finish(task_id, story.claim(task_id))


def a_retry_that_was_never_answered(story: Story) -> None:
    task_id = story.publish("flaky", max_retries=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.call("retry", task_id, "unknown")
    story.wait(5.0)
    story.again(task_id)
    story.calls[-2:] = []
    story.finish(task_id, story.claim(task_id))


def a_claim_that_was_handed_back_unstarted(story: Story) -> None:
    task_id = story.publish()
    run_id = story.claim(task_id, starts=False)
    story.wait(3.0)
    story.finish(task_id, run_id, CANCELED, note=None)
    story.finish(task_id, story.claim(task_id, "w2"))


LEGAL: tuple[Scene, ...] = (
    a_success,
    a_delayed_task,
    failures_until_a_success,
    failures_until_the_limit,
    a_final_failure,
    a_retry_that_the_handler_asked_for,
    a_hand_back,
    a_rescue_after_pings,
    a_task_that_kills_its_worker_every_time,
    two_places,
    a_limit_for_each_worker,
    a_cancel_of_what_waits,
    a_cancel_of_what_runs,
    a_cancel_that_comes_too_late,
    a_cancel_whose_holder_has_died,
    a_retry_of_a_failed_task,
    a_retry_of_a_canceled_task,
    a_rerun_of_a_success,
    many_reruns,
    more_failures_than_a_document_keeps,
    closed_runs_that_are_cleaned,
    an_oplog_whose_clock_lies_a_little_behind,
    a_lapsed_run_that_is_cleaned,
    options_that_change_while_it_runs,
    a_removal_while_it_runs,
    a_task_that_expired,
    deposits,
    a_deposit_begun_at_the_instant_of_its_claim,
    a_deposit_whose_worker_died_behind_its_commit,
    a_publish_that_was_never_answered,
    a_retry_that_was_never_answered,
    a_claim_that_was_handed_back_unstarted,
)
#: Each takes as many writes as all others together.
LONG = (many_reruns, more_failures_than_a_document_keeps)


@pytest.mark.parametrize("scene", LEGAL, ids=lambda scene: scene.__name__)
def test_what_the_design_allows_is_clean(scene: Scene, story: Story, tmp_path: Path) -> None:
    scene(story)
    verdict = verdict_on(story, tmp_path)
    assert verdict.is_clean, verdict.describe()


def test_history_of_all_that_is_allowed_is_clean(story: Story, tmp_path: Path) -> None:
    for scene in LEGAL:
        if scene not in LONG:
            scene(story)
            story.wait(1.0)
    verdict = verdict_on(story, tmp_path)
    assert verdict.is_clean, verdict.describe()
    assert verdict.word == "CLEAN"
    json.dumps(verdict.as_dict())
