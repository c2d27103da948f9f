"""The model of the order names what breaks a rule, and lets pass what does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import pytest

from tests.order.history import Change, End, History, Limit, Run, Settings, Task, Trouble, Up, Worker
from tests.order.model import Judgement, Kind, judge
from tests.order.simulation import simulate
from tests.order.times import joined, within, without
from tests.parity.cases import SCALE

QUEUE = "queue:queue"
ONE = Settings(Limit(1))


@dataclass
class Story:
    """A history that is being made. Its tasks are in one queue, one run at a time, unless a scene says otherwise."""

    tasks: list[Task] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=lambda: [Worker("w1"), Worker("w2")])
    changes: list[Change] = field(default_factory=lambda: [Change(QUEUE, -1.0, -1.0, ONE)])
    troubles: list[Trouble] = field(default_factory=list)
    unsure: list[Up] = field(default_factory=list)

    def task(self, task_id: str, *runs: Run, **fields: Any) -> None:
        """Add a task. It is due at 0 unless the scene says otherwise."""
        self.tasks.append(Task(task_id, runs=runs, **fields))

    def limit(self, limit: Limit | None = None, *, target: str = QUEUE, at: float = -1.0, **fields: Any) -> None:
        """Set limits, at once. A change before the beginning replaces what holds there."""
        if at < 0:
            self.changes = [change for change in self.changes if change.target != target]
        self.changes.append(Change(target, at, at, Settings(limit, **fields)))

    def judged(self, **options: Any) -> Judgement:
        history = History(self.tasks, self.workers, self.changes, self.troubles, self.unsure)
        return judge(history, **options)


Scene = Callable[[Story], None]
BROKEN: dict[Scene, set[Kind]] = {}
KEPT: list[Scene] = []


def broken(*kinds: Kind) -> Callable[[Scene], Scene]:
    def take_in(scene: Scene) -> Scene:
        BROKEN[scene] = set(kinds)
        return scene

    return take_in


def kept(scene: Scene) -> Scene:
    KEPT.append(scene)
    return scene


def run(at: float, seconds: float = 1.0, worker: str = "w1", end: End = "success", **fields: Any) -> Run:
    """Return a run that starts when it is claimed."""
    return Run(worker, at, at + seconds, end, **{"started": at, **fields})


# --- priority and age -------------------------------------------------------------------------------------------------


@broken("order")
def lower_priority_goes_first(story: Story) -> None:
    story.task("before", run(1))
    story.task("low", run(2))
    story.task("high", run(3), priority=1)


@kept
def higher_priority_goes_first(story: Story) -> None:
    story.task("before", run(1), priority=2)
    story.task("low", run(3))
    story.task("high", run(2), priority=1)


@broken("order")
def younger_goes_first(story: Story) -> None:
    story.task("young", run(2), due=0.1)
    story.task("old", run(3))


@kept
def younger_of_a_higher_priority_goes_first(story: Story) -> None:
    story.task("young", run(2), due=1.9, priority=1)
    story.task("old", run(3))


@kept
def tie_in_any_order(story: Story) -> None:
    story.task("a", run(2))
    story.task("b", run(1))


@broken("order")
def urgent_task_waits_behind_the_backlog_when_its_delay_is_over(story: Story) -> None:
    for second in range(8):
        story.task(f"backlog-{second}", run(second))
    story.task("urgent", run(8), due=2.5, priority=100)


@kept
def urgent_task_starts_next_when_its_delay_is_over(story: Story) -> None:
    for second in (0, 1, 2, 4, 5):
        story.task(f"backlog-{second}", run(second))
    story.task("urgent", run(3), due=2.5, priority=100)


# --- what is tolerated ------------------------------------------------------------------------------------------------


@kept
def better_task_was_due_for_less_than_a_second(story: Story) -> None:
    story.task("low", run(2))
    story.task("high", run(3), due=1.1, priority=1)


@kept
def claim_of_the_better_task_was_under_way(story: Story) -> None:
    story.task("low", run(2, 0.1))
    story.task("high", run(2.2), priority=1)


@kept
def permit_was_left_for_the_better_task(story: Story) -> None:
    story.limit(Limit(3))
    story.task("low", run(2))
    story.task("high", run(2.9), priority=1)


@broken("order")
def last_permit_was_taken_by_a_claim_that_was_under_way(story: Story) -> None:
    story.limit(Limit(2))
    story.task("low", run(2))
    story.task("best", run(2.1), priority=2)
    story.task("high", run(3), priority=1)


@kept
def task_that_was_canceled_meanwhile(story: Story) -> None:
    story.task("low", run(2))
    story.task("high", gone=2.1, priority=1)


@kept
def task_whose_rank_is_not_known(story: Story) -> None:
    story.task("low", run(2))
    story.task("high", run(3), priority=1, is_judged=False)


# --- interrupted tasks ------------------------------------------------------------------------------------------------


@broken("order")
def new_task_starts_before_one_whose_lease_lapsed(story: Story) -> None:
    story.task("lapsed", run(0, 1, end="lapse"), run(4))
    story.task("new", run(3), priority=100)
    story.task("between", run(1))


@kept
def task_whose_lease_lapsed_starts_before_a_new_one(story: Story) -> None:
    story.task("lapsed", run(0, 1, end="lapse"), run(3))
    story.task("new", run(4), priority=100)
    story.task("between", run(1, 2), due=0.5, priority=200)


@broken("order")
def new_task_starts_before_one_that_was_handed_back(story: Story) -> None:
    story.task("back", run(0, 1, end="hand-back"), run(4))
    story.task("new", run(3), priority=100)


@kept
def task_that_was_handed_back_starts_before_a_new_one(story: Story) -> None:
    story.task("back", run(0, 1, end="hand-back"), run(3))
    story.task("new", run(4), priority=100)


@broken("order")
def of_two_interrupted_tasks_the_lower_priority_goes_first(story: Story) -> None:
    story.limit(Limit(2))
    story.task("low", run(0, 1, end="lapse"), run(3))
    story.task("high", run(0, 1, end="hand-back"), run(4), priority=1)
    story.task("new", run(1, 9), due=0.5)


@kept
def of_two_lapsed_tasks_either_may_be_the_older(story: Story) -> None:
    story.limit(Limit(2))
    story.task("closed late", run(0, 1, end="lapse"), run(4), due=-1)
    story.task("closed at once", run(0, 1, end="lapse"), run(3), due=-0.5)
    story.task("new", run(1, 9))


@broken("order")
def failed_task_ranks_by_its_retry_time_and_waits_too_long(story: Story) -> None:
    story.task("failed", run(0, 1, end="failure", retry_at=3), run(6))
    story.task("younger", run(5), due=3.5)


@kept
def failed_task_ranks_by_its_retry_time(story: Story) -> None:
    story.task("failed", run(0, 1, end="failure", retry_at=3), run(6))
    story.task("older", run(5), due=2)


@broken("order")
def task_that_asked_for_a_retry_goes_before_an_older_one(story: Story) -> None:
    story.task("asked", run(0, 1, end="retry", retry_at=1), run(3))
    story.task("older", run(4), due=0.5)


@kept
def task_that_asked_for_a_retry_ranks_by_its_time(story: Story) -> None:
    story.task("asked", run(0, 1, end="retry", retry_at=1), run(4))
    story.task("older", run(3), due=0.5)


# --- limits -----------------------------------------------------------------------------------------------------------


@broken("order")
def start_in_a_window_is_given_to_the_wrong_task(story: Story) -> None:
    story.limit(Limit(starts=2, window=2.0))
    story.task("before", run(1, 0.1), priority=9)
    story.task("low", run(2, 0.1))
    story.task("high", run(3.1, 0.1), priority=1)


@kept
def starts_in_a_window_go_to_the_better_tasks(story: Story) -> None:
    story.limit(Limit(starts=2, window=2.0))
    story.task("before", run(1, 0.1), priority=9)
    story.task("low", run(3.1, 0.1))
    story.task("high", run(2, 0.1), priority=1)


@broken("order")
def task_with_a_free_key_is_passed_over(story: Story) -> None:
    story.limit(Limit(2), key_limit=Limit(1))
    story.task("long", run(0, 9), priority=9)
    story.task("low", run(2))
    story.task("high", run(3), priority=1, key="k")


@kept
def task_whose_key_is_in_use_is_passed_over(story: Story) -> None:
    story.limit(Limit(2), key_limit=Limit(1))
    story.task("long", run(0, 2.5), priority=9, key="k")
    story.task("low", run(2))
    story.task("high", run(3), priority=1, key="k")


@broken("order")
def task_is_passed_over_because_another_tenant_has_an_equal_key(story: Story) -> None:
    story.limit(Limit(2), key_limit=Limit(1))
    story.task("long", run(0, 2.5), priority=9, key="k", tenant="a")
    story.task("low", run(2))
    story.task("high", run(3), priority=1, key="k", tenant="b")


@broken("order")
def permit_of_a_key_goes_to_the_wrong_task(story: Story) -> None:
    story.limit(key_limit=Limit(1))
    story.task("low", run(2), key="k")
    story.task("high", run(3), priority=1, key="k")


@kept
def task_of_another_key_goes_first(story: Story) -> None:
    story.limit(key_limit=Limit(1))
    story.task("low", run(2), key="k")
    story.task("high", run(3), priority=1, key="other")


@broken("order")
def permit_of_a_tenant_in_the_queue_goes_to_the_wrong_task(story: Story) -> None:
    story.limit(tenant_limit=Limit(1))
    story.task("low", run(2), tenant="a")
    story.task("high", run(3), priority=1, tenant="a")


@kept
def task_of_another_tenant_in_the_queue_goes_first(story: Story) -> None:
    story.limit(tenant_limit=Limit(1))
    story.task("low", run(2), tenant="a")
    story.task("high", run(3), priority=1, tenant="b")


@broken("order")
def permit_of_a_tenant_goes_to_the_wrong_task_in_another_queue(story: Story) -> None:
    story.limit(Limit(1), target="tenant:a")
    story.task("low", run(2), tenant="a")
    story.task("high", run(3), priority=1, tenant="a", queue="other")


@kept
def permit_of_a_tenant_goes_to_the_best_task_of_all_queues(story: Story) -> None:
    story.limit(Limit(1), target="tenant:a")
    story.task("low", run(3), tenant="a")
    story.task("high", run(2), priority=1, tenant="a", queue="other")


@kept
def limit_that_is_being_changed(story: Story) -> None:
    story.changes.append(Change(QUEUE, 1.5, 2.5, Settings(Limit(1, None))))
    story.task("low", run(2))
    story.task("high", run(3), priority=1)


@broken("order")
def new_limit_is_kept_and_the_order_is_not(story: Story) -> None:
    story.limit()
    story.limit(Limit(1), at=0.5)
    story.task("low", run(2))
    story.task("high", run(3), priority=1)


@kept
def limit_was_lifted(story: Story) -> None:
    story.limit(at=0.5)
    story.task("low", run(2))
    story.task("high", run(3), priority=1)


# --- workers and their slots ------------------------------------------------------------------------------------------

BOTH = [Worker("w1", 10, names=frozenset({"work"})), Worker("w2", 1, names=frozenset({"other"}))]


@broken("order")
def task_of_the_other_app_is_passed_over(story: Story) -> None:
    story.workers = BOTH
    story.task("low", run(2))
    story.task("high", run(3, worker="w2"), priority=1, name="other")


@kept
def other_app_has_no_free_slot(story: Story) -> None:
    story.workers = BOTH
    story.task("long", run(0, 2.5, "w2"), queue="elsewhere", name="other")
    story.task("low", run(2))
    story.task("high", run(3, worker="w2"), priority=1, name="other")


@kept
def other_app_has_just_started(story: Story) -> None:
    story.workers = [BOTH[0], replace(BOTH[1], ups=[Up(1.5)])]
    story.task("low", run(2))
    story.task("high", run(3, worker="w2"), priority=1, name="other")


@broken("order")
def task_for_a_named_worker_is_passed_over(story: Story) -> None:
    story.task("low", run(2))
    story.task("high", run(3, worker="w2"), priority=1, named=frozenset({"w2"}))


@kept
def named_worker_is_down(story: Story) -> None:
    story.workers = [Worker("w1"), Worker("w2", ups=[Up(0, 1.5), Up(2.5)])]
    story.task("low", run(2))
    story.task("high", run(3, worker="w2"), priority=1, named=frozenset({"w2"}))


@broken("order")
def slot_goes_to_a_lower_priority(story: Story) -> None:
    story.limit()
    story.workers = [Worker("w1", 1)]
    story.task("low", run(8))
    story.task("high", run(9), priority=1)


@kept
def slot_goes_to_a_lower_priority_while_another_is_free(story: Story) -> None:
    story.limit()
    story.workers = [Worker("w1", 2)]
    story.task("low", run(8))
    story.task("high", run(9), priority=1)


@broken("order")
def slot_goes_to_a_much_younger_task(story: Story) -> None:
    story.limit()
    story.workers = [Worker("w1", 1)]
    story.task("young", run(8), due=4)
    story.task("old", run(9))


@kept
def slot_goes_to_a_task_of_the_own_share_that_is_a_little_younger(story: Story) -> None:
    story.limit()
    story.workers = [Worker("w1", 1)]
    story.task("young", run(8), due=3)
    story.task("old", run(9))


# --- fair turns -------------------------------------------------------------------------------------------------------


def turns(story: Story, tenants: Sequence[str | None], *, begin: float = 2.0, gap: float = 1.0, **fields: Any) -> None:
    """Start tasks of these tenants one after the other. All are due at 0."""
    for number, tenant in enumerate(tenants):
        story.task(f"{tenant}-{number}", run(begin + number * gap, gap), tenant=tenant, **fields)


@broken("turn")
def tenant_with_a_backlog_has_two_turns(story: Story) -> None:
    story.limit(Limit(1), fair=True)
    turns(story, "abaaba")


@kept
def tenants_take_turns(story: Story) -> None:
    story.limit(Limit(1), fair=True)
    turns(story, "abcabcab")


@broken("turn")
def turns_that_are_short_and_unequal(story: Story) -> None:
    story.limit(Limit(2), fair=True)
    turns(story, list(islice(cycle([*"aab"]), 60)), gap=0.05)


@kept
def turns_that_are_short_and_equal(story: Story) -> None:
    story.limit(Limit(2), fair=True)
    turns(story, list(islice(cycle([*"abba"]), 60)), gap=0.05)


@kept
def tenant_takes_all_turns_while_no_other_waits(story: Story) -> None:
    story.limit(Limit(1), fair=True)
    turns(story, "aaaa")
    story.task("b", run(6), tenant="b", due=5.5)


@broken("turn")
def tenant_that_has_come_waits_for_several_turns(story: Story) -> None:
    story.limit(Limit(1), fair=True)
    turns(story, "aaaaaa")
    story.task("b", run(8), tenant="b", due=3.5)


@broken("turn")
def tasks_of_no_tenant_wait_for_several_turns(story: Story) -> None:
    story.limit(Limit(1), fair=True)
    turns(story, ["a", None, "a", "a", None])


@broken("turn")
def turns_of_a_rate_are_unequal(story: Story) -> None:
    story.limit(Limit(starts=1, window=1.0), fair=True)
    turns(story, "abaab", gap=1.1)


@kept
def turns_of_a_rate_are_equal(story: Story) -> None:
    story.limit(Limit(starts=1, window=1.0), fair=True)
    turns(story, "abab", gap=1.1)


@broken("turn")
def turns_beside_keys_are_unequal(story: Story) -> None:
    story.limit(Limit(1), key_limit=Limit(1), fair=True)
    turns(story, "abaaaab", key="k")


@kept
def tenant_whose_key_is_in_use_has_no_turn(story: Story) -> None:
    story.limit(Limit(2), key_limit=Limit(1), fair=True)
    story.task("b-long", run(1, 4), tenant="b", key="k")
    turns(story, "aaab", key="k")


@kept
def interrupted_task_goes_before_turns(story: Story) -> None:
    story.limit(Limit(1), fair=True)
    story.task("a-back", run(1, 1, end="hand-back"), run(3), tenant="a")
    story.task("a-1", run(2), tenant="a")
    story.task("b", run(4), tenant="b")


@broken("order")
def interrupted_task_waits_for_a_turn(story: Story) -> None:
    story.limit(Limit(1), fair=True)
    story.task("a-back", run(0, 1, end="hand-back"), run(4), tenant="a")
    story.task("b", run(3), tenant="b")


@kept
def older_task_of_another_tenant_waits_for_its_turn(story: Story) -> None:
    story.limit(Limit(1), fair=True)
    turns(story, "ab")
    story.task("a-old", run(4), tenant="a", due=0.1)
    story.task("c-urgent", run(5), tenant="c", due=3.5, priority=100)


@broken("order")
def within_a_tenant_the_lower_priority_goes_first(story: Story) -> None:
    story.limit(Limit(1), fair=True)
    story.task("low", run(2), tenant="a")
    story.task("high", run(3), tenant="a", priority=1)


@broken("turn")
def turns_of_one_worker_are_unequal(story: Story) -> None:
    story.limit(fair=True)
    story.workers = [Worker("w1", 1)]
    turns(story, "abaab", begin=8.0)


@kept
def workers_take_turns_each_by_itself(story: Story) -> None:
    story.limit(fair=True)
    story.workers = [Worker("w1", 1), Worker("w2", 1)]
    for number, tenant in enumerate("aabbaa"):
        story.task(f"{tenant}-{number}", run(8 + number, 2, f"w{1 + number % 2}"), tenant=tenant)


@kept
def turns_before_they_are_asked_for(story: Story) -> None:
    story.limit(Limit(1))
    story.limit(Limit(1), at=6.5, fair=True)
    turns(story, "aaaabab")


# --- limits are kept --------------------------------------------------------------------------------------------------


@broken("too many runs")
def two_at_once_where_one_is_allowed(story: Story) -> None:
    story.task("a", run(0, 2))
    story.task("b", run(1, 2))


@kept
def next_run_when_the_lease_has_lapsed(story: Story) -> None:
    story.task("a", run(0, 2, end="lapse"), run(3))
    story.task("b", run(2, 1), due=2, priority=1)


@kept
def runs_from_before_the_limit_are_not_counted(story: Story) -> None:
    story.limit()
    story.limit(Limit(1), at=1)
    story.task("a", run(0, 5))
    story.task("b", run(2, 5))


@broken("too many runs")
def two_of_a_key_at_once(story: Story) -> None:
    story.limit(Limit(9), key_limit=Limit(1))
    story.task("a", run(0, 2), key="k")
    story.task("b", run(1, 2), key="k")


@kept
def equal_keys_of_two_tenants_at_once(story: Story) -> None:
    story.limit(Limit(9), key_limit=Limit(1))
    story.task("a", run(0, 2), key="k", tenant="a")
    story.task("b", run(1, 2), key="k", tenant="b")


@broken("too many starts")
def three_handlers_start_within_the_window(story: Story) -> None:
    story.limit(Limit(starts=2, window=1.0))
    for task_id, claimed, started in (("a", 0.0, 0.6), ("b", 0.5, 0.6), ("c", 1.2, 1.2)):
        story.task(task_id, run(claimed, started=started))


@kept
def handlers_start_as_often_as_allowed(story: Story) -> None:
    story.limit(Limit(starts=2, window=1.0))
    for task_id, at in (("a", 0.0), ("b", 0.5), ("c", 1.0), ("d", 1.5)):
        story.task(task_id, run(at))


# --- what was broken --------------------------------------------------------------------------------------------------


@kept
def start_while_something_was_broken(story: Story) -> None:
    story.troubles.append(Trouble(1, 2.5))
    story.task("low", run(2))
    story.task("high", run(3), priority=1)


@broken("order")
def start_long_after_something_was_broken(story: Story) -> None:
    story.troubles.append(Trouble(0, 1))
    story.task("low", run(2))
    story.task("high", run(3), priority=1)


@kept
def task_waited_for_less_than_the_grace_of_a_trouble(story: Story) -> None:
    story.troubles.append(Trouble(1, 9, 5.0))
    story.task("low", run(4))
    story.task("high", run(5), priority=1)


@broken("order")
def task_waited_for_more_than_the_grace_of_a_trouble(story: Story) -> None:
    story.troubles.append(Trouble(1, 9, 3.0))
    story.task("low", run(4))
    story.task("high", run(5), priority=1)


@kept
def permits_of_another_pool_that_a_dead_worker_may_hold(story: Story) -> None:
    story.limit(Limit(1), key_limit=Limit(1))
    story.unsure.append(Up(1, 9))
    story.task("low", run(2))
    story.task("high", run(3), priority=1, key="k")


@kept
def turns_while_something_was_broken(story: Story) -> None:
    story.limit(Limit(1), fair=True)
    story.troubles.append(Trouble(3, 5))
    turns(story, "abaab")


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", BROKEN, ids=lambda scene: scene.__name__)
def test_what_breaks_the_order_is_named(scene: Scene) -> None:
    story = Story()
    scene(story)
    judgement = story.judged()
    assert {violation.kind for violation in judgement.violations} == BROKEN[scene], str(judgement)


@pytest.mark.parametrize("scene", KEPT, ids=lambda scene: scene.__name__)
def test_what_keeps_the_order_passes(scene: Scene) -> None:
    story = Story()
    scene(story)
    judgement = story.judged()
    assert not judgement.violations, str(judgement)


# --- delays -----------------------------------------------------------------------------------------------------------


def delays(story: Story, **options: Any) -> dict[str, tuple[str, float, int]]:
    found = story.judged(**options).delays
    return {delay.task_id: (delay.wait, round(delay.seconds, 3), delay.overtaken) for delay in found}


def test_rescue_counts_from_the_lapse_where_a_permit_is_free() -> None:
    story = Story()
    story.task("lapsed", run(0, 2, end="lapse"), run(2.3))
    assert delays(story) == {"lapsed": ("lapse", 0.3, 0)}


def test_rescue_counts_from_the_permit_where_all_are_taken() -> None:
    story = Story()
    story.limit(Limit(2))
    story.task("lapsed", run(0, 2, end="lapse"), run(3.4))
    story.task("more urgent and lapsed", run(0, 1.5, end="lapse"), run(2.1, 0.9), priority=1)
    story.task("long", run(1.8, 5))
    assert delays(story)["lapsed"] == ("lapse", 0.4, 0)


def test_rescue_counts_from_the_next_start_of_a_window() -> None:
    story = Story()
    story.limit(Limit(starts=1, window=1.0))
    story.task("lapsed", run(0, 2, end="lapse"), run(2.7))
    story.task("other", run(1.5, 0.1))
    assert delays(story) == {"lapsed": ("lapse", 0.2, 0)}


def test_rescue_counts_from_the_first_free_slot() -> None:
    story = Story(workers=[Worker("w1", ups=[Up(0, 1.5)]), Worker("w2", 1)])
    story.task("lapsed", run(0, 2, end="lapse"), run(4.1, worker="w2"))
    story.task("elsewhere", run(1, 3, worker="w2"), queue="other")
    assert delays(story) == {"lapsed": ("lapse", 0.1, 0)}


def test_task_that_was_handed_back_tells_how_many_overtook_it() -> None:
    story = Story()
    story.task("back", run(0, 1, end="hand-back"), run(4))
    story.task("under way", run(1.1, 0.9))
    story.task("second", run(2))
    story.task("third", run(3))
    assert delays(story) == {"back": ("hand-back", 2.0, 2)}


def test_urgent_tasks_are_measured_from_when_they_are_due_or_the_next_permit_is_free() -> None:
    story = Story()
    story.task("long", run(0, 3))
    story.task("urgent", run(3.2, 0.8), due=1, priority=100)
    story.task("next", run(4.1), due=2, priority=100)
    assert delays(story, urgent=100) == {"urgent": ("first", 0.2, 0), "next": ("first", 0.1, 0)}


def test_delay_across_a_change_of_limits_is_not_measured() -> None:
    story = Story()
    story.limit(Limit(2), at=2.1)
    story.task("lapsed", run(0, 2, end="lapse"), run(2.3))
    assert delays(story) == {}


# --- times ------------------------------------------------------------------------------------------------------------


def test_times_are_joined_cut_and_left_out() -> None:
    times = joined([Up(5, 6), Up(0, 2), Up(1, 3), Up(3, 4), Up(9, 9)])
    assert times == [Up(0, 4), Up(5, 6)]
    assert within(times, [Up(1, 2), Up(3, 5.5), Up(7, 8)]) == [Up(1, 2), Up(3, 4), Up(5, 5.5)]
    assert without(times, [Up(3.5, 9), Up(-1, 0.5), Up(1, 2)]) == [Up(0.5, 1), Up(2, 3.5)]


# --- simulations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3 * SCALE))
def test_engine_that_keeps_the_order_passes(seed: int) -> None:
    judgement = judge(simulate(seed))
    assert not judgement.violations, str(judgement)
    assert judgement.starts >= 80


@pytest.mark.parametrize("seed", range(3 * SCALE))
def test_engine_that_starts_any_task_is_found_out(seed: int) -> None:
    assert judge(simulate(seed, is_orderly=False)).of("order", "turn")
