"""The checker names what is lost, told twice or wrongly derived: histories that are good but for one thing."""

from __future__ import annotations

from datetime import timedelta

from mtask.kernel.document.status import RunStatus
from mtask.kernel.statements import publish as requests
from tests.chaos.selftests.scenes import Scenes
from tests.chaos.selftests.story import Story, instant

FAIL, CANCELED, SUCCESS = RunStatus.FAIL, RunStatus.CANCELED, RunStatus.SUCCESS

SCENES = Scenes()


# --- lost -------------------------------------------------------------------------------------------------------------


@SCENES.violate("lost")
def acknowledged_task_that_nobody_ever_saw(story: Story) -> None:
    story.call("publish", "quick:nowhere", "created")


@SCENES.violate("lost")
def kept_task_that_is_not_there(story: Story) -> None:
    task_id = story.done()
    story.remove(task_id)
    story.wait(5.0)
    story.call("publish", task_id, "kept")


@SCENES.violate("lost")
def task_that_never_ends(story: Story) -> None:
    story.publish()


@SCENES.violate("lost")
def unacknowledged_task_that_never_ends(story: Story) -> None:
    story.publish(answer="unknown")


@SCENES.violate("lost")
def task_whose_run_never_ends(story: Story) -> None:
    story.running()


@SCENES.violate("lost")
def task_that_is_gone_without_a_removal(story: Story) -> None:
    task_id = story.done()
    story.tasks.delete_one({"_id": task_id})


@SCENES.violate("lost")
def removal_that_nobody_asked_for(story: Story) -> None:
    story.remove(story.done(), is_asked=False)


@SCENES.violate("lost")
def removal_before_it_was_asked_for(story: Story) -> None:
    task_id = story.done()
    story.remove(task_id, is_asked=False)
    story.wait(5.0)
    story.call("remove", task_id, "unknown")


@SCENES.violate("lost")
def expiry_before_its_time(story: Story) -> None:
    task_id = story.done(retain_success=60)
    story.wait(30.0)
    story.remove(task_id, is_asked=False)


@SCENES.violate("lost")
def retry_that_was_acknowledged_and_never_written(story: Story) -> None:
    task_id = story.publish("doomed", max_retries=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(5.0)
    story.call("retry", task_id, "done")


@SCENES.violate("lost")
def cancel_that_was_acknowledged_and_never_written(story: Story) -> None:
    task_id, run_id = story.running()
    story.wait(1.0)
    story.call("cancel", task_id, "done")
    story.wait(1.0)
    story.finish(task_id, run_id)


@SCENES.violate("lost")
def update_that_was_acknowledged_and_never_written(story: Story) -> None:
    task_id = story.done()
    story.wait(5.0)
    story.call("update", task_id, "updated")


@SCENES.violate("lost")
def removal_that_was_acknowledged_and_never_done(story: Story) -> None:
    task_id = story.done()
    story.wait(5.0)
    story.call("remove", task_id, "done")


# --- double_acknowledgements ------------------------------------------------------------------------------------------


@SCENES.violate("double_acknowledgements")
def creation_that_is_told_twice_at_once(story: Story) -> None:
    task_id = story.publish()
    story.call("publish", task_id, "created")
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("double_acknowledgements")
def creation_that_is_told_again_later(story: Story) -> None:
    task_id = story.done()
    story.wait(60.0)
    story.call("publish", task_id, "created")


# --- wrong_fields -----------------------------------------------------------------------------------------------------


@SCENES.violate("wrong_fields")
def status_that_is_not_derived(story: Story) -> None:
    task_id, run_id = story.running()
    story.set(task_id, task_state__status="INIT")
    story.finish(task_id, run_id)


@SCENES.violate("wrong_fields")
def preemption_time_that_is_a_millisecond_off(story: Story) -> None:
    task_id, run_id = story.running()
    off = story.document(task_id)["task_state"]["next_preempt_time"] + timedelta(milliseconds=1)
    story.set(task_id, task_state__next_preempt_time=off)
    story.finish(task_id, run_id)


@SCENES.violate("wrong_fields")
def new_task_that_is_due_at_another_time(story: Story) -> None:
    task_id = story.publish(delay=2.0)
    version = story.versions.pop()
    assert version.document is not None
    version.document["task_state"]["next_preempt_time"] = instant(0.5)
    story.versions.append(version)
    story.wait(2.0)
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("wrong_fields")
def failure_that_is_not_counted(story: Story) -> None:
    task_id, run_id = story.running()
    story.finish(task_id, run_id, FAIL)
    story.wait(1.0)
    story.set(task_id, task_state__failed_cnt=0)
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("wrong_fields")
def end_without_its_time(story: Story) -> None:
    task_id, run_id = story.running()
    story.finish(task_id, run_id)
    story.tasks.update_one({"_id": task_id}, {"$unset": {"task_state.finish_time": ""}})
    document = story.versions[-1].document
    assert document is not None
    del document["task_state"]["finish_time"]


@SCENES.violate("wrong_fields")
def end_with_a_preemption_time(story: Story) -> None:
    task_id, run_id = story.running()
    story.finish(task_id, run_id)
    story.tasks.update_one({"_id": task_id}, {"$set": {"task_state.next_preempt_time": instant(9.0)}})
    document = story.versions[-1].document
    assert document is not None
    document["task_state"]["next_preempt_time"] = instant(9.0)


@SCENES.violate("wrong_fields")
def retention_that_is_too_short(story: Story) -> None:
    task_id, run_id = story.running(retain_success=60)
    story.finish(task_id, run_id)
    story.tasks.update_one({"_id": task_id}, {"$set": {"expire_time": instant(9.0)}})
    document = story.versions[-1].document
    assert document is not None
    document["expire_time"] = instant(9.0)


@SCENES.violate("wrong_fields")
def lease_that_is_moved_back(story: Story) -> None:
    task_id, run_id = story.running()
    runs = story.runs(task_id)
    runs[0]["ping_expire_time"] = instant(story.now + 3.0)
    story.rewrite(task_id, runs)
    story.finish(task_id, run_id)


@SCENES.violate("wrong_fields")
def cancel_that_nobody_asked_for(story: Story) -> None:
    task_id = story.publish()
    story.apply(task_id, requests.cancel(instant(story.now)))


@SCENES.violate("wrong_fields")
def task_that_nobody_published(story: Story) -> None:
    task_id = story.done()
    story.calls = [call for call in story.calls if call.task_id != task_id]


@SCENES.violate("wrong_fields")
def options_that_nobody_changed(story: Story) -> None:
    task_id = story.publish()
    story.set(task_id, task_option__priority=7)
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("wrong_fields")
def lapsed_run_that_a_claim_leaves_open(story: Story) -> None:
    task_id, _ = story.running()
    story.wait(4.1)
    runs = story.runs(task_id)
    run_id = story.fresh("run")
    now = story.now
    new = {"run_id": run_id, "worker_id": "w2", "attempt": 2, "status": "RUNNING", "claim_time": instant(now)}
    new["ping_expire_time"] = instant(now + 4.0)
    story.rewrite(task_id, [*runs, new])
    story.note("start", task_id, run_id)
    story.settle(task_id)
    story.finish(task_id, run_id)


@SCENES.violate("wrong_fields")
def retry_delay_that_is_too_short(story: Story) -> None:
    task_id, run_id = story.running(retry_delay=5)
    story.finish(task_id, run_id, FAIL, delay=1.0)
    story.wait(1.0)
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("wrong_fields")
def document_that_is_malformed(story: Story) -> None:
    task_id = story.done()
    story.call("update", task_id, "updated")
    story.set(task_id, task_state__failed_cnt=-1)


test_what_is_wrong_is_named, _ = SCENES.tests()
