"""The checker names what is wrong with calls that gather, and lets pass what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mtask.kernel.document.status import RunStatus
from mtask.kernel.statements.finish import Outcome, finish
from tests.chaos.load import tasks
from tests.chaos.selftests.scenes import Scenes, verdict_on
from tests.chaos.selftests.story import Story, instant

TASK = "renewed:again/0"
SCENES = Scenes()


def publish(story: Story, *calls: str, **given: Any) -> None:
    """Publish these calls, one after the other."""
    for call_id in calls:
        is_first = story.tasks.find_one({"_id": TASK}) is None
        story.gather(TASK, call_id, answer="created" if is_first else "updated", **given)
        story.wait(0.1)


def begin(story: Story, worker_id: str = "w1", *, saw: str | None = None) -> str:
    """Claim the task; its handler notes whose params it has."""
    run_id = story.claim(TASK, worker_id, starts=False)
    params = story.document(TASK)["params"]
    calls = [call["call_id"] for call in params.get("calls", [params])]
    story.note("start", TASK, run_id, detail=calls if saw is None else [saw])
    story.wait(0.1)
    return run_id


def end(story: Story, run_id: str, status: RunStatus = RunStatus.SUCCESS) -> None:
    story.finish(TASK, run_id, status)
    story.wait(0.1)


@SCENES.allow
def calls_while_a_run_goes_on(story: Story) -> None:
    publish(story, "c1")
    first = begin(story)
    publish(story, "c2", "c3")
    end(story, first)
    end(story, begin(story, "w2"))


@SCENES.allow
def calls_before_the_first_claim(story: Story) -> None:
    publish(story, "c1", "c2")
    end(story, begin(story))


@SCENES.allow
def call_after_the_end(story: Story) -> None:
    publish(story, "c1")
    end(story, begin(story))
    story.wait(10.0)
    publish(story, "c2")
    end(story, begin(story))


@SCENES.allow
def calls_while_a_run_fails(story: Story) -> None:
    publish(story, "c1")
    first = begin(story)
    publish(story, "c2")
    end(story, first, RunStatus.FAIL)
    end(story, begin(story))


@SCENES.allow
def calls_while_a_run_dies(story: Story) -> None:
    publish(story, "c1")
    begin(story)
    publish(story, "c2")
    story.wait(5.0)
    story.settle(TASK)
    end(story, begin(story, "w2"))


@SCENES.allow
def round_that_is_tried_again(story: Story) -> None:
    publish(story, "c1")
    end(story, begin(story), RunStatus.FAIL)
    story.wait(1.0)
    end(story, begin(story))


@SCENES.allow
def second_failure_that_begins_the_next_round(story: Story) -> None:
    """One write takes the error of the first failure, which only the newest one keeps, and makes its run past."""
    publish(story, "c1")
    raised = {"type": "RuntimeError", "traceback": "..."}
    story.finish(TASK, begin(story), RunStatus.FAIL, error=raised)
    story.wait(1.0)
    second = begin(story)
    publish(story, "c2")
    story.finish(TASK, second, RunStatus.FAIL, error=raised)
    story.wait(0.1)
    end(story, begin(story))


@SCENES.allow
def call_that_is_sent_again(story: Story) -> None:
    """Its publisher was not told of the first time. By the second time its round has passed."""
    publish(story, "c1")
    first = begin(story)
    story.gather(TASK, "c2", answer="unknown")
    story.wait(0.1)
    publish(story, "c2")
    end(story, first)
    end(story, begin(story))
    publish(story, "c2")


@SCENES.allow
def call_that_arrives_after_a_newer_one(story: Story) -> None:
    publish(story, "c1")
    end(story, begin(story))
    asked = story.now
    story.wait(0.2)
    publish(story, "c3")
    last = begin(story)
    story.gather(TASK, "c2", answer="kept", asked=asked)
    story.calls[-2:] = [replace(call, sent=asked) for call in story.calls[-2:]]
    end(story, last)


@SCENES.allow
def cancel_of_the_run_and_of_the_next_round(story: Story) -> None:
    publish(story, "c1")
    run_id = begin(story)
    publish(story, "c2")
    story.cancel(TASK)
    story.wait(0.1)
    end(story, run_id, RunStatus.CANCELED)


@SCENES.allow
def lists_of_calls(story: Story) -> None:
    """A list that has failed is tried again, and calls since its first try wait for its end."""
    publish(story, "c1", "c2", kind="calls")
    end(story, begin(story), RunStatus.FAIL)
    publish(story, "c3", kind="calls")
    story.wait(1.0)
    second = begin(story)
    publish(story, "c4", kind="calls")
    end(story, second)
    end(story, begin(story))


@SCENES.allow
def calls_that_move_the_start(story: Story) -> None:
    publish(story, "c1", "c2", "c3", debounce_ms=1000, max_wait_ms=1100)
    story.wait(1.0)
    run_id = begin(story)
    publish(story, "c4", debounce_ms=1000, max_wait_ms=1100)
    end(story, run_id)
    story.wait(1.0)
    end(story, begin(story))


@SCENES.allow
def calls_in_one_millisecond(story: Story) -> None:
    story.gather(TASK, "c1", answer="created", debounce_ms=1000)
    story.gather(TASK, "c2", asked=story.now + 0.001, debounce_ms=1000)
    story.wait(1.0)
    end(story, begin(story))


@SCENES.allow
def call_after_a_rerun(story: Story) -> None:
    """The round is open again and has no run, so it takes a further call."""
    publish(story, "c1")
    end(story, begin(story))
    story.again(TASK, "rerun")
    story.wait(0.1)
    publish(story, "c2")
    end(story, begin(story))


# --- wrong ----------------------------------------------------------------------------------------------------


@SCENES.violate("wrong_rounds")
def call_that_is_acknowledged_and_never_written(story: Story) -> None:
    publish(story, "c1")
    run_id = begin(story)
    story.call("gather", TASK, "updated", gather_id="c2")
    end(story, run_id)


@SCENES.violate("wrong_rounds")
def next_round_that_is_dropped(story: Story) -> None:
    publish(story, "c1")
    run_id = begin(story)
    publish(story, "c2")
    story.apply(TASK, [{"$unset": "again"}])
    end(story, run_id)


@SCENES.violate("wrong_rounds")
def next_round_that_a_finish_does_not_begin(story: Story) -> None:
    publish(story, "c1")
    run_id = begin(story)
    publish(story, "c2")
    story.note("end", TASK, run_id)
    ends = finish([Outcome(TASK, run_id, RunStatus.SUCCESS)], instant(story.now))
    story.apply(TASK, ends[:-1])


@SCENES.violate("wrong_rounds")
def next_round_without_the_calls_that_it_had(story: Story) -> None:
    publish(story, "c1")
    run_id = begin(story)
    publish(story, "c2", "c3")
    ids = story.document(TASK)["again"]["gather"]["ids"]
    story.tasks.update_one({"_id": TASK}, {"$set": {"again.gather.ids": ids[1:]}})
    end(story, run_id)
    end(story, begin(story))


@SCENES.violate("wrong_rounds")
def call_that_makes_two_rounds(story: Story) -> None:
    publish(story, "c1")
    end(story, begin(story))
    publish(story, "c2")
    end(story, begin(story))
    story.tasks.update_one({"_id": TASK}, {"$set": {"gather.seen": [], "gather.ids": []}})
    publish(story, "c1")
    end(story, begin(story))


@SCENES.violate("wrong_rounds")
def call_that_joins_a_round_that_has_begun(story: Story) -> None:
    publish(story, "c1")
    run_id = begin(story)
    story.call("gather", TASK, "updated", gather_id="c2")
    story.set(TASK, gather__newest={"asked_time": instant(story.now), "call_id": "c2"}, gather__ids=["c1", "c2"])
    end(story, run_id)


@SCENES.violate("wrong_rounds")
def round_that_is_replaced_before_it_begins(story: Story) -> None:
    publish(story, "c1")
    newest = story.document(TASK)["gather"]["newest"]
    story.call("gather", TASK, "updated", gather_id="c2")
    mark = {"asked_time": instant(story.now), "call_id": "c2"}
    story.set(TASK, gather__newest=mark, gather__ids=["c2"], gather__consumed=newest)
    end(story, begin(story))


@SCENES.violate("wrong_rounds")
def handler_with_the_params_of_an_older_call(story: Story) -> None:
    publish(story, "c1", "c2")
    end(story, begin(story, saw="c1"))


@SCENES.violate("wrong_rounds")
def call_that_is_left_out_and_none_is_newer(story: Story) -> None:
    publish(story, "c1")
    end(story, begin(story))
    story.wait(5.0)
    story.call("gather", TASK, "kept", gather_id="c2")


@SCENES.violate("wrong_rounds")
def list_that_misses_a_call(story: Story) -> None:
    publish(story, "c1", "c2", kind="calls")
    end(story, begin(story, saw="c1"))


@SCENES.violate("wrong_rounds")
def list_that_has_ended_and_holds_the_next_one_up(story: Story) -> None:
    publish(story, "c1", kind="calls")
    run_id = begin(story)
    publish(story, "c2", kind="calls")
    story.note("end", TASK, run_id)
    ends = finish([Outcome(TASK, run_id, RunStatus.SUCCESS)], instant(story.now))
    story.apply(TASK, ends[:-1])


@SCENES.violate("wrong_rounds")
def start_that_the_last_call_did_not_move(story: Story) -> None:
    publish(story, "c1", debounce_ms=1000)
    story.call("gather", TASK, "updated", gather_id="c2")
    mark = {"asked_time": instant(story.now), "call_id": "c2"}
    story.set(TASK, gather__newest=mark, gather__ids=["c1", "c2"])
    story.wait(1.0)
    end(story, begin(story, saw="c2"))


@SCENES.violate("lost", "wrong_rounds")
def last_round_that_never_begins(story: Story) -> None:
    publish(story, "c1")
    run_id = begin(story)
    publish(story, "c2")
    end(story, run_id)


test_what_is_wrong_is_named, test_what_is_well_passes = SCENES.tests()


def test_calls_and_rounds_are_counted(story: Story, tmp_path: Path) -> None:
    calls_while_a_run_dies(story)
    assert verdict_on(story, tmp_path).figures.controls["calls that gather"] == {
        "tasks": 1,
        "calls": 2,
        "rounds": 2,
        "begun by the end of a run": 1,
        "by the lapse of one": 1,
    }


# --- the load -------------------------------------------------------------------------------------------------


def test_the_calls_of_a_load_are_those_of_its_seed_and_meet_under_one_key() -> None:
    calls = {
        name: [call for batch in range(60) for call in tasks.gather_calls(7, name, batch)] for name in ("p1", "p2")
    }
    assert calls["p1"] == [call for batch in range(60) for call in tasks.gather_calls(7, "p1", batch)]
    assert {(call.name, call.key) for call in calls["p1"]} == {(call.name, call.key) for call in calls["p2"]}
    ids = [call.call_id for made in calls.values() for call in made]
    assert len(ids) == len(set(ids)) > 60
    # A document remembers the ids of all its calls, so no task may have many.
    keys = [call.key for made in calls.values() for call in made]
    assert max(map(keys.count, keys)) < 80
