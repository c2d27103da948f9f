"""A flood of malformed documents past the validator, with good tasks among them and two worker processes beside.

`python -m tests.faults.malformed_flood --documents 10000 --good 1000`. Exit code 0: both workers live, all good tasks
are done, and each malformed document is FAIL with a reason or named by `mtask doctor`; 1: not so.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bson
from pymongo import MongoClient, WriteConcern
from pymongo.errors import WriteError

from mtask import App
from mtask.client.sync import Client as MtaskClient
from mtask.kernel.document.status import FINAL_STATUSES
from mtask.kernel.driver.errors import NOT_STORABLE
from mtask.kernel.driver.stores import READING, SyncStore
from mtask.kernel.worker.discovery.quarantine import malformation
from mtask.local import temporary
from tests.faults import changing
from tests.faults.changing import Chance
from tests.faults.fuzzing import LAST_RESORTS
from tests.faults.malformed import good
from tests.mongo import Client, Document
from tests.workers import WorkerProcess

app = App()
WORKERS = ("w1", "w2")
#: How long the workers may take for all of it, in seconds for each document, and at least: it is asserted what, not
#: how fast.
_PATIENCE, _LEAST_PATIENCE = 0.06, 120.0


@app.task
def noop() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Result:
    """What became of the flood."""

    documents: int
    good: int
    seconds: float = 0.0
    refused: int = 0  #: by the server itself, and replaced by others
    harmless: int = 0  #: changed, and still well-formed
    failed: int = 0  #: malformed, and FAIL with the reason
    #: Malformed, and only named by the doctor; by why no worker has marked them.
    named: Counter[str] = field(default_factory=Counter)
    mended: int = 0  #: only what is derived was wrong, and it was derived anew
    removed: int = 0  #: by their own expire_time, or retention
    #: What should not be.
    lost: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  #: what a last resort logged

    @property
    def is_clean(self) -> bool:
        """Whether all is as promised."""
        return not (self.lost or self.unfinished or self.dead or self.failures)

    def describe(self) -> str:
        """Return the figures, one a line."""
        named = ", ".join(f"{why}: {count}" for why, count in self.named.most_common())
        lines = [
            f"{self.documents} changed documents, {self.good} good tasks among them, in {self.seconds:.0f} s",
            f"malformed and FAIL with a reason: {self.failed}",
            f"malformed and named by the doctor alone: {self.named.total()} ({named})",
            f"changed and still well-formed: {self.harmless}; derived anew, and well-formed by that: {self.mended}; "
            f"removed by their own expire_time or retention: {self.removed}",
            f"refused by the server, and replaced: {self.refused}",
            *(f"NOT MARKED, NOT NAMED: {told}" for told in self.lost[:20]),
            *(f"NOT DONE: {told}" for told in self.unfinished[:20]),
            *(f"DEAD: {told}" for told in self.dead),
            *(f"LAST RESORT: {told}" for told in self.failures[:5]),
            "CLEAN" if self.is_clean else "NOT CLEAN",
        ]
        return "\n".join(lines)


def documents(seed: int) -> Iterator[Document]:
    """Yield changed documents without end."""
    choice, number = Chance(seed), 0
    while True:
        number += 1
        key = f"bad-{number}"
        if number % 10 == 0:
            yield changing.anything(choice, key)
            continue
        document = changing.in_state(key, *choice.of(changing.STATES))
        for _ in range(choice.of([1, 1, 1, 2, 3, 5])):
            changing.change(choice, document)
        yield document


class Flood:
    """One flood over one database."""

    def __init__(self, uri: str, mongo: Client, database: str, folder: Path) -> None:
        self._uri, self._database, self._folder = uri, database, folder
        store = SyncStore(mongo, database)
        self._tasks = store.tasks.with_options(codec_options=READING, write_concern=WriteConcern(w=1))
        self._writing = store.tasks.with_options(write_concern=WriteConcern(w=1))
        self._registry = store.collections["workers"]
        self._client = MtaskClient(uri, database=database)
        self._held: list[Document] = []

    def run(self, count: int, good_cnt: int, seed: int) -> Result:
        """Write half of it before the workers start, and half under their eyes; return what became of all."""
        result, began = Result(count, good_cnt), time.monotonic()
        self._client.init()
        flow = self._flow(documents(seed), count, good_cnt, random.Random(seed), result)
        for _, _ in zip(range((count + good_cnt) // 2), flow, strict=False):
            pass
        with self._workers() as workers:
            for _ in flow:
                pass
            self._wait(result, workers)
            result.seconds = time.monotonic() - began
            result.dead = [f"{worker.worker_id}: {worker.log[-2000:]}" for worker in workers if not worker.is_alive]
            for worker in workers:
                lines = worker.log.splitlines()
                result.failures += [line for line in lines if any(sign in line for sign in LAST_RESORTS)]
        self._client.close()
        return result

    def _flow(
        self, changed: Iterator[Document], count: int, good_cnt: int, chance: random.Random, result: Result
    ) -> Iterator[None]:
        order = ["bad"] * count + ["good"] * good_cnt
        chance.shuffle(order)
        for place, kind in enumerate(order):
            if kind == "good":
                self._writing.insert_one(good(f"good-{place}"))
            else:
                self._insert(changed, result)
            yield

    def _insert(self, changed: Iterator[Document], result: Result) -> None:
        """Write the next changed document that the server takes."""
        for document in changed:
            try:
                self._writing.insert_one(document, bypass_document_validation=True)
            except (WriteError, *NOT_STORABLE):
                result.refused += 1
                continue
            self._held.append(bson.decode(bson.encode(document, codec_options=self._writing.codec_options), READING))
            return

    @contextmanager
    def _workers(self) -> Iterator[list[WorkerProcess]]:
        started = [
            WorkerProcess(self._uri, self._database, name, folder=self._folder, app="tests.faults.malformed_flood:app")
            for name in WORKERS
        ]
        try:
            yield started
        finally:
            for worker in started:
                worker.reap()

    def _wait(self, result: Result, workers: Sequence[WorkerProcess]) -> None:
        """Wait until nothing is left to be done, or for too long."""
        end = time.monotonic() + max(_LEAST_PATIENCE, _PATIENCE * (result.documents + result.good))
        left = self._held
        while all(worker.is_alive for worker in workers):
            # What is marked stays marked: only the rest is looked at again.
            left = self._judge(left, result)
            result.unfinished = self._unfinished()
            is_over = time.monotonic() > end
            # What is in the workers' reach is waited for, whatever the doctor says meanwhile.
            if is_over or not (result.unfinished or any(self._why_left(document) == IN_REACH for document in left)):
                named = self._named()
                unnamed = [document for document in left if str(document["_id"]) not in named]
                if is_over or not unnamed:
                    result.lost = [self._told(document) for document in unnamed]
                    result.named = Counter(self._why_left(document) for document in left if document not in unnamed)
                    return
            time.sleep(2.0)

    def _unfinished(self) -> list[str]:
        left = {"key": {"$regex": "^good-"}, "name": "noop", "task_state.status": {"$ne": "SUCCESS"}}
        return [str(found["_id"]) for found in self._tasks.find(left, {"_id": 1})]

    def _judge(self, held: Sequence[Document], result: Result) -> list[Document]:
        """Count what is done with; return what is not."""
        left = []
        for before in held:
            after = self._tasks.find_one({"_id": {"$eq": before["_id"]}})
            if malformation(before) is None:
                result.harmless += 1
            elif after is None and _may_expire(before):
                result.removed += 1
            elif after is not None and malformation(after) is None:
                result.mended += 1
            elif after is not None and _is_marked(after):
                result.failed += 1
            else:
                left.append(before)
        return left

    def _named(self) -> set[str]:
        named: set[str] = set()
        for finding in self._client.diagnose():
            for ids in ("task_ids", "marked_ids"):
                named.update(finding.fields.get(ids, ()))
        return named

    def _why_left(self, before: Document) -> str:
        """Say why no worker had to mark it as it was, or has to as it is: another's live run may hold it by now."""
        after = self._tasks.find_one({"_id": {"$eq": before["_id"]}})
        return next((why for why in (_why(before), _why(after or before)) if why != IN_REACH), IN_REACH)

    def _told(self, before: Document) -> str:
        after = self._tasks.find_one({"_id": {"$eq": before["_id"]}})
        state = after.get("task_state") if after else None
        return f"{before['_id']!r:.80}: {malformation(before)!s:.200}; {_why(before)}; it became {state!r:.300}"


IN_REACH = "in reach of the workers"


def _may_expire(before: Document) -> bool:
    """Whether the document, or its FAIL, is removed by its own word."""
    option = before.get("task_option")
    return "expire_time" in before or (isinstance(option, dict) and option.get("retain_fail_ms") is not None)


def _is_marked(document: Document) -> bool:
    state = document.get("task_state")
    runs = state.get("worker_states") if isinstance(state, dict) else None
    last = runs[-1] if isinstance(runs, list) and runs else None
    is_fail = isinstance(state, dict) and state.get("status") == "FAIL" and "next_preempt_time" not in state
    return is_fail and isinstance(last, dict) and bool(last.get("fail_reason"))


def _why(document: Document) -> str:
    """Say why no worker has to meet this document."""
    state, option = document.get("task_state"), document.get("task_option")
    if not isinstance(state, dict):
        return "without a state" if isinstance(state, list) else IN_REACH
    status = state.get("status")
    if any(of in [*FINAL_STATUSES] for of in (status if isinstance(status, list) else [status])):
        return "already final"
    if isinstance(option, list):
        return "with options in a list"  # no batch query looks into it; the stream tells of it
    due = state.get("next_preempt_time")
    if isinstance(due, datetime) and due > datetime.now(UTC):
        return "not yet due"
    if document.get("queue", "default") not in ("default", None, ["default"]):
        return "in no queue of theirs"
    if document.get("name", "noop") not in ("noop", None, ["noop"]):
        return "under no name of theirs"
    named = option.get("specific_worker_ids") if isinstance(option, dict) else None
    if named not in ([], None) and not any(worker in str(named) for worker in WORKERS):
        return "for other workers"
    return IN_REACH


def main(given: Sequence[str] | None = None) -> int:
    """Run it on a server of its own, and tell the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000, help="changed documents [10000]")
    parser.add_argument("--good", type=int, default=1_000, help="good tasks among them [1000]")
    parser.add_argument("--seed", type=int, default=1, help="repeats an earlier flood [1]")
    arguments = parser.parse_args(given)
    with temporary() as server, tempfile.TemporaryDirectory() as folder:
        mongo: MongoClient[dict[str, Any]] = MongoClient(server.uri, tz_aware=True)
        try:
            flood = Flood(server.uri, mongo, "flood", Path(folder))
            result = flood.run(arguments.documents, arguments.good, arguments.seed)
        finally:
            mongo.close()
    print(result.describe())
    return 0 if result.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
