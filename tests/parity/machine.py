"""The world of the state machine: every operation as a step that the server and the model take, and are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from hypothesis import note

from mtask.doctor import operations as diagnosis
from mtask.errors import LeaseLost, MtaskError
from mtask.kernel.document import rules
from mtask.kernel.document.options import as_keywords
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.bson import with_zones
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations import publish as publishing
from mtask.kernel.operations import transactions
from mtask.kernel.operations.publish import NewTask, Policy, Published
from mtask.kernel.statements.finish import Outcome
from tests.parity import machine_model as model
from tests.parity.cases import WORKERS, Document, parsed
from tests.parity.machine_history import Act, History
from tests.parity.machine_model import Prediction
from tests.parity.machine_step import Observed, fitted, shifted

KEYS = ["a:b", "$key", "é"]
QUEUES = ["default", "$other"]


class World:
    """Tasks in a real database and in the model: whatever is done to them is done to both, and compared."""

    def __init__(self, store: SyncStore) -> None:
        self.store = store
        store.tasks.delete_many({})
        #: What the model says, equal to what is stored.
        self.documents: dict[str, Document] = {}
        self.stored: dict[str, Document] = {}
        self.histories: dict[str, History] = {f"task:{key}": History() for key in KEYS}
        #: Every run that was ever given, with its task and worker.
        self.given: list[tuple[str, str, str]] = []
        self.token_cnt = 0
        #: The server's clock before and after the last step.
        self.started = self.now = self.server_time()

    def server_time(self) -> datetime:
        return self.store.run(diagnosis.server_time())

    # -- one step

    def step(
        self,
        act: Act,
        operation: Operation[Any],
        predictions: Mapping[str, Prediction],
        *,
        in_transaction: bool = False,
        is_one_update: bool = True,
    ) -> Any:
        """Run the operation, hold what it did against the model, and return its result or its error."""
        note(f"{act} on {sorted(predictions)}")
        self.started = self.server_time()
        result: Any = None
        try:
            if in_transaction:
                with self.store.client.start_session() as session:
                    transactions.start(session)
                    result = self.store.run(operation, session)
            else:
                result = self.store.run(operation)
        except MtaskError as error:
            result = error
        self.now = self.server_time()
        self.stored = {document["_id"]: document for document in self.store.tasks.find()}
        told = {task_id: _error_of(result, place) for place, task_id in enumerate(predictions)}
        before = self.documents
        observed = Observed(self.started, self.now, before, self.stored, told)
        self.documents, nows = fitted(observed, predictions, is_one_update=is_one_update)
        for task_id, history in self.histories.items():
            was, is_now = before.get(task_id), self.documents.get(task_id)
            if task_id in predictions and told[task_id] is None:
                history.observe(was, is_now, nows[task_id], act)
            else:
                assert is_now == was
        return result

    def runs(self, task_id: str) -> list[Document]:
        document = self.documents.get(task_id)
        return document["task_state"]["worker_states"] if document else []

    def run_of(self, task_id: str, run_id: str) -> Document | None:
        return next((run for run in self.runs(task_id) if run["run_id"] == run_id), None)

    def holds(self, given: tuple[str, str, str]) -> bool:
        run = self.run_of(given[0], given[1])
        return run is not None and model.is_live(run, self.now)

    def pick(self, picks: Sequence[int], *, is_live: bool) -> list[tuple[str, str, str]]:
        """Return runs that hold their task, or that no longer do: at most one of each task."""
        choice = [given for given in self.given if self.holds(given) is is_live]
        if is_live and not choice:
            self.claim_what_can_be_taken(picks[0])
            choice = [given for given in self.given if self.holds(given)]
        picked = [choice[-1 - number % len(choice)] for number in picks] if choice else []
        return list({given[0]: given for given in picked}.values())

    # -- publishers

    def publish(self, new: NewTask, policy: Policy, start: int | None) -> None:
        if start is not None:
            new = replace(new, start=model.after(start, self.now))
        existed, before = new.task_id in self.documents, self.documents.get(new.task_id)
        act = Act("publish", clean_failed=policy.clean_failed, clean_success=policy.clean_success)
        result = self.step(act, publishing.publish(new, policy), {new.task_id: model.published(new, policy)})
        if isinstance(result, Published):
            is_changed = existed and self.documents[new.task_id] != before
            assert result == Published(new.task_id, created=not existed, updated=is_changed)

    def publish_many(self, batch: list[NewTask], policy: Policy) -> None:
        existed = set(self.documents)
        act = Act("publish", clean_failed=policy.clean_failed, clean_success=policy.clean_success)
        operation = publishing.publish_many(batch, policy, in_session=False)
        predictions = {new.task_id: model.published(new, policy) for new in batch}
        results = self.step(act, operation, predictions, is_one_update=False)
        for new, result in zip(batch, results, strict=True):
            assert isinstance(result, MtaskError) or result.created is (new.task_id not in existed)

    # -- workers

    def token(self) -> str:
        self.token_cnt += 1
        return f"token{self.token_cnt}"

    def claim(self, worker_id: str, task_ids: list[str]) -> None:
        token = self.token()
        run_ids = claims.run_ids_of(task_ids, token)
        act = Act("claim", worker_id, frozenset(run_ids.values()))
        prediction = model.claimed(worker_id, run_ids)
        are_simple = (
            len(task_ids) > 1 and self.token_cnt % 2 == 0
        )  # first by the short statement; what the model says does not depend on it
        operation = claims.claim(task_ids, worker_id, token, are_simple=are_simple)
        found = self.step(act, operation, dict.fromkeys(task_ids, prediction), is_one_update=not are_simple)
        got = {task_id for task_id, run_id in run_ids.items() if self.run_of(task_id, run_id)}
        assert {document["_id"]: with_zones(document) for document in found} == {
            task_id: self.stored[task_id] for task_id in got
        }
        self.given += [(task_id, run_id, worker_id) for task_id, run_id in run_ids.items() if task_id in got]

    def can_be_taken(self, worker_id: str) -> set[str]:
        return {t for t, document in self.documents.items() if rules.may_take(parsed(document), worker_id, self.now)}

    def claim_what_can_be_taken(self, pick: int) -> None:
        pairs = [(worker_id, task_id) for worker_id in WORKERS for task_id in sorted(self.can_be_taken(worker_id))]
        if pairs:
            worker_id, task_id = pairs[pick % len(pairs)]
            self.claim(worker_id, [task_id])

    def discover(self, worker_id: str, horizon_ms: int) -> None:
        """The batch query finds what this worker can take, whatever was last written."""
        expected = self.can_be_taken(worker_id)
        found = self.store.run(finding.scan(QUEUES, ["task"], worker_id, horizon_ms, 10))
        self.now = self.server_time()
        # A lease that lapsed meanwhile may have used up the limit.
        assert expected & self.can_be_taken(worker_id) <= {document["_id"] for document in found.documents}

    def finish(self, held: list[tuple[str, str, str]], ends: list[Outcome]) -> None:
        made = [replace(end, task_id=t, run_id=r) for end, (t, r, _) in zip(ends, held, strict=False)]
        by_task = {end.task_id: end for end in made}
        act = Act("finish", run_ids=frozenset(end.run_id for end in made))
        is_simple = self.token_cnt % 2 == 0 and all(end.status is RunStatus.SUCCESS for end in made)
        operation = claims.finish(made, is_simple=is_simple)
        predictions = dict.fromkeys(by_task, model.finished(by_task))
        stands = self.step(act, operation, predictions, is_one_update=not is_simple)
        runs = [(end, self.run_of(end.task_id, end.run_id)) for end in made]
        expected = {end.run_id for end, run in runs if run is not None and run["status"] == end.status}
        assert stands == expected, "a worker was told wrongly whether its outcome stands"

    def finish_some(self, picks: list[int], ends: list[Outcome]) -> None:
        held = self.pick(picks, is_live=True)
        if held:
            self.finish(held, ends)

    def hand_back(self, picks: list[int]) -> None:
        held = self.pick(picks, is_live=True)
        if held:
            end = Outcome("", "", RunStatus.CANCELED, reason="handed back: the worker stopped")
            self.finish(held, [end] * len(held))

    def finish_what_is_lost(self, pick: int, end: Outcome) -> None:
        """Its run has lapsed, was preempted, canceled or finished, or its task removed: nothing may change."""
        lost = self.pick([pick], is_live=False)
        if lost:
            before = self.documents
            self.finish(lost, [end])
            assert self.documents == before

    def finish_under_the_name_of_another_task(self, task_id: str, pick: int, end: Outcome) -> None:
        held = self.pick([pick], is_live=True)
        if held and held[0][0] != task_id:
            before = self.documents
            self.finish([(task_id, held[0][1], held[0][2])], [end])
            assert self.documents == before

    def finish_in_a_transaction(self, pick: int, is_live: bool, returns: Any) -> None:
        held = self.pick([pick], is_live=is_live)
        if not held:
            return
        task_id, run_id, _ = held[0]
        end = Outcome(task_id, run_id, RunStatus.SUCCESS)
        operation = transactions.commit(end, lambda: True)

        def prediction(before: Document | None, now: datetime) -> Document | None:
            if not model.holds(before, [run_id], now):
                raise LeaseLost(task_id, run_id)
            return model.finished({task_id: end})(before, now)

        act = Act("finish", run_ids=frozenset([run_id]))
        self.step(act, operation, {task_id: prediction}, in_transaction=True)
        act = Act("set_returns", run_ids=frozenset([run_id]))
        added = transactions.store_return(task_id, run_id, returns)
        self.step(act, added, {task_id: model.with_returns(run_id, returns)})

    def ping(self, picks: list[int], lost: list[int], lease_ms: int) -> None:
        held = [*self.pick(picks, is_live=True), *self.pick(lost, is_live=False)]
        if not held:
            return
        run_ids = [run_id for _, run_id, _ in held]
        task_ids = list(dict.fromkeys(task_id for task_id, _, _ in held))
        single, before = held[0], self.documents
        runs = {run_id: task_id for task_id, run_id, _ in held}
        predictions = dict.fromkeys(task_ids, model.pinged(run_ids, lease_ms))
        found = self.step(Act("ping", run_ids=frozenset(run_ids)), claims.ping(runs, lease_ms), predictions)
        there = {document["_id"] for document in found}
        if len(runs) > 1:
            assert there == {task_id for task_id in task_ids if task_id in self.documents}
        elif not model.holds(before.get(single[0]), run_ids, self.started):
            assert not there
        elif model.holds(before.get(single[0]), run_ids, self.now):
            assert there == {single[0]}
        for document in found:
            seen = {run["run_id"]: run for run in document["task_state"]["worker_states"]}
            names = ("run_id", "status", "ping_expire_time")
            runs_now = self.runs(document["_id"])
            assert seen == {run["run_id"]: {name: run[name] for name in names} for run in runs_now}

    def settle(self, task_ids: list[str]) -> None:
        self.step(Act("settle"), claims.settle(task_ids), dict.fromkeys(task_ids, model.settled))

    def settle_lapsed(self, grace_ms: int) -> None:
        predictions = dict.fromkeys(self.documents, model.settled_if_lapsed(grace_ms))
        self.step(Act("settle"), claims.settle_lapsed(grace_ms, 10), predictions, is_one_update=False)

    # -- clients

    def cancel(self, task_id: str) -> None:
        self.is_told(task_id, self.step(Act("cancel"), queries.cancel(task_id), {task_id: model.canceled(task_id)}))

    def run_again(self, pick: int, everything: bool) -> None:
        ended = [t for t, document in sorted(self.documents.items()) if "finish_time" in document["task_state"]]
        choice = ended or sorted(self.histories)
        task_id = choice[pick % len(choice)]
        operation = queries.run_again(task_id, everything=everything)
        prediction = model.run_again(task_id, everything=everything)
        self.is_told(task_id, self.step(Act("run_again"), operation, {task_id: prediction}))

    def update_option(self, task_id: str, option: Document, names: set[str]) -> None:
        wanted = {name: option[name] for name in sorted(names)}
        operation = queries.update_option(task_id, as_keywords(wanted))
        prediction = model.with_option(task_id, wanted)
        self.is_told(task_id, self.step(Act("update_option"), operation, {task_id: prediction}))

    def is_told(self, task_id: str, result: Any) -> None:
        if not isinstance(result, MtaskError):
            assert result == self.stored[task_id]

    def remove(self, task_id: str) -> None:
        existed = task_id in self.documents
        assert self.step(Act("remove"), queries.remove(task_id), {task_id: model.removed}) is existed

    # -- time, and what it brings

    def move(self, by: timedelta) -> None:
        """Let time pass: it is the same whether the clock goes on or every instant goes back."""
        if by > timedelta(0) and self.documents:
            self.documents = {task_id: shifted(document, -by) for task_id, document in self.documents.items()}
            self.replace({task_id: shifted(document, -by) for task_id, document in self.stored.items()})

    def replace(self, documents: dict[str, Document]) -> None:
        for task_id, document in documents.items():
            self.store.tasks.replace_one({"_id": task_id}, document)
        self.stored = documents

    def time_passes(self, milliseconds: int) -> None:
        self.move(timedelta(milliseconds=milliseconds))

    def time_passes_to_a_deadline(self, pick: int, extra_ms: int) -> None:
        """A lease, a delay or a start comes due, or is about to."""
        ahead = sorted({found for found in self.deadlines() if found > self.now})
        if ahead:
            self.move(ahead[pick % len(ahead)] - self.now + timedelta(milliseconds=extra_ms))

    def deadlines(self) -> Iterator[datetime]:
        for task_id, document in self.documents.items():
            yield document["task_state"].get("start_time", self.now)
            for run in self.runs(task_id):
                yield run["ping_expire_time"] if run["status"] == "RUNNING" else run.get("retry_time", self.now)

    def much_has_happened(self, task_id: str, times: int) -> None:
        """Grow the document as many more hand-backs and earlier rounds would have: the array is bounded."""
        document = self.documents.get(task_id)
        if document is None or len(self.runs(task_id)) > 40:
            return
        grown = shifted(document, timedelta(0))
        again = [run for run in self.runs(task_id) if run["status"] == "CANCELED" or run.get("past")]
        is_unlimited = document["task_option"]["max_unexpected_retries"] < 0
        if is_unlimited and document["task_option"]["retry_scope"] == "task":
            again += [run for run in self.runs(task_id) if run["status"] in ("FAIL", "TIMEOUT") and not run.get("past")]
        more = [run | {"run_id": f"{self.token()}-0"} for run in again[-1:] for _ in range(times)]
        counted = sum(run["status"] in ("FAIL", "TIMEOUT") and not run.get("past") for run in more)
        grown["task_state"]["worker_states"][:0] = more
        grown["task_state"]["failed_cnt"] += counted
        self.histories[task_id].failed_cnt += counted
        self.documents = self.documents | {task_id: grown}
        self.replace(self.stored | {task_id: shifted(grown, timedelta(0))})


def _error_of(result: Any, place: int) -> type[MtaskError] | None:
    told = result[place] if isinstance(result, list) and len(result) > place else result
    return type(told) if isinstance(told, MtaskError) else None
