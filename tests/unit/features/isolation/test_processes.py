"""The wait for the end of a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mtask.features.isolation.processes import wait_for_end


@pytest.fixture
def reader() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when its standard input does."""
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_the_end_of_a_process_is_waited_for_and_its_zombie_removed(
    reader: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert not wait_for_end(reader, 0.01)
    assert reader.stdin is not None
    reader.stdin.close()
    assert wait_for_end(reader, 60)
    assert reader.returncode == 0
    assert wait_for_end(reader, 60)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux has pidfds")
def test_the_wait_does_not_look_again_and_again(
    reader: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(timeout: float | None = None) -> int:
        raise OSError("this wait looks again and again")

    # Only of this process: threads of other tests' clients sleep meanwhile.
    monkeypatch.setattr(reader, "wait", refuse)
    opened: list[int] = []
    open_pidfd = os.pidfd_open

    def noting(pid: int) -> int:
        opened.append(open_pidfd(pid))
        return opened[-1]

    monkeypatch.setattr(os, "pidfd_open", noting)
    assert not wait_for_end(reader, 0.01)
    (descriptor,) = opened
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
