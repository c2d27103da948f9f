"""The work of a benchmark's handlers: the same on both sides, and as much as it is said to be."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.measuring.app import app
from benchmarks.measuring.counters import children_of
from benchmarks.measuring.spinning import bare_rate, rounds_for, spin


def test_work_is_the_same_for_the_same_rounds_and_the_handler_does_it() -> None:
    assert spin(1000) == spin(1000) == 3500
    assert app.handlers["spin"].function is spin


def test_more_time_is_more_rounds() -> None:
    assert 0 < rounds_for(0.0001) < rounds_for(0.01)


def test_bare_processes_do_the_work_side_by_side() -> None:
    assert bare_rate(2, 10, 3) > 0


def test_children_of_a_process_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.pid in children_of(os.getpid())
        assert children_of(process.pid) == []
        process.communicate(b"\n")
    assert process.pid not in children_of(os.getpid())
