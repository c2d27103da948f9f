"""Write the sync client from the asyncio one: `make generate`.

The files of SOURCES hold the calls with their docstrings. Their sync code differs only by the missing `await`. Other
differences (threads, Motor, tasks of asyncio) are in pairs of classes, written by hand, with the same names.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Each source, and the file that is generated from it.
SOURCES = {
    "mtask/client/aio.py": "mtask/client/sync.py",
    "mtask/client/flow_handles_aio.py": "mtask/client/flow_handles_sync.py",
    "mtask/client/handles_aio.py": "mtask/client/handles_sync.py",
    "mtask/features/events/events_aio.py": "mtask/features/events/events_sync.py",
}
#: Names in code, and words in docstrings and comments.
NAMES = {
    "AsyncClient": "Client",
    "AsyncCompleted": "Completed",
    "AsyncConnection": "SyncConnection",
    "AsyncCursor": "SyncCursor",
    "AsyncEvents": "Events",
    "AsyncFlowHandle": "FlowHandle",
    "AsyncIterator": "Iterator",
    "AsyncReader": "SyncReader",
    "AsyncTaskHandle": "TaskHandle",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "connection_aio": "connection_sync",
    "events_aio": "events_sync",
    "flow_handles_aio": "flow_handles_sync",
    "handles_aio": "handles_sync",
}
#: Texts that differ, by file, as they are after NAMES has been applied. Each must be found at least once.
PHRASES = {
    "mtask/client/aio.py": (
        (
            "The client for asyncio. The sync client is generated from it: run `make generate` after a change.",
            "The client for sync code.",
        ),
        ("cancel and retry tasks, from asyncio.", "cancel and retry tasks, from sync code."),
        (
            "a `pymongo.AsyncMongoClient`, or a Motor client.",
            "a `pymongo.MongoClient`. This client is safe to share between threads.",
        ),
        (
            "`session`: inside that transaction\n        (an AsyncClientSession, or Motor's).",
            "`session`: inside that transaction.",
        ),
        ("in an `async with` block", "in a `with` block"),
        # The sync iterator begins at once, not at the start of its block.
        (
            "return events_sync.Events(self._store, asked, self._make_ready)",
            "return events_sync.Events(self._store, asked, self._make_ready).open()",
        ),
        # A session of Motor has no type of the driver.
        ("session: Any = None", "session: SyncSession | None = None"),
        (
            "    from mtask.kernel.driver.operation import Operation, T\n",
            "    from mtask.kernel.driver.operation import Operation, T\n"
            "    from mtask.kernel.driver.types import SyncSession\n",
        ),
    ),
    "mtask/client/flow_handles_aio.py": (("of a flow for asyncio:", "of a flow for sync code:"),),
    "mtask/client/handles_aio.py": (("of a task for asyncio:", "of a task for sync code:"),),
    "mtask/features/events/events_aio.py": (
        ("as they end, for asyncio.", "as they end, for sync code."),
        ("for asyncio: it continues", "for sync code: it continues"),
        ("in an `async with` block", "in a `with` block"),
        (
            "\n    A call that is cancelled loses nothing: its read continues, and the next call returns the event.",
            "",
        ),
    ),
}
_WORDS = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")
_LEFT = re.compile(r"async|await|aio\b|motor", re.IGNORECASE)


class CannotGenerate(Exception):
    """The source holds text for which there is no rule."""


def generated(source: str, text: str) -> str:
    """Return the sync file for the asyncio one of this path and text; raise CannotGenerate."""
    made = _WORDS.sub(lambda found: NAMES[found.group()], _without_keywords(text))
    for former, present in PHRASES[source]:
        if former not in made:
            raise CannotGenerate(f"{source}: this text of PHRASES is missing: {former!r}")
        made = made.replace(former, present)
    for number, line in enumerate(made.splitlines(), start=1):
        if _LEFT.search(line):
            raise CannotGenerate(f"{source}: no rule for line {number} of the generated text: {line.strip()}")
    return f"# Generated from {source}: edit that one, then run `make generate`.\n{made}"


def _without_keywords(text: str) -> str:
    """Remove `async` and `await` from the code, not from strings and comments."""
    lines = text.splitlines(keepends=True)
    for row, begin, end in reversed(list(_keywords(text))):
        line = lines[row]
        lines[row] = line[:begin] + line[end:].lstrip(" ")
    return "".join(lines)


def _keywords(text: str) -> Iterator[tuple[int, int, int]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in ("async", "await"):
            yield token.start[0] - 1, token.start[1], token.end[1]


def main() -> None:
    """Write every generated file."""
    for source, target in SOURCES.items():
        (ROOT / target).write_text(generated(source, (ROOT / source).read_text()))
        sys.stdout.write(f"generated {target} from {source}\n")


if __name__ == "__main__":
    main()
