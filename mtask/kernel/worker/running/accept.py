"""Adoption: turns the documents of claimed tasks into held runs, and passes the runs to the slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from mtask.kernel.document import rules
from mtask.kernel.document.handlers import Handler
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask
from mtask.kernel.driver.codec import Unreadable
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations.claim import claimed_task, facts_of, simple_facts
from mtask.kernel.operations.find_due import lapse_in
from mtask.kernel.worker.discovery.inbox import Questions
from mtask.kernel.worker.discovery.quarantine import Quarantine
from mtask.kernel.worker.process.counts import due_since
from mtask.kernel.worker.process.part import Admission
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.running.run import EndReason, HeldRun
from mtask.kernel.worker.running.runner import Runner
from mtask.kernel.worker.running.slots import Slots

Document = dict[str, Any]


class Adoption:
    """Takes over the runs that claims have won."""

    def __init__(
        self,
        scope: Scope,
        handlers: Mapping[str, Handler],
        quarantine: Quarantine,
        questions: Questions,
        runner: Runner,
        slots: Slots,
    ) -> None:
        self._worker_id = scope.worker_id
        self._ledger = scope.ledger
        self._meter = scope.meter
        self._handlers = handlers
        self._served = scope.served
        self._quarantine = quarantine
        self._store = scope.store
        self._codec = scope.store.codec
        self._questions = questions
        self._runner = runner
        self._slots = slots
        #: Whether all tasks of the last claimed group were simple tasks. The worker assumes the same of the next group.
        self.are_simple = True
        self.won_cnt = 0

    async def adopt(self, documents: Sequence[dict[str, Any]], attempt: Attempt) -> None:
        """Start the runs that a claim has won. After that, close the runs that cannot be started."""
        if attempt.admission is not None:
            attempt.admission.hold([document["_id"] for document in documents])
        run_ids = attempt.run_ids
        refused: list[tuple[dict[str, Any], Exception]] = []
        now = monotonic()
        self.won_cnt += len(documents)
        for document in documents:
            self._ledger.claimed(document["_id"], now)
        held, others = self._simple(documents, run_ids, attempt)
        are_simple = True
        for document, read in zip(others, await self._readable(others), strict=True):
            task_id = document["_id"]
            try:
                if isinstance(read, Exception):
                    raise read
                task, is_readable = read
                run_id, own = run_ids[task_id], task.runs[-1]
                if own.run_id != run_id:
                    own = next(entry for entry in reversed(task.runs) if entry.run_id == run_id)
                facts = facts_of(task, own)
                run = HeldRun(facts, task, self._handlers[task.name], attempt.sent)
                run.codec = None if self._codec.is_plain else self._codec
                _admit(run, attempt.admission)
            except Exception as error:  # an error at one task does not stop the others' adoption
                refused.append((document, error))
                continue
            self._meter.claimed(facts, due_since(task))
            if len(task.runs) > 1 and (lapse := lapse_in(document, own.claim_time)) is not None:
                self._meter.lapsed([lapse])  # the claim has closed lapsed runs
            are_simple &= run.is_simple and not task.task_option.specific_worker_ids
            if own.status is RunStatus.RUNNING and run.is_lease_valid:  # a run that is read back late may be over
                if not is_readable:
                    run.end(EndReason.UNREADABLE)
                    self._quarantine.leave_alone(task_id)
                # final: another worker has since marked the task FAIL as malformed
                if not is_readable or task.task_state.status.is_final:
                    self._runner.hold([run])
                    self._runner.hand_back(run)
                    continue
                held.append(run)
                if task.task_state.cancel_requested or not rules.is_admitted(task, self._worker_id):
                    self._questions.ask_holder(task_id)
            else:
                run.leave_gate(is_closed=own.status is not RunStatus.RUNNING)
        self._runner.hold(held)
        if self._served.fair_queues:
            self._keep_turns(held, attempt)
        for run in held:
            self._slots.add(run, now)
        self._slots.start_waiting()
        self._ledger.forget_old_claims(now)
        if len(attempt.task_ids) > 1 and documents:
            self.are_simple = are_simple
        for document, problem in refused:
            run_id, is_closed = run_ids[document["_id"]], False
            try:
                is_closed = await self._quarantine.end(document, run_id, problem)
                if is_closed:
                    self._meter.refused(document.get("queue"), document.get("name"))
            finally:
                if attempt.admission is not None:
                    attempt.admission.release(document["_id"], run_id, is_closed=is_closed)

    def _keep_turns(self, held: list[HeldRun], attempt: Attempt) -> None:
        """Sort runs as the claim has named their tasks, and have those that take turns start in this order."""
        places = {task_id: place for place, task_id in enumerate(attempt.task_ids)}
        held.sort(key=lambda run: places[run.task_id])
        for run in held:
            run.takes_turns = self._served.is_fair(run.queue) and not run.is_interrupted

    def _simple(
        self, documents: Sequence[dict[str, Any]], run_ids: Mapping[str, str], attempt: Attempt
    ) -> tuple[list[HeldRun], Sequence[dict[str, Any]]]:
        """Return the runs of simple tasks, whose tasks are made when something reads them; and the other documents."""
        if not self._codec.is_plain:
            return [], documents  # the end of each run is encoded, and a task says how
        held, others = [], []
        for document in documents:
            task_id = document["_id"]
            facts = simple_facts(document, run_ids[task_id], self._worker_id, self._handlers)
            if facts is None:
                others.append(document)
                continue
            run = HeldRun(facts, document, self._handlers[facts.name], attempt.sent)
            self._meter.claimed(facts, facts.due)
            _admit(run, attempt.admission)
            if run.is_lease_valid:
                held.append(run)
            else:
                run.leave_gate(is_closed=False)
        return held, others

    async def _readable(self, documents: Sequence[dict[str, Any]]) -> list[tuple[StoredTask, bool] | Exception]:
        """Return the task of each document, decoded, and whether this worker can decode it. Or return an error."""
        found: list[tuple[StoredTask, bool] | Exception] = []
        for document in documents:
            try:
                found.append((claimed_task(document), True))
            except Exception as error:
                found.append(error)
        if not (documents and self._codec.is_needed(documents)):
            return found
        tasks = [each[0] for each in found if isinstance(each, tuple)]
        problems = iter(await self._store.run(self._codec.open_claimed(tasks)))
        return [each if isinstance(each, Exception) else _decoded(each[0], next(problems)) for each in found]

    async def take_back(self, documents: Sequence[dict[str, Any]], attempt: Attempt) -> None:
        """Start runs that a claim has won. The claim's reply was lost, and a later read has found these runs."""
        await self.adopt(documents, attempt)

    async def give_up(self, task_ids: Sequence[str], attempt: Attempt) -> None:
        """Give back what the gate has given for tasks that the claim did not win."""
        if attempt.admission is not None and task_ids:
            await attempt.admission.settle(task_ids)


def _admit(run: HeldRun, admission: Admission | None) -> None:
    if admission is not None:
        run.admission = admission
        admission.time_begin(run)


def _decoded(task: StoredTask, problem: Exception | None) -> tuple[StoredTask, bool] | Exception:
    return (task, problem is None) if problem is None or isinstance(problem, Unreadable) else problem


# --- attempt ---------------------------------------------------------------------------------------------

# An attempt: the record of one claim that was sent.


@dataclass(frozen=True, slots=True)
class Attempt:
    """One claim: its tasks, its token, and the time at which it was sent (monotonic seconds)."""

    task_ids: Sequence[str]
    token: str
    sent: float
    #: What the gate has given for the tasks; None: they did not wait there.
    admission: Admission | None = None

    @property
    def run_ids(self) -> dict[str, str]:
        """The run_id that this claim gives to each task. The key is the task's id."""
        return claims.run_ids_of(self.task_ids, self.token)
