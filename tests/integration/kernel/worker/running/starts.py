"""Watches in which order a worker starts the runs that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic

from mtask import TaskSpec
from mtask.kernel.worker.running.run import HeldRun, Order
from tests.integration.worker_harness import Bench
from tests.mongo import until

LAST = datetime.max.replace(tzinfo=UTC)


async def release(
    bench: Bench, specs: Sequence[TaskSpec], concurrency: int, amid: Callable[[], None] = lambda: None
) -> None:
    """Publish tasks, do something to them, and let the worker claim them once it knows all of them."""
    queue = bench.worker.parts.queue
    with bench.backed_up():
        await bench.client.publish_many(specs)
        amid()
        await until(lambda: queue.ready_count(monotonic()) == len(specs), message="all are ready")
        bench.worker.parts.slots.set_concurrency(concurrency)


@dataclass
class Watch:
    """Looks, at each start of a run, at the runs that the worker holds and that have not started."""

    orders: dict[str, Order] = field(default_factory=dict)  #: the order of each task as it was published
    overtaken: list[tuple[str, str]] = field(default_factory=list)
    most_waiting: int = 0

    def over(self, bench: Bench) -> None:
        """Begin to look."""
        runner, ledger = bench.worker.parts.runner, bench.worker.parts.scope.ledger
        start = runner.start

        def started(run: HeldRun) -> None:
            self.look(run, [held for held in ledger.held if held.asyncio_task is None and held is not run])
            start(run)

        runner.start = started  # type: ignore[method-assign]

    def look(self, run: HeldRun, waiting: Sequence[HeldRun]) -> None:
        """Note which of the runs that wait should have started before this one."""
        self.most_waiting = max(self.most_waiting, len(waiting))
        mine = self._order(run)
        self.overtaken += [(one.task_id, run.task_id) for one in waiting if self._order(one) < mine]

    def _order(self, run: HeldRun) -> Order:
        is_new, priority, due = self.orders[run.task_id]
        had_retry = run.attempt > 2 - is_new  # a task that was handed back has had one run more
        return (True, priority, LAST) if had_retry else (is_new, priority, due)
