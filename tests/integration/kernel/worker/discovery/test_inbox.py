"""Hints of scans: the tasks of a scan are queued together exactly as each of them is queued alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import pytest
from bson import Code, Int64

from mtask import App
from mtask.kernel.worker.discovery.inbox import Inbox
from tests.integration.worker_harness import Working

Document = dict[str, Any]
_PAST = datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None)
_BEGUN = "RUNNING"
_OF_ENTRY = ("name", "priority", "due", "rank", "is_begun", "is_simple", "queue", "tenant", "lane")


def hint(key: str, name: str = "noop", **changed: Any) -> Document:
    """Return a document as a scan reads it."""
    state = {"status": changed.pop("status", "INIT"), "next_preempt_time": changed.pop("moment", _PAST)}
    option = {"priority": changed.pop("priority", 0)}
    made = {"_id": f"{name}:{key}", "name": name, "queue": "default", "task_option": option, "task_state": state}
    return made | changed


def without(document: Document, *path: str) -> Document:
    """Return the document without the field at this path."""
    made = deepcopy(document)
    inner = made
    for field in path[:-1]:
        inner = inner[field]
    del inner[path[-1]]
    return made


def all_kinds(now: datetime) -> list[Document]:
    """Return documents of all kinds: such as are queued, looked at later, or examined."""
    later = now + timedelta(minutes=1)
    return [
        *(hint(f"plain-{number}") for number in range(4)),
        *(hint(f"high-{number}", priority=5) for number in range(2)),
        *(hint(f"of-acme-{number}", tenant="acme") for number in range(2)),
        *(hint(f"of-paused-{number}", tenant="paused") for number in range(2)),
        *(hint(f"other-{number}", name="other") for number in range(2)),
        *(hint(f"unserved-{number}", name="unserved") for number in range(2)),
        *(hint(f"stopped-{number}", name="stopped") for number in range(2)),
        hint("elsewhere", queue="elsewhere"),
        hint("later", moment=later),
        hint("begun", status=_BEGUN),
        hint("begun-later", status=_BEGUN, moment=later),
        hint("left-alone"),
        hint("claiming"),
        hint("held"),
        hint("heard"),
        hint("claimed"),
        hint("claimed-long-ago"),
        hint("sealed", sealed="key-1"),
        hint("one", priority=1),
        hint("true", priority=True),
        hint("seven", priority=7),
        hint("float", priority=0.0),
        hint("half", priority=0.5),
        hint("large", priority=Int64(7)),
        hint("text", priority="high"),
        hint("code", name="noop", queue=Code("default")),
        hint("list", queue=["default"]),
        hint("tenants", tenant=["acme"]),
        hint("text-moment", moment="soon"),
        hint("no-moment", moment=None),
        hint("statuses", status=["INIT"]),
        {**hint("wrong-id"), "_id": "other:wrong-id"},
        {**hint("longer-id"), "_id": "noop2:longer-id"},
        {**hint("number"), "_id": 5},
        {**hint("code-id"), "_id": Code("noop:code-id")},
        {**hint("listed-name"), "name": ["noop"]},
        {**hint("options"), "task_option": [1]},
        {**hint("state"), "task_state": "INIT"},
        without(hint("no-queue"), "queue"),
        without(hint("no-name"), "name"),
        without(hint("no-priority"), "task_option", "priority"),
        without(hint("no-status"), "task_state", "status"),
        without(hint("no-time"), "task_state", "next_preempt_time"),
    ]


@pytest.fixture
def app() -> App:
    made = App()
    for name in ("noop", "other", "stopped"):
        made.task(name=name)(lambda: None)
    return made


def outcome(inbox: Any, push: Callable[[list[Document]], None], documents: Iterable[Document]) -> Mapping[str, Any]:
    """Push these documents into the empty inbox; return all that comes of it, and empty the inbox again."""
    push(list(documents))
    queue, questions, ledger = inbox._queue, inbox._questions, inbox._ledger
    found = {
        "queued": {
            task_id: [getattr(entry, field) for field in _OF_ENTRY] for task_id, entry in queue._entries.items()
        },
        "looked at later": dict(questions.due._times),
        "suspect": dict(questions.suspects),
        "doubted": [task_id for task_id, _ in questions.doubted],
        "missed": dict(questions._missed),
        "unserved": set(ledger.unserved_names),
    }
    for task_id in list(queue._entries):
        queue.discard(task_id)
    for task_id in list(questions.due._times):
        questions.due.discard(task_id)
    questions.suspects.clear()
    questions.doubted.clear()
    questions._missed.clear()
    ledger.unserved_names.clear()
    return found


async def test_tasks_of_a_scan_are_queued_together_as_each_is_alone(working: Working, app: App) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    async with working(app) as bench:
        parts = bench.worker.parts
        inbox: Inbox = parts.inbox
        # From here to the end nothing is awaited: no part of the worker acts in between.
        ledger, sent = parts.scope.ledger, monotonic()
        kinds = all_kinds(datetime.now(UTC).replace(tzinfo=None))
        parts.quarantine.leave_alone("noop:left-alone")
        ledger.claiming.add("noop:claiming")
        ledger._held["noop:held"] = object()  # type: ignore[assignment]
        ledger.claimed("noop:claimed-long-ago", sent - 1)
        ledger.claimed("noop:claimed", sent + 1)
        ledger._heard["noop:heard"] = sent + 1
        parts.scope.served.paused_names = frozenset({"stopped"})
        parts.scope.served.paused_tenants = frozenset({"paused"})

        def alone(documents: list[Document]) -> None:
            for document in documents:
                try:
                    inbox._push_found(document, sent)
                except Exception as error:
                    inbox._questions.cannot_take(document["_id"], error)

        for _ in range(300):
            documents = draw.sample(kinds, draw.randint(2, len(kinds)))
            expected = outcome(inbox, alone, documents)
            found = outcome(inbox, lambda given: inbox.push_all_found(given, sent), documents)
            assert found == expected, f"seed {seed}: {[document['_id'] for document in documents]}"
        everything = outcome(inbox, lambda given: inbox.push_all_found(given, sent), kinds)
        assert {"noop:plain-0", "noop:plain-3", "noop:high-1", "noop:of-acme-1", "other:other-1"} <= set(
            everything["queued"]
        )
        # The first of its kind is older than what this worker knows, and only the second one is queued.
        parts.claimer._wake.clear()
        inbox.push_all_found([hint("claimed"), hint("plain-0")], sent)
        assert "noop:plain-0" in parts.queue
        assert parts.claimer._wake.is_set()
        parts.queue.discard("noop:plain-0")
        del ledger._held["noop:held"]
        ledger.claiming.clear()


async def test_tasks_of_a_share_are_queued_with_the_ranks_that_they_have_alone(working: Working, app: App) -> None:
    def other(worker_id: str, names: list[str], queue: str) -> Document:
        return {"_id": worker_id, "names": names, "queues": [queue], "concurrency": 1, "appeal_cnt": 0}

    async with working(app) as bench:
        parts = bench.worker.parts
        # `other` is served in other queues, too: its tasks cannot be divided, so a share holds all of them.
        parts.ranks._peers.update([other("w2", ["noop"], "default"), other("w3", ["other"], "elsewhere")])
        ledger, sent = parts.scope.ledger, monotonic()
        drawn = [hint(f"{number}", name=name) for name in ("noop", "other") for number in range(50)]
        share = [task for task in drawn if task["name"] == "other" or not parts.ranks.rank(task["_id"], "noop")]
        ledger.claimed(share[0]["_id"], sent - 1)

        def alone(documents: list[Document]) -> None:
            for document in documents:
                parts.inbox._push_found(document, sent)

        def together(documents: list[Document]) -> None:
            parts.inbox.push_all_found(documents, sent, are_in_share=True)

        expected = outcome(parts.inbox, alone, share)
        assert {entry[_OF_ENTRY.index("rank")] for entry in expected["queued"].values()} == {0, 1, 3}
        assert outcome(parts.inbox, together, share) == expected
        # The first of a name is queued as if it were alone.
        assert outcome(parts.inbox, together, [*share[1:], share[0]]) == outcome(parts.inbox, alone, share)
