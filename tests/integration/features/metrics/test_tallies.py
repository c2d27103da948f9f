"""Tallies: stored by their workers, folded once when these are dead, and never counted twice or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest

from mtask.database import setup
from mtask.features.metrics import client
from mtask.features.metrics import operations as tallies
from mtask.features.metrics.rules import COUNTS_ID, TOTALS_ID
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import workers
from mtask.kernel.operations.workers import Heartbeat, Registration
from mtask.kernel.worker.process.counts import MAX_PAIRS, OTHER, Pair, Tally, tally_of, total
from tests.explaining import only
from tests.integration.stores import registration

T = TypeVar("T")


def worker(store: SyncStore, name: str, runs: int = 0, queue: str = "q") -> Registration:
    """Register a worker that has stored a tally with so many runs."""
    me = registration(name, [queue], ["n"])
    store.run(workers.register(me))
    if runs:
        assert record(store, me, runs, queue=queue)
    return me


def record(store: SyncStore, me: Registration, runs: int, *, is_first: bool = True, queue: str = "q") -> bool:
    made = Tally()
    made.of(queue, "n").runs["SUCCESS"] = runs
    fields = {**made.document(), "incarnation": me.incarnation, "worker_id": me.worker_id}
    return store.run(tallies.record(me.incarnation, fields, is_first=is_first))


def die(store: SyncStore, me: Registration) -> None:
    """Let the registration of a worker expire."""
    store.run(workers.heartbeat(me, Heartbeat(WorkerStatus.STOPPED, 0, 1, [])))


def run_cnt(store: SyncStore) -> int:
    """Return the runs that the whole collection tells of."""
    return total(map(tally_of, client._not_folded(store.run(_all()), None))).run_cnt


def _all() -> Operation[Any]:
    from mtask.kernel.driver.operation import metrics

    return (yield metrics("find", {"_id": {"$ne": COUNTS_ID}}))


def stepped(store: SyncStore, operation: Operation[T], step: Callable[[int], object]) -> T:
    """Run an operation call by call. `step` is called before each call, with its number."""
    number = 0
    try:
        call = next(operation)
        while True:
            step(number)
            number += 1
            call = operation.send(store.run(only(call)))
    except StopIteration as stop:
        result: T = stop.value
        return result


def test_the_tally_of_a_dead_worker_is_folded_once_and_kept_for_two_days(store: SyncStore) -> None:
    alive, dead = worker(store, "alive", 3), worker(store, "dead", 40)
    assert store.run(tallies.fold()) == 0
    die(store, dead)
    assert store.run(tallies.fold()) == 1
    assert store.run(tallies.fold()) == 0
    collection = store.collections["metrics"]
    totals = collection.find_one({"_id": TOTALS_ID})
    assert totals is not None
    assert (tally_of(totals).run_cnt, totals["folded"]) == (40, [dead.incarnation])
    folded = collection.find_one({"_id": dead.incarnation})
    assert folded is not None
    assert timedelta(days=1) < folded["expire_time"] - folded["fold_time"] <= timedelta(days=2, minutes=1)
    assert run_cnt(store) == 43
    assert record(store, alive, 5, is_first=False)
    assert run_cnt(store) == 45
    # The TTL index removes the tally; the next fold forgets its name, and its runs stay.
    collection.delete_one({"_id": dead.incarnation})
    die(store, alive)
    assert store.run(tallies.fold()) == 1
    totals = collection.find_one({"_id": TOTALS_ID})
    assert totals is not None
    assert totals["folded"] == [alive.incarnation]
    assert run_cnt(store) == 45


def test_a_worker_that_is_folded_alive_learns_it_and_stores_nothing_there(store: SyncStore) -> None:
    frozen = worker(store, "frozen", 40)
    die(store, frozen)
    store.run(tallies.fold())
    assert not record(store, frozen, 5_060, is_first=False)
    assert not record(store, frozen, 5_060, is_first=True), "its first write had landed, and it does not know"
    assert run_cnt(store) == 40
    kept = store.run(tallies.find_tally(frozen.incarnation))
    assert kept is not None
    assert kept.run_cnt == 40


def test_readers_see_each_run_once_between_all_steps_of_a_fold(store: SyncStore) -> None:
    worker(store, "alive", 1)
    for name in ("a", "b"):
        die(store, worker(store, name, 10))
    seen: list[int] = []
    assert stepped(store, tallies.fold(), lambda _: seen.append(run_cnt(store))) == 2
    assert set(seen) == {21}
    assert len(seen) >= 7


def test_a_reader_that_reads_the_documents_at_different_times_counts_each_run_once(store: SyncStore) -> None:
    """A find is no snapshot: it may return the totals of before a fold and a tally of after it, or the reverse."""
    die(store, worker(store, "dead", 10))
    die(store, worker(store, "other", 7))
    states: list[dict[str, Any]] = []

    def note(_: int) -> None:
        states.append({found["_id"]: found for found in store.collections["metrics"].find()})

    stepped(store, tallies.fold(), note)
    note(0)
    assert [TOTALS_ID in state for state in (states[0], states[-1])] == [False, True]
    for of_totals in states:
        for of_tallies in states:
            read = [found for found in of_tallies.values() if found["_id"] != TOTALS_ID]
            read += [of_totals[TOTALS_ID]] if TOTALS_ID in of_totals else []
            now = None
            assert total(map(tally_of, client._not_folded(read, now))).run_cnt == 17


def test_of_two_folders_at_any_step_only_one_counts(store: SyncStore) -> None:
    for step in range(7):
        die(store, worker(store, f"dead{step}", 10))

        def other(number: int, step: int = step) -> None:
            if number == step:
                # It also folds a tally that the first folder has not seen.
                die(store, worker(store, f"later{step}", 10))
                store.run(tallies.fold())

        stepped(store, tallies.fold(), other)
        assert run_cnt(store) == 20 * (step + 1)
        totals = store.run(tallies.find_tally(TOTALS_ID))
        assert totals is not None
        assert totals.run_cnt == 20 * (step + 1), "the second write does not undo the first"


def test_a_folder_may_die_at_any_step(store: SyncStore) -> None:
    class Died(Exception):
        pass

    def dies_at(step: int) -> Callable[[int], None]:
        def die_there(number: int) -> None:
            if number == step:
                raise Died

        return die_there

    for step in range(1, 7):
        die(store, worker(store, f"dead{step}", 10))
        with pytest.raises(Died):
            stepped(store, tallies.fold(), dies_at(step))
        assert run_cnt(store) == 10 * step
        store.run(tallies.fold())
        assert run_cnt(store) == 10 * step
        assert store.collections["metrics"].count_documents({"kind": "worker", "expire_time": None}) == 0


def test_many_folders_at_once_fold_each_tally_once(store: SyncStore) -> None:
    for number in range(12):
        die(store, worker(store, f"dead{number}", 5))
    added: list[int] = []
    threads = [threading.Thread(target=lambda: added.append(store.run(tallies.fold()))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(added) == 12
    assert run_cnt(store) == 60


def test_totals_keep_a_bounded_number_of_pairs_and_those_that_metrics_show(store: SyncStore) -> None:
    store.run(setup.make_sure(["metrics"]))
    shown = [[f"shown-{number}", "n"] for number in range(MAX_PAIRS)]
    counts = {"_id": COUNTS_ID, "kind": "counts", "schema_version": SCHEMA_VERSION, "admitted": shown}
    store.collections["metrics"].insert_one(counts)
    die(store, worker(store, "a", 10, queue="shown-3"))
    die(store, worker(store, "b", 10, queue="not shown"))
    store.run(tallies.fold())
    totals = store.run(tallies.find_tally(TOTALS_ID))
    assert totals is not None
    assert {pair: counts.runs["SUCCESS"] for pair, counts in totals.pairs.items()} == {
        Pair("shown-3", "n"): 10,
        OTHER: 10,
    }
