"""The checker names what is wrong with results, handlers and effects: histories that are good but for one thing."""

from __future__ import annotations

from dataclasses import replace

from mtask.kernel.document.status import RunStatus
from mtask.kernel.statements import finish
from mtask.kernel.statements.finish import Outcome
from tests.chaos.selftests.scenes import Scenes
from tests.chaos.selftests.story import Story, instant

FAIL, CANCELED, SUCCESS = RunStatus.FAIL, RunStatus.CANCELED, RunStatus.SUCCESS

SCENES = Scenes()


# --- stale_results ----------------------------------------------------------------------------------------------------


@SCENES.violate("stale_results")
def success_of_a_run_that_had_timed_out(story: Story) -> None:
    task_id, first = story.running()
    story.wait(4.1)
    story.note("end", task_id, first)
    second = story.claim(task_id, "w2")
    runs = story.runs(task_id)
    runs[0] |= {"status": "SUCCESS", "success_time": instant(story.now)}
    story.rewrite(task_id, runs)
    story.finish(task_id, second, CANCELED)


@SCENES.violate("stale_results")
def result_written_into_a_closed_run(story: Story) -> None:
    task_id, run_id = story.running(max_retries=5)
    story.finish(task_id, run_id, FAIL)
    story.wait(1.0)
    story.change_run(task_id, fail_reason="another")
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("stale_results")
def session_named_by_a_closed_run(story: Story) -> None:
    task_id, run_id = story.running(max_retries=5)
    story.finish(task_id, run_id, FAIL)
    story.wait(1.0)
    story.change_run(task_id, session_id="session")
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("stale_results")
def lease_of_a_closed_run_that_is_moved(story: Story) -> None:
    task_id, run_id = story.running()
    story.finish(task_id, run_id, CANCELED)
    story.change_run(task_id, ping_expire_time=instant(story.now + 60))
    story.finish(task_id, story.claim(task_id))


# --- engine_failures --------------------------------------------------------------------------------------------------


@SCENES.violate("engine_failures")
def claimer_that_met_what_it_does_not_know(story: Story) -> None:
    story.logs["w1"] = [
        "2026-11-28 20:21:48.673 ERROR   claimer failed and goes on",
        "    Traceback (most recent call last):",
        '      File "claim.py", line 97, in claim',
        "    KeyError: 'listed'",
        "2026-11-28 20:21:49.100 WARNING handler failed task=loud:1",
    ]


@SCENES.allow
def logs_of_handlers_and_of_a_database_that_fail(story: Story) -> None:
    story.logs["w1"] = [
        "2026-11-28 20:21:49.100 WARNING handler failed task=loud:1",
        "    Traceback (most recent call last):",
        "    RuntimeError: attempt 3",
        "2026-11-28 20:21:49.101 ERROR   middleware failed, the step goes on middleware=trace",
        "2026-11-28 20:21:49.102 WARNING scan failed, will be repeated reason='stepped down.'",
    ]


# --- wrong_ends -------------------------------------------------------------------------------------------------------


@SCENES.violate("wrong_ends")
def child_that_a_handler_cannot_terminate(story: Story) -> None:
    task_id, run_id = story.running("forking", max_retries=0)
    story.finish(task_id, run_id, FAIL)


@SCENES.violate("wrong_ends")
def failure_of_what_only_a_later_release_can_run(story: Story) -> None:
    task_id, run_id = story.running("grown", max_retries=0)
    story.finish(task_id, run_id, FAIL)


@SCENES.violate("wasted_runs")
def worker_that_takes_at_once_what_it_has_handed_on(story: Story) -> None:
    handed_on(story, between=5.0)


@SCENES.allow
def worker_that_takes_after_a_while_what_it_has_handed_on(story: Story) -> None:
    handed_on(story, between=31.0)


@SCENES.allow
def worker_that_is_restarted_after_it_has_handed_on(story: Story) -> None:
    handed_on(story, between=5.0)
    end = {"place": "w1", "pid": 1, "exit_code": -9, "expected": True, "began": 0.0, "at": story.now - 2.0}
    story.facts["ends"] = [end]


def handed_on(story: Story, between: float) -> None:
    """Let a worker hand a task on, and claim it again; then another one runs it."""
    task_id = story.publish("grown")
    for wait in (between, 0.1):
        run_id = story.claim(task_id)
        story.finish(task_id, run_id, CANCELED, reason="handed on: the params do not fit this version: unit")
        story.wait(wait)
    story.finish(task_id, story.claim(task_id, "w2"))


@SCENES.violate("wrong_ends", "wrong_effects")
def success_of_an_aborted_transaction(story: Story) -> None:
    task_id, run_id = story.running("aborting")
    story.finish(task_id, run_id)


@SCENES.allow
def handlers_that_abort_and_fork(story: Story) -> None:
    task_id, run_id = story.running("aborting", max_retries=0)
    story.finish(task_id, run_id, FAIL)
    task_id, run_id = story.running("forking")
    story.finish(task_id, run_id)


def committed(story: Story) -> tuple[str, str]:
    """Commit a SUCCESS whose value is still to come; return the task and the run."""
    task_id, run_id = story.running("quick")
    outcome = Outcome(task_id, run_id, RunStatus.SUCCESS, returns_owed_by="incarnation")
    story.apply(task_id, finish.finish([outcome], instant(story.now)))
    story.wait(0.1)
    story.note("end", task_id, run_id)
    return task_id, run_id


@SCENES.allow
def values_that_come_after_the_commit_and_are_lost(story: Story) -> None:
    task_id, run_id = committed(story)
    story.apply(task_id, finish.store_return(run_id, 1))
    story.apply(task_id, finish.store_return(run_id, 1))
    task_id, run_id = committed(story)
    story.apply(task_id, finish.lose_return(run_id, "the worker died"))


@SCENES.violate("wrong_owed")
def value_that_is_still_owed_in_the_end(story: Story) -> None:
    committed(story)


@SCENES.violate("stale_results", "second_success")
def value_that_comes_with_another_change(story: Story) -> None:
    task_id, run_id = committed(story)
    story.apply(task_id, finish.store_return(run_id, 1))
    story.change_run(task_id, fail_reason="another")


def late(story: Story, seconds: float) -> tuple[str, str]:
    """Have a run that lapsed so long ago, and that nobody has closed."""
    task_id, run_id = story.running()
    story.wait(4.0 + seconds)
    return task_id, run_id


def finish_late(story: Story, status: RunStatus, seconds: float) -> None:
    """Finish a run after its lease had lapsed, as an engine without the fence would."""
    task_id, run_id = late(story, seconds)
    story.note("end" if status is SUCCESS else "raised", task_id, run_id)
    now = instant(story.now)
    runs = story.runs(task_id)
    runs[0] |= {"status": status.value, **({"success_time": now} if status is SUCCESS else {"fail_time": now})}
    if status is not SUCCESS:
        runs[0] |= {"retry_time": instant(story.now + 0.2), "fail_reason": "late"}
    story.rewrite(task_id, runs, counted=int(status is FAIL))
    if status is not SUCCESS:
        story.wait(0.3)
        story.finish(task_id, story.claim(task_id, "w2"))


@SCENES.violate("stale_results")
def success_at_the_very_end_of_the_lease(story: Story) -> None:
    finish_late(story, SUCCESS, 0.0)


@SCENES.violate("stale_results")
def success_after_the_lease(story: Story) -> None:
    finish_late(story, SUCCESS, 2.0)


@SCENES.violate("stale_results")
def failure_after_the_lease(story: Story) -> None:
    finish_late(story, FAIL, 0.5)


@SCENES.violate("stale_results")
def hand_back_after_the_lease(story: Story) -> None:
    finish_late(story, CANCELED, 0.5)


@SCENES.violate("stale_results")
def ping_that_brings_a_lapsed_lease_back(story: Story) -> None:
    task_id, run_id = late(story, 0.5)
    runs = story.runs(task_id)
    runs[0]["ping_expire_time"] = instant(story.now + 4.0)
    story.rewrite(task_id, runs)
    story.finish(task_id, run_id)


@SCENES.violate("stale_results")
def success_whose_handler_never_ended(story: Story) -> None:
    task_id, run_id = story.running()
    story.finish(task_id, run_id, note=None)


@SCENES.violate("stale_results")
def success_whose_handler_raised(story: Story) -> None:
    task_id, run_id = story.running()
    story.finish(task_id, run_id, note="raised")


@SCENES.violate("stale_results")
def success_that_is_older_than_its_handlers_end(story: Story) -> None:
    task_id, run_id = story.running()
    story.finish(task_id, run_id, note=None)
    story.wait(1.0)
    story.note("end", task_id, run_id)


@SCENES.violate("stale_results")
def plain_success_that_was_only_written(story: Story) -> None:
    task_id, run_id = story.running()
    story.finish(task_id, run_id, note="written")


@SCENES.violate("stale_results")
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


@SCENES.violate("stale_results")
def closed_run_that_vanishes(story: Story) -> None:
    task_id, run_id = story.running()
    story.finish(task_id, run_id, CANCELED)
    story.rewrite(task_id, [])
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("stale_results")
def running_run_that_vanishes(story: Story) -> None:
    task_id, _ = story.running()
    story.rewrite(task_id, [])
    story.finish(task_id, story.claim(task_id, "w2"))


@SCENES.violate("stale_results")
def success_of_a_run_that_was_never_running(story: Story) -> None:
    task_id = story.publish()
    run_id = story.force(task_id, status="SUCCESS", success_time=instant(story.now))
    story.notes[-1] = replace(story.notes[-1], at=story.now - 0.1)
    story.note("end", task_id, run_id)


@SCENES.violate("stale_results")
def run_of_another_worker_under_the_same_run_id(story: Story) -> None:
    task_id, run_id = story.running()
    story.change_run(task_id, worker_id="w2")
    story.change_run(task_id, worker_id="w1")
    story.finish(task_id, run_id)


# --- wrong_effects ----------------------------------------------------------------------------------------------------


@SCENES.violate("wrong_effects")
def deposit_without_its_effect(story: Story) -> None:
    story.done("deposit")
    story.effects.clear()


@SCENES.violate("wrong_effects")
def effect_that_was_written_twice(story: Story) -> None:
    story.done("deposit_plain")
    story.effects *= 2


@SCENES.violate("wrong_effects")
def effect_of_a_run_that_timed_out(story: Story) -> None:
    task_id, run_id = story.running("deposit")
    story.effects.append({"task_id": task_id, "run_id": run_id, "worker_id": "w1"})
    story.wait(4.1)
    story.deposit(task_id, story.claim(task_id, "w2"))


@SCENES.violate("wrong_effects")
def effect_of_nobody(story: Story) -> None:
    story.effects.append({"task_id": "deposit:none", "run_id": "none", "worker_id": "w1"})


@SCENES.violate("wrong_effects")
def effect_of_another_handler(story: Story) -> None:
    task_id, run_id = story.running()
    story.effects.append({"task_id": task_id, "run_id": run_id, "worker_id": "w1"})
    story.finish(task_id, run_id)


@SCENES.violate("wrong_effects")
def effect_under_another_workers_name(story: Story) -> None:
    story.done("deposit")
    story.effects[-1]["worker_id"] = "w9"


# --- unstarted --------------------------------------------------------------------------------------------------------


@SCENES.violate("unstarted")
def success_that_no_handler_began(story: Story) -> None:
    task_id = story.publish()
    story.finish(task_id, story.claim(task_id, starts=False), note=None)


@SCENES.violate("unstarted")
def handler_that_no_claim_granted(story: Story) -> None:
    story.note("start", story.done(), "run-from-nowhere")


@SCENES.violate("unstarted")
def handler_of_another_worker(story: Story) -> None:
    task_id, run_id = story.running()
    story.notes[-1] = replace(story.notes[-1], worker_id="w9")
    story.finish(task_id, run_id)


@SCENES.violate("unstarted")
def handler_that_begins_before_its_claim(story: Story) -> None:
    story.wait(5.0)
    task_id, run_id = story.running()
    story.notes[-1] = replace(story.notes[-1], at=story.now - 2.0)
    story.finish(task_id, run_id)


test_what_is_wrong_is_named, test_what_is_well_passes = SCENES.tests()
