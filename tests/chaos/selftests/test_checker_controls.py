"""The checker names what is wrong with limits, pauses and schedules, and lets pass what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.history import Fault
from tests.chaos.selftests.scenes import Scenes, verdict_on
from tests.chaos.selftests.story import EPOCH, Story, instant

LIMIT = {"name": "limited", "key": None, "concurrency": 2}
KEY_LIMIT = {"name": "limited", "key": "k", "concurrency": 1}

SCENES = Scenes()

# --- limits -----------------------------------------------------------------------------------------------------------


def hold(story: Story, count: int, **options: object) -> list[tuple[str, str]]:
    """Have so many run at once."""
    return [story.running("limited", **options) for _ in range(count)]


def let_go(story: Story, held: list[tuple[str, str]]) -> None:
    story.wait(0.5)
    for task_id, run_id in held:
        story.finish(task_id, run_id)
    story.wait(0.1)


def filled(story: Story, count: int = 2, **options: object) -> None:
    """Fill the limit once more, when the backlog has drained."""
    story.facts |= {"limits": [LIMIT], "drained_at": story.now}
    story.wait(0.1)
    let_go(story, hold(story, count, **options))


@SCENES.allow
def as_many_as_allowed(story: Story) -> None:
    for _ in range(2):
        let_go(story, hold(story, 2))
    filled(story)


@SCENES.allow
def handler_of_a_lapsed_run_that_goes_on(story: Story) -> None:
    ((task_id, frozen),) = hold(story, 1)
    story.wait(4.1)
    story.settle(task_id)
    held = hold(story, 2)
    story.note("cancelled", task_id, frozen)
    let_go(story, held)
    story.finish(task_id, story.claim(task_id, "w2"))
    filled(story)


@SCENES.allow
def one_after_the_other_of_a_key(story: Story) -> None:
    let_go(story, [*hold(story, 1, limit_key="k"), *hold(story, 1)])
    filled(story, 1, limit_key="k")
    story.facts["limits"] = [KEY_LIMIT]


@SCENES.violate("over_limit")
def one_too_many(story: Story) -> None:
    let_go(story, hold(story, 3))
    filled(story)


@SCENES.violate("over_limit")
def one_too_many_beside_a_killed_worker_that_holds_its_lease(story: Story) -> None:
    ((task_id, _),) = hold(story, 1)
    story.wait(2.0)
    let_go(story, hold(story, 2))
    story.wait(2.0)
    story.finish(task_id, story.claim(task_id, "w2"))
    filled(story)


@SCENES.violate("over_limit")
def one_too_many_of_a_key(story: Story) -> None:
    let_go(story, hold(story, 2, limit_key="k"))
    filled(story, 1, limit_key="k")
    story.facts["limits"] = [KEY_LIMIT]


@SCENES.violate("over_limit")
def limit_that_cannot_be_filled_any_more(story: Story) -> None:
    let_go(story, hold(story, 2))
    filled(story, 1)


@SCENES.violate("over_limit")
def place_that_is_not_given_back(story: Story) -> None:
    filled(story)
    entry = {"task_id": "limited:k", "token": "t", "claim_by": instant(2)}
    story.places.append({"_id": '["limited"]', "starts": [], "running": [entry], "schema_version": 1})


@SCENES.violate("over_limit", "stale_results")
def handler_that_goes_on_when_its_place_is_given_to_another(story: Story) -> None:
    (ended, _) = held = hold(story, 2)
    story.finish(*ended, note=None)
    (other,) = hold(story, 1)
    story.wait(0.5)
    story.note("end", *ended)
    let_go(story, [held[1], other])
    filled(story)


# --- pauses -----------------------------------------------------------------------------------------------------------


def paused(story: Story, since: float, until: float) -> None:
    instants = [EPOCH.timestamp() + seconds for seconds in (since, until)]
    story.faults.append(Fault("pause queue", "pausable", since, until, detail={"pauses": [instants], "unknown": 0}))


@SCENES.allow
def claims_before_a_pause_and_after_it(story: Story) -> None:
    story.done("pausable")
    since = story.now
    story.wait(1.0)
    task_id = story.publish("pausable")
    story.done("quick")
    story.wait(1.0)
    paused(story, since, story.now)
    story.wait(0.01)
    story.finish(task_id, story.claim(task_id))


@SCENES.allow
def claim_within_a_pause_that_nobody_was_told_of(story: Story) -> None:
    story.faults.append(Fault("pause queue", "pausable", 0.5, 9.0, detail={"pauses": [], "unknown": 1}))
    story.done("pausable")


@SCENES.violate("claimed_paused")
def claim_within_a_pause(story: Story) -> None:
    since = story.now
    story.wait(0.5)
    story.done("pausable")
    story.wait(0.5)
    paused(story, since, story.now)


# --- schedules --------------------------------------------------------------------------------------------------------


def scheduled(story: Story, count: int, **facts: object) -> None:
    """Have a schedule of so many seconds, beginning with the next but one."""
    first = EPOCH.timestamp() + int(story.now) + 2
    known = {"name": "tick", "interval": 1.0, "first": first, "until": first + count - 0.5, "next": first + count}
    story.facts["schedules"] = [{**known, "fired": count, **facts}]
    story.now = int(story.now) + 2.0


def fire(story: Story, *, late: float = 0.0, due: float = 0.0) -> str:
    """Make the firing of this second."""
    task_id = f"tick:tick/{instant(story.now).replace(tzinfo=None).isoformat(timespec='seconds')}Z"
    story.wait(late)
    story.publish_again(task_id, delay=due - late, answer=None)
    story.calls.pop()
    story.finish(task_id, story.claim(task_id))
    story.wait(1.0 - late)
    return task_id


@SCENES.allow
def firings_one_of_them_late(story: Story) -> None:
    scheduled(story, 3)
    for late in (0.0, 0.7, 0.0):
        fire(story, late=late)


@SCENES.violate("wrong_firings")
def firing_that_is_missing(story: Story) -> None:
    scheduled(story, 3, fired=3)
    fire(story)
    story.wait(1.0)
    fire(story)


@SCENES.violate("wrong_firings")
def schedule_that_fired_no_more(story: Story) -> None:
    scheduled(story, 3, fired=1, next=EPOCH.timestamp() + 1)
    fire(story)
    story.wait(2.0)


@SCENES.violate("wrong_firings")
def firing_that_was_made_twice(story: Story) -> None:
    scheduled(story, 2, fired=3)
    fire(story)
    fire(story)


@SCENES.violate("wrong_firings", "lost")
def firing_that_was_published_twice(story: Story) -> None:
    scheduled(story, 2)
    fire(story)
    task_id = fire(story)
    story.remove(task_id, is_asked=False)
    story.publish_again(task_id, delay=-1.0, answer=None)
    story.calls.pop()
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("wrong_firings", "wrong_fields")
def firing_at_no_time_of_the_schedule(story: Story) -> None:
    scheduled(story, 2)
    fire(story)
    fire(story)
    fire(story)


@SCENES.violate("wrong_firings")
def firing_that_is_due_at_another_time(story: Story) -> None:
    scheduled(story, 1)
    fire(story, late=0.5, due=0.2)


test_what_is_wrong_is_named, test_what_is_well_passes = SCENES.tests()


def test_lapsed_runs_that_wait_for_a_place_are_no_slow_rescues(story: Story, tmp_path: Path) -> None:
    filled(story)
    task_id, _ = story.running("limited")
    story.wait(9.0)
    story.finish(task_id, story.claim(task_id, "w2"))
    assert not verdict_on(story, tmp_path).figures.rescues


def test_figures_tell_of_limits_pauses_and_firings(story: Story, tmp_path: Path) -> None:
    as_many_as_allowed(story)
    claims_before_a_pause_and_after_it(story)
    firings_one_of_them_late(story)
    text = verdict_on(story, tmp_path).describe()
    assert "limit of limited: allowed 2, most held at once 2, most handlers at once 2, runs 6" in text
    assert "pauses of pausable: confirmed 1, unknown 0, claims inside 0, published inside 1" in text
    assert "firings of tick: expected 3, missing 0, twice 0, stray 0" in text


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"limits": [{"name": "limited"}]}, "the facts of limits cannot be read"),
        ({"schedules": [{"name": "tick"}]}, "the facts of schedules cannot be read"),
    ],
)
def test_facts_that_cannot_be_read_prove_nothing(
    facts: dict[str, object], reason: str, story: Story, tmp_path: Path
) -> None:
    story.done()
    story.facts |= facts
    assert any(reason in doubt for doubt in verdict_on(story, tmp_path).not_proven)
