"""Events as clients read them: what was asked for, each once, and from any token on; by every kind of client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from typing import Any, Literal

import pytest

from mtask import AsyncClient, Client, RunStatus
from mtask.database import setup
from mtask.errors import EventsLost, InvalidInput
from mtask.features.events.task_events import EventKind, TaskEvent
from mtask.kernel.document.rules import KEPT_RUNS
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations.publish import Policy
from mtask.kernel.statements.finish import Outcome
from tests.clients import KINDS, AnyClient, Kind, claim, fail, open_client, server_now, succeed
from tests.integration.client.event_readings import SOON, Reading, Told, told
from tests.integration.stores import lapse, parsed
from tests.integration.stores import publish as publish_task
from tests.mongo import Client as Mongo
from tests.mongo import fail_command

#: The kind of event, and the run.
Transition = tuple[str, str | None]


@pytest.fixture(autouse=True)
def set_up(store: SyncStore) -> None:
    store.run(setup.ensure())


def a_life(store: SyncStore, key: str = "k", *, is_removed: bool = True) -> Told:
    """Let a task be taken three times, time out, fail, succeed and be removed; return what is to be told."""
    publish_task(store, key, retry_delay=0)
    claim(store, f"task:{key}", "w1")
    lapse(store, key)
    fail(store, f"task:{key}", claim(store, f"task:{key}", "w2"))
    succeed(store, f"task:{key}", claim(store, f"task:{key}", "w2"))
    kinds = ["published", "claimed", "timed_out", "claimed", "failed", "claimed", "succeeded"]
    if is_removed:
        store.tasks.delete_one({"_id": f"task:{key}"})
        kinds.append("removed")
    return [(kind, f"task:{key}") for kind in kinds]


def test_a_life_is_told_in_order_with_who_and_why(client: AnyClient, store: SyncStore) -> None:
    with Reading(client) as reading:
        expected = a_life(store, is_removed=False)  # of a task that is gone only what happened is known, and when
        found = reading.take(len(expected))
        assert reading.is_silent()
    assert told(found) == expected
    by_worker = [(event.kind.value, event.worker_id, event.attempt) for event in found if event.worker_id]
    assert by_worker[:4] == [("claimed", "w1", 1), ("timed_out", "w1", 1), ("claimed", "w2", 2), ("failed", "w2", 2)]
    assert found[4].reason == "no luck"
    assert [event.kind for event in found if event.is_end] == [EventKind.SUCCEEDED]
    assert all(earlier.time <= later.time for earlier, later in pairwise(found))
    assert {(event.name, event.key) for event in found} == {("task", "k")}


def test_events_of_many_long_names_are_told(client: AnyClient, store: SyncStore) -> None:
    """MongoDB takes no regular expression of more than 32,764 bytes: it was one of all names."""
    names = ["task", *(f"{'n' * 100}{number}" for number in range(400))]
    with Reading(client, name=names) as reading:
        client.publish("other", key="k")
        expected = a_life(store)
        found = reading.take(len(expected))
    assert told(found) == expected


def test_from_every_token_on_the_rest_is_told(client: AnyClient, store: SyncStore) -> None:
    with Reading(client) as reading:
        begin = reading.token
        expected = a_life(store)
        found = reading.take(len(expected))
        assert reading.token == found[-1].token
    assert begin is not None
    assert len({event.token for event in found}) == len(found)
    for place, token in enumerate([begin, *(event.token for event in found[:-1])]):
        with Reading(client, after=token) as reading:
            assert told(reading.take(len(expected) - place)) == expected[place:], place


def test_a_token_of_one_kind_of_client_serves_the_others(mongo_uri: str, database_name: str, store: SyncStore) -> None:
    def reading_by(kind: Kind, **given: Any) -> list[TaskEvent]:
        with open_client(kind, mongo_uri, database_name) as client, Reading(client, **given) as reading:
            return reading.take(1)

    with Client(mongo_uri, database=database_name) as client, client.events() as happening:
        happening.open()
        expected = a_life(store)
        first = happening.poll(SOON)
    assert first is not None
    found = [first]
    for kind in (*KINDS, *KINDS):
        found += reading_by(kind, after=found[-1].token)
    assert told(found) == expected[: len(found)]


LAPSE = "lapse"
MIXED = ("FAIL", "CANCELED", LAPSE)
TOLD_BY = {"FAIL": "failed", "CANCELED": "canceled", LAPSE: "timed_out"}


def tries(store: SyncStore, ends: list[str]) -> Iterator[list[Transition]]:
    """Publish a task and let a try end in each of these ways; yield after each write what it is to tell."""
    publish_task(store, "k", max_retries=-1, retry_delay=0)
    yield [("published", None)]
    lapsed: list[Transition] = []
    for place, end in enumerate(ends):
        run_id = claim(store, "task:k", f"of {end}")
        yield [*lapsed, ("claimed", run_id)]
        ended: list[Transition] = [(TOLD_BY[end], run_id)]
        lapsed = []
        if end != LAPSE:
            finish(store, run_id, RunStatus(end), reason=f"{end} {place}")
            yield ended
            continue
        lapse(store, "k")
        if place % 2:
            store.run(claims.settle(["task:k"]))
            yield ended
        else:
            lapsed = ended  # the next claim closes it


def finish(store: SyncStore, run_id: str, status: Any, **given: Any) -> None:
    outcome = Outcome("task:k", run_id, status, **{"delay_ms": 0, **given})
    assert store.run(claims.finish([outcome])) == {run_id}


def transition(event: TaskEvent | None) -> Transition:
    assert event is not None
    return event.kind.value, event.run_id


def read_now(client: Client, store: SyncStore, after: str | None) -> list[Transition]:
    """Return all that has happened to the task until now."""
    publish_task(store, after_all := f"read {server_now(store)}")
    found: list[Transition] = []
    with client.events(after=after) as happening:
        for event in happening:
            if event.key == after_all:
                break
            if event.key == "k":
                found.append(transition(event))
    return found


@pytest.mark.parametrize(
    "ends",
    [
        Random(0).choices(MIXED, k=60),
        *(pytest.param(Random(seed).choices(MIXED, k=60), marks=pytest.mark.long) for seed in (1, 2)),
        ["FAIL", "CANCELED"] * 30,
        ["FAIL"] * 59 + [LAPSE],
    ],
    ids=["mixed", "mixed too", "mixed again", "in turn", "failing"],
)
def test_of_many_tries_each_is_told_however_late_it_is_read(
    mongo_uri: str, database_name: str, store: SyncStore, ends: list[str]
) -> None:
    wanted: list[Transition] = []
    with Client(mongo_uri, database=database_name) as client:
        with client.events().open() as happening:
            begin = happening.token
            for told_now in tries(store, ends):
                assert [transition(happening.poll(SOON)) for _ in told_now] == told_now
                wanted += told_now
        assert len(parsed(store, "k").task_state.worker_states) < len(ends), "old runs are left out"
        late = read_now(client, store, begin)
        store.tasks.delete_one({"_id": "task:k"})
        of_the_gone = read_now(client, store, begin)
    assert of_the_gone.pop() == ("removed", None)
    for found in (late, of_the_gone):
        assert [kind for kind, _ in found] == [kind for kind, _ in wanted]
        assert all(run in (None, right) for (_, run), (_, right) in zip(found, wanted, strict=True))
    assert late[-2:] == wanted[-2:]


def test_a_run_that_is_left_out_as_soon_as_it_lapsed_is_told(
    mongo_uri: str, database_name: str, store: SyncStore
) -> None:
    publish_task(store, "k", max_retries=-1, retry_delay=0, concurrent_worker_cnt=2)
    with Client(mongo_uri, database=database_name) as client, client.events().open() as happening:
        begin = happening.token
        wanted: list[Transition] = [("claimed", claim(store, "task:k", "w1"))]
        for _ in range(21):
            run_id = claim(store, "task:k", "w2")
            finish(store, run_id, RunStatus.FAIL)
            wanted += [("claimed", run_id), ("failed", run_id)]
        lapse(store, "k")
        wanted += [("timed_out", None), ("claimed", claim(store, "task:k", "w2"))]
        found = read_now(client, store, begin)
    assert [kind for kind, _ in found] == [kind for kind, _ in wanted]
    assert found[-2:] == wanted[-2:]


def test_what_a_publish_cleaned_at_once_after_a_claim_is_not_claimed_again(
    mongo_uri: str, database_name: str, store: SyncStore
) -> None:
    publish_task(store, "k")
    with Client(mongo_uri, database=database_name) as client, client.events().open() as happening:
        begin = happening.token
        wanted: list[Transition] = []
        for _ in range(3):
            run_id = claim(store, "task:k", "w1")
            finish(store, run_id, RunStatus.CANCELED)
            wanted += [("claimed", run_id), ("canceled", run_id)]
        wanted.append(("claimed", claim(store, "task:k", "w1")))
        publish_task(store, "k", policy=Policy(clean_failed=True))
        assert len(parsed(store, "k").task_state.worker_states) == 1
        assert [kind for kind, _ in read_now(client, store, begin)] == [kind for kind, _ in wanted]


def test_a_run_that_a_publish_moved_up_beyond_those_kept_is_not_claimed_again(
    mongo_uri: str, database_name: str, store: SyncStore
) -> None:
    publish_task(store, "k", concurrent_worker_cnt=KEPT_RUNS + 1, retry_delay=0)
    for number in range(KEPT_RUNS):  # whatever is left out, successes of this round are not
        succeed(store, "task:k", claim(store, "task:k", f"w{number}"))
    fail(store, "task:k", claim(store, "task:k", "another"))
    with Client(mongo_uri, database=database_name) as client, client.events().open() as happening:
        begin = happening.token
        run_id = claim(store, "task:k", "another")
        publish_task(store, "k", policy=Policy(clean_failed=True))
        assert parsed(store, "k").task_state.worker_states[KEPT_RUNS].run_id == run_id
        assert read_now(client, store, begin) == [("claimed", run_id)]


def test_run_that_a_publish_moved_up_behind_twenty_others_is_not_claimed_again(
    mongo_uri: str, database_name: str, store: SyncStore
) -> None:
    """Twenty stay before it, and failed_cnt what it was: but for the count the change says what a claim's would."""
    publish_task(store, "k", concurrent_worker_cnt=KEPT_RUNS + 2, retry_delay=0)
    for number in range(KEPT_RUNS + 1):
        run_id = claim(store, "task:k", f"w{number}")
        if number:
            succeed(store, "task:k", run_id)
        else:
            finish(store, run_id, RunStatus.CANCELED)
    with Client(mongo_uri, database=database_name) as client, client.events().open() as happening:
        begin = happening.token
        run_id = claim(store, "task:k", "another")
        publish_task(store, "k", policy=Policy(clean_failed=True))
        assert parsed(store, "k").task_state.worker_states[KEPT_RUNS].run_id == run_id
        assert parsed(store, "k").task_state.clean_cnt == 1
        assert publish_task(store, "k", policy=Policy(clean_failed=True)).updated is False, "nothing is left to clean"
        assert read_now(client, store, begin) == [("claimed", run_id)]


@pytest.mark.parametrize(
    ("status", "is_simple"),
    [(RunStatus.SUCCESS, True), (RunStatus.SUCCESS, False), (RunStatus.FAIL, False)],
)
def test_progress_that_is_sent_again_is_told_once(
    client: AnyClient, store: SyncStore, status: Literal[RunStatus.SUCCESS, RunStatus.FAIL], is_simple: bool
) -> None:
    """As when the finish is sent before the ping's reply is read, and when a ping's reply was lost."""
    half = {"fraction": 0.5, "message": "half"}
    with Reading(client) as reading:
        publish_task(store, "k")
        run_id = claim(store, "task:k", "w1")
        for _ in range(2):
            store.run(claims.ping({run_id: "task:k"}, 60_000, {run_id: half}))
            written = parsed(store, "k").task_state.worker_states[0].progress
            assert written is not None
            while server_now(store) <= written.time:
                pass
        outcome = Outcome("task:k", run_id, status, progress=half)
        assert store.run(claims.finish([outcome], is_simple=is_simple)) == {run_id}
        assert parsed(store, "k").task_state.worker_states[0].progress == written
        kinds = [event.kind.value for event in reading.take(4)]
        assert kinds == ["published", "claimed", "progress", "succeeded" if status is RunStatus.SUCCESS else "failed"]


def test_progress_that_is_read_late_is_told_as_it_was(client: AnyClient, store: SyncStore) -> None:
    with Reading(client) as reading:
        begin = reading.token
    publish_task(store, "k")
    run_id = claim(store, "task:k", "w1")
    for fraction, message in ((0.25, "sales"), (0.5, "sales"), (0.75, "costs")):
        store.run(claims.ping({run_id: "task:k"}, 60_000, {run_id: {"fraction": fraction, "message": message}}))
    with Reading(client, after=begin) as reading:
        found = reading.take(5)
    # A change names what is new; what was the same is not known any more, and not told as what came later.
    assert [(event.progress, event.message) for event in found[2:]] == [(0.25, "sales"), (0.5, None), (0.75, "costs")]


def test_a_token_in_the_middle_of_a_change_serves_when_the_task_is_gone(client: AnyClient, store: SyncStore) -> None:
    with Reading(client) as reading:
        publish_task(store, "k")
        run_id = claim(store, "task:k", "w1")
        finish(store, run_id, RunStatus.SUCCESS, progress={"fraction": 1.0, "message": "done"})
        found = reading.take(3)
        assert [event.kind for event in found] == [EventKind.PUBLISHED, EventKind.CLAIMED, EventKind.PROGRESS]
        assert not any(event.is_end for event in found)
    store.tasks.delete_one({"_id": "task:k"})
    with Reading(client, after=found[1].token) as reading:
        (progress,) = reading.take(1)
        assert (progress.progress, progress.message, progress.run_id) == (1.0, "done", None)
        assert progress.token == found[2].token
    with Reading(client, after=found[2].token) as reading:
        ended, removed = reading.take(2)
        assert told([ended, removed]) == [("succeeded", "task:k"), ("removed", "task:k")]
        assert ended.is_end


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"task:a", "task:b:1", "other:a", "task.b:a", "sub/task:a"}),
        ({"name": "task"}, {"task:a", "task:b:1"}),
        ({"name": ["other", "task.b"]}, {"other:a", "task.b:a"}),
        ({"key": "a"}, {"task:a", "other:a", "task.b:a", "sub/task:a"}),
        ({"key": "b:1"}, {"task:b:1"}),
        ({"queue": "mail"}, {"other:a"}),
        ({"queue": ["mail", "default"], "key": ["a", "b:1"], "name": "task"}, {"task:a", "task:b:1"}),
        ({"name": "none"}, set()),
    ],
)
def test_only_what_was_asked_for_is_told(
    mongo_uri: str, database_name: str, given: dict[str, Any], expected: set[str]
) -> None:
    with Client(mongo_uri, database=database_name) as client, client.events(**given) as happening:
        happening.open()
        for name, key, queue in (("task", "a", None), ("task", "b:1", None), ("other", "a", "mail")):
            client.publish(name, key=key, queue=queue)
        client.publish("task.b", key="a")
        client.publish("sub/task", key="a")
        for name, key in (("task", "a"), ("task", "b:1"), ("other", "a"), ("task.b", "a"), ("sub/task", "a")):
            client.cancel(name, key)
        found: list[TaskEvent] = []
        while len(found) < 2 * len(expected):
            event = happening.poll(SOON)
            assert event is not None, told(found)
            found.append(event)
        assert happening.poll(0.0) is None
    assert sorted(told(found)) == sorted((kind, of) for of in expected for kind in ("published", "canceled"))


@pytest.mark.fresh_database
def test_since_an_instant_all_is_told_that_happened_then(client: AnyClient, store: SyncStore) -> None:
    publish_task(store, "k")
    since = parsed(store, "k").task_state.create_time
    with Reading(client, since=since - timedelta(seconds=1)) as reading:
        assert told(reading.take(1)) == [("published", "task:k")]


def test_what_is_done_to_a_task_by_hand_is_told(client: AnyClient, store: SyncStore) -> None:
    with Reading(client) as reading:
        publish_task(store, "k")
        client.cancel("task", "k")
        client.retry("task", "k")
        run_id = claim(store, "task:k", "w1")
        client.cancel("task", "k")  # asks the holder
        store.run(claims.finish([Outcome("task:k", run_id, RunStatus.CANCELED, reason="asked")]))
        client.remove("task", "k")
        found = reading.take(6)
        assert reading.is_silent()
    kinds = ["published", "canceled", "reopened", "claimed", "canceled", "removed"]
    assert told(found) == [(kind, "task:k") for kind in kinds]
    assert [event.is_end for event in found] == [False, True, False, False, True, False]
    assert found[4].reason == "asked"


def test_they_can_be_iterated_over(mongo_uri: str, database_name: str, store: SyncStore) -> None:
    async def scenario() -> Told:
        async with AsyncClient(mongo_uri, database=database_name) as client, client.events() as happening:
            await asyncio.to_thread(a_life, store)
            found: list[TaskEvent] = []
            async for event in happening:
                found.append(event)
                if event.kind is EventKind.REMOVED:
                    break
            return told(found)

    with Client(mongo_uri, database=database_name) as client, client.events() as happening:
        happening.open()
        expected = asyncio.run(scenario())
        found: list[TaskEvent] = []
        for event in happening:
            found.append(event)
            if event.kind is EventKind.REMOVED:
                happening.close()  # ends the iteration
    assert told(found) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_oplog_no_longer_holds_is_said_to_be_lost(
    mongo_uri: str, database_name: str, mongo: Mongo, kind: Kind
) -> None:
    with open_client(kind, mongo_uri, database_name, appname=database_name) as client:
        client.init()
        history_lost = fail_command(mongo, "aggregate", error_code=286, app_name=database_name)
        with history_lost, pytest.raises(EventsLost, match="without after or since"):
            Reading(client, since=datetime(2001, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("kind", KINDS)
def test_they_go_on_where_they_were_after_a_break(
    mongo_uri: str, database_name: str, mongo: Mongo, store: SyncStore, kind: Kind
) -> None:
    with (
        open_client(kind, mongo_uri, database_name, appname=database_name) as client,
        Reading(client) as reading,
    ):
        publish_task(store, "before")
        assert told(reading.take(1)) == [("published", "task:before")]
        # The driver tries to go on by itself, once; then it is ours to do.
        with fail_command(mongo, ["getMore", "aggregate"], times=4, close_connection=True, app_name=database_name):
            expected = a_life(store)
            assert told(reading.take(len(expected))) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"after": "no token"},
        {"after": ""},
        {"after": "ab.x"},
        {"after": "ab.-1"},
        {"after": 5},
        {"since": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"since": "yesterday"},
        {"since": datetime(1900, 1, 1, tzinfo=UTC)},
        {"after": "ab", "since": datetime(2026, 1, 1, tzinfo=UTC)},
        {"name": 5},
    ],
)
def test_nonsense_is_refused(mongo_uri: str, database_name: str, given: dict[str, Any]) -> None:
    with Client(mongo_uri, database=database_name) as client, pytest.raises(InvalidInput):
        client.events(**given)


def test_the_end_of_a_run_that_begins_the_next_round_is_told_with_it(client: AnyClient, store: SyncStore) -> None:
    def again(number: int) -> None:
        client.publish("task", number, key="k", if_running="again")

    with Reading(client) as reading:
        again(1)
        run_id = claim(store, "task:k", "w1")
        again(2)
        succeed(store, "task:k", run_id)
        claim(store, "task:k", "w1")
        again(3)
        client.cancel("task", "k")
        again(4)
        lapse(store, "k")
        store.run(claims.settle(["task:k"]))
        run_id = claim(store, "task:k", "w1")
        succeed(store, "task:k", run_id)
        again(5)
        found = reading.take(10)
        assert reading.is_silent()
    kinds = ["published", "claimed", "succeeded", "reopened", "claimed", "timed_out", "reopened", "claimed"]
    kinds += ["succeeded", "reopened"]
    assert told(found) == [(kind, "task:k") for kind in kinds]
    assert [event.kind.value for event in found if event.is_end] == ["succeeded"]
