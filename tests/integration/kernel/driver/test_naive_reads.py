"""Reads without time zones: what they leave open, and what handlers see of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from bson.binary import Binary

from mtask import App, Context, TaskSpec
from mtask.kernel.driver.operation import Operation, tasks
from mtask.kernel.driver.stores import SyncStore
from tests.integration.worker_harness import Working
from tests.mongo import until

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def test_document_that_looks_like_a_reference_is_a_document(store: SyncStore) -> None:
    store.database.get_collection("tasks").insert_one(
        {"_id": "task:odd", "$ref": "tasks", "$id": 1, "at": NOON}, bypass_document_validation=True
    )
    (found,) = store.run(_read("task:odd"))
    assert found == {"_id": "task:odd", "$ref": "tasks", "$id": 1, "at": NOON.replace(tzinfo=None)}


def test_value_that_the_codec_cannot_read_is_read_without_time_zones_too(store: SyncStore) -> None:
    broken = {"_id": "task:broken", "id": Binary(b"12345", 4), "at": NOON}
    store.database.get_collection("tasks").insert_one(broken, bypass_document_validation=True)
    (found,) = store.run(_read("task:broken"))
    assert found["at"] == NOON.replace(tzinfo=None)
    assert bytes(found["id"]) == b"12345"


async def test_handlers_of_a_group_see_dates_with_time_zones_at_any_depth(working: Working) -> None:
    app, seen = App(), []
    given = {"at": NOON, "list": [NOON, {"in": {"it": [[NOON]]}}]}

    @app.task
    async def work(context: Context, at: Any, list: Any) -> None:  # noqa: A002
        task = context.task
        state, (run,) = task.task_state, task.runs
        dates = [state.create_time, state.next_preempt_time, run.claim_time, run.ping_expire_time]
        seen.append(({"at": at, "list": list}, task.params, [date.tzinfo for date in dates if date is not None]))

    async with working(app, concurrency=0) as bench:
        await bench.client.publish_many([TaskSpec("work", given, key=str(number)) for number in range(20)])
        bench.worker.parts.slots.set_concurrency(20)
        await until(lambda: bench.count("SUCCESS") == 20, message="all done")
    assert seen == [(given, given, [UTC] * 4)] * 20
    assert {repr(entry[0]) for entry in seen} == {repr(given)}


def _read(task_id: str) -> Operation[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = yield tasks("find_naive", {"_id": task_id})
    return found
