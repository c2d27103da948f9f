"""What a fan-in costs the server: documents examined and statements for each task that ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta

import pytest
from pymongo import MongoClient

from benchmarks.cases.flows import CHILDREN, LISTED, documents
from benchmarks.measuring.counters import Counters
from mtask.features.flows import settle as settling
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from mtask.local import ReplicaSet
from tests.integration import stores
from tests.mongo import Client

TASKS, GROUP = 2_000, 100
#: The mark is read, and removed: 2. The step that waits looks about ln n times. A look reads, of children, those that
#: are still open: all, then about half of them, and so on. Of a list of dependencies, it reads all of them.
MAX_EXAMINED = {CHILDREN: 6.0, LISTED: 10.0}
#: For each group: read the marks, look for what the tasks hold, remove the marks. The rest is for looks and moves.
MAX_ROUND_TRIPS = 6.0
MAX_LOOKS = 40


def counted(server: Client) -> Counters:
    return Counters.of(server.admin.command("serverStatus"))


@pytest.mark.parametrize("side", [CHILDREN, LISTED])
def test_a_fan_in_examines_a_bounded_number_of_documents_for_each_task(single_set: ReplicaSet, side: str) -> None:
    random.seed(17)  # the choice of the next dependency that holds the step
    server: Client = MongoClient(single_set.uri, tz_aware=True, serverMonitoringMode="poll", heartbeatFrequencyMS=10**7)
    with server:
        store = stores.ready_store(server, "costs")
        now = server.admin.command("hello")["localTime"]
        made = list(documents(side, TASKS, now, timedelta(0)))
        store.tasks.insert_many(made)
        task_ids = [document["_id"] for document in made[:TASKS]]
        random.shuffle(task_ids)
        used = Counters()
        for place in range(0, TASKS, GROUP):
            group = task_ids[place : place + GROUP]
            finish(store, group)
            before = counted(server)
            store.run(settling.settle_all(group))
            used += counted(server) - before
        assert store.tasks.count_documents({"owed_since": {"$exists": True}}) == 0
        last = store.tasks.find_one({"_id": "noop:fan-in/last"})
        assert last is not None
        assert last["task_state"]["status"] == "INIT"
        largest = max(server["costs"]["tasks"].aggregate([{"$project": {"n": {"$bsonSize": "$$ROOT"}}}]), key=size)
    assert used.docs_examined < MAX_EXAMINED[side] * TASKS
    assert used.requests < MAX_ROUND_TRIPS * TASKS / GROUP + MAX_LOOKS
    if side == CHILDREN:
        assert largest["n"] < 16 * 1024


def size(document: dict[str, int]) -> int:
    return document["n"]


def finish(store: SyncStore, task_ids: Sequence[str]) -> None:
    """Claim these tasks and end them, as a worker does that dies right afterwards."""
    claimed = store.run(claims.claim(task_ids, "w", f"token-{task_ids[0]}", are_simple=True))
    outcomes = [
        Outcome(document["_id"], document["task_state"]["worker_states"][-1]["run_id"], RunStatus.SUCCESS)
        for document in claimed
    ]
    assert len(store.run(claims.finish(outcomes, is_simple=True, has_steps=True))) == len(task_ids)
