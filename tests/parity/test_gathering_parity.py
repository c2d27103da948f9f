"""A publish call that gathers changes a task as the pure rules say. What follows a round is derived rightly."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

import bson
from hypothesis import HealthCheck, given, settings

from mtask.features.gathering import statements as gathering
from mtask.features.gathering.publish import asked_time
from mtask.features.gathering.statements import SentCall
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.statements import claim as pipelines
from mtask.kernel.statements import derive
from tests.oracles import gathering as rules
from tests.parity import changes
from tests.parity.cases import (
    NOW,
    SCALE,
    Document,
    bare,
    gathers,
    many,
    mark,
    numbered,
    option,
    parsed,
    randoms,
    task,
)
from tests.parity.stored import inserted, stored_after

_properties = settings(max_examples=15 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
_VALUES: list[Any] = [None, 1, "$name", {"$add": [1, 2]}, [{"$literal": 1}]]


def gathering_task(random: Random) -> Document:
    document = task(random)
    return gathers(random, document) if "flow" not in document else document


def call(random: Random) -> rules.Call:
    debounce = random.choice([None, 0, 1000, 70_000])
    start = NOW + timedelta(milliseconds=random.choice([-1000, 0, 5000]))
    return rules.Call(
        **mark(random),
        kind=random.choice(["latest", "calls"]),
        params=random.choice(_VALUES),
        queue=random.choice(["default", "$other"]),
        task_option=option(random),
        lookup=random.choice([None, [{"k": "user_id", "v": 1}]]),
        start_time=None if debounce is not None else random.choice([None, start]),
        debounce_ms=debounce,
        max_wait_ms=None if debounce is None else random.choice([None, 0, 80_000]),
        is_own_id=random.random() < 0.5,
    )


def sent(call: rules.Call) -> SentCall:
    content = {"params": call.params, "queue": call.queue, "task_option": dict(call.task_option)}
    if call.lookup is not None:
        content["lookup"] = list(call.lookup)
    waits = (call.debounce_ms, call.max_wait_ms)
    return SentCall(call.asked_time, call.call_id, call.kind, content, call.start_time, *waits, call.is_own_id)


def size_with(document: Document, call: rules.Call) -> int:
    base = rules.base_round(parsed(document), NOW)
    former = base.params.get("calls", []) if base is not None and isinstance(base.params, dict) else []
    return len(bson.encode({"calls": [*former, call.params]}))


def settled(store: SyncStore, documents: list[Document]) -> list[Document]:
    return stored_after(store, documents, pipelines.settle(NOW))


@_properties
@given(many(gathering_task, 40).map(numbered), randoms())
def test_a_call_joins_the_round_that_the_rules_say(store: SyncStore, documents: list[Document], random: Random) -> None:
    before = settled(store, documents)
    made = call(random)
    stage = gathering.add(sent(made), NOW)
    stored = stored_after(store, before, stage)
    for former, after in zip(before, stored, strict=True):
        expected = changes.added(former, changes.gather(made, size_with(former, made)), NOW)
        assert bare(after) == bare(expected)
    # The derived fields are those that every other change would derive.
    assert stored_after(store, stored, derive.derive(NOW)) == stored
    # The short stages make the same change, where their guard matches.
    with inserted(store, before) as ids:
        short = {task_id for task_id in ids if store.tasks.find_one(gathering.untouched(task_id))}
    alike = [(former, after) for former, after in zip(before, stored, strict=True) if former["_id"] in short]
    if alike:
        shortly = stored_after(store, [former for former, _ in alike], gathering.add_untouched(sent(made), NOW))
        assert list(map(bare, shortly)) == [bare(after) for _, after in alike]
    # A call that is sent twice counts once.
    assert stored_after(store, stored, stage) == stored


@_properties
@given(many(gathering_task, 40).map(numbered), randoms())
def test_a_call_opens_what_ended_beside_a_run_as_the_rules_say(
    store: SyncStore, documents: list[Document], random: Random
) -> None:
    made = call(random)
    stages = [*derive.close_lapsed(NOW), gathering.reopen(sent(made), NOW), *derive.derive(NOW)]
    for former, after in zip(documents, stored_after(store, documents, stages), strict=True):
        assert bare(after) == bare(changes.changed(former, changes.reopen(made), NOW))


@_properties
@given(many(gathering_task, 40).map(numbered))
def test_the_document_tells_the_newest_call(store: SyncStore, documents: list[Document]) -> None:
    with inserted(store, documents) as ids:
        projected = {"last": gathering.last_asked_time(), "asked": gathering.asked_time(NOW)}
        rows = {row["_id"]: row for row in store.tasks.find({"_id": {"$in": ids}}, projected)}
    for document in documents:
        task = parsed(document)
        known = [
            gather.newest.asked_time
            for gather in (task.gather, task.again.gather if task.again else None)
            if gather is not None and gather.newest is not None
        ]
        row = rows[document["_id"]]
        assert row["last"] == max(known, default=None)
        assert row["asked"] == asked_time(NOW, max(known, default=None))
