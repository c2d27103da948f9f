"""Judges calls that gather (if_running="again", debounce, collect): none is lost, and none makes two rounds.

A round of a task begins with a claim. The document says whose calls are in a round: `gather.ids` of those that chose
their ids, as all of the load do, and `gather.newest`, whose params the round has if it does not collect those of all.
`gather.consumed` is the newest call of the rounds before, so it differs from round to round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from mtask.kernel.document import rules
from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.document.task import Gathering, Task
from tests.chaos.judge.record.asked import PROMISES, TOLERANCE, Asked
from tests.chaos.judge.record.change import MILLISECOND, Change
from tests.chaos.judge.record.verdict import Verdict


@dataclass(slots=True)
class _Gatherer:
    """A task whose calls are gathered."""

    number: int = 1  #: of the present round
    #: The number of the round of each call.
    rounds: dict[str, int] = field(default_factory=dict)
    #: The rounds that a claim began.
    begun: set[int] = field(default_factory=set)
    newest_begun: datetime | None = None  #: the latest asked_time of a round that began
    is_awaited: bool = False  #: a next round waits
    #: The rounds that somebody canceled, and the calls of next rounds that somebody canceled.
    canceled: set[int] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)

    def is_done(self, number: int) -> bool:
        """Whether a claim began the round, or somebody canceled it."""
        return number in self.begun or number in self.canceled


class RoundJudge:
    """Follows tasks that gather. Versions of all tasks come in the order in which the database wrote them."""

    def __init__(self, verdict: Verdict, asked: Asked) -> None:
        self._verdict = verdict
        self._asked = asked
        self._tasks: dict[str, _Gatherer] = {}
        #: The calls whose params each run has.
        self._calls: dict[str, list[str]] = {}
        self._opened = self._opened_by_lapse = 0

    def created(self, task: Task) -> None:
        """Follow a new task that gathers."""
        if task.gather is not None:
            gatherer = self._tasks[task.id] = _Gatherer()
            self._place(task.id, gatherer, task.gather.ids)
            self._judge_start(task, task.gather)

    def changed(self, change: Change) -> None:
        """Judge one write to a task that gathers."""
        before, after = change.before, change.after
        gatherer = self._tasks.get(after.id)
        if gatherer is None or before.gather is None or after.gather is None:
            return
        if before.gather.consumed != after.gather.consumed:
            self._begin(change, gatherer, before.gather, after.gather)
        else:
            self._go_on(change, gatherer, before.gather, after.gather)
        if before.again is not None and after.again is not None:
            self._judge_kept(change, before.again.gather.ids, after.again.gather.ids)
        gatherer.is_awaited = after.again is not None
        if after.status is TaskStatus.CANCELED:
            gatherer.canceled.add(gatherer.number)
        # A list that has failed is tried again, and the next one waits for that.
        is_over = after.gather.kind != "calls" or after.status.is_final
        is_held = any(run.status is RunStatus.RUNNING for run in rules.current_runs(after))
        if after.again is not None and is_over and not is_held:
            self._report(change, "the next round waits, and no run holds the task", status=after.status)
        for run in change.appended:
            gatherer.begun.add(gatherer.number)
            newest = after.gather.newest
            if newest is not None:
                self._calls[run.run_id] = after.gather.ids if after.gather.kind == "calls" else [newest.call_id]
                gatherer.newest_begun = max(newest.asked_time, gatherer.newest_begun or newest.asked_time)

    def _begin(self, change: Change, gatherer: _Gatherer, was: Gathering, now: Gathering) -> None:
        """Judge the change to another round."""
        before = change.before
        if not gatherer.is_done(gatherer.number):
            self._report(change, "a round was replaced before it began", calls=was.ids)
        if now.consumed != was.newest:
            self._report(change, "a round began that does not know the newest call before it", newest=was.newest)
        if before.again is not None:
            self._judge_kept(change, before.again.gather.ids, now.ids)
            self._opened += 1
            self._opened_by_lapse += any(run.status is RunStatus.TIMEOUT for _, run in change.closed)
        gatherer.number += 1
        self._place(change.task_id, gatherer, now.ids)
        self._judge_start(change.after, now)

    def _go_on(self, change: Change, gatherer: _Gatherer, was: Gathering, now: Gathering) -> None:
        """Judge a write within a round."""
        before, after = change.before, change.after
        if before.again is not None and after.again is None:
            if self._asked.may_write(change.task_id, change.at.timestamp(), "cancel"):
                gatherer.dropped.update(before.again.gather.ids)
            else:
                self._report(change, "the next round was dropped", calls=before.again.gather.ids)
        if (was.newest, was.ids) == (now.newest, now.ids):
            return
        if rules.current_runs(before):
            self._report(change, "a call joined a round that had begun", newest=now.newest)
        self._judge_kept(change, was.ids, now.ids)
        self._place(change.task_id, gatherer, set(now.ids) - set(was.ids))
        self._judge_start(after, now)

    def _judge_kept(self, change: Change, was: Iterable[str], now: Iterable[str]) -> None:
        lost = set(was) - set(now)
        if lost:
            self._report(change, "calls were dropped", calls=sorted(lost))

    def _place(self, task_id: str, gatherer: _Gatherer, calls: Iterable[str]) -> None:
        number = gatherer.number
        for call_id in calls:
            first = gatherer.rounds.setdefault(call_id, number)
            if first != number:
                what = "a call made two rounds"
                self._verdict.report("wrong_rounds", task_id, what, call=call_id, first=first, again=number)

    def _judge_start(self, task: Task, gather: Gathering) -> None:
        """Judge the start of a round that waits for further calls. That no claim comes before it is judged of all."""
        if gather.debounce_ms is None or gather.newest is None or gather.first_time is None or gather.full:
            return
        expected = gather.newest.asked_time + gather.debounce_ms * MILLISECOND
        if gather.max_wait_ms is not None:
            expected = min(expected, gather.first_time + gather.max_wait_ms * MILLISECOND)
        # A call in the same millisecond as the one before it has a time that is one later. The start waits for none.
        earliest, start = expected - len(gather.ids) * MILLISECOND, task.task_state.start_time
        if start is None or not earliest <= start <= expected:
            self._verdict.report(
                "wrong_rounds", task.id, "another start than its calls ask for", start=start, due=expected
            )

    def removed(self, task_id: str) -> None:
        """Forget a task that was removed."""
        self._tasks.pop(task_id, None)

    # --- in the end -------------------------------------------------------------------------------------------

    def conclude(self, saw: Mapping[str, list[str]]) -> None:
        """Judge what is left, what publishers were told, and whose params handlers saw, by run_id."""
        for task_id, gatherer in self._tasks.items():
            if gatherer.is_awaited:
                self._verdict.report("wrong_rounds", task_id, "a next round waits in the end")
            if not gatherer.is_done(gatherer.number):
                self._verdict.report("wrong_rounds", task_id, "the last round never began")
            self._judge_calls(task_id, gatherer)
        for run_id, calls in saw.items():
            expected = self._calls.get(run_id, calls)
            if calls != expected:
                what = "a handler saw the params of other calls than those of its round"
                self._verdict.report("wrong_rounds", run_id, what, saw=calls, expected=expected)
        if self._tasks:
            self._verdict.figures.controls["calls that gather"] = {
                "tasks": len(self._tasks),
                "calls": sum(len(gatherer.rounds) for gatherer in self._tasks.values()),
                "rounds": sum(len(gatherer.begun) for gatherer in self._tasks.values()),
                "begun by the end of a run": self._opened,
                "by the lapse of one": self._opened_by_lapse,
            }

    def _judge_calls(self, task_id: str, gatherer: _Gatherer) -> None:
        """Judge calls that were acknowledged: a round began after each, with its params or with those of a newer."""
        for request in self._asked.of(task_id, "gather"):
            if request.answer not in PROMISES or request.gather_id is None or request.gather_id in gatherer.dropped:
                continue
            told = {"call": request.gather_id, "answer": request.answer, "sent": f"{request.sent:.3f}"}
            number = gatherer.rounds.get(request.gather_id)
            if number is None and request.answer == "kept":
                # A newer call had come before it: rounds go by the time that a call reads before it is sent.
                newest = gatherer.newest_begun
                if newest is None or newest.timestamp() < request.sent - TOLERANCE:
                    self._verdict.report("wrong_rounds", task_id, "a call was left out, and none newer began", **told)
            elif number is None:
                self._verdict.report("wrong_rounds", task_id, "a call was acknowledged, and is in no round", **told)
            elif not gatherer.is_done(number):
                self._verdict.report(
                    "wrong_rounds", task_id, "a call was acknowledged, and its round never began", **told
                )

    def _report(self, change: Change, what: str, **evidence: object) -> None:
        self._verdict.report("wrong_rounds", change.task_id, what, at=change.at.isoformat(), **evidence)
