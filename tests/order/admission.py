"""Judges limits: how many runs were live at once, and how many handlers started in a window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, NamedTuple

from tests.order.history import History, Run
from tests.order.permits import Pledge, Pool, Rules


class Extra(NamedTuple):
    """A run beyond a limit."""

    kind: Literal["too many runs", "too many starts"]
    task_id: str
    at: float
    what: str


def beyond(history: History, rules: Rules, clock: float) -> Iterator[Extra]:
    """Yield the runs beyond a limit. A limit counts the runs that were claimed after it was in force."""
    runs: dict[tuple[Pool, Pledge], list[tuple[Run, str]]] = defaultdict(list)
    for task in history.tasks:
        for run in task.runs:
            for pool, pledge in (rules.pledges(task, run.claimed, run.claimed) or {}).items():
                runs[pool, pledge].append((run, task.id))
    for (pool, pledge), counted in runs.items():
        if pledge.limit.concurrency is not None:
            yield from _runs_beyond(pool, pledge, counted, clock)
        if pledge.limit.starts is not None:
            yield from _starts_beyond(pool, pledge, counted, clock)


def _runs_beyond(pool: Pool, pledge: Pledge, counted: list[tuple[Run, str]], clock: float) -> Iterator[Extra]:
    live: list[Run] = []
    for run, task_id in sorted(counted, key=lambda pair: pair[0].claimed):
        live = [other for other in live if other.ended - clock > run.claimed]
        live.append(run)
        if len(live) > (pledge.limit.concurrency or 0):
            yield Extra("too many runs", task_id, run.claimed, f"{len(live)} runs of {_name(pool)}, {pledge.limit}")


def _starts_beyond(pool: Pool, pledge: Pledge, counted: list[tuple[Run, str]], clock: float) -> Iterator[Extra]:
    most = pledge.limit.starts or 0
    starts = sorted((run.started, task_id) for run, task_id in counted if run.started is not None)
    for (first, _), (last, task_id) in zip(starts, starts[most:], strict=False):
        if last - first < pledge.limit.window - clock:
            what = f"{most + 1} starts of {_name(pool)} within {last - first:.3f} s, {pledge.limit}"
            yield Extra("too many starts", task_id, last, what)


def _name(pool: Pool) -> str:
    return "/".join(map(str, filter(None, pool)))
