"""The inbox: turns the hints of the change stream and of scans into entries of the preemption queue.

A hint may be late, doubled or wrong. The inbox does not decide whether a task may run: the claim decides.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Container, Iterable, Mapping
from datetime import datetime
from typing import Any

from mtask.kernel.document import rules
from mtask.kernel.document.identity import is_name
from mtask.kernel.document.rules import HORIZON
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.fleet import Ranks
from mtask.kernel.worker.discovery.quarantine import Losses, Quarantine
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.process.part import Hooks
from mtask.kernel.worker.process.state import Ledger, Scope
from mtask.kernel.worker.process.time import seconds_of

#: The delay of a lookup for each worker that ranks before this one, and the longest total delay, in seconds. The first
#: worker that looks a task up claims it. The other workers hear of the claim from the change stream.
_STAGGER, _MAX_STAGGER = 0.03, 0.12
#: The most task names that this worker remembers because it has no handler for them.
MAX_UNSERVED = 100

#: What tasks may share: their name, queue, priority, tenant, status and limit_key, and whether they have runs. Equal
#: ones are alike whatever their types are.
_Kind = tuple[Any, Any, Any, Any, Any, Any, bool]


class Inbox:
    """Puts tasks into the preemption queue."""

    def __init__(
        self,
        scope: Scope,
        queue: PreemptionQueue,
        quarantine: Quarantine,
        losses: Losses,
        questions: Questions,
        ranks: Ranks,
        hooks: Hooks,
    ) -> None:
        self._scope = scope
        self._ledger = scope.ledger
        self._queues = frozenset(scope.queues)
        self._names = frozenset(scope.names)
        self._queue = queue
        self._served = scope.served
        self._skips = hooks.skips
        self._quarantine = quarantine
        self._losses = losses
        self._questions = questions
        self._ranks = ranks

    def push(self, task_id: Any, document: Mapping[str, Any], *, is_simple: bool = False) -> None:
        """Queue a task from its document. If a needed field cannot be read, ask for a lookup of the task."""
        try:
            name, queue, tenant = document["name"], document.get("queue"), document.get("tenant")
            option, state = document["task_option"], document["task_state"]
            priority, limit_key = int(option["priority"]), option.get("limit_key")
            moment, is_begun = state["next_preempt_time"], state.get("status") == TaskStatus.RUNNING
            has_runs = bool(state.get("worker_states"))
            # In a malformed document, the name or the queue may be a list or JavaScript code. Python reads such code as
            # a str that is not hashable.
            is_readable = type(task_id) is str and type(name) is str and type(queue) in (str, type(None))
            is_readable = is_readable and type(tenant) in (str, type(None)) and type(limit_key) in (str, type(None))
            is_readable = is_readable and isinstance(moment, datetime)
            is_readable = is_readable and task_id == f"{name}:{task_id.partition(':')[2]}"
            stored = seconds_of(moment) if is_readable else 0.0
            due = self._scope.clock.monotonic(stored)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            is_readable = False
        if not is_readable:
            self._questions.suspect(task_id)
        elif (queue is not None and queue not in self._queues) or self._served.is_paused(queue, name, tenant):
            return
        elif name not in self._names:
            self.note_unserved(str(name))
        elif self._skips(document):
            return
        elif is_begun or has_runs:
            # Only its runs tell whether it was interrupted. A hint read brings them. A task whose runs were read must
            # not leave the queue for this read: others would begin before it.
            if not self._queue.knows_begun(task_id, stored, is_lapsed=is_begun):
                self._look_when_due(task_id, name, due)
        else:
            self._enqueue(
                task_id, name, queue, priority, due, stored, is_simple=is_simple, tenant=tenant, limit_key=limit_key
            )

    def push_all_found(
        self, documents: Iterable[Mapping[str, Any]], sent: float, *, are_in_share: bool = False
    ) -> None:
        """Queue the tasks that a scan found, unless this worker has newer information about them.

        Most tasks of a backlog are alike. This worker decides once a scan whether it queues the new tasks of a kind.

        `sent`: the time at which the scan was sent (monotonic seconds).
        `are_in_share`: the scan was for this worker's share, and the share has not changed since.
        """
        #: The beginning that the ids of the queued tasks must have, by the kind of these tasks.
        beginnings: dict[_Kind, str] = {}
        rank = self._ranks.rank_in_share if are_in_share else self._ranks.rank
        left_alone = frozenset(self._quarantine.left_alone())
        for document in documents:
            try:
                kind = _kind_of(document)
                if not self._push_alike(document, kind, beginnings, sent, left_alone, rank):
                    self._push_found(document, sent)
                    if self._is_taken(kind):
                        beginnings[kind] = f"{kind[0]}:"
            except Exception as error:
                self._questions.cannot_take(document["_id"], error)
        self._scope.signals.task_queued.send()

    def _push_found(self, document: Mapping[str, Any], sent: float) -> None:
        task_id = document["_id"]
        if type(task_id) is str and self._ledger.is_beyond(task_id, sent):
            return
        self.push(task_id, document)

    def _is_taken(self, kind: _Kind) -> bool:
        """Whether this worker queues all tasks of this kind, and needs no other field of them."""
        name, queue, priority, tenant, status, limit_key, has_runs = kind
        are_texts = type(name) is type(queue) is str and (tenant is None or type(tenant) is str)
        are_texts = are_texts and (limit_key is None or type(limit_key) is str)
        if not are_texts or type(priority) is not int or status != TaskStatus.INIT or has_runs:
            return False
        return name in self._names and queue in self._queues and not self._served.is_paused(queue, name, tenant)

    def _push_alike(
        self,
        document: Mapping[str, Any],
        kind: _Kind,
        beginnings: Mapping[_Kind, str],
        sent: float,
        left_alone: Container[str],
        rank: Callable[[str, str], int],
    ) -> bool:
        """Do as `_push_found` does, if the task is well-formed and its kind has a beginning; else return False.

        `left_alone`: the tasks that this worker must not try now. `rank` returns its rank for a task of some name.
        """
        try:
            beginning = beginnings.get(kind)
        except TypeError:  # a field is a list, for example
            return False
        if beginning is None:
            return False
        task_id, moment = document["_id"], document["task_state"].get("next_preempt_time")
        # Scans read no `sealed`: their filter leaves out what this worker cannot decrypt.
        if type(task_id) is not str or type(moment) is not datetime or "sealed" in document:
            return False
        if not task_id.startswith(beginning) or task_id in left_alone:
            return False
        if not self._ledger.is_beyond(task_id, sent):
            name, queue, priority, tenant, _, limit_key, _ = kind
            self._questions.due.discard(task_id)
            stored = seconds_of(moment)
            self._queue.push(
                task_id,
                name,
                priority,
                self._scope.clock.monotonic(stored),
                rank(task_id, name),
                queue=queue,
                tenant=tenant,
                limit_key=limit_key,
                moment=stored,
            )
        return True

    def push_changed(
        self, task_id: Any, preempt_time: Any, *, is_begun: bool | None = None, concerns_holder: bool = False
    ) -> None:
        """Handle a change of a task. The change stream has reported it without the task's document.

        `concerns_holder`: if this worker runs the task, the run may have to end.
        """
        if type(task_id) is not str:
            self._questions.suspect(task_id)
            return
        self._ledger.heard(task_id)
        self._quarantine.heard(task_id)
        is_held = self._ledger.held_run(task_id) is not None
        if concerns_holder and (is_held or task_id in self._ledger.claiming):
            self._questions.ask_holder(task_id)
        name = task_id.partition(":")[0]
        if is_held or name not in self._names or name in self._served.paused_names:
            return
        if not isinstance(preempt_time, datetime):
            self._questions.suspect(task_id)
            return
        stored = seconds_of(preempt_time)
        due = self._scope.clock.monotonic(stored)
        # A task that became INIT again may have been interrupted: a hint read tells.
        if is_begun is None and self._queue.move(task_id, due, moment=stored):
            self._scope.signals.task_queued.send()
        else:
            # Usually another worker holds the task now. The change tells only when the task is due next. A lookup at
            # that time reads the rest.
            self._look_when_due(task_id, name, due)

    def ranks_first(self, task_id: Any) -> bool:
        """Whether this worker ranks first for a task. True for a malformed `_id`: nobody ranks for it."""
        return type(task_id) is not str or self._ranks.rank(task_id, task_id.partition(":")[0]) == 0

    def is_served(self, queue: str | None) -> bool:
        """Whether this worker serves the queue."""
        return queue in self._queues

    def is_handled(self, name: str) -> bool:
        """Whether this worker has a handler for tasks of this name."""
        return name in self._names

    def schedule(self, task: Task, now: datetime) -> None:
        """Queue a task for the time at which this worker may claim it.

        If that time is beyond the horizon, forget the task.
        """
        moment = rules.preemptable_at(task, self._scope.worker_id, now)
        stored = task.task_state.next_preempt_time
        if moment is not None and stored is not None:
            moment = max(moment, stored)  # the guard of the claim reads the stored time
        is_due = moment is not None and moment <= now
        if is_due:
            moment = stored  # the task does not lose its place by being read anew
        if not is_due:
            self._losses.forget(task.id)
        elif pause := self._losses.pause(task.id):
            if self._losses.is_suspicious(task.id):
                self._questions.doubt(task.id, "it is due, but every claim of it is lost")
            self._quarantine.leave_alone(task.id, pause)
        if moment is None or moment - now > HORIZON:
            self.forget(task.id)
            return
        due = self._scope.clock.monotonic_of(moment)
        if task.status is TaskStatus.RUNNING and not is_due:
            self._look_when_due(task.id, task.name, due)
        else:
            self._enqueue(
                task.id,
                task.name,
                task.queue,
                task.task_option.priority,
                due,
                seconds_of(stored or moment),
                is_begun=rules.is_interrupted(task, max(now, moment)),
                is_lapsed=is_due and task.status is TaskStatus.RUNNING,
                tenant=task.tenant,
                limit_key=task.task_option.limit_key,
            )

    def forget(self, task_id: str) -> None:
        """Remove a task from the queue and from the due lookups."""
        self._queue.discard(task_id)
        self._questions.due.discard(task_id)

    def note_unserved(self, name: str) -> None:
        """Note a task name that occurs in this worker's queues but has no handler in this worker."""
        names = self._ledger.unserved_names
        if is_name(name) and name not in names and len(names) < MAX_UNSERVED:
            names.add(name)
            logger.warning("no handler here for a task in a queue of this worker", extra=fields(name=name))

    def _enqueue(
        self,
        task_id: str,
        name: str,
        queue: str | None,
        priority: int,
        due: float,
        stored: float,
        *,
        is_begun: bool = False,
        is_lapsed: bool = False,
        is_simple: bool = False,
        tenant: str | None = None,
        limit_key: str | None = None,
    ) -> None:
        if task_id in self._ledger.claiming:
            self._questions.missed(task_id)  # the current claim of the task may be older than this hint
        elif self._quarantine.is_left_alone(task_id):
            self._questions.ask_when_due(task_id, self._quarantine.left_alone_until(task_id))
        else:
            self._questions.due.discard(task_id)
            rank = self._ranks.rank(task_id, name)
            self._queue.push(
                task_id,
                name,
                priority,
                due,
                rank,
                is_begun=is_begun,
                is_simple=is_simple,
                queue=queue,
                tenant=tenant,
                limit_key=limit_key,
                moment=stored,
                is_lapsed=is_lapsed,
            )
            self._scope.signals.task_queued.send()

    def _look_when_due(self, task_id: str, name: str, due: float) -> None:
        if task_id in self._ledger.claiming:
            self._questions.missed(task_id)
            return
        self._queue.discard(task_id)
        self._questions.ask_when_due(task_id, due + min(self._ranks.rank(task_id, name) * _STAGGER, _MAX_STAGGER))


def _kind_of(document: Mapping[str, Any]) -> _Kind:
    """Return the kind of a task that a scan found. It may hold anything, as the document may be malformed."""
    option, state = document.get("task_option"), document.get("task_state")
    if type(option) is not dict or type(state) is not dict:
        return None, None, None, None, None, None, False
    return (
        document.get("name"),
        document.get("queue"),
        option.get("priority"),
        document.get("tenant"),
        state.get("status"),
        option.get("limit_key"),
        bool(state.get("worker_states")),
    )


# --- questions -------------------------------------------------------------------------------------------

# Questions: collects the tasks that must be read now or when they become due. `Lookups` reads these tasks.

#: The most due lookups that are kept. Each takes about 200 bytes.
_MAX_DUE_LOOKUPS = 10_000


class Questions:
    """The tasks that must be read, because a hint alone does not say enough about them."""

    def __init__(self, ledger: Ledger, quarantine: Quarantine) -> None:
        self._ledger = ledger
        self._quarantine = quarantine
        #: The ids of the tasks to be read now. The key is a text of the id, because an id may not be hashable.
        self.suspects: dict[str, Any] = {}
        #: The ids of the tasks whose whole documents must be examined, each with the error or the reason.
        self.doubted: list[tuple[Any, Exception | str]] = []
        #: The tasks whose run in this worker may have to end.
        self.holders: set[str] = set()
        #: The tasks to be read when they become due.
        self.due = DueLookups(_MAX_DUE_LOOKUPS)
        #: `wake` is set when a task is to be read now. `wake_due` is set when the time of the next due lookup has
        #: changed.
        self.wake, self.wake_due = asyncio.Event(), asyncio.Event()
        #: The tasks that changed while their claim was under way. The value: whether the claimed run may have to end.
        self._missed: dict[str, bool] = {}

    @property
    def is_any(self) -> bool:
        """Whether any task is to be read now."""
        return bool(self.suspects or self.holders or self.doubted)

    def suspect(self, task_id: Any) -> None:
        """Read this task soon."""
        # The key is the text of the `_id`, because the `_id` of a malformed document may not be hashable.
        self.suspects[task_id if type(task_id) is str else repr(task_id)] = task_id
        self.wake.set()

    def suspect_all(self, task_ids: Iterable[Any]) -> None:
        """Read these tasks soon, with one batched read."""
        for task_id in task_ids:
            self.suspect(task_id)

    def cannot_take(self, task_id: Any, error: Exception) -> None:
        """Ask for the examination of a task whose document has caused an unexpected error.

        Call this in the `except` block, because it logs the current exception.
        """
        if self.doubt(task_id, error):
            logger.exception("a document that cannot be taken is examined", extra=fields(task=repr(task_id)))

    def doubt(self, task_id: Any, error: Exception | str) -> bool:
        """Ask for the examination of a task's whole document. Return False if the task must not be tried now.

        `error`: the reason of the examination.
        """
        if self._quarantine.is_left_alone(task_id):
            return False
        self.doubted.append((task_id, error))
        self.wake.set()
        return True

    def ask_holder(self, task_id: str) -> None:
        """Ask whether this worker's run of the task may continue. If the task is being claimed, ask after the claim."""
        if task_id in self._ledger.claiming:
            self._missed[task_id] = True
        else:
            self.holders.add(task_id)
            self.wake.set()

    def missed(self, task_id: str) -> None:
        """Note that a hint came while its task was being claimed. The claim may be older than the hint."""
        self._missed.setdefault(task_id, False)

    def landed(self, task_ids: Iterable[str]) -> None:
        """Handle the hints that came while these tasks were being claimed. The claim has ended now."""
        if not self._missed:
            return
        for task_id in task_ids:
            concerns_holder = self._missed.pop(task_id, None)
            if concerns_holder is None:
                continue
            if self._ledger.held_run(task_id) is None:
                self.suspect(task_id)
            elif concerns_holder:
                self.ask_holder(task_id)

    def ask_when_due(self, task_id: str, when: float) -> None:
        """Ask for a read of this task at the time `when` (monotonic seconds)."""
        self.due.put(task_id, when)
        if self.due.next_time() == when:
            self.wake_due.set()


# --- due -------------------------------------------------------------------------------------------------

# Due lookups: a list of the tasks that this worker will read from the database when they become due.
#
# Most of these tasks run on other workers, and finish long before their leases would lapse.


class DueLookups:
    """A bounded list of tasks, ordered by the instant (monotonic seconds) at which each task may be due.

    The entries are hints. If an entry is lost, a scan finds its task.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: Whether entries beyond the capacity were dropped. Only a scan finds the tasks of the dropped entries.
        self.was_cut = False
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._times)

    def put(self, task_id: str, when: float) -> None:
        """Add an entry: read this task at `when` (monotonic seconds). The entry replaces an earlier one of the task."""
        if self._times.get(task_id) == when:
            return
        self._times[task_id] = when
        heapq.heappush(self._heap, (when, task_id))
        if len(self._heap) > 4 * self.capacity or len(self._times) > self.capacity + self.capacity // 4:
            self._shrink()

    def discard(self, task_id: str) -> None:
        """Remove a task."""
        self._times.pop(task_id, None)

    def next_time(self) -> float | None:
        """Return the instant of the next lookup (monotonic seconds); None: no task is listed."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float, limit: int) -> list[str]:
        """Remove and return at most `limit` tasks that are due at `now` (monotonic seconds), the longest due first."""
        taken: list[str] = []
        while len(taken) < limit:
            when = self.next_time()
            if when is None or when > now:
                break
            _, task_id = heapq.heappop(self._heap)
            del self._times[task_id]
            taken.append(task_id)
        return taken

    def _shrink(self) -> None:
        """Remove replaced items from the heap. Beyond the capacity, also remove the tasks that become due last."""
        self._heap = sorted((when, task_id) for task_id, when in self._times.items())
        for _, task_id in self._heap[self.capacity :]:
            del self._times[task_id]
            self.was_cut = True
        del self._heap[self.capacity :]
