"""A process with a wrong clock sleeps for as long as it asks for, like any other."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import pytest

from tests import faketime
from tests.workers import ROOT

_SCRIPT = """
import json, subprocess, sys, time
began, wall = time.monotonic(), time.time()
time.sleep(0.05)
slept = time.monotonic() - began
ended = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.05)"]).wait(60)
print(json.dumps([began, wall, slept, ended]))
"""


@pytest.mark.parametrize("minutes", [10, -10])
def test_a_process_with_a_wrong_clock_can_sleep(minutes: int) -> None:
    offset = timedelta(minutes=minutes)
    before, monotonic = time.time(), time.monotonic()
    began, wall, slept, ended = json.loads(faketime.run([sys.executable, "-c", _SCRIPT], offset, cwd=ROOT))
    assert slept >= 0.05
    assert ended == 0
    assert wall - before >= offset.total_seconds()
    assert monotonic <= began <= time.monotonic()
