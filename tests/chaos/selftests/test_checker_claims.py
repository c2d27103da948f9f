"""The checker names what is wrong with claims, leases and successes: histories that are good but for one thing."""

from __future__ import annotations

from mtask.kernel.document.status import RunStatus
from mtask.kernel.statements import publish as requests
from tests.chaos.selftests.scenes import Scenes
from tests.chaos.selftests.story import Story, instant

FAIL, CANCELED, SUCCESS = RunStatus.FAIL, RunStatus.CANCELED, RunStatus.SUCCESS

SCENES = Scenes()


# --- over_held --------------------------------------------------------------------------------------------------------


@SCENES.violate("over_held")
def claim_of_a_task_that_is_held(story: Story) -> None:
    task_id, first = story.running()
    second = story.force(task_id, "w2")
    story.finish(task_id, first, CANCELED)
    story.finish(task_id, second)


@SCENES.violate("over_held", "wrong_fields")
def claim_at_an_instant_that_has_not_come(story: Story) -> None:
    task_id = story.publish()
    story.log_lag = 0.1
    run_id = story.claim(task_id)
    story.log_lag = 0.0
    story.finish(task_id, run_id)


@SCENES.violate("over_held")
def claim_beyond_the_places(story: Story) -> None:
    task_id, first = story.running(concurrent_worker_cnt=2)
    second, third = story.claim(task_id, "w2"), story.force(task_id, "w3")
    story.finish(task_id, third, CANCELED)
    story.finish(task_id, second)
    story.finish(task_id, first)


@SCENES.violate("over_held")
def second_place_of_one_worker(story: Story) -> None:
    task_id, first = story.running(concurrent_worker_cnt=2)
    second = story.force(task_id, "w1")
    story.finish(task_id, second, CANCELED)
    story.finish(task_id, first)
    story.finish(task_id, story.claim(task_id, "w2"))


@SCENES.violate("over_held")
def claim_one_millisecond_before_the_lease_ends(story: Story) -> None:
    task_id, _ = story.running()
    story.wait(3.999)
    second = story.force(task_id, "w2")
    story.wait(0.001)
    story.settle(task_id)
    story.finish(task_id, second)


@SCENES.violate("over_held")
def timeout_before_the_lease_ends(story: Story) -> None:
    task_id, _ = story.running()
    story.wait(2.0)
    runs = story.runs(task_id)
    runs[0].update(status="TIMEOUT", fail_time=instant(story.now))
    story.rewrite(task_id, runs, counted=1)
    story.finish(task_id, story.claim(task_id, "w2"))


@SCENES.violate("over_held")
def claim_by_a_worker_that_is_not_named(story: Story) -> None:
    task_id = story.publish(specific_worker_ids=["w2", "w3"])
    story.finish(task_id, story.force(task_id, "w1"))


@SCENES.violate("over_held")
def claim_before_the_start_time(story: Story) -> None:
    task_id = story.publish(delay=10.0)
    story.wait(9.0)
    story.finish(task_id, story.force(task_id))


@SCENES.violate("over_held")
def claim_before_the_retry_time(story: Story) -> None:
    task_id = story.publish("flaky", retry_delay=5)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(4.0)
    story.finish(task_id, story.force(task_id))


@SCENES.violate("over_held")
def claim_of_a_task_whose_end_was_asked_for(story: Story) -> None:
    task_id, first = story.running(concurrent_worker_cnt=2)
    story.cancel(task_id)
    second = story.force(task_id, "w2")
    story.finish(task_id, second, CANCELED)
    story.finish(task_id, first, CANCELED)


@SCENES.violate("over_held")
def lease_that_is_longer_than_asked_for(story: Story) -> None:
    task_id = story.publish()
    story.finish(task_id, story.force(task_id, ping_expire_time=instant(story.now + 60.0)))


@SCENES.violate("over_held")
def ping_that_makes_the_lease_too_long(story: Story) -> None:
    task_id, run_id = story.running()
    story.wait(1.0)
    story.ping(task_id, run_id, lease=60.0)
    story.finish(task_id, run_id)


# --- second_success ---------------------------------------------------------------------------------------------------


@SCENES.violate("second_success")
def two_successes_of_one_worker(story: Story) -> None:
    task_id, first = story.running("team", concurrent_worker_cnt=2)
    story.finish(task_id, first)
    story.finish(task_id, story.force(task_id, "w1"))
    story.finish(task_id, story.claim(task_id, "w2"))


@SCENES.violate("second_success", "over_held")
def more_successes_than_places(story: Story) -> None:
    task_id, first = story.running()
    second = story.force(task_id, "w2")
    story.finish(task_id, first)
    story.finish(task_id, second)


@SCENES.violate("second_success")
def claim_after_the_success(story: Story) -> None:
    task_id = story.done()
    story.wait(1.0)
    story.finish(task_id, story.force(task_id, "w2"), CANCELED)


@SCENES.violate("second_success")
def final_task_that_is_opened_again(story: Story) -> None:
    task_id = story.publish("doomed", max_retries=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(5.0)
    story.apply(task_id, requests.run_again(everything=False, now=instant(story.now)))
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("second_success")
def final_task_that_is_opened_before_it_was_asked_for(story: Story) -> None:
    task_id = story.done()
    story.wait(5.0)
    story.apply(task_id, requests.run_again(everything=True, now=instant(story.now)))
    story.finish(task_id, story.claim(task_id))
    story.wait(5.0)
    story.again(task_id, "rerun")
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("second_success")
def final_task_that_is_opened_long_after_the_refusal(story: Story) -> None:
    task_id = story.done()
    story.call("rerun", task_id, "refused")
    story.wait(5.0)
    story.apply(task_id, requests.run_again(everything=True, now=instant(story.now)))
    story.finish(task_id, story.claim(task_id))


@SCENES.violate("second_success")
def success_that_turns_into_a_failure(story: Story) -> None:
    task_id = story.done()
    story.wait(5.0)
    story.set(task_id, task_state__status="FAIL")


# --- over_tried -------------------------------------------------------------------------------------------------------


@SCENES.violate("over_tried", "wrong_fields")
def claim_beyond_the_limit_since_a_failure_was_forgotten(story: Story) -> None:
    task_id, run_id = story.running("doomed", max_retries=1)
    story.finish(task_id, run_id, FAIL)
    story.wait(0.3)
    story.set(task_id, task_state__failed_cnt=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(0.3)
    story.finish(task_id, story.claim(task_id), FAIL)


@SCENES.violate("over_tried")
def attempt_out_of_order(story: Story) -> None:
    task_id = story.publish()
    story.finish(task_id, story.force(task_id, attempt=3))


@SCENES.violate("over_tried")
def attempt_that_is_counted_twice(story: Story) -> None:
    task_id, run_id = story.running()
    story.finish(task_id, run_id, CANCELED)
    story.finish(task_id, story.force(task_id, attempt=1))


@SCENES.violate("over_tried")
def claim_after_a_final_failure(story: Story) -> None:
    task_id, first = story.running(concurrent_worker_cnt=2)
    second = story.claim(task_id, "w2")
    story.finish(task_id, first, FAIL, final=True)
    story.wait(0.3)
    third = story.force(task_id, "w3")
    story.finish(task_id, second, CANCELED)
    story.finish(task_id, third, CANCELED)


@SCENES.violate("over_tried")
def claim_beside_a_live_run_when_the_limit_is_used_up(story: Story) -> None:
    task_id, first = story.running(concurrent_worker_cnt=2, max_retries=0)
    second = story.claim(task_id, "w2")
    story.finish(task_id, first, FAIL)
    story.wait(0.3)
    third = story.force(task_id, "w3")
    story.finish(task_id, second, CANCELED)
    story.finish(task_id, third, CANCELED)


@SCENES.violate("over_tried")
def claim_when_a_lapsed_run_has_used_the_limit_up(story: Story) -> None:
    task_id, _ = story.running(concurrent_worker_cnt=2, max_retries=0)
    story.wait(1.0)
    second = story.claim(task_id, "w2")
    story.wait(3.1)
    third = story.force(task_id, "w3")
    story.finish(task_id, second, CANCELED)
    story.finish(task_id, third, CANCELED)


@SCENES.violate("over_tried")
def claim_by_a_worker_that_has_used_up_its_own_limit(story: Story) -> None:
    names = ["w1", "w2"]
    task_id = story.publish("team", specific_worker_ids=names, retry_scope="worker", max_retries=0)
    story.finish(task_id, story.claim(task_id, "w1"), FAIL)
    story.wait(0.3)
    story.finish(task_id, story.force(task_id, "w1"), CANCELED)
    story.finish(task_id, story.claim(task_id, "w2"))


@SCENES.violate("over_tried")
def handler_that_begins_twice(story: Story) -> None:
    task_id, run_id = story.running()
    story.note("start", task_id, run_id)
    story.finish(task_id, run_id)


test_what_is_wrong_is_named, _ = SCENES.tests()
