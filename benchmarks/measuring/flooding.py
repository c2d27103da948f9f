"""Clients that send the largest bodies allowed to `mtask web`, as a process of its own.

`python -m benchmarks.measuring.flooding HOST PORT TOKEN CLIENTS`: each client sends one body after the other, until a
signal. The process then writes how many answers had which status.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measuring.app import FOLDER_VARIABLE, write_whole
from benchmarks.measuring.fleet import Process
from benchmarks.measuring.server import Server, wait_until
from benchmarks.measuring.web import Web
from mtask.web.settings import WebSettings

#: The most tasks of one batch.
TASKS = 1_000
PATH = "/v1/tasks:batch"
NO_ANSWER = "none"
_ANSWERS, _READY = "answers.json", "ready"
#: The longest time, in seconds, of one request: a body waits for its turn for 20 s at most.
_TIMEOUT = 120.0
#: The longest time, in seconds, until the first body is answered.
_PATIENCE = 120.0


def largest_body(settings: WebSettings) -> bytes:
    """Return a batch of almost as many bytes and values as the server takes."""
    largest = settings.largest(is_batch=True)

    def batch(values: int, length: int) -> bytes:
        task = {"name": "noop", "params": {"texts": ["x" * length] * values}}
        return json.dumps({"tasks": [task] * TASKS}, separators=(",", ":")).encode()

    # Each value, each list and each object counts; a task has four besides its texts, and so has the batch.
    values = largest.values // TASKS - 5
    length = (largest.size - len(batch(values, 0))) // (TASKS * values)
    return batch(values, length)


@contextmanager
def flooded(server: Server, web: Web, clients: int, answers: Counter[str]) -> Iterator[None]:
    """Let so many clients send the largest bodies during the block, which begins with the first answer."""
    folder = Path(tempfile.mkdtemp(dir=server.folder))
    host, port = web.address
    shared = (host, str(port), web.printed["token"], str(clients))
    process = Process("flood", folder, "benchmarks.measuring.flooding", *shared)

    def has_begun() -> bool:
        process.check()
        web.check()
        return (folder / _READY).exists()

    try:
        wait_until(has_begun, _PATIENCE, "the first answer to a large body")
        yield
        process.check()
    finally:
        process.stop()
    answers.update(json.loads((folder / _ANSWERS).read_text()))


class _Flood:
    """The clients, and the answers so far."""

    def __init__(self, host: str, port: int, token: str, folder: Path) -> None:
        self._address = (host, port)
        self._token = token
        self._folder = folder
        self._body = largest_body(WebSettings())
        self._numbers = itertools.count()
        self.answers: Counter[str] = Counter()

    def send_forever(self) -> None:
        """Send one body after the other: each publishes tasks of its own."""
        while True:
            connection = http.client.HTTPConnection(*self._address, timeout=_TIMEOUT)
            try:
                while True:
                    status = self._send(connection)
                    self.answers[str(status)] += 1
                    (self._folder / _READY).touch()
            except (OSError, http.client.HTTPException):
                self.answers[NO_ANSWER] += 1  # refused before the body was sent: the connection is of no more use
            finally:
                connection.close()

    def _send(self, connection: http.client.HTTPConnection) -> int:
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": "application/json",
            "Idempotency-Key": f"{os.getpid()}-{next(self._numbers)}",
        }
        connection.request("POST", PATH, self._body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def main(host: str, port: str, token: str, clients: str) -> None:
    """Send until a signal, then write the answers."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    flood = _Flood(host, int(port), token, folder)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    for _ in range(int(clients)):
        threading.Thread(target=flood.send_forever, daemon=True).start()
    signal.sigwait([signal.SIGTERM])
    write_whole(folder / _ANSWERS, dict(flood.answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
