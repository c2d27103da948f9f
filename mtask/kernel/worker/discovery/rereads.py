"""Lookups: reads tasks in batches if hints do not say enough about them. The rules then decide about each task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from math import inf
from time import monotonic
from typing import Any

from pydantic import ValidationError

from mtask.errors import DatabaseError, DatabaseUnavailable
from mtask.kernel.document import rules
from mtask.kernel.document.rules import HORIZON
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import StoredTask
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from mtask.kernel.worker.discovery.inbox import Inbox, Questions
from mtask.kernel.worker.discovery.quarantine import Quarantine
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Hooks
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import wake_or_wait
from mtask.kernel.worker.running.leases import Pinger

_HORIZON_MS = int(HORIZON / timedelta(milliseconds=1))
#: The most tasks of one lookup.
_MAX_TASKS = 500
#: The least time between two lookups of due tasks, in seconds. Tasks that become due meanwhile share one read.
_GATHER = 0.05
_PAUSE = 0.1
#: The time that another worker's claim may take, in seconds.
_CLAIM_TIME = 0.1


class Lookups:
    """Reads the tasks that `Questions` has collected, and decides what to do with each task."""

    def __init__(
        self,
        scope: Scope,
        quarantine: Quarantine,
        questions: Questions,
        inbox: Inbox,
        pinger: Pinger,
        hooks: Hooks,
    ) -> None:
        self._store = scope.store
        self._scope = scope
        self._ledger = scope.ledger
        self._served = scope.served
        self._skips = hooks.skips
        self._quarantine = quarantine
        self._questions = questions
        self._inbox = inbox
        self._pinger = pinger
        self._looked_up_at = -inf
        self._is_stopping = False

    async def run(self) -> None:
        """Read the collected tasks until `stop`.

        There is one read at a time. Tasks that come later share the next read.
        """
        while not self._is_stopping:
            await self._questions.wake.wait()
            self._questions.wake.clear()
            try:
                while self._questions.is_any and not self._is_stopping:
                    await self.check_holders()
                    await self._examine_doubted()
                    batch = list(self._questions.suspects)[:_MAX_TASKS]
                    if batch:
                        await self._look_up({name: self._questions.suspects.pop(name) for name in batch})
            except DatabaseError as error:
                logger.warning("lookup failed, will be repeated", extra=fields(reason=told(error)))
                await asyncio.sleep(_PAUSE)
                self._questions.wake.set()
            except Exception:
                self._questions.wake.set()  # the remaining tasks are read in the next turn of the loop
                raise

    async def run_due(self) -> None:
        """Look tasks up when they become due, until `stop`.

        This loop is separate from `run`, because the rescue of a task must not wait for other lookups.
        """
        while not self._is_stopping:
            self._questions.wake_due.clear()
            await wake_or_wait(self._questions.wake_due, self._until_due_lookup())
            await self.look_up_due()

    def forgot_leases(self) -> bool:
        """Return whether due lookups were dropped since the last call. Only a scan can find the dropped tasks."""
        was_cut, self._questions.due.was_cut = self._questions.due.was_cut, False
        return was_cut

    def _until_due_lookup(self) -> float | None:
        """Return the seconds until the next due lookup; None: there is none."""
        when = self._questions.due.next_time()
        return None if when is None else max(0.0, max(when, self._looked_up_at + _GATHER) - monotonic())

    async def look_up_due(self) -> None:
        """Look up the tasks that have become due. The query does not return finished tasks, which are the majority."""
        if self._is_stopping or self._until_due_lookup() != 0.0:
            return
        self._looked_up_at = sent = monotonic()
        task_ids = [
            task_id for task_id in self._questions.due.take(sent, _MAX_TASKS) if not self._ledger.held_run(task_id)
        ]
        if task_ids:
            try:
                await self.take_found(await self._store.run(finding.look_at_due(task_ids, _HORIZON_MS)), sent)
            except DatabaseError:
                self._questions.suspect_all(task_ids)
            except Exception:
                self._questions.suspect_all(task_ids)
                raise

    async def look_whether_due(self, task_ids: Sequence[str], sent: float) -> bool:
        """Return whether some of these tasks are still due, and are simple; forget those that are not due.

        `sent`: the time at which the tasks were taken from the queue (monotonic seconds). Raises DatabaseError.
        """
        documents = await self._store.run(finding.look_at_due(task_ids, 0))
        for task_id in set(task_ids).difference(document["_id"] for document in documents):
            if not self._ledger.is_old_news(task_id, sent):
                self._inbox.forget(task_id)
        await self.take_found(documents, sent)
        return any(map(_is_for_any_worker, documents))

    def stop(self) -> None:
        """End `run` and `run_due`."""
        self._is_stopping = True
        self._questions.wake.set()
        self._questions.wake_due.set()

    async def check_held(self, task_ids: Iterable[str]) -> None:
        """Check whether this worker's runs of these tasks may continue, and end the runs that may not.

        Raises DatabaseError.
        """
        runs = [run for task_id in task_ids if (run := self._ledger.held_run(task_id)) is not None]
        if runs:
            documents = await self._store.run(claims.held([run.task_id for run in runs]))
            self._pinger.apply(runs, documents, None)

    async def check_holders(self) -> None:
        """Check the runs of the tasks that have changed while this worker held them."""
        holders = list(self._questions.holders)
        self._questions.holders.clear()
        await self.check_held(holders)

    async def _look_up(self, suspects: dict[str, Any]) -> None:
        sent = monotonic()
        try:
            documents = await self._store.run(finding.look(list(suspects.values())))
        except DatabaseUnavailable:
            self._questions.suspects = {**suspects, **self._questions.suspects}
            raise
        except DatabaseError as error:
            await self._look_up_apart(suspects, error)
            return
        await self.take_found(documents, sent)

    async def _look_up_apart(self, suspects: dict[str, Any], error: DatabaseError) -> None:
        """Look up each task alone, because the database has refused to read at least one of them."""
        if len(suspects) > 1:
            for name, task_id in suspects.items():
                await self._look_up({name: task_id})
            return
        logger.warning("lookup refused", extra=fields(task=next(iter(suspects)), reason=told(error)))
        await self._quarantine.examine(suspects.values(), error)

    async def _examine_doubted(self) -> None:
        while self._questions.doubted:
            task_id, error = self._questions.doubted.pop()
            await self._quarantine.examine([task_id], error)

    async def take_found(self, documents: Iterable[Mapping[str, Any]], sent: float) -> None:
        """Apply the rules to tasks that were looked up at `sent` (monotonic seconds), and examine malformed ones."""
        malformed = []
        for document in documents:
            try:
                is_well = self._resolve(document, sent)
            except Exception as error:
                self._questions.cannot_take(document["_id"], error)
            else:
                if not is_well:
                    malformed.append(document["_id"])
        # A lookup reads only some fields of a task. Only the whole document shows whether the task is malformed.
        await self._quarantine.examine([found for found in malformed if not self._quarantine.is_left_alone(found)])

    def _resolve(self, document: Mapping[str, Any], sent: float) -> bool:
        """Apply the rules to a task that was looked up; return False if it is malformed."""
        self._scope.clock.observe(document["now"], sent, monotonic())
        try:
            task = StoredTask.model_validate(document)
        except ValidationError:
            return False
        if not all(type(document[field]) is str for field in ("name", "key", "queue")):
            return False  # a field holds JavaScript code, which Python reads as text
        if not self._ledger.is_old_news(task.id, sent) and self._inbox.is_served(task.queue):
            if self._ledger.held_run(task.id) is not None:
                self._questions.ask_holder(task.id)
            elif self._served.is_paused(task.queue, task.name, task.tenant) or self._skips(document):
                self._inbox.forget(task.id)
            elif self._inbox.is_handled(task.name):
                self._inbox.schedule(task, document["now"])
            else:
                self._inbox.note_unserved(task.name)
        return True

    def still_due(self, task_ids: Sequence[str]) -> Operation[list[StoredTask]]:
        """Return the tasks that this worker may claim now. Queue the other tasks for the times at which it may."""
        return (yield from self.still_due_at(task_ids))[0]

    def still_due_at(self, task_ids: Sequence[str]) -> Operation[tuple[list[StoredTask], datetime | None]]:
        """Return the same as `still_due`, and the server's time at which the tasks were read."""
        sent = monotonic()
        documents = yield from finding.look_at_due(task_ids, _HORIZON_MS)
        found = []
        now = documents[0]["now"] if documents else None
        for document in documents:
            try:
                task = StoredTask.model_validate(document)
            except Exception:  # a lookup of this task alone handles the error
                self._questions.suspect(document["_id"])
                continue
            if self._served.is_paused(task.queue, task.name, task.tenant) or self._skips(document):
                continue
            if rules.is_claimable(task, self._scope.worker_id, document["now"]):
                found.append(task)
            elif not self._ledger.is_old_news(task.id, sent):
                self._ledger.claiming.discard(task.id)
                self._inbox.schedule(task, document["now"])
        return found, now

    def queue_again(self, tasks: Iterable[StoredTask], now: datetime) -> None:
        """Queue tasks again that were about to be claimed. They keep their places. `now`: the server's time."""
        for task in tasks:
            self._ledger.claiming.discard(task.id)
            self._inbox.schedule(task, now)

    def look_later(self, tasks: Iterable[StoredTask]) -> None:
        """Read tasks again soon that another worker is about to claim."""
        for task in tasks:
            self._ledger.claiming.discard(task.id)
            self._questions.ask_when_due(task.id, monotonic() + _CLAIM_TIME)


def _is_for_any_worker(document: Mapping[str, Any]) -> bool:
    """Whether the others may not have heard of this task: the shares of a stream leave out only tasks like this one."""
    option, state = document.get("task_option"), document.get("task_state")
    if (
        not isinstance(option, Mapping)
        or not isinstance(state, Mapping)
        or "sealed" in document
        or "version" in document
    ):
        return False
    wanted = (option.get("concurrent_worker_cnt"), option.get("specific_worker_ids"), state.get("status"))
    return wanted == (1, [], TaskStatus.INIT)
