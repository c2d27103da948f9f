"""The checker names what is wrong with executors: histories that are good but for one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtask.kernel.document.status import RunStatus
from tests.chaos.history import Fault
from tests.chaos.judge.executors import AT_ONCE, KILLING
from tests.chaos.load.app import isolated_names
from tests.chaos.selftests.scenes import Scenes, verdict_on
from tests.chaos.selftests.story import WORKER, Story

FAIL, CANCELED = RunStatus.FAIL, RunStatus.CANCELED
EXECUTOR = 7
DIED = "executor killed by SIGKILL, perhaps for want of memory"
OPTIONS: dict[str, Any] = {"max_retries": 5}

SCENES = Scenes()


def begun(story: Story, name: str = "isolated", pid: int = EXECUTOR, lease: float = 4.0) -> tuple[str, str]:
    """Have a handler begin in an executor; return the task's id and the run_id."""
    task_id = story.publish(name, worker_timeout=lease, **OPTIONS)
    story.wait(0.1)
    return task_id, begun_again(story, task_id, pid)


def begun_again(story: Story, task_id: str, pid: int) -> str:
    run_id = story.claim(task_id, starts=False)
    story.wait(0.1)
    story.note("start", task_id, run_id, pid=pid)
    story.wait(0.1)
    return run_id


def kill(story: Story, pid: int = EXECUTOR, signal: str = "SIGKILL", worker_id: str = "w1") -> None:
    """Kill an executor, and write down that it was done."""
    detail = {"killed": [{"pid": pid, "signal": signal, "at": story.now}]}
    story.faults.append(Fault(KILLING, worker_id, story.now - 0.1, story.now, detail=detail))
    story.wait(0.05)


def handed(story: Story) -> tuple[str, str]:
    """Claim a task whose handler does not begin; return the task's id and the run_id."""
    task_id = story.publish("isolated", **OPTIONS)
    return task_id, story.claim(task_id, starts=False)


def died(story: Story, *runs: tuple[str, str]) -> None:
    """Tell of these runs, one after the other, that their executors died. Then run the tasks again."""
    for task_id, run_id in runs:
        story.finish(task_id, run_id, FAIL, note=None, reason=DIED)
    for task_id, _ in runs:
        retried(story, task_id)


def handed_and_killed(story: Story, signal: str = "SIGKILL", worker_id: str = "w1") -> None:
    """Have an executor die with a run that its handler had not begun: by this signal, of this worker's executors."""
    run = handed(story)
    kill(story, signal=signal, worker_id=worker_id)
    died(story, run)


def retried(story: Story, task_id: str, after: float = 0.3) -> None:
    """Run the task again, in another executor, to its end."""
    story.wait(after)
    run_id = begun_again(story, task_id, EXECUTOR + 1)
    ended(story, task_id, run_id, EXECUTOR + 1)


def ended(story: Story, task_id: str, run_id: str, pid: int = EXECUTOR) -> None:
    story.note("end", task_id, run_id, pid=pid)
    story.finish(task_id, run_id, note=None)


# --- deaths -----------------------------------------------------------------------------------------------------------


@SCENES.violate("wrong_executors")
def run_of_a_killed_executor_that_is_lost_until_its_lease_lapses(story: Story) -> None:
    task_id, _ = begun(story)
    kill(story)
    retried(story, task_id, 4.1)


@SCENES.violate("wrong_executors")
def death_that_is_told_late(story: Story) -> None:
    task_id, run_id = begun(story, lease=12.0)
    kill(story)
    story.wait(AT_ONCE + 0.1)
    story.finish(task_id, run_id, FAIL, note=None, reason=DIED)
    retried(story, task_id)


@SCENES.violate("wrong_executors")
def death_that_is_told_with_another_cause(story: Story) -> None:
    task_id, run_id = begun(story)
    kill(story, signal="SIGSEGV")
    story.finish(task_id, run_id, FAIL, note=None, reason=DIED)
    retried(story, task_id)


@SCENES.violate("wrong_executors")
def death_that_is_told_as_a_failure_of_the_handler(story: Story) -> None:
    task_id, run_id = begun(story)
    kill(story)
    story.finish(task_id, run_id, FAIL, note=None, reason="ValueError: no")
    retried(story, task_id)


@SCENES.violate("wrong_executors")
def run_of_a_killed_executor_that_is_handed_back_and_not_counted(story: Story) -> None:
    task_id, run_id = begun(story)
    kill(story)
    story.finish(task_id, run_id, CANCELED, note=None)
    retried(story, task_id)


@SCENES.violate("wrong_executors", "stale_results")
def success_of_a_killed_executor(story: Story) -> None:
    task_id, run_id = begun(story)
    kill(story)
    story.finish(task_id, run_id, note=None)
    # It is seen as a success without an end. What is wrong with the executor is that nobody killed this one:
    other, run_id = begun(story, pid=EXECUTOR + 2)
    story.finish(other, run_id, FAIL, note=None, reason="executor exited with code 3")
    retried(story, other)


@SCENES.violate("wrong_executors")
def death_that_nobody_brought_about(story: Story) -> None:
    task_id, run_id = begun(story)
    kill(story, EXECUTOR + 2)
    story.finish(task_id, run_id, FAIL, note=None, reason=DIED)
    retried(story, task_id)


@SCENES.violate("wrong_executors")
def death_before_the_handler_began_by_another_signal(story: Story) -> None:
    handed_and_killed(story, signal="SIGSEGV")


@SCENES.violate("wrong_executors")
def death_before_the_handler_began_while_another_workers_executor_was_killed(story: Story) -> None:
    handed_and_killed(story, worker_id="w2")


@SCENES.violate("wrong_executors")
def two_deaths_before_the_handlers_began_and_one_kill(story: Story) -> None:
    handed_and_killed(story)
    died(story, handed(story))


@SCENES.violate("wrong_executors")
def death_before_the_handler_began_beside_a_kill_that_another_run_tells_of(story: Story) -> None:
    noted, other = begun(story), handed(story)
    kill(story)
    died(story, noted, other)


@SCENES.violate("wrong_executors")
def death_before_the_handler_began_of_an_executor_killed_long_before(story: Story) -> None:
    kill(story)
    story.wait(1.5)
    died(story, handed(story))


@SCENES.violate("wrong_executors")
def death_before_the_handler_began_beside_one_that_came_after_its_end(story: Story) -> None:
    other, noted = handed(story), begun(story)
    story.note("end", *noted, pid=EXECUTOR)
    kill(story)
    died(story, other, noted)


@SCENES.violate("wrong_executors")
def start_that_fails_although_nobody_disturbed_it(story: Story) -> None:
    task_id = story.publish("isolated", **OPTIONS)
    run_id = story.claim(task_id, starts=False)
    story.wait(0.1)
    story.finish(task_id, run_id, FAIL, note=None, reason="executor could not start: no")
    retried(story, task_id)


@SCENES.violate("wrong_effects")
def effect_of_a_transaction_whose_executor_was_killed(story: Story) -> None:
    task_id, run_id = begun(story, "deposit_isolated")
    note = story.note("written", task_id, run_id, pid=EXECUTOR)
    kill(story)
    story.effects.append({"task_id": task_id, "run_id": run_id, "worker_id": note.worker_id})
    story.finish(task_id, run_id, FAIL, note=None, reason=DIED)
    story.wait(0.3)
    committed(story, task_id, begun_again(story, task_id, EXECUTOR + 1), EXECUTOR + 1)


@SCENES.violate("wrong_executors")
def processes_that_outlive_their_workers(story: Story) -> None:
    story.facts["processes_left"] = 1


# --- one at a time ----------------------------------------------------------------------------------------------------


@SCENES.violate("wrong_executors")
def two_handlers_at_once_in_an_executor(story: Story) -> None:
    first, second = begun(story), begun(story)
    ended(story, *first)
    ended(story, *second)


@SCENES.violate("wrong_executors")
def isolated_handler_in_its_workers_process(story: Story) -> None:
    task_id, run_id = begun(story, pid=WORKER)
    ended(story, task_id, run_id, WORKER)


# --- what is right ----------------------------------------------------------------------------------------------------


def committed(story: Story, task_id: str, run_id: str, pid: int) -> None:
    """Commit a transaction; the handler's end is not noted."""
    story.ping(task_id, run_id, session_id=story.fresh("session"))
    note = story.note("written", task_id, run_id, pid=pid)
    story.effects.append({"task_id": task_id, "run_id": run_id, "worker_id": note.worker_id})
    story.finish(task_id, run_id, note=None)


@SCENES.allow
def a_death_is_told_at_once_and_the_task_runs_again(story: Story) -> None:
    task_id, run_id = begun(story)
    kill(story)
    story.finish(task_id, run_id, FAIL, note=None, reason=DIED)
    retried(story, task_id)


@SCENES.allow
def a_death_while_the_worker_is_frozen_is_left_to_the_lease(story: Story) -> None:
    task_id, _ = begun(story)
    kill(story)
    story.faults.append(Fault("freeze worker", "w1", story.now, story.now + 6.0))
    retried(story, task_id, 4.1)


@SCENES.allow
def a_death_while_the_database_is_away_is_left_to_the_lease(story: Story) -> None:
    task_id, _ = begun(story)
    kill(story)
    story.faults.append(Fault("kill primary", "a:1", story.now, story.now + 6.0, is_database_away=True))
    retried(story, task_id, 4.1)


@SCENES.allow
def a_death_after_the_commit_leaves_the_success(story: Story) -> None:
    task_id, run_id = begun(story, "deposit_isolated")
    committed(story, task_id, run_id, EXECUTOR)
    kill(story)


@SCENES.allow
def a_death_between_the_end_of_the_handler_and_its_receipt(story: Story) -> None:
    task_id, run_id = begun(story)
    story.note("end", task_id, run_id, pid=EXECUTOR)
    kill(story)
    story.finish(task_id, run_id, FAIL, note=None, reason=DIED)
    retried(story, task_id)


@SCENES.allow
def an_idle_executor_is_killed(story: Story) -> None:
    task_id, run_id = begun(story)
    ended(story, task_id, run_id)
    kill(story)


@SCENES.allow
def an_executor_is_killed_when_it_was_just_handed_a_run(story: Story) -> None:
    handed_and_killed(story)


@SCENES.allow
def two_executors_are_killed_when_each_was_just_handed_a_run(story: Story) -> None:
    first, second = handed(story), handed(story)
    kill(story)
    kill(story, EXECUTOR + 1)
    died(story, second, first)


@SCENES.allow
def an_executor_is_killed_at_its_start(story: Story) -> None:
    task_id = story.publish("isolated", **OPTIONS)
    run_id = story.claim(task_id, starts=False)
    kill(story)
    story.finish(task_id, run_id, FAIL, note=None, reason="executor could not start: killed by SIGKILL")
    retried(story, task_id)


@SCENES.allow
def a_canceled_run_in_a_killed_executor(story: Story) -> None:
    task_id, run_id = begun(story)
    story.cancel(task_id)
    kill(story)
    story.finish(task_id, run_id, CANCELED, note=None)


@SCENES.allow
def an_executor_has_the_pid_that_a_worker_had_before(story: Story) -> None:
    story.facts["ends"] = [life(story.now - 9, story.now)]
    story.wait(0.1)
    task_id, run_id = begun(story, pid=WORKER)
    ended(story, task_id, run_id, WORKER)


@SCENES.allow
def a_worker_has_the_pid_that_an_executor_had_before(story: Story) -> None:
    task_id, run_id = begun(story, pid=WORKER)
    ended(story, task_id, run_id, WORKER)
    story.wait(0.1)
    story.facts["ends"] = [life(story.now, story.now + 60)]


def life(began: float, ended: float) -> dict[str, Any]:
    """Return how a worker process ended, with the seconds between which it lived."""
    return {"place": "w1", "pid": WORKER, "exit_code": 0, "expected": True, "began": began, "at": ended}


@pytest.fixture
def story(story: Story) -> Story:
    """Begin a story whose facts name the handlers in executors, and the workers."""
    story.facts |= {"isolated": isolated_names(), "ends": [life(story.now, story.now + 60)]}
    return story


test_what_is_wrong_is_named, test_what_is_well_passes = SCENES.tests()


def test_the_figures_tell_how_soon_deaths_were_told(story: Story, tmp_path: Path) -> None:
    a_death_is_told_at_once_and_the_task_runs_again(story)
    a_death_after_the_commit_leaves_the_success(story)
    figures = verdict_on(story, tmp_path).figures
    assert figures.executors == {
        "handlers": 3,
        "killed": 2,
        "runs in them": 2,
        "told as FAIL": 1,
        "committed before": 1,
        "excused": 0,
    }
    assert 0 < figures.deaths.maximum < 1


@pytest.mark.parametrize(("codes", "is_clean"), [({"w1": 0}, True), ({"w1": -9}, False)])
def test_a_worker_that_does_not_end_in_order_is_a_doubt(
    story: Story, tmp_path: Path, codes: dict[str, int], is_clean: bool
) -> None:
    story.done()
    story.facts["exit_codes"] = codes
    assert verdict_on(story, tmp_path).is_clean is is_clean
