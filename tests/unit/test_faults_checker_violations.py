"""The checker names each violation as what it is: histories that are good but for one thing."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mtask.model.status import RunStatus
from mtask.store import expressions as x
from mtask.store import pipelines
from tests.faults.checker import check
from tests.faults.checks.story import Story, instant
from tests.faults.checks.verdict import KINDS, Kind
from tests.faults.history import History
from tests.mongo import Client

FAIL, CANCELED, SUCCESS = RunStatus.FAIL, RunStatus.CANCELED, RunStatus.SUCCESS
Scene = Callable[[Story], None]
SCENES: dict[Scene, set[Kind]] = {}


def violates(*kinds: Kind) -> Callable[[Scene], Scene]:
    """Register a scene that is wrong in these ways, and in no other."""

    def register(scene: Scene) -> Scene:
        SCENES[scene] = set(kinds)
        return scene

    return register


@pytest.fixture(scope="module")
def database(mongo_session_client: Client) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    yield name
    mongo_session_client.drop_database(name)


@pytest.fixture
def story(mongo_session_client: Client, database: str) -> Story:
    story = Story(mongo_session_client[database][uuid.uuid4().hex])
    story.done()
    return story


def change_run(story: Story, task_id: str, place: int = 0, **fields: Any) -> None:
    """Change a run in the document, and nothing else."""
    runs = story.document(task_id)["task_state"]["worker_states"]
    runs[place].update(fields)
    story.set(task_id, task_state__worker_states=runs)


def rewrite(story: Story, task_id: str, runs: list[dict[str, Any]], failed_cnt: int = 0) -> None:
    """Replace the runs, and derive: an engine that follows the rules, and writes what it should not."""
    change = {"task_state.worker_states": x.literal(runs), "task_state.failed_cnt": failed_cnt}
    story.apply(task_id, [{"$set": change}, *pipelines.derive(instant(story.now))])


def running(story: Story, name: str = "slow", **options: Any) -> tuple[str, str]:
    """Publish a task and claim it."""
    task_id = story.publish(name, **options)
    story.wait(0.1)
    return task_id, story.claim(task_id)


# --- lost ---------------------------------------------------------------------------------------------------------


@violates("lost")
def acknowledged_task_that_nobody_ever_saw(story: Story) -> None:
    story.call("publish", "quick:nowhere", "created")


@violates("lost")
def kept_task_that_is_not_there(story: Story) -> None:
    task_id = story.done()
    story.remove(task_id)
    story.wait(5.0)
    story.call("publish", task_id, "kept")


@violates("lost")
def task_that_never_ends(story: Story) -> None:
    story.publish()


@violates("lost")
def unacknowledged_task_that_never_ends(story: Story) -> None:
    story.publish(answer="unknown")


@violates("lost")
def task_whose_run_never_ends(story: Story) -> None:
    running(story)


@violates("lost")
def task_that_is_gone_without_a_removal(story: Story) -> None:
    task_id = story.done()
    story.tasks.delete_one({"_id": task_id})


@violates("lost")
def removal_that_nobody_asked_for(story: Story) -> None:
    story.remove(story.done(), is_asked=False)


@violates("lost")
def removal_before_it_was_asked_for(story: Story) -> None:
    task_id = story.done()
    story.remove(task_id, is_asked=False)
    story.wait(5.0)
    story.call("remove", task_id, "unknown")


@violates("lost")
def expiry_before_its_time(story: Story) -> None:
    task_id = story.done(retain_success_ms=60_000)
    story.wait(30.0)
    story.remove(task_id, is_asked=False)


@violates("lost")
def retry_that_was_acknowledged_and_never_written(story: Story) -> None:
    task_id = story.publish("doomed", max_unexpected_retries=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(5.0)
    story.call("retry", task_id, "done")


@violates("lost")
def removal_that_was_acknowledged_and_never_done(story: Story) -> None:
    task_id = story.done()
    story.wait(5.0)
    story.call("remove", task_id, "done")


# --- over_held ----------------------------------------------------------------------------------------------------


@violates("over_held")
def claim_of_a_task_that_is_held(story: Story) -> None:
    task_id, first = running(story)
    second = story.force(task_id, "w2")
    story.finish(task_id, first, CANCELED)
    story.finish(task_id, second)


@violates("over_held")
def claim_beyond_the_places(story: Story) -> None:
    task_id, first = running(story, concurrent_worker_cnt=2)
    second, third = story.claim(task_id, "w2"), story.force(task_id, "w3")
    story.finish(task_id, third, CANCELED)
    story.finish(task_id, second)
    story.finish(task_id, first)


@violates("over_held")
def second_place_of_one_worker(story: Story) -> None:
    task_id, first = running(story, concurrent_worker_cnt=2)
    second = story.force(task_id, "w1")
    story.finish(task_id, second, CANCELED)
    story.finish(task_id, first)
    story.finish(task_id, story.claim(task_id, "w2"))


@violates("over_held")
def claim_one_millisecond_before_the_lease_ends(story: Story) -> None:
    task_id, _ = running(story)
    story.wait(3.999)
    second = story.force(task_id, "w2")
    story.wait(0.001)
    story.settle(task_id)
    story.finish(task_id, second)


@violates("over_held")
def timeout_before_the_lease_ends(story: Story) -> None:
    task_id, _ = running(story)
    story.wait(2.0)
    runs = story.document(task_id)["task_state"]["worker_states"]
    runs[0].update(status="TIMEOUT", fail_time=instant(story.now))
    rewrite(story, task_id, runs, failed_cnt=1)
    story.finish(task_id, story.claim(task_id, "w2"))


@violates("over_held")
def claim_by_a_worker_that_is_not_named(story: Story) -> None:
    task_id = story.publish(specific_worker_ids=["w2", "w3"])
    story.finish(task_id, story.force(task_id, "w1"))


@violates("over_held")
def claim_before_the_start_time(story: Story) -> None:
    task_id = story.publish(delay=10.0)
    story.wait(9.0)
    story.finish(task_id, story.force(task_id))


@violates("over_held")
def claim_before_the_retry_time(story: Story) -> None:
    task_id = story.publish("flaky", unexpected_retry_delay_ms=5000)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(4.0)
    story.finish(task_id, story.force(task_id))


@violates("over_held")
def claim_of_a_task_whose_end_was_asked_for(story: Story) -> None:
    task_id, first = running(story, concurrent_worker_cnt=2)
    story.cancel(task_id)
    second = story.force(task_id, "w2")
    story.finish(task_id, second, CANCELED)
    story.finish(task_id, first, CANCELED)


@violates("over_held")
def lease_that_is_longer_than_asked_for(story: Story) -> None:
    task_id = story.publish()
    story.finish(task_id, story.force(task_id, ping_expire_time=instant(story.now + 60.0)))


@violates("over_held")
def ping_that_makes_the_lease_too_long(story: Story) -> None:
    task_id, run_id = running(story)
    story.wait(1.0)
    story.ping(task_id, run_id, lease=60.0)
    story.finish(task_id, run_id)


# --- second_success -----------------------------------------------------------------------------------------------


@violates("second_success")
def two_successes_of_one_worker(story: Story) -> None:
    task_id, first = running(story, "team", concurrent_worker_cnt=2)
    story.finish(task_id, first)
    story.finish(task_id, story.force(task_id, "w1"))
    story.finish(task_id, story.claim(task_id, "w2"))


@violates("second_success", "over_held")
def more_successes_than_places(story: Story) -> None:
    task_id, first = running(story)
    second = story.force(task_id, "w2")
    story.finish(task_id, first)
    story.finish(task_id, second)


@violates("second_success")
def claim_after_the_success(story: Story) -> None:
    task_id = story.done()
    story.wait(1.0)
    story.finish(task_id, story.force(task_id, "w2"), CANCELED)


@violates("second_success")
def final_task_that_is_opened_again(story: Story) -> None:
    task_id = story.publish("doomed", max_unexpected_retries=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(5.0)
    story.apply(task_id, pipelines.run_again(everything=False, now=instant(story.now)))
    story.finish(task_id, story.claim(task_id))


@violates("second_success")
def final_task_that_is_opened_before_it_was_asked_for(story: Story) -> None:
    task_id = story.done()
    story.wait(5.0)
    story.apply(task_id, pipelines.run_again(everything=True, now=instant(story.now)))
    story.finish(task_id, story.claim(task_id))
    story.wait(5.0)
    story.again(task_id, "rerun")
    story.finish(task_id, story.claim(task_id))


@violates("second_success")
def final_task_that_is_opened_long_after_the_refusal(story: Story) -> None:
    task_id = story.done()
    story.call("rerun", task_id, "refused")
    story.wait(5.0)
    story.apply(task_id, pipelines.run_again(everything=True, now=instant(story.now)))
    story.finish(task_id, story.claim(task_id))


@violates("second_success")
def success_that_turns_into_a_failure(story: Story) -> None:
    task_id = story.done()
    story.wait(5.0)
    story.set(task_id, task_state__status="FAIL")


# --- stale_results ------------------------------------------------------------------------------------------------


@violates("stale_results")
def success_of_a_run_that_had_timed_out(story: Story) -> None:
    task_id, first = running(story)
    story.wait(4.1)
    story.note("end", task_id, first)
    second = story.claim(task_id, "w2")
    runs = story.document(task_id)["task_state"]["worker_states"]
    runs[0] |= {"status": "SUCCESS", "success_time": instant(story.now)}
    rewrite(story, task_id, runs)
    story.finish(task_id, second, CANCELED)


@violates("stale_results")
def result_written_into_a_closed_run(story: Story) -> None:
    task_id, run_id = running(story, max_unexpected_retries=5)
    story.finish(task_id, run_id, FAIL)
    story.wait(1.0)
    change_run(story, task_id, 0, fail_reason="another")
    story.finish(task_id, story.claim(task_id))


@violates("stale_results")
def lease_of_a_closed_run_that_is_moved(story: Story) -> None:
    task_id, run_id = running(story)
    story.finish(task_id, run_id, CANCELED)
    change_run(story, task_id, 0, ping_expire_time=instant(story.now + 60))
    story.finish(task_id, story.claim(task_id))


def late(story: Story, seconds: float) -> tuple[str, str]:
    """Have a run that lapsed so long ago, and that nobody has closed."""
    task_id, run_id = running(story)
    story.wait(4.0 + seconds)
    return task_id, run_id


def finish_late(story: Story, status: RunStatus, seconds: float) -> None:
    """Finish a run after its lease had lapsed, as an engine without the fence would."""
    task_id, run_id = late(story, seconds)
    story.note("end" if status is SUCCESS else "raised", task_id, run_id)
    now = instant(story.now)
    runs = story.document(task_id)["task_state"]["worker_states"]
    runs[0] |= {"status": status.value, **({"success_time": now} if status is SUCCESS else {"fail_time": now})}
    if status is not SUCCESS:
        runs[0] |= {"retry_time": instant(story.now + 0.2), "fail_reason": "late"}
    rewrite(story, task_id, runs, failed_cnt=int(status is FAIL))
    if status is not SUCCESS:
        story.wait(0.3)
        story.finish(task_id, story.claim(task_id, "w2"))


@violates("stale_results")
def success_at_the_very_end_of_the_lease(story: Story) -> None:
    finish_late(story, SUCCESS, 0.0)


@violates("stale_results")
def success_after_the_lease(story: Story) -> None:
    finish_late(story, SUCCESS, 2.0)


@violates("stale_results")
def failure_after_the_lease(story: Story) -> None:
    finish_late(story, FAIL, 0.5)


@violates("stale_results")
def hand_back_after_the_lease(story: Story) -> None:
    finish_late(story, CANCELED, 0.5)


@violates("stale_results")
def ping_that_brings_a_lapsed_lease_back(story: Story) -> None:
    task_id, run_id = late(story, 0.5)
    runs = story.document(task_id)["task_state"]["worker_states"]
    runs[0]["ping_expire_time"] = instant(story.now + 4.0)
    rewrite(story, task_id, runs)
    story.finish(task_id, run_id)


@violates("stale_results")
def success_whose_handler_never_ended(story: Story) -> None:
    task_id, run_id = running(story)
    story.finish(task_id, run_id, note=None)


@violates("stale_results")
def success_whose_handler_raised(story: Story) -> None:
    task_id, run_id = running(story)
    story.finish(task_id, run_id, note="raised")


@violates("stale_results")
def success_that_is_older_than_its_handlers_end(story: Story) -> None:
    task_id, run_id = running(story)
    story.finish(task_id, run_id, note=None)
    story.wait(1.0)
    story.note("end", task_id, run_id)


@violates("stale_results")
def plain_success_that_was_only_written(story: Story) -> None:
    task_id, run_id = running(story)
    story.finish(task_id, run_id, note="written")


@violates("stale_results")
def run_id_of_two_tasks(story: Story) -> None:
    first, second = story.publish(), story.publish()
    run_id = story.claim(first)
    story.finish(first, run_id, CANCELED)
    story.finish(first, story.claim(first))
    story.number += 1
    story.force(second, run_id=run_id)
    story.notes.pop()
    story.finish(second, run_id, CANCELED)
    story.finish(second, story.claim(second))


@violates("stale_results")
def closed_run_that_vanishes(story: Story) -> None:
    task_id, run_id = running(story)
    story.finish(task_id, run_id, CANCELED)
    rewrite(story, task_id, [])
    story.finish(task_id, story.claim(task_id))


@violates("stale_results")
def running_run_that_vanishes(story: Story) -> None:
    task_id, _ = running(story)
    rewrite(story, task_id, [])
    story.finish(task_id, story.claim(task_id, "w2"))


@violates("stale_results")
def success_of_a_run_that_was_never_running(story: Story) -> None:
    task_id = story.publish()
    run_id = story.force(task_id, status="SUCCESS", success_time=instant(story.now))
    story.notes[-1] = replace(story.notes[-1], at=story.now - 0.1)
    story.note("end", task_id, run_id)


@violates("stale_results")
def run_of_another_worker_under_the_same_run_id(story: Story) -> None:
    task_id, run_id = running(story)
    change_run(story, task_id, 0, worker_id="w2")
    change_run(story, task_id, 0, worker_id="w1")
    story.finish(task_id, run_id)


# --- over_tried ---------------------------------------------------------------------------------------------------


@violates("over_tried", "wrong_fields")
def claim_beyond_the_limit_since_a_failure_was_forgotten(story: Story) -> None:
    task_id, run_id = running(story, "doomed", max_unexpected_retries=1)
    story.finish(task_id, run_id, FAIL)
    story.wait(0.3)
    story.set(task_id, task_state__failed_cnt=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(0.3)
    story.finish(task_id, story.claim(task_id), FAIL)


@violates("over_tried")
def attempt_out_of_order(story: Story) -> None:
    task_id = story.publish()
    story.finish(task_id, story.force(task_id, attempt=3))


@violates("over_tried")
def attempt_that_is_counted_twice(story: Story) -> None:
    task_id, run_id = running(story)
    story.finish(task_id, run_id, CANCELED)
    story.finish(task_id, story.force(task_id, attempt=1))


@violates("over_tried")
def claim_after_a_final_failure(story: Story) -> None:
    task_id, first = running(story, concurrent_worker_cnt=2)
    second = story.claim(task_id, "w2")
    story.finish(task_id, first, FAIL, final=True)
    story.wait(0.3)
    third = story.force(task_id, "w3")
    story.finish(task_id, second, CANCELED)
    story.finish(task_id, third, CANCELED)


@violates("over_tried")
def claim_beside_a_live_run_when_the_limit_is_used_up(story: Story) -> None:
    task_id, first = running(story, concurrent_worker_cnt=2, max_unexpected_retries=0)
    second = story.claim(task_id, "w2")
    story.finish(task_id, first, FAIL)
    story.wait(0.3)
    third = story.force(task_id, "w3")
    story.finish(task_id, second, CANCELED)
    story.finish(task_id, third, CANCELED)


@violates("over_tried")
def claim_when_a_lapsed_run_has_used_the_limit_up(story: Story) -> None:
    task_id, _ = running(story, concurrent_worker_cnt=2, max_unexpected_retries=0)
    story.wait(1.0)
    second = story.claim(task_id, "w2")
    story.wait(3.1)
    third = story.force(task_id, "w3")
    story.finish(task_id, second, CANCELED)
    story.finish(task_id, third, CANCELED)


@violates("over_tried")
def claim_by_a_worker_that_has_used_up_its_own_limit(story: Story) -> None:
    names = ["w1", "w2"]
    task_id = story.publish("team", specific_worker_ids=names, retry_scope="worker", max_unexpected_retries=0)
    story.finish(task_id, story.claim(task_id, "w1"), FAIL)
    story.wait(0.3)
    story.finish(task_id, story.force(task_id, "w1"), CANCELED)
    story.finish(task_id, story.claim(task_id, "w2"))


@violates("over_tried")
def handler_that_begins_twice(story: Story) -> None:
    task_id, run_id = running(story)
    story.note("start", task_id, run_id)
    story.finish(task_id, run_id)


# --- wrong_effects ------------------------------------------------------------------------------------------------


@violates("wrong_effects")
def deposit_without_its_effect(story: Story) -> None:
    story.done("deposit")
    story.effects.clear()


@violates("wrong_effects")
def effect_that_was_written_twice(story: Story) -> None:
    story.done("deposit_plain")
    story.effects *= 2


@violates("wrong_effects")
def effect_of_a_run_that_timed_out(story: Story) -> None:
    task_id, run_id = running(story, "deposit")
    story.effects.append({"task_id": task_id, "run_id": run_id, "worker_id": "w1"})
    story.wait(4.1)
    story.deposit(task_id, story.claim(task_id, "w2"))


@violates("wrong_effects")
def effect_of_nobody(story: Story) -> None:
    story.effects.append({"task_id": "deposit:none", "run_id": "none", "worker_id": "w1"})


@violates("wrong_effects")
def effect_of_another_handler(story: Story) -> None:
    task_id, run_id = running(story)
    story.effects.append({"task_id": task_id, "run_id": run_id, "worker_id": "w1"})
    story.finish(task_id, run_id)


@violates("wrong_effects")
def effect_under_another_workers_name(story: Story) -> None:
    story.done("deposit")
    story.effects[-1]["worker_id"] = "w9"


# --- wrong_fields -------------------------------------------------------------------------------------------------


@violates("wrong_fields")
def status_that_is_not_derived(story: Story) -> None:
    task_id, run_id = running(story)
    story.set(task_id, task_state__status="INIT")
    story.finish(task_id, run_id)


@violates("wrong_fields")
def preemption_time_that_is_a_millisecond_off(story: Story) -> None:
    task_id, run_id = running(story)
    off = story.document(task_id)["task_state"]["next_preempt_time"] + timedelta(milliseconds=1)
    story.set(task_id, task_state__next_preempt_time=off)
    story.finish(task_id, run_id)


@violates("wrong_fields")
def new_task_that_is_due_at_another_time(story: Story) -> None:
    task_id = story.publish(delay=2.0)
    version = story.versions.pop()
    assert version.document is not None
    version.document["task_state"]["next_preempt_time"] = instant(0.5)
    story.versions.append(version)
    story.wait(2.0)
    story.finish(task_id, story.claim(task_id))


@violates("wrong_fields")
def failure_that_is_not_counted(story: Story) -> None:
    task_id, run_id = running(story)
    story.finish(task_id, run_id, FAIL)
    story.wait(1.0)
    story.set(task_id, task_state__failed_cnt=0)
    story.finish(task_id, story.claim(task_id))


@violates("wrong_fields")
def end_without_its_time(story: Story) -> None:
    task_id, run_id = running(story)
    story.finish(task_id, run_id)
    story.tasks.update_one({"_id": task_id}, {"$unset": {"task_state.finish_time": ""}})
    document = story.versions[-1].document
    assert document is not None
    del document["task_state"]["finish_time"]


@violates("wrong_fields")
def end_with_a_preemption_time(story: Story) -> None:
    task_id, run_id = running(story)
    story.finish(task_id, run_id)
    story.tasks.update_one({"_id": task_id}, {"$set": {"task_state.next_preempt_time": instant(9.0)}})
    document = story.versions[-1].document
    assert document is not None
    document["task_state"]["next_preempt_time"] = instant(9.0)


@violates("wrong_fields")
def retention_that_is_too_short(story: Story) -> None:
    task_id, run_id = running(story, retain_success_ms=60_000)
    story.finish(task_id, run_id)
    story.tasks.update_one({"_id": task_id}, {"$set": {"expire_time": instant(9.0)}})
    document = story.versions[-1].document
    assert document is not None
    document["expire_time"] = instant(9.0)


@violates("wrong_fields")
def lease_that_is_moved_back(story: Story) -> None:
    task_id, run_id = running(story)
    runs = story.document(task_id)["task_state"]["worker_states"]
    runs[0]["ping_expire_time"] = instant(story.now + 3.0)
    rewrite(story, task_id, runs)
    story.finish(task_id, run_id)


@violates("wrong_fields")
def cancel_that_nobody_asked_for(story: Story) -> None:
    task_id = story.publish()
    story.apply(task_id, pipelines.cancel(instant(story.now)))


@violates("wrong_fields")
def options_that_nobody_changed(story: Story) -> None:
    task_id = story.publish()
    story.set(task_id, task_option__priority=7)
    story.finish(task_id, story.claim(task_id))


@violates("wrong_fields")
def lapsed_run_that_a_claim_leaves_open(story: Story) -> None:
    task_id, _ = late(story, 0.1)
    runs = story.document(task_id)["task_state"]["worker_states"]
    run_id = story.fresh("run")
    now = story.now
    new = {"run_id": run_id, "worker_id": "w2", "attempt": 2, "status": "RUNNING", "claim_time": instant(now)}
    new["ping_expire_time"] = instant(now + 4.0)
    rewrite(story, task_id, [*runs, new])
    story.note("start", task_id, run_id)
    story.settle(task_id)
    story.finish(task_id, run_id)


@violates("wrong_fields")
def retry_delay_that_is_too_short(story: Story) -> None:
    task_id, run_id = running(story, unexpected_retry_delay_ms=5000)
    story.finish(task_id, run_id, FAIL, delay=1.0)
    story.wait(1.0)
    story.finish(task_id, story.claim(task_id))


@violates("wrong_fields")
def document_that_is_malformed(story: Story) -> None:
    task_id = story.done()
    story.call("update", task_id, "updated")
    story.set(task_id, task_state__failed_cnt=-1)


# --- unstarted ----------------------------------------------------------------------------------------------------


@violates("unstarted")
def success_that_no_handler_began(story: Story) -> None:
    task_id = story.publish()
    story.finish(task_id, story.claim(task_id, starts=False), note=None)


@violates("unstarted")
def handler_that_no_claim_granted(story: Story) -> None:
    story.note("start", story.done(), "run-from-nowhere")


@violates("unstarted")
def handler_of_another_worker(story: Story) -> None:
    task_id, run_id = running(story)
    story.notes[-1] = replace(story.notes[-1], worker_id="w9")
    story.finish(task_id, run_id)


@violates("unstarted")
def handler_that_begins_before_its_claim(story: Story) -> None:
    story.wait(5.0)
    task_id, run_id = running(story)
    story.notes[-1] = replace(story.notes[-1], at=story.now - 2.0)
    story.finish(task_id, run_id)


# --- double_acknowledgements --------------------------------------------------------------------------------------


@violates("double_acknowledgements")
def creation_that_is_told_twice_at_once(story: Story) -> None:
    task_id = story.publish()
    story.call("publish", task_id, "created")
    story.finish(task_id, story.claim(task_id))


@violates("double_acknowledgements")
def creation_that_is_told_again_later(story: Story) -> None:
    task_id = story.done()
    story.wait(60.0)
    story.call("publish", task_id, "created")


# --- the tests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_one_wrong_thing_is_named_as_what_it_is(scene: Scene, story: Story, tmp_path: Path) -> None:
    scene(story)
    verdict = check(story.write(History(tmp_path)))
    assert set(verdict.violations) == SCENES[scene], verdict.describe()
    assert not verdict.not_proven, verdict.describe()
    assert not verdict.is_clean
    for kind in SCENES[scene]:
        assert verdict.findings[kind].examples[0].what in verdict.describe()


def test_each_kind_of_violation_is_tried() -> None:
    assert set().union(*SCENES.values()) == set(KINDS)
