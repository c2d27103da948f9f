"""A real `mtask web` process, and requests to it at a steady rate.

Requests use bare connections: a comfortable client would take the cores that server and worker need.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.measuring.server import NotMeasured, Scratch, Server
from benchmarks.measuring.serving import Serving
from benchmarks.report.figures import quantile

#: The longest time of one request, in seconds.
_PATIENCE = 60.0
#: The longest time, in seconds, that a connection is kept for another request.
_KEPT = 2.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: The longest head of an answer, and the longest message of a stream, in bytes.
_LONGEST = 1 << 20


class Web(Serving):
    """`mtask web` on a database."""

    def __init__(self, server: Server, scratch: Scratch) -> None:
        super().__init__(server, scratch, "web")
        self._cookie = ""

    def opened(self) -> None:
        """Begin the session of the page."""
        self._cookie = asyncio.run(self._log_in())

    def request(self, path: str) -> bytes:
        """Return a GET of this path: of the API with the token, of the page with the cookie of a session."""
        host, port = self.address
        is_of_api = path.startswith(("/v1/", "/metrics", "/healthz", "/readyz"))
        proof = f"Authorization: Bearer {self.printed['token']}" if is_of_api else f"Cookie: {self._cookie}"
        return f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{proof}\r\n\r\n".encode()

    def memory(self) -> int:
        """Return the resident memory of the process, in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES

    def get(self, path: str) -> Answer:
        """Ask once."""

        async def ask() -> Answer:
            async with connected(self) as connection:
                return await connection.ask(path)

        return asyncio.run(ask())

    async def _log_in(self) -> str:
        """Exchange the token for the cookie of a session."""
        url, token = self.printed["url"], self.printed["page"].partition("/login?token=")[2]
        form = f"token={token}".encode()
        head = (
            f"POST /login HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nOrigin: {url}\r\nContent-Length: {len(form)}\r\n"
        )
        head += "Content-Type: application/x-www-form-urlencoded\r\n\r\n"
        async with connected(self) as connection:
            answer = await connection.send(head.encode() + form)
        return answer.headers["set-cookie"].partition(";")[0]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """One connection, which is kept open."""

    def __init__(self, web: Web, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._web, self._reader, self._writer = web, reader, writer

    async def ask(self, path: str) -> Answer:
        """Send a GET and read its answer."""
        return await self.send(self._web.request(path))

    async def send(self, request: bytes) -> Answer:
        """Send a request and read its answer."""
        status, headers = await self._begun(request)
        body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(status, headers, body)

    async def begin(self, path: str) -> tuple[int, dict[str, str]]:
        """Send a GET and read the head of its answer."""
        return await self._begun(self._web.request(path))

    async def _begun(self, request: bytes) -> tuple[int, dict[str, str]]:
        self._writer.write(request)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def message(self) -> bytes:
        """Return the next message of an event stream, perhaps with a line of the transfer coding around it."""
        return await self._reader.readuntil(b"\n\n")

    async def close(self) -> None:
        """Close it."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return


async def connect(web: Web) -> Connection:
    """Open a connection."""
    reader, writer = await asyncio.open_connection(*web.address, limit=_LONGEST)
    return Connection(web, reader, writer)


@asynccontextmanager
async def connected(web: Web) -> AsyncIterator[Connection]:
    """Open a connection for the block."""
    made = await connect(web)
    try:
        yield made
    finally:
        await made.close()


# --- requests at a steady rate ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Asked:
    """The times of requests by path, in ms, and how many had another status than 200."""

    times: dict[str, list[float]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    cpu: float = 0.0  #: of the web process, in seconds

    @property
    def count(self) -> int:
        """The number of requests."""
        return sum(map(len, self.times.values()))

    def of(self, paths: Sequence[str]) -> list[float]:
        """Return the times of these paths."""
        return [time for path in paths for time in self.times.get(path, ())]

    def slowest(self) -> tuple[str, float]:
        """Return the path with the greatest 99th percentile, and this percentile."""
        found = {path: quantile(times, 0.99) for path, times in self.times.items()}
        path = max(found, key=lambda path: found[path])
        return path, found[path]


@contextmanager
def asking(web: Web, paths: Iterator[str], rate: float, asked: Asked) -> Iterator[None]:
    """Ask the paths in turn during the block, at this rate, whether or not the earlier requests have an answer.

    The time of a request begins when it is due, so it includes the time that a slow server keeps it waiting.
    """
    ending = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(_ask(web, paths, rate, asked, ending))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="requests")
    before = web.cpu()
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
        asked.cpu += web.cpu() - before
    if failed:
        raise failed[0]


async def _ask(web: Web, paths: Iterator[str], rate: float, asked: Asked, ending: threading.Event) -> None:
    free: list[tuple[Connection, float]] = []
    every: list[Connection] = []

    async def ask(path: str, due: float) -> None:
        connection, since = free.pop() if free else (None, due)
        # The server closes a connection that nobody uses.
        if connection is None or time.monotonic() - since > _KEPT:
            connection = await connect(web)
            every.append(connection)
        status = 0
        try:
            async with asyncio.timeout(_PATIENCE):
                status = (await connection.ask(path)).status
        except TimeoutError:
            web.check()
        ended = time.monotonic()
        asked.times.setdefault(path, []).append((ended - due) * 1000)
        if status != 200:
            asked.failures[f"{status or 'no answer'}: {path}"] += 1
        if status:
            free.append((connection, ended))

    began = time.monotonic()
    number = 0
    try:
        async with asyncio.TaskGroup() as requests:
            while not ending.is_set():
                due = began + number / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                requests.create_task(ask(next(paths), due))
                number += 1
    except* (OSError, asyncio.IncompleteReadError) as failed:
        web.check()
        raise NotMeasured(f"a request to mtask web had no answer: {failed.exceptions[0]!r}") from None
    finally:
        for connection in every:
            await connection.close()
