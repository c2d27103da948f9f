"""The checker names starts of limited tasks that break the order, and lets pass what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chaos.history import Fault
from tests.chaos.selftests.scenes import Scenes, verdict_on
from tests.chaos.selftests.story import EPOCH, WORKER, Story

SCENES = Scenes()
#: Longer than what the checker leaves to a busy machine, in seconds.
_LONG = 5.0


def limited(
    story: Story, queue: str = "shared", concurrency: int = 1, *, at: float = -1.0, is_known: bool = True, **more: Any
) -> None:
    """Limit a queue, and begin with two workers, of one app each."""
    limit = {"concurrency": concurrency, "starts": None, "window_ms": None}
    asked = EPOCH.timestamp() + at
    change = {"target": queue, "asked": asked, "settled": asked if is_known else None, "limit": limit}
    story.facts.setdefault("order", []).append(
        {**change, "key_limit": None, "tenant_limit": None, "fair": False, **more}
    )
    ends = [{"place": place, "pid": WORKER, "began": 0.0, "at": 900.0, "exit_code": 0} for place in ("w1", "w2")]
    story.facts["ends"] = ends


def run(story: Story, task_id: str, worker_id: str = "w1", seconds: float = 1.0) -> None:
    """Run a task to its end."""
    run_id = story.claim(task_id, worker_id)
    story.wait(seconds)
    story.finish(task_id, run_id)


def published(story: Story, *priorities: int, name: str = "ours", **options: Any) -> list[str]:
    """Publish tasks of these priorities, and have them wait long enough."""
    task_ids = [story.publish(name, priority=priority, **options) for priority in priorities]
    story.wait(_LONG)
    return task_ids


def run_in_order(story: Story, *task_ids: str) -> None:
    """Run these tasks one after the other, and far apart."""
    for task_id in task_ids:
        run(story, task_id, seconds=2.0)


@SCENES.allow
def higher_priority_goes_first(story: Story) -> None:
    limited(story)
    low, high = published(story, 0, 1)
    run_in_order(story, high, low)


@SCENES.violate("wrong_order")
def lower_priority_goes_first(story: Story) -> None:
    limited(story)
    low, high = published(story, 0, 1)
    run_in_order(story, low, high)


@SCENES.allow
def lower_priority_goes_first_without_a_limit(story: Story) -> None:
    limited(story, "metered")
    low, high = published(story, 0, 1)
    run_in_order(story, low, high)


@SCENES.allow
def higher_priority_has_only_come(story: Story) -> None:
    limited(story)
    (low,) = published(story, 0)
    high = story.publish("ours", priority=1)
    story.wait(2.0)
    run_in_order(story, low, high)


@SCENES.allow
def task_that_was_changed_has_no_known_rank(story: Story) -> None:
    limited(story)
    low, high = published(story, 0, 0)
    story.update_option(high, priority=1)
    story.wait(_LONG)
    run_in_order(story, low, high)


@SCENES.violate("wrong_order")
def new_task_goes_before_one_of_a_dead_worker(story: Story) -> None:
    limited(story)
    dead, new = published(story, 0, 0)
    story.claim(dead)
    story.wait(4.1 + _LONG)
    run_in_order(story, new, dead)


@SCENES.allow
def task_of_a_dead_worker_goes_before_a_new_one(story: Story) -> None:
    limited(story)
    dead, new = published(story, 0, 5)
    story.claim(new)
    story.wait(0.1)
    story.finish(new, story.runs(new)[0]["run_id"])
    story.claim(dead)
    story.wait(4.1 + _LONG)
    run_in_order(story, dead)


@SCENES.violate("wrong_order")
def task_of_a_dead_worker_is_not_rescued(story: Story) -> None:
    limited(story)
    (dead,) = published(story, 0)
    story.claim(dead)
    story.wait(4.1 + 12.0)
    run_in_order(story, dead)


@SCENES.violate("wrong_order")
def task_of_the_other_app_is_passed_over(story: Story) -> None:
    limited(story)
    story.done("theirs", "w2")
    low, high = *published(story, 0), *published(story, 1, name="theirs")
    run(story, low, seconds=2.0)
    run(story, high, "w2")


@SCENES.allow
def worker_of_the_other_app_is_frozen(story: Story) -> None:
    limited(story)
    story.done("theirs", "w2")
    low, high = *published(story, 0), *published(story, 1, name="theirs")
    story.faults.append(Fault("freeze worker", "w2", story.now - 1.0, story.now + 1.0))
    run(story, low, seconds=2.0)
    run(story, high, "w2")


@SCENES.allow
def worker_of_the_other_app_has_begun_nothing_since_its_start(story: Story) -> None:
    limited(story)
    story.done("theirs", "w2")
    low, high = *published(story, 0), *published(story, 1, name="theirs")
    story.facts["ends"][1]["began"] = story.now + 1.0  # another process had its pid before
    run(story, low, seconds=2.0)
    run(story, high, "w2")


@SCENES.allow
def start_behind_an_election(story: Story) -> None:
    limited(story)
    low, high = published(story, 0, 1)
    story.faults.append(Fault("step down", "", story.now - 3.0, story.now - 2.0, is_database_away=True))
    run_in_order(story, low, high)


@SCENES.violate("wrong_order")
def start_long_after_an_election(story: Story) -> None:
    limited(story)
    story.faults.append(Fault("step down", "", 0.1, 0.2, is_database_away=True))
    story.wait(20.0)
    low, high = published(story, 0, 1)
    run_in_order(story, low, high)


@SCENES.allow
def start_while_streams_are_broken(story: Story) -> None:
    limited(story)
    low, high = published(story, 0, 1)
    story.faults.append(Fault("kill cursors", "", story.now - 3.0, story.now - 2.0))
    run_in_order(story, low, high)


@SCENES.allow
def start_under_limits_that_nobody_confirmed(story: Story) -> None:
    limited(story)
    limited(story, at=story.now + 1.0, is_known=False)
    story.wait(1.0)
    low, high = published(story, 0, 1)
    run_in_order(story, low, high)


@SCENES.violate("wrong_order")
def start_under_limits_that_were_confirmed_at_last(story: Story) -> None:
    limited(story)
    limited(story, at=0.1, is_known=False)
    limited(story, at=0.5)
    low, high = published(story, 0, 1)
    run_in_order(story, low, high)


def fair(story: Story, tenants: str) -> None:
    """Run tasks of these tenants in this order. All have waited long enough."""
    limited(story, "fairly", fair=True)
    task_ids = [story.publish("fairly", tenant=tenant) for tenant in tenants]
    story.wait(_LONG)
    run_in_order(story, *task_ids)


@SCENES.allow
def tenants_take_turns(story: Story) -> None:
    fair(story, "abcabc")


@SCENES.violate("wrong_order")
def tenant_has_several_turns(story: Story) -> None:
    fair(story, "abaaab")


@SCENES.violate("over_limit")
def two_runs_at_once(story: Story) -> None:
    limited(story)
    first, second = published(story, 0, 0)
    run_id = story.claim(first)
    story.wait(0.5)
    run(story, second)
    story.finish(first, run_id)


test_what_is_wrong_is_named, test_what_is_well_passes = SCENES.tests()


def test_figures_tell_of_starts_and_rescues(story: Story, tmp_path: Path) -> None:
    task_of_a_dead_worker_goes_before_a_new_one(story)
    text = verdict_on(story, tmp_path).describe()
    assert "order of starts: judged 3, out of order 0, out of turn 0" in text
    assert "rescued behind a limit, nothing else broken: 1: median" in text


def test_facts_that_cannot_be_read_prove_nothing(story: Story, tmp_path: Path) -> None:
    story.done()
    story.facts["order"] = [{"target": "shared"}]
    assert any("the facts of the order cannot be read" in doubt for doubt in verdict_on(story, tmp_path).not_proven)
