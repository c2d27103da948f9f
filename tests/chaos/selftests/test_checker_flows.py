"""The checker names what is wrong with flows, and lets pass what is not."""

from __future__ import annotations

from pathlib import Path
from random import Random

from mtask.features.flows import statements as flows
from mtask.features.flows.rules import Verdict
from tests.chaos.history import Call, Ledger
from tests.chaos.load import flows as flow_load
from tests.chaos.load import publisher
from tests.chaos.selftests.scenes import Scenes, release, run, told
from tests.chaos.selftests.story import Story, instant

SCENES = Scenes()


def cancel(story: Story, task_id: str, culprit: str) -> None:
    story.apply(task_id, flows.end(Verdict.CANCEL, {task_id: culprit}, instant(story.now)))
    story.wait(0.01)


@SCENES.allow
def step_after_step(story: Story) -> None:
    first = story.publish_step("a")
    second = story.publish_step("b", first)
    run(story, first)
    release(story, second)
    told(story, first)
    run(story, second)
    told(story, second)


@SCENES.allow
def failure_that_a_retry_takes_back(story: Story) -> None:
    first = story.publish_step("a", max_retries=0)
    second = story.publish_step("b", first)
    third = story.publish_step("c", first, on_failed="run")
    run(story, first, fails=True)
    cancel(story, second, first)
    release(story, third)
    told(story, first, second)
    run(story, third)
    told(story, third)
    story.again(first)
    story.apply(second, flows.reopen(instant(story.now)))
    told(story, first, second)
    run(story, first)
    release(story, second)
    told(story, first)
    run(story, second)
    told(story, second)


@SCENES.allow
def retry_that_meets_the_release(story: Story) -> None:
    """Whoever releases has read the dependency right before a user opened it again."""
    first = story.publish_step("a")
    second = story.publish_step("b", first)
    run(story, first)
    story.again(first, "rerun")
    release(story, second)
    told(story, first)
    run(story, first)
    told(story, first)
    run(story, second)
    told(story, second)


@SCENES.violate("lost", "wrong_releases")
def step_that_nobody_releases(story: Story) -> None:
    first = story.publish_step("a")
    story.publish_step("b", first)
    run(story, first)
    told(story, first)


@SCENES.violate("wrong_releases")
def release_before_the_end_of_a_dependency(story: Story) -> None:
    first, other = story.publish_step("a"), story.publish_step("b")
    last = story.publish_step("c", first, other)
    run(story, first)
    release(story, last)
    run(story, last)
    run(story, other)
    told(story, first, other, last)


@SCENES.violate("wrong_releases")
def release_long_after_the_dependency_was_opened_again(story: Story) -> None:
    first = story.publish_step("a")
    last = story.publish_step("b", first)
    run(story, first)
    story.again(first, "rerun")
    story.wait(10)
    release(story, last)
    run(story, first)
    run(story, last)
    told(story, first, last)


@SCENES.violate("wrong_releases")
def release_although_a_dependency_failed(story: Story) -> None:
    first = story.publish_step("a", max_retries=0)
    last = story.publish_step("b", first)
    run(story, first, fails=True)
    release(story, last)
    run(story, last)
    told(story, first, last)


@SCENES.violate("wrong_releases")
def step_that_is_released_twice(story: Story) -> None:
    first = story.publish_step("a")
    last = story.publish_step("b", first)
    run(story, first)
    release(story, last)
    story.wait(0.1)
    now = instant(story.now)
    story.set(last, flow__release_time=now, task_state__next_preempt_time=now)
    run(story, last)
    told(story, first, last)


@SCENES.violate("wrong_releases")
def cancel_because_of_a_step_that_is_not_failed(story: Story) -> None:
    first = story.publish_step("a")
    last = story.publish_step("b", first)
    run(story, first)
    cancel(story, last, first)
    told(story, first, last)


@SCENES.violate("wrong_releases")
def change_that_others_never_hear_of(story: Story) -> None:
    first = story.publish_step("a")
    run(story, first)


@SCENES.violate("wrong_releases")
def dependency_that_is_lost(story: Story) -> None:
    first, other = story.publish_step("a"), story.publish_step("b")
    last = story.publish_step("c", first, other)
    story.set(last, flow__after=[first])
    run(story, first)
    run(story, other)
    release(story, last)
    run(story, last)
    told(story, first, other, last)


test_what_is_wrong_is_named, test_what_is_well_passes = SCENES.tests()


# --- the load -------------------------------------------------------------------------------------------------


def test_the_flows_of_a_load_are_those_of_its_seed() -> None:
    made = [flow_load.flow_of(7, "p1", batch) for batch in range(200)]
    again = [flow_load.flow_of(7, "p1", batch) for batch in range(200)]
    assert [one and one[1] for one in made] == [one and one[1] for one in again]
    assert 10 < sum(one is not None for one in made) < 80
    deeds = [deed for batch in range(300) for deed in flow_load.deeds(7, "p1", batch)]
    assert {deed.operation for deed in deeds} == {"retry", "cancel"}
    known = {task_id for one in made if one is not None for task_id in one[1]}
    assert f"{deeds[0].name}:{deeds[0].key}" in known


def test_a_publisher_goes_on_behind_its_flows(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "calls-p1.jsonl")
    tasks = [f"quick:p1/{number}" for number in range(40)]
    random = Random(1)
    steps = [f"quick:{flow_load.PREFIX}p1/0/s{random.randrange(40)}" for _ in range(5)]
    ledger.write_all([Call("c", "publish", task_id, "p1", 1.0, 2.0, "created") for task_id in [*tasks, *steps]])
    ledger.close()
    assert publisher.next_batch(tmp_path / "calls-p1.jsonl") == 1
