"""Judges the order in which tasks of limited queues started, by the model of `tests/order`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any

from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask
from tests.chaos.history import Clock, Fault
from tests.chaos.judge.handlers import Work
from tests.chaos.judge.record.asked import Asked
from tests.chaos.judge.record.logs import Document, RunLog, TaskLog
from tests.chaos.judge.record.verdict import Distribution, Kind, Verdict
from tests.chaos.load.order import APPS, QUEUES, serves
from tests.chaos.load.tasks import PROBE
from tests.order.delays import Delay
from tests.order.history import Change, History, Limit, Run, Settings, Task, Trouble, Up, Worker
from tests.order.model import Violation, judge
from tests.order.pace import Pace
from tests.order.reading import read_task
from tests.order.times import joined, without
from tests.order.tolerance import Tolerance

#: Five workers, three servers and the harness share a machine that is busy: a claim may take a second and more. Where
#: probes tell that it takes longer, more is tolerated: see `tests.order.pace`.
TOLERANCE = Tolerance(grace=3.0, under_way=1.0, filled=1.0, lag=1.0)
#: How long after a fault of the database nothing is judged, in seconds: until streams are open again, all tasks have
#: been found once more, and the claims are settled that were under way.
_DATABASE = 10.0
#: Where a stream or a read failed, a task is found by the next scan: every 5 s, and a scan may fail, too.
_BLIND, _FOUND = frozenset({"kill cursors", "fail streams", "fail reads", "kill sessions"}), 8.0
#: A worker whose network was broken, or that was frozen, works as usual after this time, in seconds.
_RECOVERY = 5.0
#: A permit that was given to a claim that never came is taken back after this time, in seconds: 2 until the claim is
#: void, and 15 until no write of it can be under way.
_RECLAIMED = 20.0
#: A worker that is stopped in order takes nothing meanwhile, in seconds.
_STOPPING = 4.0
#: The longest rescue while nothing else is broken, in seconds. The promise is in the figures.
_RESCUE = 10.0
_SLOTS = 100
_NETWORK = frozenset(
    {"cut connections", "refuse connections", "delay messages", "drop replies", "half-open connections"}
)
_HOG = "hog"


class OrderJudge:
    """Judges what started in the queues whose limits were written down."""

    def __init__(
        self,
        verdict: Verdict,
        clock: Clock,
        faults: Sequence[Fault],
        asked: Asked,
        tasks: Mapping[str, TaskLog],
        runs: Mapping[str, RunLog],
        works: Mapping[str, Work],
        *,
        is_hasty: bool = False,
    ) -> None:
        """`is_hasty`: faults follow one another without a pause. What is out of order is only counted then."""
        self._is_hasty = is_hasty
        self._verdict = verdict
        self._clock = clock
        self._asked = asked
        self._tasks = tasks
        self._runs = runs
        self._works = works
        self._faults = [replace(f, start=f.start + clock.epoch, end=f.end + clock.epoch) for f in faults]
        self._ups: dict[str, list[Up]] = {}

    def judge(self, changes: Iterable[Document], ends: Iterable[Document]) -> None:
        """Judge all starts. `changes`: the limits as they were set. `ends`: the ends of worker processes."""
        pace = Pace(History(list(self._probes()), ()))
        history = History(
            [*self._ordered(), *self._others()],
            list(self._workers(list(ends))),
            list(_read_changes(changes)),
            [*self._troubles(), *pace.troubles(TOLERANCE)],
            [Up(fault.start, fault.end + _RECLAIMED) for fault in self._faults],
        )
        judgement = judge(history, pace.tolerance(TOLERANCE))
        for found in judgement.violations:
            if found.kind.startswith("too many"):
                self._report("over_limit", found)
            elif not self._is_hasty:
                self._report("wrong_order", found)
        calm = [delay for delay in judgement.delays if delay.wait == "lapse" and self._is_calm(delay)]
        for delay in calm:
            if delay.seconds > _RESCUE and not self._is_hasty:
                what = "not rescued, and its permit was free"
                self._verdict.report("wrong_order", delay.task_id, what, since=f"{delay.since:.3f}", s=delay.seconds)
        self._verdict.figures.rescue_limited = Distribution.of(delay.seconds for delay in calm)
        self._verdict.figures.controls["order of starts"] = {
            "judged": judgement.starts,
            "out of order": len(judgement.of("order")),
            "out of turn": len(judgement.of("turn")),
        }

    def _report(self, kind: Kind, found: Violation) -> None:
        self._verdict.report(kind, found.task_id, f"{found.kind}: {found.what}", at=f"{found.at:.3f}")

    # --- tasks ----------------------------------------------------------------------------------------------------

    def _ordered(self) -> Iterator[Task]:
        """Yield the tasks whose order is judged."""
        starts = {run_id: work.start for run_id, work in self._works.items() if work.start is not None}
        for run_id, work in self._works.items():
            if work.task_id.partition(":")[0] in QUEUES and self._was_held_up(run_id, work):
                del starts[run_id]
        for task_id, log in self._tasks.items():
            document = log.document if task_id.partition(":")[0] in QUEUES else None
            if document is not None:
                task = read_task(StoredTask.model_validate(document), starts)
                yield task if self._is_plain(task_id, log, document) else replace(task, is_judged=False)

    def _probes(self) -> Iterator[Task]:
        """Yield the probes that came to a claim while nothing was done against the database."""
        away = [Up(fault.start, fault.end + _DATABASE) for fault in self._faults if fault.is_database_away]
        for task_id, log in self._tasks.items():
            document = log.document if task_id.partition(":")[0] == PROBE else None
            if document is None or not self._is_plain(task_id, log, document):
                continue
            task = read_task(StoredTask.model_validate(document), {})
            if task.runs and not any(up.since <= task.runs[0].claimed and task.due <= up.until for up in away):
                yield task

    def _is_plain(self, task_id: str, log: TaskLog, document: Document) -> bool:
        """Whether nobody has changed, canceled or reopened a task, so that its rank is known at all times."""
        is_unchanged = all(r.operation == "publish" and r.answer != "updated" for r in self._asked.of(task_id))
        is_of_one_round = not any(run.get("past") for run in document["task_state"]["worker_states"])
        return len(log.lives) == 1 and is_unchanged and is_of_one_round

    def _others(self) -> Iterator[Task]:
        """Yield all other runs, as they take slots, too."""
        by_worker: dict[str, list[Run]] = defaultdict(list)
        for run in self._runs.values():
            if run.task_id.partition(":")[0] not in QUEUES:
                has_lapsed = run.end_time is None or run.status is RunStatus.TIMEOUT
                end = run.ping_expire_time if has_lapsed or run.end_time is None else run.end_time
                by_worker[run.worker_id].append(Run(run.worker_id, run.claim_time.timestamp(), end.timestamp()))
        for worker_id, runs in by_worker.items():
            yield Task(f"others of {worker_id}", queue="", name="", runs=runs, gone=-inf, is_judged=False)

    def _was_held_up(self, run_id: str, work: Work) -> bool:
        """Whether a handler started late because its worker was frozen, or had its event loop blocked."""
        run = self._runs.get(run_id)
        if run is None or work.start is None:
            return True
        claimed, start = run.claim_time.timestamp(), work.start
        return any(up.since <= start and claimed <= up.until for up in self._held_up(work.worker_id))

    # --- workers --------------------------------------------------------------------------------------------------

    def _workers(self, ends: Sequence[Document]) -> Iterator[Worker]:
        """Yield the workers, and when they worked as usual."""
        starts: dict[tuple[str, int], list[float]] = defaultdict(list)
        for work in self._works.values():
            if work.start is not None:
                starts[work.worker_id, work.pid].append(work.start)
        for worker_id, app in APPS.items():
            names = frozenset(name for name in (*QUEUES, "") if serves(app, name))
            lives = []
            for end in ends:
                began, ended = end["began"] + self._clock.epoch, end["at"] + self._clock.epoch
                # A process has begun to work when a handler of it has started. Another one may have had its pid before.
                own = [at for at in starts[worker_id, end["pid"]] if began <= at <= ended]
                if end["place"] == worker_id and own:
                    lives.append(Up(min(own), ended - (0.0 if end["exit_code"] else _STOPPING)))
            yield Worker(worker_id, _SLOTS, None, names, without(joined(lives), self._held_up(worker_id)))

    def _held_up(self, worker_id: str) -> list[Up]:
        """Return when a worker was frozen, blocked, cut off or far too busy, and a while longer.

        Five workers share two processors. One whose handlers start long after their claims loses its permits again
        before it can use them.
        """
        if worker_id in self._ups:  # each start asks, and there are as many runs
            return self._ups[worker_id]
        found = [Up(f.start, f.end + _RECOVERY) for f in self._faults if _is_against(f, worker_id)]
        for run in self._runs.values():
            if run.worker_id == worker_id and run.task_id.startswith(f"{_HOG}:"):
                end = run.end_time or run.ping_expire_time
                found.append(Up(run.claim_time.timestamp(), end.timestamp() + _RECOVERY))
        found += [Up(claimed, start + _RECOVERY) for claimed, start in self._late_starts[worker_id]]
        self._ups[worker_id] = found
        return found

    @cached_property
    def _late_starts(self) -> Mapping[str, list[tuple[float, float]]]:
        """The claims and the starts of handlers that started too late, by worker."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for run_id, work in self._works.items():
            run = self._runs.get(run_id)
            if run is None or work.start is None:
                continue
            claimed = run.claim_time.timestamp()
            if work.start - claimed > TOLERANCE.under_way:
                found[work.worker_id].append((claimed, work.start))
        return found

    # --- faults ---------------------------------------------------------------------------------------------------

    def _troubles(self) -> Iterator[Trouble]:
        for fault in self._faults:
            if fault.is_database_away:
                yield Trouble(fault.start, fault.end + _DATABASE)
            elif fault.nemesis in _BLIND:
                yield Trouble(fault.start, fault.end + _FOUND, _FOUND)

    def _is_calm(self, delay: Delay) -> bool:
        """Whether nothing was broken but the worker whose task was rescued."""
        return not any(
            fault.start <= delay.claimed and fault.end + _DATABASE >= delay.since
            for fault in self._faults
            if not fault.nemesis.startswith("kill worker") and fault.nemesis not in _HARMLESS
        )


_HARMLESS = frozenset({"pause queue", "crowd queue", "change limits", "kill publisher", "freeze publisher"})


def _is_against(fault: Fault, worker_id: str) -> bool:
    if fault.nemesis == "freeze worker" or fault.nemesis in _NETWORK:
        return fault.target == worker_id
    return fault.target == f"mtask-worker:{worker_id}"


def _read_changes(changes: Iterable[Document]) -> Iterator[Change]:
    """Yield the changes of limits. One that was not confirmed is open until the next one of the same queue."""
    open_since: dict[str, float] = {}
    last: dict[str, Change] = {}
    for change in changes:
        target = f"queue:{change['target']}"
        asked = open_since.pop(target, change["asked"])
        limits = {name: _limit(change[name]) for name in ("limit", "key_limit", "tenant_limit")}
        settings = Settings(**limits, fair=change["fair"])
        last[target] = Change(target, asked, inf if change["settled"] is None else change["settled"], settings)
        if change["settled"] is None:
            open_since[target] = asked
        else:
            yield last.pop(target)
    yield from last.values()


def _limit(stored: Any) -> Limit | None:
    if stored is None:
        return None
    return Limit(stored["concurrency"], stored["starts"], (stored["window_ms"] or 0) / 1000)
