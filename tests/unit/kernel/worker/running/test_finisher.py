"""The finisher's lanes: no ending waits behind what flows in without end."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from mtask.kernel.document.status import RunStatus
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.process.state import Scope, Vitals
from mtask.kernel.worker.process.time import Tempo
from mtask.kernel.worker.running.finisher import Finisher
from mtask.parts.outcomes import successes

_MANY = 500
Ended = Literal[RunStatus.SUCCESS, RunStatus.FAIL, RunStatus.CANCELED]


class _Everything(frozenset[str]):
    def __contains__(self, item: object) -> bool:
        return True


class _Store:
    """Writes each group in one turn of the loop, and lets the test act before."""

    async def run(self, operation: Generator[Any, Any, Any]) -> Any:
        operation.close()
        await asyncio.sleep(0.001)
        return _Everything()


def _scope() -> Scope:
    return Scope(cast(Any, _Store()), "w1", [], [], cast(Any, None), Tempo(0.001), Vitals(10))


def _ended(name: str, status: Ended) -> tuple[Any, Outcome]:
    run = SimpleNamespace(
        queue="default",
        name=name,
        owes=frozenset(),
        took=None,
        run_id=name,
        task_id=name,
        trusted_until=float("inf"),
        is_finishing=False,
        is_simple=True,
        progress=None,
        stored_trace=None,
        leave_gate=lambda **_: None,
    )
    reason = {} if status is RunStatus.SUCCESS else {"reason": "for a reason"}
    return run, Outcome(name, name, status, **cast(Any, reason))


async def _is_written_beside(flowing: Ended, other: Ended) -> bool:
    """Whether one ending is written while endings of another status flow without end."""
    written: list[str] = []
    is_over = asyncio.Event()

    class Pinger:
        def release(self, run: Any) -> None:
            written.append(run.run_id)
            if "other" in written or len(written) > _MANY:
                is_over.set()
            else:  # one more for each that was written: some always wait
                finisher.submit(*_ended(f"next-{len(written)}", flowing))

        def release_all(self, runs: Iterable[Any]) -> None:
            for run in runs:
                self.release(run)

    finisher = Finisher(_scope(), cast(Any, Pinger()), [], successes({}))
    for number in range(20):
        finisher.submit(*_ended(f"first-{number}", flowing))
    await asyncio.sleep(0)  # their group is under way
    finisher.submit(*_ended("next", flowing))
    finisher.submit(*_ended("other", other))
    await is_over.wait()
    found = "other" in written
    await finisher.drain()
    return found


@pytest.mark.parametrize("status", [RunStatus.FAIL, RunStatus.CANCELED])
async def test_other_endings_are_written_while_successes_flow_without_end(status: Ended) -> None:
    assert await _is_written_beside(RunStatus.SUCCESS, status)


async def test_successes_are_written_while_other_endings_flow_without_end() -> None:
    assert await _is_written_beside(RunStatus.FAIL, RunStatus.SUCCESS)
