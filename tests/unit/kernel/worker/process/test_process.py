"""The signals that ask a process to end."""

from __future__ import annotations

import signal
import subprocess
import sys

_PROGRAM = """
import os
import signal
from mtask.kernel.worker.process.runtime import handle_ends
handle_ends(lambda number, frame: os.write(1, f"{signal.Signals(number).name}\\n".encode()))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_terminal_that_sends_sighup_twice_asks_once() -> None:
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGHUP)
            assert process.stdout.readline() == "SIGHUP\n"
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "SIGTERM\n"
        finally:
            process.kill()
