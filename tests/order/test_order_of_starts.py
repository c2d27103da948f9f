"""A limit changes when tasks start, never in which order: with worker processes of two apps, kills and limits.

All scenes of a play run at the same time, each in a queue of its own, on the same workers. Each test judges one queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from mtask.local import ReplicaSet
from tests.mongo import PATIENCE, eventually
from tests.order.app import ISOLATED, OTHER
from tests.order.history import History
from tests.order.model import Judgement, judge, share
from tests.order.theatre import Theatre, open_theatre, spec

#: The longest time from when a task is due and a permit is free to its start, in seconds.
SOON = 1.0
#: The same for a task whose worker died.
RESCUE = 0.5
URGENT = 100
#: What happened, by queue.
Histories = dict[str, History]


@dataclass(frozen=True, slots=True)
class Size:
    """How large a play is."""

    delayed: int  #: the tasks of the longest queue
    backlog: int  #: the tasks of the others
    seconds: float  #: how long each of them takes
    rate: tuple[int, float]  #: the most starts in a window
    few: int  #: the tasks of a tenant with few tasks
    rounds: int  #: how often workers are killed


SMALL = Size(200, 100, 0.15, (8, 1.0), few=10, rounds=4)
DEEP = Size(3000, 1500, 0.01, (50, 1.0), few=50, rounds=25)


# --- the plays --------------------------------------------------------------------------------------------------------

DELAYED, RATED = "delayed", "rated"
SHARED = {"shared-1": 1, "shared-2": 2}
FAIR, FAIR_KEYS, FAIR_RATE = "fair", "fair-keys", "fair-rate"
KEYS, WINDOW = "keys", "window"
QUIET = (DELAYED, RATED, *SHARED, FAIR, FAIR_KEYS, FAIR_RATE, KEYS, WINDOW)
#: Longer than the time by which workers look ahead.
_BEYOND_HORIZON_MS = 11_000


def play_quietly(theatre: Theatre, size: Size) -> Histories:
    """Let tasks of all kinds wait for permits of two apps. Nobody dies."""
    for number, app in enumerate(("first", "first", "second", "second")):
        theatre.launch(f"w{number}", app, 20, "--executors", "1")
    theatre.wait_running()
    theatre.limit(DELAYED, concurrency=2)
    theatre.limit(RATED, rate=size.rate)
    for queue, most in SHARED.items():
        theatre.limit(queue, concurrency=most)
    theatre.limit(FAIR, concurrency=2)
    theatre.limit(FAIR_KEYS, concurrency=2, key_concurrency=1)
    theatre.limit(FAIR_RATE, rate=size.rate)
    for queue in (FAIR, FAIR_KEYS, FAIR_RATE):
        theatre.fair(queue)
    theatre.limit(KEYS, key_concurrency=1)
    theatre.limit(WINDOW, rate=(2, 1.0))
    _begin(theatre, size)
    backlogs = (DELAYED, RATED, *SHARED, FAIR, FAIR_KEYS, FAIR_RATE)
    eventually(lambda: all(_has_begun(theatre, queue) for queue in backlogs), PATIENCE, "all queues have begun")
    _come_later(theatre, size)
    theatre.wait_done()
    return {queue: theatre.history(queue) for queue in QUIET}


def _has_begun(theatre: Theatre, queue: str) -> bool:
    """Whether workers have known this backlog for a while: some of it has ended."""
    ended = {"queue": queue, "task_state.status": "SUCCESS"}
    return theatre.tasks.count_documents(ended, limit=8) == 8


def _begin(theatre: Theatre, size: Size) -> None:
    """Publish the backlogs, and what is due only amid them."""
    half = size.backlog // 2
    for queue, backlog in ((DELAYED, size.delayed), (RATED, size.backlog)):
        theatre.publish(
            *(spec(queue, f"{n}", size.seconds if queue == DELAYED else 0.0) for n in range(backlog)),
            spec(queue, "delayed", priority=URGENT, delay=3.0),
            spec(queue, "retried", priority=URGENT, fails=1, unexpected_retry_delay_ms=_BEYOND_HORIZON_MS),
        )
    for queue in SHARED:
        theatre.publish(*(spec(queue, f"{n}", size.seconds, name=OTHER) for n in range(half)))
    for queue in (FAIR, FAIR_RATE):
        theatre.publish(*(spec(queue, f"a{n}", size.seconds, tenant="a") for n in range(size.backlog)))
    keyed = (spec(FAIR_KEYS, f"a{n}", size.seconds, tenant="a", limit_key=f"k{n % 5}") for n in range(size.backlog))
    theatre.publish(*keyed)
    theatre.publish(spec(KEYS, "long", 4.0, tenant="a", limit_key="k"), spec(KEYS, "next", tenant="a", limit_key="k"))
    theatre.publish(*(spec(WINDOW, f"{n}", name=ISOLATED) for n in range(12)))


def _come_later(theatre: Theatre, size: Size) -> None:
    """Publish what is to go before the backlogs, or take turns with them."""
    for queue in SHARED:
        theatre.publish(*(spec(queue, f"urgent-{n}", priority=URGENT) for n in range(10)))
        for worker_id in ("w1", "w3"):
            name = OTHER if worker_id == "w3" else "work"
            named = (
                spec(queue, f"{worker_id}-{n}", name=name, priority=URGENT, specific_worker_ids=[worker_id])
                for n in range(3)
            )
            theatre.publish(*named)
    for tenant in "bc":
        for queue in (FAIR, FAIR_RATE):
            theatre.publish(*(spec(queue, f"{tenant}{n}", size.seconds, tenant=tenant) for n in range(size.few)))
        keyed = (spec(FAIR_KEYS, f"{tenant}{n}", tenant=tenant, limit_key=f"k{n % 5}") for n in range(size.few))
        theatre.publish(*keyed)
    theatre.publish(spec(KEYS, "equal", tenant="b", limit_key="k"))


KILLED = {"killed-1": 1, "killed-2": 2}
ALONE, BACK = "alone", "back"
DYING = (*KILLED, ALONE, BACK)


def play_dying(theatre: Theatre, size: Size) -> Histories:
    """Kill workers amid backlogs, again and again, and end some in order."""
    for number in range(3):
        theatre.launch(f"w{number}", "first", 20, "--shutdown-timeout", "0.2")
    theatre.wait_running()
    for queue, most in {**KILLED, ALONE: 2, BACK: 3}.items():
        theatre.limit(queue, concurrency=most)
    for queue in KILLED:
        theatre.publish(*(spec(queue, f"{n}", size.seconds) for n in range(size.backlog)))
    for number in range(size.rounds):
        for queue, most in {**KILLED, ALONE: 1}.items():
            theatre.publish(*(spec(queue, f"holds-{number}-{n}", priority=1, holds=True) for n in range(most)))
        for queue, most in {**KILLED, ALONE: 1}.items():
            theatre.wait_held(queue, most)
        while held := {task: worker for queue in (*KILLED, ALONE) for task, worker in theatre.holders(queue).items()}:
            worker_id = next(iter(held.values()))
            theatre.kill(worker_id)
            theatre.wait_running()
            for task in (task for task, worker in held.items() if worker == worker_id):
                eventually(partial(_was_rescued, theatre, task), PATIENCE, f"{task} runs again")
    theatre.publish(*(spec(BACK, f"holds-{n}", holds=True) for n in range(2)))
    theatre.publish(*(spec(BACK, f"{n}", size.seconds) for n in range(size.backlog // 2)))
    held = theatre.wait_held(BACK, 2)
    for worker_id in set(held.values()):
        theatre.terminate(worker_id)
        theatre.wait_running()
    theatre.wait_done()
    return {queue: theatre.history(queue) for queue in DYING}


def _was_rescued(theatre: Theatre, task_id: str) -> bool:
    return theatre.tasks.count_documents({"_id": task_id, "task_state.worker_states.1": {"$exists": True}}) == 1


# --- what must be -----------------------------------------------------------------------------------------------------


def judged(history: History) -> Judgement:
    judgement = judge(history, urgent=URGENT)
    assert not judgement.violations, str(judgement)
    assert judgement.starts
    return judgement


def check_delayed(history: History) -> None:
    judgement = judged(history)
    first, again = judgement.seconds("first"), judgement.seconds("again")
    # The task that is tried again is urgent, too: its first start counts as well.
    assert (len(first), len(again)) == (2, 1)
    assert max(first + again) <= SOON, judgement.delays


def check_shared(history: History) -> None:
    judgement = judged(history)
    waited = judgement.seconds("first")
    assert len(waited) == 16
    assert max(waited) <= SOON, judgement.delays


def check_turns(history: History) -> None:
    judged(history)
    last = {tenant: max(task.runs[-1].claimed for task in history.tasks if task.tenant == tenant) for tenant in "abc"}
    assert max(last["b"], last["c"]) < last["a"], "the tenant with the long backlog was done first"


def check_rescues(history: History, least: int) -> None:
    rescues = judged(history).seconds("lapse")
    assert len(rescues) >= least
    assert share(rescues, 0.99) <= RESCUE, rescues


@pytest.fixture(scope="module")
def quiet(mongo_server: ReplicaSet, tmp_path_factory: pytest.TempPathFactory) -> Histories:
    """Play quietly, once for all tests of it."""
    with open_theatre(mongo_server, tmp_path_factory.mktemp("quiet"), QUIET) as theatre:
        return play_quietly(theatre, SMALL)


@pytest.fixture(scope="module")
def dying(mongo_server: ReplicaSet, tmp_path_factory: pytest.TempPathFactory) -> Histories:
    """Play with deaths, once for all tests of it."""
    with open_theatre(mongo_server, tmp_path_factory.mktemp("dying"), DYING) as theatre:
        return play_dying(theatre, SMALL)


@pytest.mark.parametrize("queue", [DELAYED, RATED])
def test_urgent_task_takes_the_next_permit_when_its_delay_is_over(queue: str, quiet: Histories) -> None:
    check_delayed(quiet[queue])


@pytest.mark.parametrize("queue", SHARED)
def test_urgent_tasks_of_one_app_take_the_next_permits_whoever_returns_them(queue: str, quiet: Histories) -> None:
    check_shared(quiet[queue])


@pytest.mark.parametrize("queue", [FAIR, FAIR_KEYS, FAIR_RATE])
def test_tenant_waits_for_no_more_than_one_turn_of_each_other(queue: str, quiet: Histories) -> None:
    check_turns(quiet[queue])


def test_equal_limit_keys_of_two_tenants_are_two_keys(quiet: Histories) -> None:
    judged(quiet[KEYS])
    runs = {task.id.rpartition("/")[2]: task.runs[0] for task in quiet[KEYS].tasks}
    assert runs["equal"].ended < runs["long"].ended
    assert runs["next"].claimed >= runs["long"].ended


def test_handlers_in_executors_never_start_more_often_than_allowed(quiet: Histories) -> None:
    assert judged(quiet[WINDOW]).starts == 12


@pytest.mark.parametrize("queue", KILLED)
def test_tasks_of_a_killed_worker_take_the_next_permits(queue: str, dying: Histories) -> None:
    check_rescues(dying[queue], KILLED[queue] * SMALL.rounds)


def test_task_of_a_killed_worker_is_rescued_at_once_where_permits_are_free(dying: Histories) -> None:
    check_rescues(dying[ALONE], SMALL.rounds)


def test_tasks_that_were_handed_back_keep_their_place(dying: Histories) -> None:
    back = [delay for delay in judged(dying[BACK]).delays if delay.wait == "hand-back"]
    assert len(back) == 2
    assert [delay.overtaken for delay in back] == [0, 0], back
    assert max(delay.seconds for delay in back) <= SOON


@pytest.mark.long
@pytest.mark.timeout(900)
def test_order_is_kept_amid_deep_backlogs(mongo_server: ReplicaSet, tmp_path: Path) -> None:
    with open_theatre(mongo_server, tmp_path, QUIET) as theatre:
        histories = play_quietly(theatre, DEEP)
    for queue in (DELAYED, RATED):
        check_delayed(histories[queue])
    for queue in SHARED:
        check_shared(histories[queue])
    for queue in (FAIR, FAIR_KEYS, FAIR_RATE):
        check_turns(histories[queue])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_order_is_kept_amid_many_deaths(mongo_server: ReplicaSet, tmp_path: Path) -> None:
    with open_theatre(mongo_server, tmp_path, DYING) as theatre:
        histories = play_dying(theatre, DEEP)
    for queue, most in {**KILLED, ALONE: 1}.items():
        check_rescues(histories[queue], most * DEEP.rounds)
