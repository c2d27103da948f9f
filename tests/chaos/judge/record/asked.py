"""What was asked of mtask: every call with its answer, by task. Instants are the servers' wall clock, in seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from tests.chaos.history import Call, Clock

#: How far instants of the two clocks may be apart, in seconds.
TOLERANCE = 0.25
#: Answers to a publish that promise a task.
PROMISES = frozenset({"created", "kept", "updated"})


@dataclass(slots=True)
class Request:
    """One call, from when it was sent to when it was answered; with no answer it may still be carried out."""

    operation: str
    sent: float
    told: float = inf
    answer: str | None = None
    gather_id: str | None = None

    def spans(self, at: float) -> bool:
        """Whether what it asked for can have been written at that instant."""
        end = inf if self.answer in (None, "unknown") else self.told
        return self.sent - TOLERANCE <= at <= end + TOLERANCE

    @property
    def is_reopening(self) -> bool:
        """Whether it may change a finished task."""
        return self.operation in ("update", "retry", "rerun", "gather") or self.answer == "updated"


class Asked:
    """All calls, by task."""

    def __init__(self, calls: Iterable[Call], clock: Clock) -> None:
        self.by_task: dict[str, list[Request]] = {}
        self.answers: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.count = 0
        unanswered: dict[str, Request] = {}
        for call in calls:
            request = unanswered.pop(call.call_id, None)
            if request is None:
                request = Request(call.operation, clock.epoch + call.sent, gather_id=call.gather_id)
                self.by_task.setdefault(call.task_id, []).append(request)
                self.count += 1
            if call.told is None:
                unanswered[call.call_id] = request
            else:
                request.told, request.answer = clock.epoch + call.told, call.answer
                self.answers[call.operation][str(call.answer)] += 1
        for request in unanswered.values():
            self.answers[request.operation]["(none)"] += 1

    def expect(self, task_id: str, since: float) -> None:
        """Take a task for asked for from then on, by nobody who is told: its schedule has it published."""
        self.by_task.setdefault(task_id, []).append(Request("publish", since))

    def of(self, task_id: str, *operations: str) -> Iterator[Request]:
        """Yield the calls about a task, of these kinds if given."""
        for request in self.by_task.get(task_id, ()):
            if not operations or request.operation in operations:
                yield request

    @property
    def changed(self) -> set[str]:
        """The tasks that were asked for more than once: changed, canceled, or run again."""
        return {task_id for task_id, requests in self.by_task.items() if len(requests) > 1}

    def may_write(self, task_id: str, at: float, *operations: str) -> bool:
        """Whether one of these calls can have written at that instant."""
        return any(request.spans(at) for request in self.of(task_id, *operations))

    def may_reopen(self, task_id: str, at: float) -> bool:
        """Whether a call that changes finished tasks can have written at that instant."""
        return any(request.is_reopening and request.spans(at) for request in self.of(task_id))

    def may_update(self, task_id: str, at: float) -> bool:
        """Whether a call that replaces options or drops runs can have written at that instant."""
        updates = (r for r in self.of(task_id) if r.operation in ("update", "gather") or r.answer == "updated")
        return any(request.spans(at) for request in updates)
