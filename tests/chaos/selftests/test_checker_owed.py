"""The checker names what is wrong with children and next tasks, and lets pass what is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mtask import Context
from mtask.features.flows import statements as flows
from mtask.features.flows.rules import Verdict
from mtask.kernel.document.status import RunStatus
from tests.chaos.load import app
from tests.chaos.load import flows as flow_load
from tests.chaos.selftests.scenes import Scenes, release, run, told, verdict_on
from tests.chaos.selftests.story import Story, instant

SCENES = Scenes()


def claimed(story: Story, *after: str) -> tuple[str, str]:
    """Publish a step that runs; return its id and the run_id."""
    task_id = story.publish_step("a", *after)
    story.wait(0.1)
    return task_id, story.claim(task_id)


def end(story: Story, task_id: str, run_id: str) -> None:
    story.wait(0.1)
    story.finish(task_id, run_id)
    told(story, task_id)


def do(story: Story, *task_ids: str) -> None:
    """Run steps to their ends, and tell the others."""
    for task_id in task_ids:
        run(story, task_id)
        told(story, task_id)


def went_on(story: Story, task_id: str, run_id: str) -> str:
    """End a run that goes on; return the id of the next task, which is published."""
    story.finish(task_id, run_id, following=story.next_of(task_id, run_id))
    (next_id,) = story.publish_owed(task_id)
    story.wait(0.01)
    return next_id


# --- children: legal ------------------------------------------------------------------------------------------


@SCENES.allow
def children_and_theirs_before_the_dependent(story: Story) -> None:
    parent, run_id = claimed(story)
    last = story.publish_step("z", parent)
    first, second = story.add(parent, run_id, "a-0", "a-1")
    own_run = story.claim(first)
    (grandchild,) = story.add(first, own_run, "a-0-0")
    end(story, parent, run_id)
    end(story, first, own_run)
    do(story, second, grandchild)
    release(story, last)
    do(story, last)


@SCENES.allow
def children_of_a_run_that_dies_before_it_is_told(story: Story) -> None:
    """Somebody else publishes them, and the next try is told of them."""
    parent, _ = claimed(story)
    last = story.publish_step("z", parent)
    story.owe(parent, "a-0")
    story.wait(5.0)
    (child,) = story.publish_owed(parent)
    second = story.claim(parent, "w2")
    story.note("added", parent, second, detail=[child])
    do(story, child)
    end(story, parent, second)
    release(story, last)
    do(story, last)


@SCENES.allow
def children_that_the_next_try_does_not_add(story: Story) -> None:
    parent, _ = claimed(story)
    story.owe(parent, "a-0")
    story.wait(5.0)
    second = story.claim(parent, "w2")
    story.wait(0.1)
    story.finish(parent, second)
    do(story, *story.publish_owed(parent))


@SCENES.allow
def child_of_a_parent_that_a_retry_opened_right_before_the_release(story: Story) -> None:
    """Whoever releases has read that the canceled parent had no children."""
    parent = story.publish_step("a")
    last = story.publish_step("z", parent, on_failed="run")
    story.cancel(parent)
    story.wait(0.1)
    story.again(parent)
    run_id = story.claim(parent)
    (child,) = story.add(parent, run_id, "a-0")
    story.wait(0.1)
    story.finish(parent, run_id)
    release(story, last)
    told(story, parent)
    do(story, child, last)


@SCENES.allow
def child_that_fails_and_is_retried(story: Story) -> None:
    parent, run_id = claimed(story)
    last = story.publish_step("z", parent)
    (child,) = story.add(parent, run_id, "a-0")
    end(story, parent, run_id)
    own_run = story.claim(child)
    story.wait(0.1)
    story.finish(child, own_run, RunStatus.FAIL, final=True)
    story.apply(last, flows.end(Verdict.CANCEL, {last: child}, instant(story.now)))
    told(story, child, last)
    story.again(child)
    story.apply(last, flows.reopen(instant(story.now)))
    told(story, child, last)
    do(story, child)
    release(story, last)
    do(story, last)


# --- children: wrong ------------------------------------------------------------------------------------------


@SCENES.violate("wrong_releases")
def release_before_the_end_of_a_child(story: Story) -> None:
    parent, run_id = claimed(story)
    last = story.publish_step("z", parent)
    (child,) = story.add(parent, run_id, "a-0")
    end(story, parent, run_id)
    release(story, last)
    do(story, last, child)


@SCENES.violate("wrong_releases")
def release_before_the_end_of_a_grandchild(story: Story) -> None:
    parent, run_id = claimed(story)
    last = story.publish_step("z", parent)
    (child,) = story.add(parent, run_id, "a-0")
    own_run = story.claim(child)
    (grandchild,) = story.add(child, own_run, "a-0-0")
    end(story, parent, run_id)
    end(story, child, own_run)
    release(story, last)
    do(story, last, grandchild)


@SCENES.violate("wrong_releases")
def release_while_a_child_is_only_owed(story: Story) -> None:
    parent, run_id = claimed(story)
    last = story.publish_step("z", parent)
    story.owe(parent, "a-0")
    story.wait(0.1)
    story.finish(parent, run_id)
    release(story, last)
    do(story, *story.publish_owed(parent), last)


@SCENES.violate("wrong_releases")
def release_although_a_child_failed(story: Story) -> None:
    parent, run_id = claimed(story)
    last = story.publish_step("z", parent)
    (child,) = story.add(parent, run_id, "a-0")
    end(story, parent, run_id)
    own_run = story.claim(child)
    story.finish(child, own_run, RunStatus.FAIL, final=True)
    told(story, child)
    release(story, last)
    do(story, last)


@SCENES.violate("wrong_releases")
def release_long_after_a_child_was_opened_again(story: Story) -> None:
    parent, run_id = claimed(story)
    last = story.publish_step("z", parent)
    (child,) = story.add(parent, run_id, "a-0")
    end(story, parent, run_id)
    do(story, child)
    story.again(child, "rerun")
    story.wait(10.0)
    release(story, last)
    do(story, child, last)


@SCENES.violate("wrong_owed")
def children_that_nobody_publishes(story: Story) -> None:
    parent, run_id = claimed(story)
    story.owe(parent, "a-0")
    end(story, parent, run_id)


@SCENES.violate("wrong_owed")
def child_that_is_taken_out_and_never_published(story: Story) -> None:
    parent, run_id = claimed(story)
    story.owe(parent, "a-0")
    story.apply(parent, [{"$unset": "owed_tasks"}])
    end(story, parent, run_id)


@SCENES.violate("wrong_owed")
def child_that_no_task_owed(story: Story) -> None:
    parent, run_id = claimed(story)
    (child,) = story.add(parent, run_id, "a-0")
    document = story.document(child)
    stray = {**document, "_id": "quick:f/x", "key": "f/x", "flow": {**document["flow"], "step": "x"}}
    story.insert(stray)
    end(story, parent, run_id)
    do(story, child, "quick:f/x")


@SCENES.violate("wrong_owed")
def child_that_exists_twice(story: Story) -> None:
    parent, run_id = claimed(story)
    (child,) = story.add(parent, run_id, "a-0")
    document = story.document(child)
    end(story, parent, run_id)
    do(story, child)
    story.remove(child)
    story.insert(document)
    do(story, child)


@SCENES.violate("wrong_owed")
def child_of_another_flow(story: Story) -> None:
    parent, run_id = claimed(story)
    story.owe(parent, "a-0")
    (owed,) = story.document(parent)["owed_tasks"]
    story.set(parent, owed_tasks=[])
    story.insert({**owed, "flow": {**owed["flow"], "key": "g"}})
    end(story, parent, run_id)
    do(story, owed["_id"])


@SCENES.violate("wrong_owed")
def child_of_a_run_that_had_lost_its_lease(story: Story) -> None:
    parent, _ = claimed(story)
    story.wait(5.0)
    story.owe(parent, "a-0")
    children = story.publish_owed(parent)
    second = story.claim(parent, "w2")
    end(story, parent, second)
    do(story, *children)


@SCENES.violate("wrong_owed")
def child_that_was_acknowledged_and_is_not_there(story: Story) -> None:
    parent, run_id = claimed(story)
    story.note("added", parent, run_id, detail=["quick:f/a-0"])
    end(story, parent, run_id)


@SCENES.violate("wrong_owed")
def child_that_is_taken_for_another_task(story: Story) -> None:
    parent, run_id = claimed(story)
    (child,) = story.add(parent, run_id, "a-0")
    story.set(parent, task_state__unpublished=[child])
    end(story, parent, run_id)
    do(story, child)


@SCENES.allow
def child_that_two_runs_owe(story: Story) -> None:
    """The second run looked for it before it was published, and owes it once more."""
    parent, _ = claimed(story)
    story.owe(parent, "a-0")
    story.wait(5.0)
    (child,) = story.publish_owed(parent)
    second = story.claim(parent, "w2")
    story.owe(parent, "a-0")
    story.apply(parent, [{"$unset": "owed_tasks"}])
    end(story, parent, second)
    do(story, child)


# --- next tasks -----------------------------------------------------------------------------------------------


@SCENES.allow
def chain_of_three(story: Story) -> None:
    task_id, run_id = story.running("relay")
    second = went_on(story, task_id, run_id)
    third = went_on(story, second, story.claim(second))
    story.wait(0.1)
    run(story, third)


@SCENES.allow
def chain_in_a_flow(story: Story) -> None:
    first, run_id = claimed(story)
    last = story.publish_step("z", first)
    second = went_on(story, first, run_id)
    third = went_on(story, second, story.claim(second))
    do(story, third)
    release(story, last)
    do(story, last)


@SCENES.allow
def rerun_of_a_task_that_went_on(story: Story) -> None:
    task_id, run_id = story.running("relay")
    run(story, went_on(story, task_id, run_id))
    story.again(task_id, "rerun")
    run_id = story.claim(task_id)
    story.wait(0.1)
    story.finish(task_id, run_id, following=story.next_of(task_id, run_id))


@SCENES.allow
def cancel_of_a_task_that_would_have_gone_on(story: Story) -> None:
    task_id, run_id = story.running("relay")
    story.cancel(task_id)
    story.wait(0.1)
    story.finish(task_id, run_id, following=story.next_of(task_id, run_id))


@SCENES.allow
def next_task_that_another_worker_publishes(story: Story) -> None:
    task_id, run_id = story.running("relay")
    story.finish(task_id, run_id, following=story.next_of(task_id, run_id))
    story.wait(8.0)
    run(story, *story.publish_owed(task_id))


@SCENES.violate("wrong_releases")
def release_before_the_end_of_a_chain(story: Story) -> None:
    first, run_id = claimed(story)
    last = story.publish_step("z", first)
    second = went_on(story, first, run_id)
    third = went_on(story, second, story.claim(second))
    release(story, last)
    do(story, last, third)


@SCENES.violate("wrong_owed")
def next_task_that_nobody_publishes(story: Story) -> None:
    task_id, run_id = story.running("relay")
    story.finish(task_id, run_id, following=story.next_of(task_id, run_id))


@SCENES.violate("wrong_owed")
def next_task_that_a_finish_forgets(story: Story) -> None:
    task_id, run_id = story.running("relay")
    story.next_of(task_id, run_id)
    story.finish(task_id, run_id)


@SCENES.violate("wrong_owed")
def next_task_for_which_nobody_asked(story: Story) -> None:
    task_id, run_id = story.running("relay")
    following = story.next_of(task_id, run_id)
    story.notes = [note for note in story.notes if note.event != "next"]
    story.finish(task_id, run_id, following=following)
    run(story, *story.publish_owed(task_id))


@SCENES.violate("wrong_owed")
def second_next_task_after_a_rerun(story: Story) -> None:
    task_id, run_id = story.running("relay")
    run(story, went_on(story, task_id, run_id))
    story.again(task_id, "rerun")
    story.wait(0.1)
    run_id = story.claim(task_id)
    following = story.next_of(task_id, run_id)
    story.tasks.update_one({"_id": task_id}, {"$unset": {"task_state.next_id": ""}})
    story.finish(task_id, run_id, following=following)
    run(story, *story.publish_owed(task_id))


@SCENES.violate("wrong_owed")
def next_task_of_a_task_whose_end_was_asked_for(story: Story) -> None:
    task_id, run_id = story.running("relay")
    story.cancel(task_id)
    story.wait(0.1)
    following = story.next_of(task_id, run_id)
    story.tasks.update_one({"_id": task_id}, {"$set": {"task_state.cancel_requested": False}})
    story.finish(task_id, run_id, following=following)
    run(story, *story.publish_owed(task_id))


@SCENES.violate("wrong_owed")
def next_task_that_misses_a_result(story: Story) -> None:
    task_id, run_id = story.running("relay")
    second = went_on(story, task_id, run_id)
    run_id = story.claim(second)
    story.wait(0.1)
    story.finish(second, run_id, RunStatus.FAIL, final=True)


test_what_is_wrong_is_named, test_what_is_well_passes = SCENES.tests()


def test_children_and_next_tasks_are_counted(story: Story, tmp_path: Path) -> None:
    children_and_theirs_before_the_dependent(story)
    task_id, run_id = story.running("relay")
    run(story, went_on(story, task_id, run_id))
    verdict = verdict_on(story, tmp_path)
    assert verdict.is_clean, verdict.describe()
    assert verdict.figures.controls["children of steps"] == {
        "children": 3,
        "of children": 1,
        "parents": 2,
        "acknowledged to their runs": 3,
    }
    assert verdict.figures.controls["next tasks"] == {"runs that returned one": 1, "went on": 1, "of flows": 0}
    assert verdict.figures.controls["steps of flows"]["released after descendants"] == 1


def test_the_children_of_a_load_are_at_most_two_levels_deep() -> None:
    made = [flow for batch in range(400) if (flow := flow_load._made(7, "p1", batch)) is not None]
    children = [task_id for flow in made for task_id in flow.children]
    levels = {task_id.rpartition("/")[2].count("-") for task_id in children}
    assert levels == {1, 2}
    assert len(children) == len(set(children)) > 200
    assert any(task_id.startswith("split:") for task_id in children)


@pytest.mark.parametrize("tree", [["quick", ["plain", "flaky"], "flaky"], [["quick"]]], ids=str)
def test_handlers_add_the_children_of_the_load(tree: list[Any]) -> None:
    def added(step: str, part: list[Any]) -> Iterator[str]:
        context = SimpleNamespace(task=SimpleNamespace(flow=SimpleNamespace(step=step)))
        for child in app._children(cast(Context, context), part):
            yield f"{child.spec.task}:f/{child.step}"
            yield from added(child.step, child.spec.params.get("tree", []))

    assert list(added("s1", tree)) == list(flow_load.children_of("split:f/s1", tree))
