"""What a signal does to a command, wherever the main thread is just then. Each case runs in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_BEGIN = """
import os, signal, threading
from datetime import timedelta
from mtask.cli.interrupts import Interruption, ending

signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)

driver = {"__name__": "pymongo.pool", "interrupt": interrupt}
exec("def work(number):\\n    interrupt(number)\\n    print('the driver goes on')", driver)
"""


def run(script: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interruption_waits_for_the_driver_and_ends_the_block_at_the_next_check(number: signal.Signals) -> None:
    assert run(f"""
try:
    with Interruption() as interruption:
        driver["work"]({int(number)})
        interrupt()
        print("later signals are ignored")
        interruption.check()
        print("not reached")
except KeyboardInterrupt:
    print("interrupted")
""") == (0, ["the driver goes on", "later signals are ignored", "interrupted"])


def test_interruption_that_nobody_checks_ends_with_the_block() -> None:
    assert run("""
try:
    with Interruption():
        driver["work"](signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
""") == (0, ["the driver goes on", "interrupted"])


def test_interruption_outside_the_driver_is_immediate_and_is_raised_once() -> None:
    assert run("""
try:
    with Interruption() as interruption:
        try:
            interrupt()
            print("not reached")
        finally:
            interruption.check()
            print("cleaned up")
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
""") == (0, ["cleaned up", "interrupted True"])


def test_command_that_cannot_end_after_an_interrupt_is_ended() -> None:
    assert run("""
with ending(timedelta(milliseconds=200)):
    lock = threading.Lock()
    lock.acquire()
    try:
        interrupt()
    except KeyboardInterrupt:
        print("waiting for a lock that nobody releases", flush=True)
        lock.acquire()
""") == (130, ["waiting for a lock that nobody releases"])


def test_command_that_ends_in_time_after_an_interrupt_is_left_alone() -> None:
    assert run("""
try:
    with ending(timedelta(milliseconds=200)):
        interrupt()
except KeyboardInterrupt:
    print("interrupted", signal.getitimer(signal.ITIMER_REAL))
""") == (0, ["interrupted (0.0, 0.0)"])


def test_interrupts_that_the_caller_ignores_stay_ignored() -> None:
    assert run("""
signal.signal(signal.SIGINT, signal.SIG_IGN)
with ending():
    interrupt()
print("went on", signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
""") == (0, ["went on True"])
