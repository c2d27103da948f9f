"""Settlers, workers, deaths, retries and cancels, interleaved statement by statement: every flow ends."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtask.errors import RunError, TaskNotFinished
from mtask.features.flows import publish as publishing
from mtask.features.flows import read
from mtask.features.flows import settle as settling
from mtask.features.flows.publish import NewFlow, NewStep
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.operation import Call, Operation
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import transactions
from mtask.kernel.operations.publish import NewTask
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from mtask.parts.relays import RELAYS
from tests.explaining import only
from tests.parity.cases import SCALE

Document = dict[str, Any]
_FINAL = ("SUCCESS", "FAIL", "CANCELED")
_BAD = ("FAIL", "CANCELED")


@pytest.fixture(scope="module")
def store(module_store: SyncStore) -> SyncStore:
    return module_store


class World:
    """A flow, and actors of whom each makes one statement in its turn, stands still, or dies."""

    def __init__(
        self, store: SyncStore, random: Random, *, retries: bool, fail_fast: bool, children: float = 0.0
    ) -> None:
        self.store = store
        self.random = random
        self.retries = 3 if retries else 0
        #: How often a task adds children, or goes on as another one.
        self.children = children
        self.canceled: set[str] = set()
        self.actors: list[Operation[Any]] = []
        #: What an actor that has begun is about to send.
        self.calls: dict[Operation[Any], Call] = {}
        self.claim_cnt = 0
        option = TaskOption(max_unexpected_retries=0).stored()
        names = [f"s{number}" for number in range(random.randint(2, 6))]
        steps = []
        for place, name in enumerate(names):
            after = random.sample(names[:place], min(place, random.choice([0, 1, 2, 3])))
            task = NewTask(f"task:f/{name}", "task", f"f/{name}", "default", None, option)
            on_failed = random.choice(["cancel", "cancel", "run", "fail"])
            steps.append(NewStep(task, name, [f"task:f/{other}" for other in after], on_failed))  # type: ignore[arg-type]
        flow = NewFlow("f", steps, fail_fast)
        transactions.transact(store, lambda: publishing.publish(flow))

    def documents(self) -> dict[str, Document]:
        return {document["_id"]: document for document in self.store.tasks.find({})}

    def with_status(self, *statuses: str) -> list[str]:
        return sorted(i for i, document in self.documents().items() if document["task_state"]["status"] in statuses)

    def work(self, task_id: str, *, fails: bool) -> Operation[None]:
        self.claim_cnt += 1
        token = f"token-{self.claim_cnt}"
        claimed = yield from claims.claim([task_id], "w", token)
        if not claimed:
            return
        flow = claimed[0]["flow"]
        if len(flow.get("ancestors", ())) < 2 and self.random.random() < self.children:
            added = [owed(flow, task_id, f"{flow['step']}-{n}") for n in range(self.random.choice([1, 2]))]
            yield from publishing.add(task_id, f"{token}-0", added, lambda: True, RELAYS)
        if fails:
            outcome = Outcome(task_id, f"{token}-0", RunStatus.FAIL, reason="no luck")
        else:
            goes_on = "next" not in flow["step"] and self.random.random() < self.children
            following = owed(flow, task_id, f"{flow['step']}/next-1") if goes_on else None
            outcome = Outcome(task_id, f"{token}-0", RunStatus.SUCCESS, next=following)
        yield from claims.finish([outcome])
        yield from settling.settle_all([task_id])

    def retry(self, task_id: str) -> Operation[None]:
        yield from queries.run_again(task_id, everything=False)
        yield from settling.settle_all([task_id])

    def cancel(self, task_id: str) -> Operation[None]:
        yield from queries.cancel(task_id)
        yield from settling.settle_all([task_id])

    def add_one(self) -> None:
        """Let a worker, a settler, a user or a scan begin."""
        due = self.with_status("INIT")
        if due:
            self.actors.append(self.work(self.random.choice(due), fails=self.random.random() < 0.3))
        owed = [task_id for task_id, document in self.documents().items() if "owed_since" in document]
        if owed and self.random.random() < 0.3:
            self.actors.append(settling.settle_all([self.random.choice(owed)]))
        failed = [task_id for task_id in self.with_status(*_BAD) if task_id not in self.canceled]
        if failed and self.retries and self.random.random() < 0.5:
            self.retries -= 1
            self.actors.append(self.retry(self.random.choice(failed)))
        waiting = self.with_status("INIT", "WAITING")
        if waiting and not self.canceled and self.random.random() < 0.1:
            self.canceled.add(chosen := self.random.choice(waiting))
            self.actors.append(self.cancel(chosen))

    def turn(self) -> None:
        """Let one actor make one statement, or die."""
        place = self.random.randrange(len(self.actors))
        actor = self.actors[place]
        if self.random.random() < 0.03:
            self.actors.pop(place)
            self.calls.pop(actor, None)
            actor.close()
            return
        try:
            call = self.calls.pop(actor, None) or next(actor)
            self.calls[actor] = actor.send(self.store.run(only(call)))
        except (StopIteration, TaskNotFinished, RunError):
            self.actors.pop(place)

    def run(self) -> None:
        for _ in range(400):
            if not self.actors or self.random.random() < 0.15:
                self.add_one()
            if not self.actors:
                break
            self.turn()
        for actor in self.actors:
            actor.close()  # all of them die

    def finish(self) -> None:
        """Do what scans and workers do, until nothing is left to do."""
        for _ in range(100):
            self.lapse()
            owed = self.store.run(read.owed(timedelta(0)))
            self.store.run(settling.settle_all(owed))
            self.children = 0.0
            for task_id in (due := self.with_status("INIT")):
                _exhaust(self.store, self.work(task_id, fails=False))
            if not owed and not due and not self.with_status("RUNNING"):
                return
        raise AssertionError("no end")

    def lapse(self) -> None:
        """Let the workers of running tasks hand their runs back, as a worker that stops does."""
        for document in self.store.tasks.find({"task_state.status": "RUNNING"}):
            run = document["task_state"]["worker_states"][-1]
            self.store.run(claims.finish([Outcome(document["_id"], run["run_id"], RunStatus.CANCELED, reason="back")]))

    def check(self, *, fail_fast: bool) -> None:
        documents = self.documents()
        for task_id, document in documents.items():
            status, flow = document["task_state"]["status"], document["flow"]
            assert status in _FINAL, f"{task_id} is lost: {status}, held by {flow.get('held_by')}"
            assert "owed_since" not in document, task_id
            culprit = flow.get("held_by")
            if status in _BAD and culprit is not None:
                assert documents[culprit]["task_state"]["status"] in _BAD, f"{task_id} ended because of {culprit}"
            if status in _BAD and "release_time" not in flow and task_id not in self.canceled and not fail_fast:
                awaited = {*flow["after"], *(i for i in documents if _is_below(documents[i], flow["after"]))}
                bad = [i for i in awaited if documents[i]["task_state"]["status"] in _BAD]
                assert bad, f"{task_id} ended, but nothing that it depends on failed"

    def check_order(self) -> None:
        """Check that no step was released before all that it waits for had ended."""
        documents = self.documents()
        for task_id, document in documents.items():
            released, after = document["flow"].get("release_time"), document["flow"]["after"]
            for other in documents.values() if after and released is not None else ():
                if other["_id"] in after or _is_below(other, after):
                    assert other["task_state"]["finish_time"] <= released, f"{task_id} before {other['_id']}"


def _is_below(document: Document, after: list[str]) -> bool:
    return bool(set(document["flow"].get("ancestors", ())) & set(after))


def owed(flow: Document, parent: str, step: str) -> OwedTask:
    """Make a task that a step of the flow adds to it."""
    part = {"key": "f", "step": step, "after": [], "on_failed": flow["on_failed"]}
    part["ancestors"] = [*flow.get("ancestors", ()), parent]
    if flow.get("fail_fast"):
        part["fail_fast"] = True
    option = TaskOption(max_unexpected_retries=0).stored()
    fixed = {"_id": f"task:f/{step}", "name": "task", "key": f"f/{step}", "queue": "default", "params": None}
    return OwedTask({**fixed, "task_option": option, "flow": part})


def _exhaust(store: SyncStore, operation: Operation[Any]) -> None:
    store.run(operation)


@settings(max_examples=12 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_whatever_interleaves_every_flow_ends_as_its_rules_say(
    store: SyncStore, seed: int, retries: bool, fail_fast: bool
) -> None:
    store.tasks.delete_many({})
    world = World(store, Random(seed), retries=retries, fail_fast=fail_fast)
    world.run()
    world.finish()
    world.check(fail_fast=fail_fast)


@settings(max_examples=12 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_dependents_wait_for_children_and_chains_whatever_interleaves(
    store: SyncStore, seed: int, retries: bool, fail_fast: bool
) -> None:
    store.tasks.delete_many({})
    world = World(store, Random(seed), retries=retries, fail_fast=fail_fast, children=0.4)
    world.run()
    world.finish()
    world.check(fail_fast=fail_fast)
    if not retries:
        world.check_order()
    assert all("owed_tasks" not in document for document in world.documents().values())
