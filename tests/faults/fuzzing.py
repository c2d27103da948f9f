"""What the fuzz of hostile input shares: how long it runs, and values of every kind.

The few examples of a usual run are the same each time. MTASK_TEST_FUZZ=50 draws fifty times as many, fresh ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, TypeVar

import bson
from bson import DBRef, MaxKey, MinKey, ObjectId, Timestamp
from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.regex import Regex
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from pymongo import WriteConcern
from pymongo.errors import WriteError

from mtask import App
from mtask.kernel.driver.errors import NOT_STORABLE
from mtask.kernel.driver.stores import CODEC, SyncStore
from tests.integration.worker_harness import Bench, working_on
from tests.mongo import Client, Document

T = TypeVar("T")
SCALE = int(os.environ.get("MTASK_TEST_FUZZ", "1"))


def fuzz(examples: int, *, shrink: bool = True) -> settings:
    """Return the settings of a property that tries this many examples in a usual run.

    Without `shrink` where a failure is a long wait, which would be repeated for each smaller example.
    """
    return settings(
        max_examples=examples * SCALE,
        deadline=None,
        derandomize=SCALE == 1,
        database=None,
        print_blob=True,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


#: Patience for one thing to happen, in seconds: the fuzz asserts what, not how fast.
PATIENCE = 40.0
#: Time for one property: pytest's own limit is made for a usual run.
LIMIT = 120 * SCALE

#: Letters that steer a terminal, break a line, turn the direction of writing, or end a string in C.
CONTROL = "\0\x01\a\b\t\n\v\f\r\x1b\x1c\x7f\x85\x9b\u2028\u202e\u2066\ufeff"
_TELLING = "aZ0_.:/-, $%{}[]'\"\\äß中\U0001f600"
_telling_texts = st.sampled_from([
    "", " ", ":", "::", "$", "$key", "$$NOW", "$$ROOT", ".", "..", "a.b", "0", "-1", "NaN", "null", "true", "INIT",
    "\x1b[2J\x1b[31m", "\x1b]0;title\a", "\x9b31m", "a\nb", "\r\n", "\0", "a\0b", "‮txt", "e\u0301", "\ufeff", "x" * 300,
    "x" * 3000, "../../etc/passwd", "%s%n", "{}", "[bold red]", "':drop", "noop", "default",
])  # fmt: skip
#: Any text that BSON holds.
texts = st.one_of(
    _telling_texts,
    st.text(st.one_of(st.sampled_from(CONTROL + _TELLING), st.characters(exclude_categories=["Cs"])), max_size=20),
)
#: And what Python takes for text, but UTF-8 does not.
any_texts = st.one_of(texts, texts, st.sampled_from(["\ud800", "a\udfff", "\udc80key", "\ud83d"]))

integers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 1000, 1001, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63), 315_360_000_001]),
    st.integers(-5, 100_000),
    st.integers(-(2**63), 2**63 - 1),
)
numbers = st.one_of(
    integers,
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 1e18, 1e19, 1e308, 5e-324]),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.floats(),
    st.booleans(),
    integers.map(Int64),
    st.sampled_from(["0", "1", "4.2", "1E+6144", "-1E-6176", "NaN", "sNaN", "Infinity", "-Infinity"]).map(Decimal128),
)
#: Instants that Python holds, at both ends of its years and around the present.
instants = st.one_of(
    st.sampled_from([
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(2020, 1, 1, tzinfo=UTC),
        datetime(2100, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC),
    ]),
    st.datetimes(timezones=st.just(UTC)).map(lambda drawn: drawn.replace(microsecond=0)),
)  # fmt: skip
#: Those that only BSON holds, too.
dates = st.one_of(
    instants,
    st.sampled_from([0, -1, 2**62, -(2**62), 2**63 - 1, -(2**63), 253_402_300_800_000]).map(DatetimeMS),
    st.integers(-(2**63), 2**63 - 1).map(DatetimeMS),
)


def made(*makers: Callable[[], Any]) -> st.SearchStrategy[Any]:
    """Draw one of these: made anew each time, as Hypothesis looks closely at what it has in hand."""
    return st.sampled_from(makers).map(lambda make: make())


_rare = st.one_of(
    st.sampled_from(
        [MinKey(), MaxKey(), ObjectId("5f5e0c5e5f5e0c5e5f5e0c5e"), Timestamp(0, 0), Timestamp(2**32 - 1, 1)]
    ),
    made(lambda: Regex("a.*", 0), lambda: Regex("", 2)),
    made(lambda: DBRef("tasks", 1), lambda: DBRef("tasks", "a:b", "other", more=1)),
    st.uuids(),
    st.builds(Binary, st.binary(max_size=20), st.sampled_from([0, 2, 5, 6, 128, 255])),
    st.binary(max_size=20),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts, dates, _rare)
#: Names of fields inside a document: all that BSON holds.
field_names = st.one_of(
    st.sampled_from(["", "a", "$a", "a.b", ".", "$", "$$", "a.$b", "$ref", "$id", "$date", "_id", "0", "__proto__"]),
    texts.filter(lambda text: "\0" not in text),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.lists(inner, max_size=3), st.dictionaries(field_names, inner, max_size=3))


def _deep(levels: int) -> Any:
    made: Any = 1
    for level in range(levels):
        made = [made] if level % 2 else {"a": made}
    return made


def _all_of(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        leaves,
        st.recursive(leaves, _nested, max_leaves=5),
        st.sampled_from([[], {}, [[]], [None], [{}], {"": {}}]),
        st.sampled_from([20, 101, 120, 150]).map(_deep),
    )


_code = made(lambda: Code("function() {}"), lambda: Code("x", {"y": 1}))
#: Any value of BSON: each type of it, empty and nested.
values = _all_of(st.one_of(scalars, scalars, scalars, scalars, _code))


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text for this one")


#: What only Python has: no BSON type at all, or out of BSON's range.
foreign = st.one_of(
    made(lambda: 2**63, lambda: -(2**63) - 1, lambda: 10**5000, lambda: 1 + 2j, object, _Unprintable),
    made(lambda: ..., lambda: NotImplemented, lambda: int, lambda: print, lambda: range(3)),
    made(lambda: memoryview(b"x"), lambda: bytearray(b"x"), lambda: {1, 2}, lambda: frozenset("a"), lambda: (1, (2,))),
    made(lambda: {1: 2}, lambda: {None: 1}, lambda: {"\0": 1}, lambda: {("a",): 1}, lambda: {b"a": 1}),
    made(lambda: "\ud800", lambda: {"a": "\udfff"}, lambda: {"\ud800": 1}, lambda: _deep(500), lambda: [_deep(3000)]),
    made(lambda: {"a": {"b": [object()]}}, lambda: [{"a": 10**30}], lambda: Regex("\0", 0)),
    st.sampled_from([timedelta(days=1), timedelta.max, timedelta.min, timedelta(microseconds=1)]),
    st.sampled_from([
        datetime(2024, 1, 1),  # noqa: DTZ001 naive on purpose
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
        datetime(2024, 1, 1, tzinfo=UTC).date(),
        datetime(2024, 1, 1, tzinfo=UTC).time(),
    ]),
    st.decimals(),
    st.fractions(),
)  # fmt: skip
#: Hypothesis takes Code, which is a str, for text of its own, and trips over it.
_usual = _all_of(scalars)
#: Anything that a caller could hand over.
anything = st.one_of(_usual, _usual, foreign)


#: How the last resorts of a worker tell in its log that something got through which should have been dealt with.
_LAST_RESORTS = ("goes on", "cannot be taken is examined", "could not be concluded", "bug in mtask", "Traceback")


class Lab:
    """A worker in this process that is kept from one example to the next, and what it logs.

    Between the examples its event loop stands still, its pings go on.
    """

    def __init__(self, uri: str, database: str, mongo: Client, app: App, **options: Any) -> None:
        self._given = (uri, database, mongo, app)
        self._options = options
        self._stack = AsyncExitStack()
        self._runner = asyncio.Runner()
        self._log = _Resorts()
        self.tasks = SyncStore(mongo, database).tasks
        self.registry = SyncStore(mongo, database).collections["workers"]
        self.bench: Bench

    def __enter__(self) -> Lab:
        logging.getLogger("mtask").addHandler(self._log)
        self._runner.get_loop().set_exception_handler(self._log.unhandled)
        self.bench = self._runner.run(self._stack.enter_async_context(working_on(*self._given, **self._options)))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(Exception) if self.bench.life.done() else nullcontext():
                self._runner.run(self._stack.aclose())
        finally:
            self._runner.close()
            logging.getLogger("mtask").removeHandler(self._log)

    def run(self, example: Coroutine[Any, Any, T]) -> T:
        """Run one example in the worker's loop; fail if the worker did not get over it."""
        self._log.seen.clear()
        try:
            done = self._runner.run(example)
        finally:
            self.assert_well()
        return done

    def assert_well(self) -> None:
        """Fail if the worker has ended, or a last resort had to keep it alive."""
        life = self.bench.life
        assert not life.done(), f"the worker ended: {life.exception() if not life.cancelled() else 'cancelled'!r}"
        assert not self._log.seen, "\n".join(self._log.seen)

    def insert(self, documents: Sequence[Document]) -> list[Document]:
        """Write these past every validation; return what is stored, without those that the server cannot hold."""
        held = []
        for document in documents:
            with suppress(WriteError, *NOT_STORABLE):
                document.setdefault("_id", ObjectId())
                self.tasks.with_options(write_concern=WriteConcern(w=1)).insert_one(
                    document, bypass_document_validation=True
                )
                held.append(bson.decode(bson.encode(document, codec_options=CODEC), CODEC))
        return held

    def find(self, document_id: Any) -> Document | None:
        """Return a task's document as the engine reads it."""
        return self.tasks.find_one({"_id": {"$eq": document_id}})

    def scan(self) -> None:
        """Let the worker scan at once, as it does every few seconds."""
        self.bench.worker.parts.scans.ask_full()


class _Resorts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take down what should not have come to this."""
        told = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None and "handler failed" not in told:
            told += " " + "".join(traceback.format_exception(record.exc_info[1]))
        if any(sign in told for sign in _LAST_RESORTS):
            self.seen.append(told)

    def unhandled(self, _: Any, context: dict[str, Any]) -> None:
        """Take down what a callback of the loop raised."""
        error = context.get("exception")
        self.seen.append(f"{context['message']} {''.join(traceback.format_exception(error)) if error else ''}")
