"""The checker measures rescues, failovers, handlers beyond their lease, and what happens in each second."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtask.kernel.document.status import RunStatus
from tests.chaos.history import Fault
from tests.chaos.selftests.scenes import verdict_on
from tests.chaos.selftests.story import Story

FAIL = RunStatus.FAIL


def rescue(story: Story, after: float) -> str:
    """Let a lease lapse, and have another worker come so much later; return the task's id."""
    task_id = story.publish("slow")
    story.claim(task_id)
    story.wait(4.0 + after)
    story.finish(task_id, story.claim(task_id, "w2"))
    return task_id


def test_rescue_is_measured_from_the_end_of_the_lease_to_the_next_claim(story: Story, tmp_path: Path) -> None:
    task_id = rescue(story, 0.3)
    figures = verdict_on(story, tmp_path).figures
    assert [(found.task_id, round(found.delay, 3)) for found in figures.rescues] == [(task_id, 0.3)]
    assert figures.rescue_up.count == 1
    assert figures.rescue_up.maximum == pytest.approx(0.3)


def test_rescue_is_measured_from_when_a_settled_task_was_free(story: Story, tmp_path: Path) -> None:
    task_id = story.publish("slow")
    story.claim(task_id)
    story.wait(6.0)
    story.settle(task_id)
    story.wait(1.0)
    story.finish(task_id, story.claim(task_id, "w2"))
    assert [round(found.delay, 3) for found in verdict_on(story, tmp_path).figures.rescues] == [3.0]


def test_rescue_does_not_count_the_delay_of_another_runs_failure(story: Story, tmp_path: Path) -> None:
    task_id = story.publish("team", concurrent_worker_cnt=2, retry_delay=5)
    story.claim(task_id)
    second = story.claim(task_id, "w2")
    story.wait(3.0)
    story.finish(task_id, second, FAIL)  # nobody may come before 5 s from now
    story.wait(5.25)
    third, fourth = story.claim(task_id, "w3"), story.claim(task_id, "w4")
    story.finish(task_id, third)
    story.finish(task_id, fourth)
    verdict = verdict_on(story, tmp_path)
    assert verdict.is_clean, verdict.describe()
    assert [round(found.delay, 3) for found in verdict.figures.rescues] == [0.25]


def test_task_that_nobody_may_take_again_is_no_rescue(story: Story, tmp_path: Path) -> None:
    task_id = story.publish("killer", max_retries=1)
    for worker_id in ("w1", "w2"):
        story.claim(task_id, worker_id)
        story.wait(4.0)
    story.settle(task_id)
    assert len(verdict_on(story, tmp_path).figures.rescues) == 1  # the first time


def test_rescue_while_the_database_was_away_is_counted_apart(story: Story, tmp_path: Path) -> None:
    began = story.now + 4.0
    rescue(story, 5.0)
    story.faults.append(Fault("kill primary", "node 1", began - 2.0, began + 3.0, is_database_away=True))
    story.wait(1.0)
    rescue(story, 0.2)
    figures = verdict_on(story, tmp_path).figures
    assert (figures.rescue_away.count, figures.rescue_up.count) == (1, 1)
    assert figures.rescue_away.maximum == pytest.approx(5.0)
    assert figures.rescues[0].faults[0].startswith("kill primary node 1")
    assert [round(found.delay, 3) for found in figures.worst_rescues] == [0.2]


def test_rescue_while_there_was_no_worker_is_counted_apart(story: Story, tmp_path: Path) -> None:
    began = story.now + 4.0
    rescue(story, 3.0)
    story.faults.append(Fault("kill all workers", "w1 w2", began - 2.0, began + 2.0, detail={"is_fleet_away": True}))
    story.wait(1.0)
    rescue(story, 0.2)
    figures = verdict_on(story, tmp_path).figures
    assert (figures.rescue_no_worker.count, figures.rescue_up.count) == (1, 1)
    assert figures.rescue_no_worker.maximum == pytest.approx(3.0)
    assert [round(found.delay, 3) for found in figures.worst_rescues] == [0.2]


def test_rescue_that_only_named_workers_could_do_is_counted_apart(story: Story, tmp_path: Path) -> None:
    task_id = story.publish("slow", specific_worker_ids=["w1"])
    story.claim(task_id)
    story.wait(9.0)
    story.finish(task_id, story.claim(task_id))
    figures = verdict_on(story, tmp_path).figures
    assert (figures.rescue_named.count, figures.rescue_up.count) == (1, 0)


def test_failover_is_measured_from_the_election_to_the_first_claim(story: Story, tmp_path: Path) -> None:
    story.done()
    story.faults.append(Fault("step down", "node 1", story.now, story.now + 1, True, {"elected_at": story.now + 0.5}))
    story.wait(2.0)
    claimed = story.now + 0.02
    story.done()
    figures = verdict_on(story, tmp_path).figures
    assert figures.failover.count == 1
    assert figures.failover.maximum == pytest.approx(1.5 + 0.02, abs=0.002), claimed


def test_handler_that_goes_on_beyond_its_lease_is_a_figure(story: Story, tmp_path: Path) -> None:
    for worker_id in ("w1", "w2"):
        task_id = story.publish("slow")
        run_id = story.claim(task_id, worker_id)
        story.wait(5.0)
        story.note("raised", task_id, run_id)
        story.finish(task_id, story.claim(task_id, "w3"))
    story.faults.append(Fault("freeze worker", "w1", 3.0, 6.0))
    verdict = verdict_on(story, tmp_path)
    assert verdict.is_clean
    overtime = verdict.figures.overtime
    assert (overtime.excused.count, overtime.others.count) == (1, 1)
    assert overtime.others.maximum == pytest.approx(1.0, abs=0.01)


def test_handler_that_blocks_its_worker_excuses_what_ran_beside_it(story: Story, tmp_path: Path) -> None:
    hog = story.publish("hog")
    hogging = story.claim(hog)
    task_id = story.publish("slow")
    run_id = story.claim(task_id)
    story.wait(6.0)
    story.note("cancelled", task_id, run_id)
    story.note("end", hog, hogging)
    story.finish(hog, story.claim(hog, "w2"))
    story.finish(task_id, story.claim(task_id, "w2"))
    story.faults.append(Fault("hog", "", 1.0, 6.0, detail={"task_id": hog}))
    overtime = verdict_on(story, tmp_path).figures.overtime
    assert (overtime.excused.count, overtime.others.count) == (2, 0)


def test_figures_count_what_happened_second_by_second(story: Story, tmp_path: Path) -> None:
    story.done()
    story.wait(3.0)
    task_id = story.publish("doomed", max_retries=1)
    for _ in range(2):
        story.finish(task_id, story.claim(task_id), FAIL)
        story.wait(0.3)
    verdict = verdict_on(story, tmp_path)
    figures, timeline = verdict.figures, verdict.figures.timeline
    assert sum(timeline.published) == 2
    assert (sum(timeline.claimed), sum(timeline.started)) == (3, 3)
    assert (sum(timeline.succeeded), sum(timeline.failed)) == (1, 2)
    assert timeline.published[:5] == [0, 1, 0, 0, 1]
    assert len({len(timeline.published), len(timeline.claimed), len(timeline.failed)}) == 1
    assert figures.by_name_and_status == {"quick": {"SUCCESS": 1}, "doomed": {"FAIL": 1}}
    assert figures.calls == {"publish": {"created": 2}}
    assert figures.runs_by_status == {"SUCCESS": 1, "FAIL": 2}
