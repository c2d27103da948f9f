"""Documents that hold arrays where a text, a number, an instant or an object belongs: no reader stumbles over them.

A condition by field matches values inside arrays, so such documents are found beside those that are sound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, combinations, product
from typing import Any

import pytest
from pymongo.errors import BulkWriteError

from mtask import Client
from mtask.doctor import operations as diagnosis
from mtask.errors import FlowWaitTimeout
from mtask.features.flows import retention
from mtask.kernel.driver.stores import SyncStore
from tests import build
from tests.integration import stores
from tests.mongo import Client as Mongo
from tests.mongo import Document

# An index of a collection that has held arrays is one of arrays for good.
pytestmark = pytest.mark.fresh_database
_EARLIER = build.PAST - timedelta(days=1)
_FLOW: Document = {"key": "f", "step": "first", "after": [], "on_failed": "cancel", "head": "f", "end_time": None}
_STEP: Document = {
    "key": "f",
    "step": "second",
    "after": ["right:f/first"],
    "on_failed": "cancel",
    "held_by": "right:f/first",
}
#: What tasks look like before some of their fields become arrays.
_KINDS: dict[str, Document] = {
    "due": build.task("noop:due", option={"priority": 9}, tenant="acme"),
    "running": build.task("noop:running", build.run(), option={"priority": 9}, state={"status": "RUNNING"}),
    "ended": build.task(
        "noop:ended",
        build.run("SUCCESS", success_time=build.PAST),
        state={"status": "SUCCESS", "finish_time": build.PAST, "next_preempt_time": build.PAST},
        tenant="acme",
    ),
    "first": build.task("noop:first", flow=_FLOW),
    "second": build.task("noop:second", state={"status": "WAITING"}, flow=_STEP),
}
_FIELDS = ("queue", "name", "tenant", "task_option", "task_state", "task_state.status", "flow")
_FURTHER = (
    *("key", "task_option.priority", "task_state.create_time", "task_state.next_preempt_time"),
    *("task_state.finish_time", "task_state.worker_states.0", "task_state.worker_states.0.worker_id"),
    *("flow.key", "flow.head", "flow.held_by", "flow.after", "flow.end_time"),
)


def _wrap(document: Document, path: str) -> bool:
    """Put a field into an array; return whether the document has it."""
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    node: Any = document
    try:
        for part in parents:
            node = node[part]
        node[last] = [node[last]]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _malformed() -> Iterator[Document]:
    for kind, sound in _KINDS.items():
        for number, paths in enumerate(chain(combinations(_FIELDS, 1), combinations(_FIELDS, 2), zip(_FURTHER))):
            for is_final in (False, True):  # without a next_preempt_time, a task is in fewer indexes
                document = build.changed(sound, {"_id": f"noop:{kind}-{number}-{is_final}"})
                if is_final:
                    del document["task_state"]["next_preempt_time"]
                if kind == "first":
                    document["flow"]["head"] = document["_id"]  # no two tasks have one there
                # The inner one first: an array of an object has no fields by name.
                if all(_wrap(document, path) for path in sorted(paths, key=len, reverse=True)):
                    yield document


@pytest.fixture
def store(mongo: Mongo, database_name: str) -> SyncStore:
    """A database with many malformed documents, and a few sound ones, which are due earlier."""
    store = stores.ready_store(mongo, database_name)
    sound = [
        build.task("right:acme:due", time=_EARLIER, tenant="acme"),
        build.task("right:f/first", time=_EARLIER, flow=_FLOW),
        build.task("right:f/second", time=_EARLIER, state={"status": "WAITING"}, flow=_STEP),
        build.task("right:ended", time=_EARLIER, state={"status": "SUCCESS", "finish_time": build.PAST}),
    ]
    for ended in sound[2:]:
        del ended["task_state"]["next_preempt_time"]
    tasks = store.tasks
    tasks.insert_many(sound)
    with suppress(BulkWriteError):  # an index takes no two arrays
        tasks.insert_many(_malformed(), ordered=False, bypass_document_validation=True)
    assert tasks.count_documents({}) > 100
    for pair in (["queue", "name"], ["queue", "task_state.status"]):  # those by which the server cannot sort
        assert tasks.count_documents({path: {"$type": "array"} for path in pair})
    return store


@pytest.mark.parametrize("most", [None, 10_000])
@pytest.mark.parametrize("tenant", [None, "acme"])
def test_statistics_leave_them_out(store: SyncStore, reader: Client, most: int | None, tenant: str | None) -> None:
    client = reader if tenant is None else reader.for_tenant(tenant)
    rows = client.stats(most=most)
    counted = {(row.queue, row.name, row.status): row.count for row in rows}
    assert list(counted) == sorted(counted)
    assert counted["default", "right", "INIT"] == (2 if tenant is None else 1)
    assert all(isinstance(part, str) for row in counted for part in row)


def test_queues_are_counted_beside_them(store: SyncStore, reader: Client) -> None:
    [row] = reader.queues()
    assert row.queue == "default"
    assert row.oldest_preempt_time == _EARLIER
    assert not row.is_oldest_rough
    assert reader.metrics()


@pytest.mark.parametrize("is_fair", [False, True])
def test_positions_are_told_beside_them(store: SyncStore, reader: Client, is_fair: bool) -> None:
    if is_fair:
        reader.set_fair("default", True)
    found = reader.position("right", "acme:due")
    assert found.ahead is not None
    assert (found.tenants_ahead is not None) <= is_fair
    [reason] = reader.position("right", "f/second").reasons
    assert "right:f/first" in reason.message


def test_flows_are_read_beside_them(store: SyncStore, reader: Client) -> None:
    rows = {row.key: row for row in reader.flows(limit=0)}
    assert all(isinstance(key, str) for key in rows)
    row = rows["f"]
    assert row.head == "right:f/first"
    assert row.counts["WAITING"] >= 1
    assert {"right:f/first", "right:f/second"} <= {step.task_id for step in reader.flow("f").steps}
    with pytest.raises(FlowWaitTimeout):
        reader.wait_flow("f", timeout=0.01)


def test_flow_is_opened_again_beside_a_malformed_first_step(store: SyncStore) -> None:
    store.tasks.delete_one({"_id": "right:f/first"})
    malformed = build.task("noop:first", flow=[_FLOW])
    store.tasks.insert_one(malformed, bypass_document_validation=True)
    store.run(retention.revive(["f"]))
    assert store.tasks.find_one({"_id": "noop:first"}) == malformed


#: The sound tasks, each with its status.
_SOUND = {"right:acme:due": "INIT", "right:f/first": "INIT", "right:f/second": "WAITING", "right:ended": "SUCCESS"}


_STATUSES = (None, ["INIT"], ["WAITING"], ["SUCCESS"], ["INIT", "RUNNING"], ["SUCCESS", "FAIL"])
_CRITERIA: Sequence[Document] = ({}, {"queue": "default"}, {"name": "right"}, {"key_prefix": "f"})


def test_lists_and_counts_hold_what_is_sound(store: SyncStore, reader: Client) -> None:
    for statuses, criteria in product(_STATUSES, _CRITERIA):
        prefix = f"right:{criteria.get('key_prefix', '')}"
        known = {task_id: status for task_id, status in _SOUND.items() if task_id.startswith(prefix)}
        expected = {task_id for task_id, status in known.items() if statuses is None or status in statuses}
        found: set[str] = set()
        cursor = None
        while True:
            page = reader.find_page(limit=7, cursor=cursor, status=statuses, **criteria)
            found |= {task.id for task in page.tasks}
            cursor = page.next_cursor
            if cursor is None:
                break
        assert found & _SOUND.keys() == expected
        assert reader.count_up_to(status=statuses, **criteria).count >= len(expected)
        if "key_prefix" not in criteria:
            assert {task.id for task in reader.find(limit=0, status=statuses, **criteria)} & _SOUND.keys() == expected
    assert "right:acme:due" in {task.id for task in reader.for_tenant("acme").find_page(limit=500).tasks}


def test_doctor_looks_at_all_of_them(store: SyncStore, reader: Client) -> None:
    assert "documents" in {finding.check for finding in reader.diagnose()}
    assert store.run(diagnosis.held_by(["w1"]))["w1"] >= 1
    groups = [finding.fields for finding in reader.diagnose() if finding.check == "due tasks"]
    assert {("default", "right"), ("default", "noop")} >= {(each["queue"], each["name"]) for each in groups}
