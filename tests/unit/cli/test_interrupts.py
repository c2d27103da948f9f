"""What a signal does to a command, wherever the main thread is just then. Each case runs in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_BEGIN = """
import os, signal, threading
from datetime import timedelta
from mtask.cli.interrupts import Interruption, ending, leaving, taking_over

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


def test_interrupt_leaves_no_limit_of_the_driver_that_is_set_by_half() -> None:
    assert run("""
import mtask.kernel.driver.stores
from pymongo import _csot
try:
    with ending():
        _csot.TIMEOUT.set(8.0)  # its deadline is not set yet
        interrupt()
except KeyboardInterrupt:
    print("closing is limited by", _csot.remaining())
""") == (0, ["closing is limited by None"])


def test_interrupts_that_the_caller_ignores_stay_ignored() -> None:
    assert run("""
signal.signal(signal.SIGINT, signal.SIG_IGN)
with ending():
    interrupt()
print("went on", signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
""") == (0, ["went on True"])


# --- leaving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_leaving_ends_the_process_with_0_and_its_output(number: signal.Signals) -> None:
    assert run(f"""
with leaving():
    print("begun")
    interrupt({int(number)})
    print("not reached")
""") == (0, ["begun"])


def test_leaving_leaves_a_sighup_that_is_ignored_and_puts_the_handlers_back() -> None:
    assert run("""
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with leaving():
    interrupt(signal.SIGHUP)
    print("ignored")
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
      == [signal.default_int_handler, signal.SIG_DFL])
""") == (0, ["ignored", "True"])


def test_a_signal_that_comes_while_others_take_over_reaches_them() -> None:
    assert run("""
with leaving():
    with taking_over():
        interrupt(signal.SIGTERM)
        print(signal.signal(signal.SIGTERM, lambda *_: print("taken")) == signal.SIG_DFL)
    interrupt(signal.SIGTERM)
print(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)
""") == (0, ["True", "taken", "taken", "True"])


def test_process_that_is_forked_before_the_start_ends_by_its_signal() -> None:
    assert run("""
with leaving():
    child = os.fork()
    if not child:
        interrupt(signal.SIGTERM)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""") == (0, ["-15"])
