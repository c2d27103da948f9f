"""A server for one test session or one demo. It leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

from mtask.errors import MongodFailed
from mtask.local import _supervise
from mtask.local.folder import find_mongod
from mtask.local.node import Security
from mtask.local.replica_set import ReplicaSet

#: Time limit of the wait for the sweep. It is longer than the time limit of the sweep itself.
SWEEP_TIMEOUT = timedelta(seconds=_supervise.SWEEP_SECONDS + 10)


@contextmanager
def temporary(
    nodes: int = 1,
    *,
    mongod: Path | None = None,
    parameters: Mapping[str, str] = MappingProxyType({}),
    cache_mb: int = 256,
    timeout: timedelta = timedelta(seconds=60),
    election_timeout: timedelta = timedelta(milliseconds=1500),
    security: Security | None = None,
) -> Iterator[ReplicaSet]:
    """Run a replica set in a folder of its own. At the end everything is removed, even if this process is killed.

    `timeout`: time limit of the start. `security`: passwords and TLS. Raises MongodNotFound and MongodFailed.
    """
    binary = find_mongod(mongod)
    folder = Path(tempfile.mkdtemp(prefix="mtask-")).resolve()
    with swept(folder, binary):
        yield ReplicaSet.start(
            folder,
            nodes=nodes,
            mongod=binary,
            parameters=parameters,
            cache_mb=cache_mb,
            timeout=timeout,
            election_timeout=election_timeout,
            security=security,
        )


@contextmanager
def swept(folder: Path, binary: Path) -> Iterator[None]:
    """Start a small process that removes the folder and its mongods when the block or this process ends."""
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", _supervise.__file__, str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert supervisor.stdin is not None
        supervisor.stdin.close()
        if supervisor.wait(SWEEP_TIMEOUT.total_seconds()) != 0:
            raise MongodFailed(
                str(binary),
                f"its temporary folder {folder} could not be cleared",
                "End the mongod that uses the folder and remove the folder.",
                failed="did not stop",
            )
