"""Schedules by real worker processes: each firing once, whatever clocks say and whoever is killed.

A usual run fires for twelve seconds and kills the faster for it; MTASK_TEST_FUZZ=2 for a whole one.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import cycle

import pytest

from tests import faketime
from tests.acceptance.conftest import Report
from tests.faults.fuzzing import SCALE
from tests.mongo import PATIENCE, eventually
from tests.workers import Stage, WorkerProcess

_SECONDS, _KILL_EVERY = (12, 2.5) if SCALE == 1 else (60, 10.0)
_OFFSETS = [timedelta(minutes=minutes) for minutes in (-5, -2, 0, 2, 5)]


@pytest.mark.long
def test_every_second_by_five_processes_with_wrong_clocks_of_which_one_after_another_is_killed(
    stage: Stage, report: Report
) -> None:
    started = [stage.launch(f"w{n}", environment=faketime.environment(by)) for n, by in enumerate(_OFFSETS)]
    for worker in started:
        stage.wait_running(worker)
    begin = stage.client.server_time() + timedelta(seconds=1)
    schedule = stage.client.add_schedule(
        "tick",
        "noop",
        timedelta(seconds=1),
        start_time=begin,
        end_time=begin + timedelta(seconds=_SECONDS - 1),
        catch_up="all",
    )
    assert schedule.schedule_state.next_fire_time == schedule.start_time
    victims = cycle(range(len(started)))
    next_kill = time.monotonic() + _KILL_EVERY / 2

    def is_over() -> bool:
        nonlocal next_kill
        if time.monotonic() >= next_kill:
            next_kill += _KILL_EVERY
            place = next(victims)
            started[place].kill()
            started[place] = _again(stage, place)
        return stage.client.get_schedule("tick").schedule_state.next_fire_time is None

    eventually(is_over, _SECONDS + PATIENCE, "all firings made", interval=0.2)
    eventually(lambda: stage.client.count(status="SUCCESS") == _SECONDS, PATIENCE, "all done")
    published = sorted(stage.client.find(name="noop", limit=0), key=lambda task: task.key)
    fired = [schedule.anchor + timedelta(seconds=second) for second in range(_SECONDS)]
    assert [task.key for task in published] == [schedule.key_of(at) for at in fired]
    assert stage.client.get_schedule("tick").schedule_state.fired_cnt == _SECONDS
    late = sorted((task.task_state.create_time - at).total_seconds() for task, at in zip(published, fired, strict=True))
    assert late[0] >= 0, "fired before its time"
    report("a firing is published after its time, median, ms", round(1000 * late[_SECONDS // 2]))
    report("a firing is published after its time, latest, ms", round(1000 * late[-1]))


def _again(stage: Stage, place: int) -> WorkerProcess:
    return stage.launch(f"w{place}", environment=faketime.environment(_OFFSETS[place]))


def test_without_a_scheduler_nothing_fires_and_with_one_it_does(stage: Stage) -> None:
    stage.start("w1", "--no-scheduler")
    stage.client.add_schedule("tick", "noop", timedelta(seconds=1))
    stage.client.publish("noop", key="by hand", delay=timedelta(seconds=2.5))
    eventually(lambda: stage.client.count(status="SUCCESS") == 1, PATIENCE, "the one by hand")
    assert stage.client.get_schedule("tick").schedule_state.fired_cnt == 0
    stage.start("w2")
    eventually(lambda: stage.client.count(status="SUCCESS") >= 3, PATIENCE, "two firings done")
