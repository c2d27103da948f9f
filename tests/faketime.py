"""Processes with a wrong clock, by libfaketime. Their monotonic clock is right."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path

_FOLDERS = ("/usr/lib/*/faketime", "/usr/lib*/faketime", "/usr/local/lib/faketime", "/opt/homebrew/lib/faketime")
_LIBRARY = "libfaketime.so.1"
#: Its `sitecustomize` mends `time.sleep` in Python processes.
_SITE = Path(__file__).with_name("faketime_site")
#: Python's pools start threads, so the thread-safe variant of the library is preferred.
_LIBRARIES = ("libfaketimeMT.so.1", _LIBRARY)


@cache
def library() -> Path:
    """Return the path of libfaketime. If there is none, fail, and say how to install it."""
    for name in _LIBRARIES:
        for pattern in _FOLDERS:
            for found in sorted(Path("/").glob(f"{pattern}/{name}".lstrip("/"))):
                return found
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        if line.strip().startswith(_LIBRARY):
            return Path(line.rsplit("=> ", 1)[1])
    raise AssertionError("libfaketime is not installed: run tools/setup.sh dev, or apt-get install libfaketime")


def environment(offset: timedelta) -> dict[str, str]:
    """Return this environment for a process whose wall clock is wrong by `offset`."""
    seconds = offset.total_seconds()
    paths = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "LD_PRELOAD": str(library()),
        "FAKETIME": f"{seconds:+g}s",
        # Versions before 0.9.9 use the name without the prefix.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
        "NO_FAKE_STAT": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def run(arguments: Sequence[str], offset: timedelta, *, cwd: Path, timeout: float = 60) -> str:
    """Run a command with a wrong clock. Return its output. If the command fails, fail with its output."""
    ran = subprocess.run(
        arguments, env=environment(offset), cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}: {ran.stdout}{ran.stderr}"
    return ran.stdout
