"""Child processes: starts them, learns of their deaths, says what they died of, and reads their memory."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: The module that an executor runs.
_CHILD = "mtask.features.isolation.child"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG = 1
#: In macOS: the kind of `proc_pidinfo` that holds the memory, and the size of its answer.
_TASK_INFO, _TASK_INFO_BYTES = 4, 96


def start(app: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start an executor; return its process and this end of its socket. Call this in a thread that outlives it.

    The process gets a session of its own. So it can be killed together with all processes that it has started, and
    Ctrl-C does not reach it.
    """
    ours, theirs = socket.socketpair()
    try:
        command = [sys.executable, "-m", _CHILD, app, str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent ends. Exit if the parent has ended already.

    Linux kills it at the end of the *thread* that started it. So this thread must be a permanent one. Other systems
    have nothing like that: there, the end of the socket ends this process.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def be_killed_first() -> None:
    """Let Linux choose this process first when the machine runs out of memory, and not the worker."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def kill_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and to all processes that it has started, if they are in its session still."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def reap_group(pid: int) -> bool:
    """Reap the processes of a killed group that have become this process's children; return whether some are left.

    They do so where this process is the first one of a container. The executor itself must have been reaped before.
    While a process of the group is there, as a zombie too, the system gives its number to no other group.
    """
    with suppress(ChildProcessError):
        while os.waitpid(-pid, os.WNOHANG) != (0, 0):
            pass
        return True
    return False


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for the end of a child process, but at most for this time; return whether it has ended.

    `Popen.wait` with a timeout would look again and again, with a sleep of up to 50 ms in between.
    """
    if process.poll() is not None:
        return True
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # another system than Linux, or a sandbox that does not allow it
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.poll() is not None
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll(seconds * 1000)
    finally:
        os.close(descriptor)
    return process.poll() is not None


class DeathWatch:
    """Calls a function in the event loop when a child process has ended.

    The end of the socket would not do: a process that the handler has started may hold the socket open.
    """

    def __init__(self, process: subprocess.Popen[bytes], on_death: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._descriptor: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._descriptor = os.pidfd_open(process.pid)
        if self._descriptor is not None:
            self._loop.add_reader(self._descriptor, self._died)
        else:
            name = f"mtask-executor-{process.pid}"
            threading.Thread(target=self._wait, args=(process,), name=name, daemon=True).start()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with suppress(RuntimeError):  # the loop has closed: the worker has ended
            self._loop.call_soon_threadsafe(self._died)

    def _died(self) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        self._on_death()


def cause_of_death(code: int) -> str:
    """Say what a process died of. `code`: its exit code, or the number of a signal below zero."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (", perhaps for want of memory" if -code == signal.SIGKILL else "")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it is not known."""
    if sys.platform == "darwin":
        answer = ctypes.create_string_buffer(_TASK_INFO_BYTES)
        libproc = ctypes.CDLL("/usr/lib/libproc.dylib")
        if libproc.proc_pidinfo(pid, _TASK_INFO, ctypes.c_uint64(0), answer, _TASK_INFO_BYTES) < _TASK_INFO_BYTES:
            return 0
        return int.from_bytes(answer.raw[8:16], sys.byteorder)
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


# --- guard -----------------------------------------------------------------------------------------------

# The guard: a small process that outlives the worker, and ends what its executors have started.
#
# Linux kills an executor with its worker, but not the processes that the executor has started. Other systems kill
# neither.

_SCRIPT = Path(__file__).with_name("_guard.py")
#: The longest wait for the end of the guard, in seconds. Without executors, it has nothing to do.
_END = 3.0


class Guard:
    """Starts the guard process, and tells it of executors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def start(self) -> None:
        """Start the process if it does not run, and tell it of all executors."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            command = [sys.executable, "-I", "-S", str(_SCRIPT)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
            self._tell("".join(f"+{pid}\n" for pid in self._groups))

    def add(self, pid: int) -> None:
        """Guard this executor. Its process group has its id."""
        with self._lock:
            self._groups.add(pid)
            self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """Forget an executor of which nothing is left: another process may get its id."""
        with self._lock:
            self._groups.discard(pid)
            self._tell(f"-{pid}\n")

    def stop(self) -> None:
        """End the process."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            wait_for_end(process, _END)

    def _tell(self, text: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has been killed: the next start of an executor starts another
                self._process.stdin.write(text.encode())
