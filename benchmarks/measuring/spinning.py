"""Work for the processor: how much of `spin` takes a given time here, and how fast bare processes do it."""

from __future__ import annotations

import multiprocessing
import threading
import time
from math import inf

#: The trials of each length. The shortest one counts: whatever else the machine does can only make a trial longer.
_TRIALS = 200
#: The longest wait for bare processes, in seconds: one that cannot start must not be waited for without an end.
_PATIENCE = 300.0


def spin(rounds: int) -> int:
    """Add up numbers: nothing but Python's own instructions. A handler, too: it never calls the system."""
    total = 0
    for number in range(rounds):
        total += number & 7
    return total


def rounds_for(seconds: float) -> int:
    """Return the argument with which `spin` uses the processor for this time, by trying it on this machine."""
    rounds, takes = 1_000, _least_time(1_000)
    while takes * 4 < seconds:
        rounds *= 2
        takes = _least_time(rounds)
    return round(rounds * seconds / takes)


def bare_rate(processes: int, rounds: int, count: int) -> float:
    """Return the calls of `spin` a second by bare processes side by side, `count` calls in each of them."""
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(processes + 1)
    several = [context.Process(target=_spin_often, args=(gate, rounds, count)) for _ in range(processes)]
    for one in several:
        one.start()
    gate.wait(_PATIENCE)
    began = time.monotonic()
    gate.wait(_PATIENCE)
    seconds = time.monotonic() - began
    for one in several:
        one.join()
    return processes * count / seconds


def _spin_often(gate: threading.Barrier, rounds: int, count: int) -> None:
    gate.wait(_PATIENCE)
    for _ in range(count):
        spin(rounds)
    gate.wait(_PATIENCE)


def _least_time(rounds: int) -> float:
    least = inf
    for _ in range(_TRIALS):
        began = time.thread_time()
        spin(rounds)
        least = min(least, time.thread_time() - began)
    return least
