"""Whole histories of one task that gathers, statement by statement: calls that come late or twice, claims, ends, lapsed
leases, cancels and retries in any order. After each statement the document is what the pure rules make of it.

The clock is the test's own, so a lease lapses when the history says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any

import bson
import pytest
from hypothesis import HealthCheck, given, settings

from mtask.features.gathering import statements as gathering
from mtask.features.gathering.publish import asked_time
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import GatherKind
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.statements import claim as pipelines
from mtask.kernel.statements import derive
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements.finish import Outcome, finish
from tests.oracles import gathering as rules
from tests.parity import changes
from tests.parity.cases import NOW, SCALE, Document, bare, parsed, randoms
from tests.parity.test_gathering_parity import sent

ID = "work:k"
_properties = settings(max_examples=12 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
Mark = tuple[datetime, str]


@dataclass
class History:
    """One task, and what its publishers and workers know."""

    store: SyncStore
    random: Random
    kind: GatherKind
    now: datetime = NOW
    number: int = 0
    #: Calls whose asked_time is known, and that may be sent, also more than once.
    asked: list[rules.Call] = field(default_factory=list)
    #: The calls that have been applied.
    applied: dict[str, rules.Call] = field(default_factory=dict)
    held: dict[str, Document] = field(default_factory=dict)
    consumed: list[Mark] = field(default_factory=list)
    succeeded: list[list[Any]] = field(default_factory=list)
    given_up: list[Any] = field(default_factory=list)  #: the params that were canceled
    canceled: list[Mark] = field(default_factory=list)
    failed: list[Any] = field(default_factory=list)  #: the params of rounds that had no try left

    def document(self) -> Document:
        found = self.store.tasks.find_one({"_id": ID})
        assert found is not None
        return found

    def apply(self, pipeline: derive.Pipeline, change: changes.Change, guard: Document | None = None) -> bool:
        """Apply a change on the server, and by the pure rules; compare. Return whether the guard matched."""
        before = self.document()
        matched = self.store.tasks.update_one({"_id": ID, **(guard or {})}, pipeline).matched_count
        if matched:
            after = self.document()
            assert bare(after) == bare(changes.changed(before, change, self.now))
            self.note(before, after)
        return bool(matched)

    def note(self, before: Document, after: Document) -> None:
        """Note the params of a round that has used up its tries, if another round has taken its place."""
        if before["params"] == after["params"]:
            return
        current = {run.run_id for run in parsed(before).runs if not run.past}
        runs = [run for run in parsed(after).runs if run.run_id in current]
        failed = [run for run in runs if run.status in (RunStatus.FAIL, RunStatus.TIMEOUT)]
        if len(failed) > 1 or any(run.final for run in failed):
            self.failed.append(before["params"])

    # --- the steps ----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Read the server's time for a call. It is sent later, or never."""
        self.number += 1
        task = parsed(self.document())
        marks = [g.newest.asked_time for g in (task.gather, task.again and task.again.gather) if g and g.newest]
        debounce = self.random.choice([None, 0, 500, 3000])
        self.asked.append(
            rules.Call(
                asked_time=asked_time(self.now, max(marks, default=None)),
                call_id=f"c{self.number}",
                kind=self.kind,
                params=self.number,
                queue=self.random.choice(["default", "other"]),
                task_option=task_option(),
                debounce_ms=debounce,
                max_wait_ms=None if debounce is None else self.random.choice([None, debounce, 5000]),
            )
        )

    def send(self) -> None:
        """Apply one of the calls, perhaps not for the first time."""
        if not self.asked:
            return
        call = self.random.choice(self.asked[-4:])
        self.settle()
        before = self.document()
        self.store.tasks.update_one({"_id": ID}, gathering.add(sent(call), self.now))
        base = rules.base_round(parsed(before), self.now)
        former = base.params["calls"] if base is not None and call.kind == "calls" else []
        size = len(bson.encode({"calls": [*former, call.params]}))
        after = self.document()
        assert bare(after) == bare(changes.added(before, changes.gather(call, size), self.now))
        self.note(before, after)
        self.applied.setdefault(call.call_id, call)

    def claim(self) -> None:
        self.number += 1
        run_id = f"r{self.number}"
        worker = self.random.choice(["w1", "w2"])
        before = self.document()
        if before["task_state"].get("next_preempt_time", self.now + timedelta(1)) > self.now:
            return
        if self.random.random() < 0.5 and self.store.tasks.find_one(pipelines.unbegun([ID], self.now)):
            pipeline = pipelines.claim_unbegun(worker, {"$literal": run_id}, self.now)
        else:
            pipeline = pipelines.claim(worker, {"$literal": run_id}, self.now)
        self.apply(pipeline, changes.claim(worker, {ID: run_id}))
        after = self.document()
        if run_id in {run["run_id"] for run in after["task_state"]["worker_states"]}:
            self.held[run_id] = after
            self.consumed.append(mark_of(after))

    def finish(self) -> None:
        """End a run that is still held, or try to end one that has lost its lease."""
        if not self.held:
            return
        run_id = self.random.choice(sorted(self.held))
        status = self.random.choice([RunStatus.SUCCESS, RunStatus.SUCCESS, RunStatus.FAIL, RunStatus.CANCELED])
        final = status is RunStatus.FAIL and self.random.random() < 0.3
        assert status is not RunStatus.RUNNING
        assert status is not RunStatus.TIMEOUT
        outcome = Outcome(ID, run_id, status, reason=None if status is RunStatus.SUCCESS else "x", final=final)
        before = self.document()
        live = {run.run_id for run in parsed(before).runs if run.is_live(self.now)}
        is_short = status is RunStatus.SUCCESS and self.random.random() < 0.5
        is_done = False
        if is_short:
            guard = pipelines.held_alone([outcome], self.now)
            is_done = self.apply(pipelines.succeed([outcome], self.now), changes.finish({ID: outcome}), guard)
        if not is_done and run_id in live:
            is_done = self.apply(finish([outcome], self.now), changes.finish({ID: outcome}))
        assert is_done is (run_id in live)
        params = self.held.pop(run_id)["params"]
        if is_done and status is RunStatus.SUCCESS:
            self.succeeded.append(params)

    def settle(self) -> None:
        self.apply(pipelines.settle(self.now), changes.nothing)

    def cancel(self) -> None:
        before = self.document()
        self.apply(requests.cancel(self.now), changes.cancel)
        if before["task_state"]["status"] not in ("SUCCESS", "FAIL", "CANCELED"):
            for part in (before, before.get("again")):
                if part is not None:
                    self.given_up.append(part["params"])
                    self.canceled.append(mark_of(part))

    def retry(self) -> None:
        if self.document()["task_state"]["status"] in ("FAIL", "CANCELED"):
            self.apply(requests.run_again(everything=False, now=self.now), changes.run_again(everything=False))

    def wait(self) -> None:
        self.now += timedelta(milliseconds=self.random.choice([1, 100, 700, 2500]))


STEPS = [History.ask] * 4 + [History.send] * 6 + [History.claim] * 5 + [History.finish] * 4
STEPS += [History.settle, History.cancel, History.retry] + [History.wait] * 5


def mark_of(part: Document) -> Mark:
    newest = part["gather"]["newest"]
    return newest["asked_time"], newest["call_id"]


def task_option() -> Document:
    option = TaskOption(
        ping_interval_ms=500, worker_timeout_ms=1500, max_unexpected_retries=1, unexpected_retry_delay_ms=50
    )
    return option.stored()


def first(history: History) -> None:
    """Insert the task as its first call does."""
    history.number += 1
    params: Any = history.number
    call = rules.Call(history.now, f"c{history.number}", history.kind, params, "default", task_option())
    gather, _ = gathering.first_round(sent(call), history.now)
    stored: Document = {"kind": history.kind, "first_time": history.now, "newest": call.mark.model_dump()}
    if history.kind == "calls":
        stored["ids"] = [call.call_id]
        params = {"calls": [params]}
    assert stored.keys() == gather.keys()
    fixed = {"_id": ID, "name": "work", "key": "k", "queue": "default", "params": params}
    document = requests.task_document({**fixed, "task_option": task_option()}, None, history.now)
    history.store.tasks.insert_one({**document, "gather": stored})
    history.applied[call.call_id] = call
    history.asked.append(call)


@pytest.fixture(params=["latest", "calls"])
def kind(request: pytest.FixtureRequest) -> GatherKind:
    made: GatherKind = request.param
    return made


def test_no_call_is_lost_and_none_counts_twice(store: SyncStore, kind: GatherKind) -> None:
    @_properties
    @given(randoms())
    def run(random: Random) -> None:
        store.tasks.delete_many({})
        history = History(store, random, kind)
        first(history)
        for _ in range(random.choice([10, 25, 45])):
            random.choice(STEPS)(history)
        drain(history)
        check(history)

    run()


def drain(history: History) -> None:
    """Let every run end, and the task run until it has nothing left to do."""
    for _ in range(20):
        while history.held:
            history.finish()
        history.now += timedelta(seconds=10)
        history.settle()
        if history.document()["task_state"]["status"] in ("SUCCESS", "FAIL", "CANCELED"):
            break
        history.claim()
    found = history.document()
    assert found["task_state"]["status"] in ("SUCCESS", "FAIL", "CANCELED"), "it comes to rest"
    assert "again" not in found


def check(history: History) -> None:
    canceled = flat(history.given_up)
    if history.kind == "latest":
        assert history.consumed == sorted(history.consumed), "no run gets older params than one before it"
        newest = max([*history.consumed, *history.canceled])
        for call in history.applied.values():
            assert (call.asked_time, call.call_id) <= newest, f"{call.call_id} was lost"
        # A round that succeeded is followed by another one only for a newer call.
        numbers = [params for params in history.succeeded if params not in canceled]
        assert len(set(numbers)) == len(numbers), "a call counted twice"
        return
    done = [one for one in flat(history.succeeded) if one not in canceled]
    assert len(set(done)) == len(done), "a call counted twice"
    reached = {*done, *canceled, *flat(history.failed), *flat([history.document()["params"]])}
    for call in history.applied.values():
        assert call.params in reached, f"{call.call_id} was lost"


def flat(params: list[Any]) -> list[Any]:
    found: list[Any] = []
    for one in params:
        found += one["calls"] if isinstance(one, dict) else [one]
    return found
