"""The channel: passes messages between a worker and one of its executors, over a socket.

A message is a BSON document after its length, four bytes. Pickle is never used: reading a message runs no code.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from mtask.kernel.driver.bson import packed, unpacked
from mtask.kernel.worker.process.log import logger

Message = dict[str, Any]

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
        self._loop.add_reader(self._socket, self._read)

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

    def _read(self) -> None:
        self._receive()

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
