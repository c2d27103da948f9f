"""Hints: what discovery has heard of tasks, resolved by the rules and put into the preemption queue.

Nothing here decides: a hint may be late, doubled or wrong. The claim decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from math import inf
from time import monotonic
from typing import Any

from pydantic import ValidationError

from mtask.errors import DatabaseError, DatabaseUnavailable
from mtask.model import rules
from mtask.model.documents import StoredTask, Task
from mtask.model.identity import is_name
from mtask.model.rules import HORIZON
from mtask.model.status import TaskStatus
from mtask.store.driver.operation import Operation
from mtask.store.driver.stores import AsyncStore
from mtask.store.statements.filters import Filter, of_shares, other_than
from mtask.store.tasks import claims, finding
from mtask.worker.admission.controls import Controls
from mtask.worker.admission.losses import Losses
from mtask.worker.admission.quarantine import Quarantine
from mtask.worker.claiming.claimer import Claimer
from mtask.worker.leases.pinger import Pinger
from mtask.worker.log import fields, logger
from mtask.worker.running.runner import Runner
from mtask.worker.state.clock import ServerClock
from mtask.worker.state.due import DueLooks
from mtask.worker.state.peers import Peers
from mtask.worker.state.queue import PreemptionQueue

_HORIZON_MS = int(HORIZON / timedelta(milliseconds=1))
_MAX_LOOK = 500
#: Tasks that are looked at when they come due, at most: about 200 bytes each.
_MAX_DUE_LOOKS = 10_000
#: Between two looks at what came due, in seconds at least: what comes due meanwhile shares one.
_GATHER = 0.05
#: By how much later a worker looks for each that ranks before it for the task, in seconds, and at most: whoever looks
#: first takes it, and the stream tells the others.
_STAGGER, _MAX_STAGGER = 0.03, 0.12
#: Names without a handler here that are taken down at most.
MAX_UNSERVED = 100
_PAUSE = 0.1
#: How long it is remembered that the stream told of a task, in seconds (no read takes longer); of how many at least.
_NEWS, _MIN_HEARD = 20.0, 2000


class Hints:
    """Feeds the preemption queue, and resolves by batched reads what a hint alone does not tell."""

    def __init__(
        self,
        store: AsyncStore,
        worker_id: str,
        queues: Sequence[str],
        names: Sequence[str],
        queue: PreemptionQueue,
        clock: ServerClock,
        pinger: Pinger,
        quarantine: Quarantine,
        controls: Controls,
    ) -> None:
        self._controls = controls
        self._store = store
        self._worker_id = worker_id
        self._queues = frozenset(queues)
        self._names = frozenset(names)
        self._queue = queue
        self._clock = clock
        self._pinger = pinger
        self._quarantine = quarantine
        self._peers = Peers(worker_id, queues)
        self._claimer: Claimer
        self._runner: Runner
        self._due_looks = DueLooks(_MAX_DUE_LOOKS)
        self._looked_at = -inf
        self._suspects: dict[str, Any] = {}
        #: Tasks whose documents raised what nobody foresaw, or whose claims are lost again and again; and what is odd.
        self._doubted: list[tuple[Any, Exception | str]] = []
        self._losses = Losses()
        self._holders: set[str] = set()
        #: Changed while their claim was under way; and whether in a way that concerns who holds them.
        self._missed: dict[str, bool] = {}
        #: When the stream last told of a task, monotonic seconds: what was asked before that is no news.
        self._heard: dict[str, float] = {}
        self._heard_limit = _MIN_HEARD
        self._wake = asyncio.Event()
        self._wake_due = asyncio.Event()
        self._is_stopping = False
        self.unserved_names: set[str] = set()

    def connect(self, claimer: Claimer, runner: Runner) -> None:
        """Tell it who claims and who runs."""
        self._claimer = claimer
        self._runner = runner

    # --- what is heard ------------------------------------------------------------------------------------

    def push(self, task_id: Any, document: Mapping[str, Any], *, is_simple: bool = False) -> None:
        """Take a task as its document says; where that cannot be read, look at the whole of it."""
        try:
            name, queue = document["name"], document.get("queue")
            priority = int(document["task_option"]["priority"])
            state = document["task_state"]
            moment, is_begun = state["next_preempt_time"], state.get("status") == TaskStatus.RUNNING
            # Code is a str, and not hashable; a name or a queue may be a list.
            is_readable = type(task_id) is str and type(name) is str and type(queue) in (str, type(None))
            is_readable = is_readable and isinstance(moment, datetime)
            is_readable = is_readable and task_id == f"{name}:{task_id.partition(':')[2]}"
            due = self._clock.monotonic_of(moment) if is_readable else 0.0
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            is_readable = False
        if not is_readable:
            self.suspect(task_id)
        elif (queue is not None and queue not in self._queues) or self._controls.is_paused(queue, name):
            return
        elif name not in self._names:
            self.note_unserved(str(name))
        elif is_begun and due > monotonic():
            self._look_when_due(task_id, name, due)
        else:
            self._enqueue(task_id, name, queue, priority, due, is_begun=is_begun, is_simple=is_simple)

    def push_found(self, document: Mapping[str, Any], sent: float) -> None:
        """Take a task that a scan found, unless there is newer news than the scan, sent then (monotonic seconds)."""
        try:
            self._push_found(document, sent)
        except Exception as error:
            self.cannot_take(document["_id"], error)

    def _push_found(self, document: Mapping[str, Any], sent: float) -> None:
        task_id = document["_id"]
        if type(task_id) is str:
            if self._is_old_news(task_id, sent) or self._runner.held_run(task_id) is not None:
                return
            if task_id in self._claimer.busy:
                return  # the scan is no news to the claim under way
        self.push(task_id, document)

    def push_changed(
        self, task_id: Any, preempt_time: Any, *, is_begun: bool | None = None, concerns_holder: bool = False
    ) -> None:
        """Take a change of a task that the stream told of, without its document."""
        if type(task_id) is not str:
            self.suspect(task_id)
            return
        self._note_heard(task_id)
        self._quarantine.heard(task_id)
        is_held = self._runner.held_run(task_id) is not None
        if concerns_holder and (is_held or task_id in self._claimer.busy):
            self.look_at_holder(task_id)
        name = task_id.partition(":")[0]
        if is_held or name not in self._names or name in self._controls.paused_names:
            return
        if not isinstance(preempt_time, datetime):
            self.suspect(task_id)
            return
        due = self._clock.monotonic_of(preempt_time)
        if not is_begun and self._queue.move(task_id, due, is_begun=is_begun):
            self._claimer.wake()
        else:
            # Another worker's lease, mostly; or only the time is known, and the rest can wait until then.
            self._look_when_due(task_id, name, due)

    def cannot_take(self, task_id: Any, error: Exception) -> None:
        """Examine a task soon whose document raised what nobody foresaw; called while that is handled."""
        if self.doubt(task_id, error):
            logger.exception("a document that cannot be taken is examined", extra=fields(task=repr(task_id)))

    def doubt(self, task_id: Any, error: Exception | str) -> bool:
        """Examine a task soon of which this is odd; return False where it is left alone for now."""
        if self._quarantine.is_left_alone(task_id):
            return False
        self._doubted.append((task_id, error))
        self._wake.set()
        return True

    def look_again(self, task_ids: Iterable[Any]) -> None:
        """Look at these tasks soon, with one batched read."""
        for task_id in task_ids:
            self.suspect(task_id)

    def suspect(self, task_id: Any) -> None:
        """Look at this task soon."""
        # By its text: the `_id` of a malformed document need not be hashable.
        self._suspects[task_id if type(task_id) is str else repr(task_id)] = task_id
        self._wake.set()

    def lost(self, task_ids: Sequence[str], won: Iterable[str]) -> None:
        """Look at tasks whose claim was lost, and at what they are now; these others were won."""
        for task_id in won:
            self._losses.forget(task_id)
        self._losses.add(task_ids)
        self.look_again(task_ids)

    def look_at_holder(self, task_id: str) -> None:
        """See soon whether the run held here may go on; after the claim that is under way, if there is one."""
        if task_id in self._claimer.busy:
            self._missed[task_id] = True
        else:
            self._holders.add(task_id)
            self._wake.set()

    def landed(self, task_ids: Iterable[str]) -> None:
        """Take up what was heard of tasks while their claim was under way."""
        if not self._missed:
            return
        for task_id in task_ids:
            concerns_holder = self._missed.pop(task_id, None)
            if concerns_holder is None:
                continue
            if self._runner.held_run(task_id) is None:
                self.suspect(task_id)
            elif concerns_holder:
                self.look_at_holder(task_id)

    def note_unserved(self, name: str) -> None:
        """Take down a name that waits in a queue served here, without a handler here; what is no name is left out."""
        if is_name(name) and name not in self.unserved_names and len(self.unserved_names) < MAX_UNSERVED:
            self.unserved_names.add(name)
            logger.warning("no handler here for a task in a queue served here", extra=fields(name=name))

    def prepare_peers(self, live: Sequence[Mapping[str, Any]]) -> None:
        """Compute in any thread what `take_peers` needs."""
        self._peers.prepare(live, self._names)

    def take_peers(self, live: Sequence[Mapping[str, Any]]) -> None:
        """Rank anew among these workers."""
        self._peers.update(live)
        self._queue.rerank((task_id, self._rank(task_id, name)) for task_id, name in self._queue.names())

    def share(self, names: Iterable[str]) -> tuple[list[Filter], float]:
        """Return what only tasks match that this worker ranks first for, and which part of all that is, at the least.

        Nothing where all of them are its own.
        """
        shares = self._peers.shares(names)
        part = min((slots.count("1") / len(slots) for _, slots in shares), default=1.0)
        return ([of_shares(shares)] if shares else []), part

    def not_left_alone(self) -> list[Filter]:
        """Return what leaves the tasks out of a scan that are left alone here.

        Each has its look when that is over; a batch of nothing else would hide what stands behind it.
        """
        return other_than(self._quarantine.left_alone())

    def _enqueue(
        self,
        task_id: str,
        name: str,
        queue: str | None,
        priority: int,
        due: float,
        *,
        is_begun: bool,
        is_simple: bool = False,
    ) -> None:
        if task_id in self._claimer.busy:
            self._missed.setdefault(task_id, False)  # the claim under way may be older than this hint
        elif self._quarantine.is_left_alone(task_id):
            self._look_at(task_id, self._quarantine.left_alone_until(task_id))
        else:
            self._due_looks.discard(task_id)
            rank = self._rank(task_id, name)
            self._queue.push(task_id, name, priority, due, rank, is_begun=is_begun, is_simple=is_simple, queue=queue)
            self._claimer.wake()

    def _look_when_due(self, task_id: str, name: str, due: float) -> None:
        if task_id in self._claimer.busy:
            self._missed.setdefault(task_id, False)
            return
        self._queue.discard(task_id)
        self._look_at(task_id, due + min(self._rank(task_id, name) * _STAGGER, _MAX_STAGGER))

    def _look_at(self, task_id: str, when: float) -> None:
        self._due_looks.put(task_id, when)
        if self._due_looks.next_time() == when:
            self._wake_due.set()

    def _note_heard(self, task_id: str) -> None:
        now = monotonic()
        self._heard[task_id] = now
        if len(self._heard) > self._heard_limit:
            self._heard = {heard: when for heard, when in self._heard.items() if when > now - _NEWS}
            self._heard_limit = max(_MIN_HEARD, 2 * len(self._heard))

    def _is_old_news(self, task_id: str, sent: float) -> bool:
        """Whether there was news of this task since then (monotonic seconds): its claim here, or from the stream."""
        return max(self._claimer.recent.get(task_id, 0.0), self._heard.get(task_id, 0.0)) > sent

    def _rank(self, task_id: str, name: str) -> int:
        """Return how many live workers go before this one for the task."""
        # Due again after a run here: it did not succeed. What fails on this worker may do well on another, and the
        # rank by the task's id alone would bring it back here each time, until its limit is used up.
        was_tried_here = task_id in self._claimer.recent
        return self._peers.last(name) if was_tried_here else self._peers.rank(task_id, name)

    # --- looks --------------------------------------------------------------------------------------------

    async def run_looks(self) -> None:
        """Resolve hints until `stop`. Woken by hints; bounded by one read at a time, while which others gather."""
        while not self._is_stopping:
            await self._wake.wait()
            self._wake.clear()
            try:
                while (self._suspects or self._holders or self._doubted) and not self._is_stopping:
                    await self._look_at_holders()
                    await self._examine_doubted()
                    batch = list(self._suspects)[:_MAX_LOOK]
                    if batch:
                        await self._look({name: self._suspects.pop(name) for name in batch})
            except DatabaseError as error:
                logger.warning("look failed, will be repeated", extra=fields(reason=str(error)))
                await asyncio.sleep(_PAUSE)
                self._wake.set()
            except Exception:
                self._wake.set()  # the rest waits for the next turn
                raise

    async def run_due_looks(self) -> None:
        """Look at what comes due until `stop`, beside whatever else is looked at: a rescue waits for it."""
        while not self._is_stopping:
            self._wake_due.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._until_due_look()):
                    await self._wake_due.wait()
            await self._look_at_due()

    def forgot_leases(self) -> bool:
        """Return whether others held more since the last call than is kept in mind here: only a scan finds those."""
        was_cut, self._due_looks.was_cut = self._due_looks.was_cut, False
        return was_cut

    def _until_due_look(self) -> float | None:
        """Return the seconds until the next due look, None where there is none."""
        when = self._due_looks.next_time()
        return None if when is None else max(0.0, max(when, self._looked_at + _GATHER) - monotonic())

    async def _look_at_due(self) -> None:
        """Look at what has come due: most of it is finished, and not even returned."""
        if self._is_stopping or self._until_due_look() != 0.0:
            return
        self._looked_at = sent = monotonic()
        task_ids = [task_id for task_id in self._due_looks.take(sent, _MAX_LOOK) if not self._runner.held_run(task_id)]
        if task_ids:
            try:
                await self._take_looks(await self._store.run(finding.look_at_due(task_ids, _HORIZON_MS)), sent)
            except DatabaseError:
                self.look_again(task_ids)
            except Exception:
                self.look_again(task_ids)
                raise

    def stop(self) -> None:
        """Look at nothing more."""
        self._is_stopping = True
        self._wake.set()
        self._wake_due.set()

    async def look_at_held(self, task_ids: Iterable[str]) -> None:
        """See whether the runs that this worker holds of these tasks may go on."""
        runs = [run for task_id in task_ids if (run := self._runner.held_run(task_id)) is not None]
        if runs:
            documents = await self._store.run(claims.held([run.task_id for run in runs]))
            self._pinger.apply(runs, documents, None)

    async def _look_at_holders(self) -> None:
        holders = list(self._holders)
        self._holders.clear()
        await self.look_at_held(holders)

    async def _look(self, suspects: dict[str, Any]) -> None:
        sent = monotonic()
        try:
            documents = await self._store.run(finding.look(list(suspects.values())))
        except DatabaseUnavailable:
            self._suspects = {**suspects, **self._suspects}
            raise
        except DatabaseError as error:
            await self._look_apart(suspects, error)
            return
        await self._take_looks(documents, sent)

    async def _look_apart(self, suspects: dict[str, Any], error: DatabaseError) -> None:
        """Look at each alone: the database refuses to tell of one of them."""
        if len(suspects) > 1:
            for name, task_id in suspects.items():
                await self._look({name: task_id})
            return
        logger.warning("look refused", extra=fields(task=next(iter(suspects)), reason=str(error)))
        await self._quarantine.examine(suspects.values(), error)

    async def _examine_doubted(self) -> None:
        while self._doubted:
            task_id, error = self._doubted.pop()
            await self._quarantine.examine([task_id], error)

    async def _take_looks(self, documents: Iterable[Mapping[str, Any]], sent: float) -> None:
        malformed = []
        for document in documents:
            try:
                is_well = self._resolve(document, sent)
            except Exception as error:
                self.cannot_take(document["_id"], error)
            else:
                if not is_well:
                    malformed.append(document["_id"])
        # The look leaves parts out: only the whole document can be judged.
        await self._quarantine.examine([found for found in malformed if not self._quarantine.is_left_alone(found)])

    def _resolve(self, document: Mapping[str, Any], sent: float) -> bool:
        """Take a task as a look shows it; return False where it is malformed."""
        self._clock.observe(document["now"], sent, monotonic())
        try:
            task = StoredTask.model_validate(document)
        except ValidationError:
            return False
        if not all(type(document[field]) is str for field in ("name", "key", "queue")):
            return False  # code, which only Python takes for text
        if not self._is_old_news(task.id, sent) and task.queue in self._queues:
            if self._runner.held_run(task.id) is not None:
                self.look_at_holder(task.id)
            elif self._controls.is_paused(task.queue, task.name):
                self._forget(task.id)
            elif task.name in self._names:
                self._schedule(task, document["now"])
            else:
                self.note_unserved(task.name)
        return True

    def _schedule(self, task: Task, now: datetime) -> None:
        """Put a task into the queue for when the rules let this worker take it, if that is within the horizon."""
        moment = rules.preemptable_at(task, self._worker_id, now)
        stored = task.task_state.next_preempt_time
        if moment is not None and stored is not None:
            moment = max(moment, stored)  # the claim's guard goes by what is stored, whoever wrote it
        is_due = moment is not None and moment <= now
        if not is_due:
            self._losses.forget(task.id)
        elif pause := self._losses.pause(task.id):
            if self._losses.is_suspicious(task.id):
                self.doubt(task.id, "it is due, and each claim of it is lost")
            self._quarantine.leave_alone(task.id, pause)
        if moment is None or moment - now > HORIZON:
            self._forget(task.id)
            return
        due, is_begun = self._clock.monotonic_of(moment), task.status is TaskStatus.RUNNING
        if is_begun and moment > now:
            self._look_when_due(task.id, task.name, due)
        else:
            self._enqueue(task.id, task.name, task.queue, task.task_option.priority, due, is_begun=is_begun)

    def _forget(self, task_id: str) -> None:
        self._queue.discard(task_id)
        self._due_looks.discard(task_id)

    def still_due(self, task_ids: Sequence[str]) -> Operation[list[StoredTask]]:
        """Return those of these tasks that this worker could take now; the others are queued for when it can."""
        sent = monotonic()
        documents = yield from finding.look_at_due(task_ids, _HORIZON_MS)
        found = []
        for document in documents:
            try:
                task = StoredTask.model_validate(document)
            except Exception:  # whatever it is: a look finds out
                self.suspect(document["_id"])
                continue
            if self._controls.is_paused(task.queue, task.name):
                continue
            if rules.may_take(task, self._worker_id, document["now"]):
                found.append(task)
            elif not self._is_old_news(task.id, sent):
                self._claimer.busy.discard(task.id)
                self._schedule(task, document["now"])
        return found
