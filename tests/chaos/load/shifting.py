"""Time zones whose clocks shift while a run goes on: one forward by an hour, and one back.

A process finds them if the folder is in its environment, as `environment` says.
"""

from __future__ import annotations

import struct
import time
import zoneinfo
from collections.abc import Mapping
from pathlib import Path

FORWARD, BACK = "forward", "back"
#: The zones of the schedules of these names.
ZONES: Mapping[str, str] = {FORWARD: "Test/Forward", BACK: "Test/Back"}
#: The clocks shift this time after the zones were made, in seconds.
_AFTER = 60
_HOUR = 3600
_VARIABLE = "PYTHONTZPATH"


def make(folder: Path) -> Mapping[str, str]:
    """Write the zones, and let this process find them, too; return the environment in which others do."""
    shift = int(time.time()) + _AFTER
    for name, offsets in ((FORWARD, (0, _HOUR)), (BACK, (_HOUR, 0))):
        path = folder / ZONES[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_zone(shift, *offsets))
    paths = [str(folder.absolute()), *zoneinfo.TZPATH]
    zoneinfo.reset_tzpath(paths)
    return {_VARIABLE: ":".join(paths)}


def _zone(shift: int, before: int, after: int) -> bytes:
    """Return a zone with one shift, at this Unix time, in the format of RFC 8536. Offsets are in seconds."""
    footer = "UTC0" if after == 0 else "<+01>-1"
    types = struct.pack(">lBBlBB", before, 0, 0, after, 0, 4)
    block = struct.pack(">qB", shift, 1) + types + b"one\0two\0"
    return (
        _header(1, 2, 8)
        + struct.pack(">lBlBBlBB", 0, 1, before, 0, 0, after, 0, 4)
        + b"one\0two\0"
        + (_header(1, 2, 8) + block + f"\n{footer}\n".encode())
    )


def _header(times: int, types: int, letters: int) -> bytes:
    return b"TZif2" + bytes(15) + struct.pack(">6l", 0, 0, 0, times, types, letters)
