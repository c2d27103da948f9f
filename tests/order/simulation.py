"""An engine that keeps the order, made of nothing but the order: what it does is a history for the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from tests.order.history import Change, End, History, Limit, Run, Settings, Task, Worker
from tests.order.permits import Pool, Rules

_STEP = 0.02
#: How long a claim takes at most, and how late a permit comes back, in seconds.
_CLAIM, _RETURN = 0.1, 0.05


@dataclass
class Live:
    """A run under way."""

    task: Task
    run: Run
    pools: list[Pool]


@dataclass
class Simulation:
    """Workers that take tasks in the right order, at times that are a little late."""

    random: Random
    tasks: dict[str, Task]
    workers: list[Worker]
    changes: list[Change]
    is_orderly: bool = True  #: else any task that could start is as good as any other
    live: list[Live] = field(default_factory=list)
    starts: dict[Pool, list[float]] = field(default_factory=lambda: defaultdict(list))
    largest: dict[str, float] = field(default_factory=lambda: defaultdict(float))  #: V of each queue
    finishes: dict[tuple[str, str | None], float] = field(
        default_factory=lambda: defaultdict(float)
    )  #: F of each tenant
    last_turn: dict[tuple[str, str | None], int] = field(default_factory=dict)  #: the number of its last start

    def __post_init__(self) -> None:
        # New limits hold at once, which callers do not know.
        self._rules = Rules(replace(change, settled=change.asked) for change in self.changes)
        self._waiting = dict.fromkeys(self.tasks)

    def history(self) -> History:
        """Run all tasks to their ends."""
        at = 0.0
        while self._waiting or self.live:
            at += _STEP
            self.live = [live for live in self.live if live.run.ended + _RETURN > at or not self._end(live)]
            while (best := self._best(at)) is not None:
                self._start(*best, at)
        return History(list(self.tasks.values()), self.workers, self.changes)

    def _end(self, live: Live) -> bool:
        if live.run.end != "success":
            self._waiting[live.task.id] = None
        return True

    # --- who is next ----------------------------------------------------------------------------------------------

    def _best(self, at: float) -> tuple[Task, Worker, list[Pool]] | None:
        ready = [found for task_id in self._waiting if (found := self._ready(self.tasks[task_id], at)) is not None]
        if not self.is_orderly:
            return self.random.choice(ready) if ready else None
        return min(ready, key=lambda found: self._key(found[0], at), default=None)

    def _key(self, task: Task, at: float) -> tuple[bool, float, float, int, float, float]:
        is_interrupted = bool(task.runs) and task.runs[-1].end in ("lapse", "hand-back")
        place = (self.random.random(),)
        lane = (task.queue, task.tenant)
        tag, turn = 0.0, 0.0
        if self._settings(task, at).fair:
            # Of equal tags, the tenant goes first whose turn came longest ago.
            tag, turn = max(self.largest[task.queue], self.finishes[lane]), self.last_turn.get(lane, -1)
        return (not is_interrupted, tag, turn, -task.priority, position(task), *place)

    def _ready(self, task: Task, at: float) -> tuple[Task, Worker, list[Pool]] | None:
        if position(task) > at:
            return None
        pledges = self._rules.pledges(task, at, at) or {}
        if not all(self._is_free(pool, pledge.limit, at) for pool, pledge in pledges.items()):
            return None
        free = [worker for worker in self.workers if worker.serves(task) and self._held(worker) < worker.slots]
        return (task, self.random.choice(free), list(pledges)) if free else None

    def _is_free(self, pool: Pool, limit: Limit, at: float) -> bool:
        held = sum(pool in live.pools for live in self.live)
        started = sum(start > at - limit.window for start in self.starts[pool])
        return held < (limit.concurrency or 10**6) and started < (limit.starts or 10**6)

    def _held(self, worker: Worker) -> int:
        return sum(live.run.worker == worker.id for live in self.live)

    def _settings(self, task: Task, at: float) -> Settings:
        steady = self._rules.steady(f"queue:{task.queue}", at, at)
        return Settings() if steady is None else steady[0]

    # --- runs -----------------------------------------------------------------------------------------------------

    def _start(self, task: Task, worker: Worker, pools: list[Pool], at: float) -> None:
        del self._waiting[task.id]
        lane = (task.queue, task.tenant)
        tag = max(self.largest[task.queue], self.finishes[lane])
        self.largest[task.queue], self.finishes[lane] = tag, tag + 1
        self.last_turn[lane] = sum(map(len, self.starts.values()))
        claimed = at + self.random.uniform(0.0, _CLAIM)
        for pool in pools:
            self.starts[pool].append(claimed)
        ended = claimed + self.random.choice((0.0, 0.05, 0.3, 1.0))
        end: End = self.random.choices(("success", "lapse", "hand-back", "failure", "retry"), (90, 3, 3, 2, 2))[0]
        retry_at = ended + self.random.choice((0.1, 3.0)) if end in ("failure", "retry") else None
        run = Run(worker.id, claimed, ended, end, claimed, retry_at)
        self.tasks[task.id] = replace(task, runs=(*task.runs, run))
        self.live.append(Live(self.tasks[task.id], run, pools))


def position(task: Task) -> float:
    """Return the task's next_preempt_time."""
    return max([task.due, *(run.retry_at for run in task.runs if run.retry_at is not None)])


_LIMITS = (
    Settings(Limit(1)),
    Settings(Limit(2)),
    Settings(Limit(2), fair=True),
    Settings(Limit(3), key_limit=Limit(1)),
    Settings(Limit(3), key_limit=Limit(1), fair=True),
    Settings(Limit(4), tenant_limit=Limit(2), fair=True),
    Settings(Limit(starts=5, window=1.0)),
    Settings(Limit(starts=5, window=1.0), fair=True),
    Settings(Limit(3, 8, 1.0), key_limit=Limit(None, 3, 1.0)),
)


def simulate(seed: int, task_cnt: int = 80, *, is_orderly: bool = True) -> History:
    """Make up tasks, workers and limits, and run all."""
    random = Random(seed)
    workers = [
        Worker("w1", random.choice((2, 20)), names=frozenset({"work"})),
        Worker("w2", random.choice((2, 20)), names=frozenset({"other"})),
        Worker("w3", 20),
    ]
    tasks = list(_tasks(random, task_cnt))
    by_id = {task.id: task for task in tasks}
    return Simulation(random, by_id, workers, list(_changes(random)), is_orderly).history()


def _changes(random: Random) -> Iterator[Change]:
    for queue in "xy":
        yield Change(f"queue:{queue}", -1.0, -1.0, random.choice(_LIMITS))
        if random.random() < 0.3:
            yield Change(f"queue:{queue}", 5.0, 5.1, random.choice(_LIMITS))
    if random.random() < 0.3:
        yield Change("tenant:a", -1.0, -1.0, Settings(Limit(random.choice((1, 3)))))


def _tasks(random: Random, count: int) -> Iterator[Task]:
    for number in range(count):
        name = random.choice(("work", "other"))
        named = random.choice(({"work": "w1", "other": "w2"}[name], "w3"))
        yield Task(
            f"t{number}",
            random.choice((0.0, 0.0, 0.5, random.uniform(0, 20))),
            random.choice("xy"),
            name,
            random.choice((None, "a", "a", "b", "c")),
            random.choice((None, "k", "l")),
            random.choice((0, 0, 1, 5)),
            frozenset({named}) if random.random() < 0.1 else frozenset(),
        )
