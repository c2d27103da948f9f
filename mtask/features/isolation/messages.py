"""The messages between a worker and an executor, as documents.

A worker sends: `hello` (what the executor needs to start), `run`, `lease` (the lease holds until then), `end` (end the
run, for this reason), `paused` (no ping of the run is sent now), `stop`.

An executor sends: `ready`, `unready` (it cannot start), `progress`, `pause` (a transaction is about to begin),
`log` (lines that the handler has logged),
`renewed` (its lease, before a transaction), `committed`, `resume` (the transaction is over), `done`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask
from mtask.kernel.driver.bson import packed, unpacked
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from mtask.kernel.worker.process.log import logger
from mtask.kernel.worker.running.run import EndReason, HeldRun

Message = dict[str, Any]
_PLAIN = [field.name for field in fields(Outcome) if field.name not in ("status", "progress", "next")]


def run_message(run: HeldRun) -> Message:
    """Return the message that starts a run in an executor."""
    # The params go beside the task and not through pydantic: they arrive exactly as they are stored.
    task = run.task.model_dump(by_alias=True, exclude={"params"}, exclude_unset=True)
    return {
        "kind": "run",
        "run_id": run.run_id,
        "task": task,
        "params": run.task.params,
        "until": run.trusted_until,
        "tells_begin": run.on_begin is not None,
        "trace": trace_message(run),
    }


def trace_message(run: HeldRun) -> Message | None:
    """Return the span of a run as a message. None: it has none."""
    if run.trace is None:
        return None
    return {"trace": dict(run.trace), "is_stored": run.stored_trace is not None}


def follow(run: HeldRun, message: Message | None) -> None:
    """Let a run follow the span that such a message names."""
    if message is not None:
        run.follow(message["trace"], is_stored=message["is_stored"])


def task_in(message: Message) -> StoredTask:
    """Return the task that a `run` message holds."""
    return StoredTask.model_validate({**message["task"], "params": message["params"]})


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as a document. Its progress is left out: it has messages of its own."""
    document = {name: getattr(outcome, name) for name in _PLAIN}
    return {**document, "status": outcome.status.value, "next": None if outcome.next is None else outcome.next.parts()}


def outcome_in(document: dict[str, Any]) -> Outcome:
    """Return the outcome that such a document holds."""
    owed = document["next"]
    return Outcome(
        status=RunStatus(document["status"]),  # type: ignore[arg-type]  # an executor makes only these three
        next=None if owed is None else OwedTask(**owed),
        **{name: document[name] for name in _PLAIN},
    )


def reason_in(message: Message) -> EndReason | None:
    """Return the reason for which a message ends a run, if it names one."""
    name = message.get("reason")
    return None if name is None else EndReason[name]


# --- origin ----------------------------------------------------------------------------------------------

# What the executors of a worker get from it at their start.


@dataclass(frozen=True, slots=True)
class Origin:
    """What the executors of one worker get from it."""

    uri: str
    database: str
    worker_id: str
    incarnation: str
    log_format: str = "text"
    keep_logs: int = 0  #: the most lines of a run that are kept
    codec: Message | None = field(default=None, repr=False)  #: what their codec is made from; None: it is plain

    def hello(self) -> dict[str, Any]:
        """Return the first message to an executor. It holds the URI, so it must not be on a command line."""
        root, own = logging.getLogger(), logging.getLogger("mtask")
        levels = {"log_level": root.getEffectiveLevel(), "own_log_level": own.getEffectiveLevel()}
        logs = {"log_format": self.log_format, "keep_logs": self.keep_logs}
        # Handlers publish, and their transactions write results, from the executor: it needs the codec, too.
        codec = {} if self.codec is None else {"codec": self.codec}
        worker = {"worker_id": self.worker_id, "incarnation": self.incarnation}
        return {"uri": self.uri, "database": self.database, **worker, **levels, **logs, **codec}


# --- channel ---------------------------------------------------------------------------------------------

# The channel: passes messages between a worker and one of its executors, over a socket.
#
# A message is a BSON document after its length, four bytes. Pickle is never used: reading a message runs no code.

_LENGTH = struct.Struct("<I")
_CHUNK = 256 * 1024
#: A message of at most this many bytes is sent together with its length. A larger one is not copied for that.
_SMALL = 64 * 1024


class Channel:
    """One end of a socket, in an event loop. Only the event loop's thread may use it."""

    def __init__(
        self, connected: socket.socket, on_message: Callable[[Message], None], on_end: Callable[[], None]
    ) -> None:
        """`on_end` is called when nothing more can come: the other end is closed, or sent something unreadable."""
        connected.setblocking(False)
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._is_reading = self._is_writing = False
        self._is_closed = False

    def open(self) -> None:
        """Pass each message on from now on."""
        self._is_reading = True
        self._loop.add_reader(self._socket, self._receive)

    def send(self, message: Message) -> None:
        """Send a message. If the other end is gone, the message is dropped: whoever waits learns of that elsewhere."""
        if self._is_closed:
            return
        body = packed(message)
        length = _LENGTH.pack(len(body))
        parts = (length + body,) if len(body) <= _SMALL else (length, body)
        self._unsent.extend(map(memoryview, parts))
        if not self._is_writing:
            self._write()

    def drain(self) -> None:
        """Pass on the messages that have arrived already. Call this when the other process has ended."""
        while self._is_reading and self._receive():
            pass

    def close(self) -> None:
        """Close the socket. What is not sent yet is dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_reading()
        if self._is_writing:
            self._loop.remove_writer(self._socket)
        self._socket.close()

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket)

    def _write(self) -> None:
        try:
            while self._unsent:
                part = self._unsent[0]
                sent = self._socket.send(part)
                if sent == len(part):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = part[sent:]
        except (BlockingIOError, InterruptedError):
            if not self._is_writing:
                self._is_writing = True
                self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self._unsent.clear()
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._socket)

    def _receive(self) -> bool:
        """Receive a part of what has arrived, and pass the complete messages on; return whether more may be there."""
        try:
            chunk = self._socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self._stop_reading()
            self._on_end()
            return False
        self._received += chunk
        self._pass_on()
        return True

    def _pass_on(self) -> None:
        at = 0
        while len(self._received) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, at)
            end = at + _LENGTH.size + length
            if len(self._received) < end:
                break
            body = bytes(memoryview(self._received)[at + _LENGTH.size : end])
            at = end
            try:
                message = unpacked(body)
            except Exception:
                logger.exception("message of an executor cannot be read")
                self._stop_reading()
                self._on_end()
                return
            try:
                self._on_message(message)
            except Exception:
                logger.exception("message of an executor failed")
        if at:
            del self._received[:at]
