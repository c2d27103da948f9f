"""Documents that got in past the validator: none of them ends a loop of the worker, and each gets its word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import attrgetter
from time import monotonic
from typing import Any

import pytest
from bson import DBRef, ObjectId, encode
from bson.binary import Binary
from bson.code import Code
from bson.decimal128 import Decimal128
from bson.regex import Regex
from pymongo import WriteConcern

from mtask import App, Context
from mtask.kernel.driver.stores import CODEC, READING
from mtask.kernel.worker.running import leases
from tests import build
from tests.faults.malformed import good
from tests.integration.worker_harness import Bench, Working, between
from tests.loops import in_loop
from tests.mongo import Client, Document, until

_AGO = datetime(2024, 1, 1, tzinfo=UTC)
_MAX_BYTES = 16 * 2**20


@pytest.fixture
def app() -> App:
    made = App()

    @made.task
    async def noop(context: Context) -> str:
        return context.worker_id

    @made.task
    async def hold() -> None:
        await asyncio.sleep(600)

    @made.task
    async def echo(value: Any) -> Any:
        return value

    return made


@asynccontextmanager
async def outliving(working: Working, app: App, **options: Any) -> AsyncIterator[Bench]:
    """Run a worker, and see that it lives at the end of the block and works."""
    async with working(app, **options) as bench:
        yield bench
        bench.resume_stream()
        insert(bench, good("last"))
        await bench.status("noop:last", "SUCCESS")
        assert not bench.life.done()


@pytest.fixture
@in_loop
async def bench(working: Working, app: App) -> AsyncIterator[Bench]:
    """Run a worker that lives at the end of the test and works."""
    async with outliving(working, app) as made:
        yield made


def insert(bench: Bench, *documents: Document) -> None:
    """Write these past the validator, and wait until the scans, which read what a majority has, can see them."""
    unchecked = bench.tasks.with_options(codec_options=CODEC, write_concern=WriteConcern(w="majority"))
    unchecked.insert_many(documents, bypass_document_validation=True)


def changed(key: str, /, **changes: Any) -> Document:
    """Return a due task with fields changed, `a__b` standing for a.b."""
    return build.changed(good(key), changes)


def reason(bench: Bench, task_id: Any) -> str:
    """Return why a task is FAIL; nothing where it is not."""
    found = bench.tasks.with_options(codec_options=READING).find_one({"_id": {"$eq": task_id}})
    assert found is not None, task_id
    state = found["task_state"]
    if not isinstance(state, dict) or state.get("status") != "FAIL" or "next_preempt_time" in state:
        return ""
    return str(state["worker_states"][-1]["fail_reason"]) if state.get("worker_states") else "none is told"


async def failed(bench: Bench, task_ids: Sequence[Any]) -> None:
    """Wait until all of these are FAIL as malformed."""
    await until(
        lambda: bench.life.done() or all(reason(bench, task_id) for task_id in task_ids), message=f"{task_ids} FAIL"
    )
    assert not bench.life.done(), f"the worker ended: {bench.life}"
    assert all(reason(bench, task_id).startswith("malformed document: ") for task_id in task_ids)


#: None of these is to be hashed, compared or looked into as what it should be.
_NAMES: tuple[Any, ...] = (
    ["noop"],
    [["noop"]],
    {"a": 1},
    {},
    Code("noop"),
    Code("noop", {"a": 1}),
    Decimal128("1"),
    Regex("noop"),
    b"noop",
    Binary(b"noop", 4),
    DBRef("noop", 1),
    float("nan"),
)


async def test_name_of_any_type_that_the_stream_tells_of_ends_no_loop(bench: Bench) -> None:
    bench.stop_scans()
    for place, name in enumerate(_NAMES):
        # Without a list of workers it is told to all; and as it might be told to those of its queue.
        lost = changed("lost", name=name, task_option__specific_worker_ids=None) | {"_id": f"{name}:{place}"}
        due = changed(f"due {place}", name=name, task_option__specific_worker_ids="w1")
        insert(bench, lost, good(f"beside {place}"), due)
        await failed(bench, [f"{name}:{place}", f"noop:due {place}"])
        await bench.status(f"noop:beside {place}", "SUCCESS")


_FOUND: dict[str, dict[str, Any]] = {
    # An index holds no document with two lists in its fields.
    "a name in a list": {"name": ["noop"], "task_option__specific_worker_ids": None},
    "a state in a list": {"task_state": [{"next_preempt_time": _AGO}], "task_option__specific_worker_ids": None},
    "a state in a list, for one worker": {
        "task_state": [{"next_preempt_time": _AGO, "status": "INIT"}] * 2,
        "task_option__specific_worker_ids": "w1",
    },
    "runs in a list": {"task_state__worker_states": [[{"run_id": ["a"], "status": {}}]]},
    "a run whose id is an object": {"task_state__worker_states": [{"run_id": {"a": 1}, "status": "FAIL"}]},
    "options in a list": {"task_option": [{"specific_worker_ids": [], "priority": 1}]},
    "a queue in a list": {"queue": ["default"], "task_option__specific_worker_ids": None},
    "a count beyond 64 bits": {"task_state__failed_cnt": 1e19},
    "a count beyond what a double tells": {"task_state__failed_cnt": 2**62},
    "a priority that is a decimal": {"task_option__priority": Decimal128("1")},
    "a key of bytes that are no UUID": {"key": Binary(b"bad", 4)},
}


async def test_document_that_a_scan_brings_ends_no_loop(bench: Bench) -> None:
    bench.stop_stream()
    for kind, changes in _FOUND.items():
        insert(bench, good(f"before {kind}"), changed(kind, **changes), good(f"after {kind}"))
        bench.worker.parts.scans.ask_full()
        await failed(bench, [f"noop:{kind}"])
        await bench.status(f"noop:before {kind}", "SUCCESS")
        await bench.status(f"noop:after {kind}", "SUCCESS")


_AS_GIVEN = {
    "an object with $id and $ref": {"a": [{"$id": 1, "$ref": "x", "more": {"$ref": "y", "$id": {"b": 2}}}]},
    "an object with $id, $ref and $db": {"$ref": "x", "$id": ObjectId("5f5e0c5e5f5e0c5e5f5e0c5e"), "$db": "z"},
    "an object with a $ref that is no text": {"$ref": 5, "$id": 1},
    "bytes that are marked as a UUID, and are none": [Binary(b"short", 4)],
}


async def test_params_reach_the_handler_as_they_were_published(bench: Bench) -> None:
    # In a group of its own, and beside others: what cannot be decoded must not cost those anything.
    for kind, value in _AS_GIVEN.items():
        for keys in ([f"{kind}, alone"], [f"{kind}, {place}" for place in ("left", "bad", "right")]):
            with bench.backed_up():
                insert(bench, *(good(key, name="echo", params={"value": value}) for key in keys))
                await until(partial(_has_queued, bench, len(keys)), message="queued")
            for key in keys:
                await bench.status(f"echo:{key}", "SUCCESS")
                task = await bench.client.get("echo", key)
                assert task.params == {"value": value}
                assert type(task.params["value"]) is type(value)
                assert task.returns == value
                assert len(task.runs) == 1
    assert len(await bench.client.find(name="echo")) == 4 * len(_AS_GIVEN)


def _has_queued(bench: Bench, count: int) -> bool:
    return len(bench.worker.parts.queue) == count


async def test_events_tell_of_tasks_whose_values_cannot_all_be_decoded(bench: Bench) -> None:
    events = bench.client.events(key="bad")
    async with events:
        value = Binary(b"short", 4)
        insert(bench, good("bad", name="echo", params={"value": [value, {"$ref": "x", "$id": 1}]}))
        kinds = []
        async for event in events:
            kinds.append(str(event.kind))
            if event.is_end:
                break
        assert kinds == ["published", "claimed", "succeeded"]


async def test_names_that_are_none_keep_the_worker_from_nothing(bench: Bench) -> None:
    names = [{"$ref": "x", "$id": 1}, {"$a": 1}, "x" * 2**20, 5]
    bench.stop_stream()
    for number in range(3):
        insert(bench, *(changed(f"{place}/{number}", name=name) for place, name in enumerate(names)))
    insert(bench, changed("other", name="another"))
    bench.worker.parts.scans.ask_full()
    await until(lambda: bench.worker.parts.scope.ledger.unserved_names == {"another"}, message="the one that is a name")


# --- loops ----------------------------------------------------------------------------------------------------


_STEPS = [
    "scans.scan",
    "scans.upkeep",
    "stream.follow",
    "stream.read",
    "lookups.check_holders",
    "lookups.take_found",
    "lookups.look_up_due",
    "claimer.launch",
    "features.limits.reclaim_dead",
    "features.retention.remove_surplus",
    "features.controls.refresh",
]


async def test_loop_outlives_what_nobody_foresaw(bench: Bench) -> None:
    async def outlive(bench: Bench, step: str) -> None:
        part, _, name = step.rpartition(".")
        raised: list[str] = []
        owner: Any = attrgetter(part)(bench.worker.parts)
        real, take = getattr(owner, name), bench.worker.parts.stream.take

        def failing(*arguments: Any, **options: Any) -> Any:
            if len(raised) < 3:
                raised.append(step)
                raise ZeroDivisionError("nobody foresaw this")
            return real(*arguments, **options)

        setattr(owner, name, failing)
        if name in ("follow", "read"):
            owner.take = lambda event: bool(raised) and take(event)  # so that it is opened anew
        for number in (f"{step} {round_}" for round_ in range(4)):  # whatever wakes the loops
            insert(bench, good(number), changed(f"bad-{number}", task_state__status=7))
            bench.worker.parts.scans.ask_full()
            for loop in (
                bench.worker.parts.features.limits,
                bench.worker.parts.features.retention,
                bench.worker.parts.features.controls,
            ):
                loop._wake.set()
            bench.worker.parts.questions.wake.set()
            bench.worker.parts.questions.ask_when_due("noop:none", monotonic())
            await bench.status(f"noop:{number}", "SUCCESS")
            await failed(bench, [f"noop:bad-{number}"])
        await until(lambda: raised, message=f"{step} was called")
        setattr(owner, name, real)
        if name in ("follow", "read"):
            owner.take = take

    for step in _STEPS:
        await outlive(bench, step)


@pytest.mark.parametrize("reader", ["scan", "stream"])
async def test_document_that_a_reader_trips_over_is_examined_and_holds_up_no_other(bench: Bench, reader: str) -> None:
    if reader == "scan":
        bench.stop_stream()
    else:
        bench.stop_scans()
    inbox: Any = bench.worker.parts.inbox
    push = inbox.push

    def tripping(task_id: Any, *arguments: Any, **options: Any) -> None:
        if "trap" in str(task_id):
            raise ZeroDivisionError("nobody foresaw this")
        push(task_id, *arguments, **options)

    inbox.push = tripping
    insert(bench, good("trap"), changed("trap-bad", key=5), good("right"))
    bench.worker.parts.scans.ask_full()
    await bench.status("noop:right", "SUCCESS")
    await failed(bench, ["noop:trap-bad"])
    # One that looks well is not taken for malformed: the mistake is ours.
    await until(lambda: bench.worker.parts.quarantine.is_left_alone("noop:trap"), message="left alone")
    assert bench.state("noop:trap")["status"] == "INIT"


async def test_pinger_keeps_the_leases_of_the_others_where_one_document_cannot_be_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = leases.apply_one

    def tripping(run: Any, *arguments: Any, **options: Any) -> None:
        if run.task_id == "hold:bad":
            raise ZeroDivisionError("nobody foresaw this")
        apply(run, *arguments, **options)

    monkeypatch.setattr(leases, "apply_one", tripping)
    options = {"task_option__ping_interval_ms": 100, "task_option__worker_timeout_ms": 3_000}
    insert(bench, *(changed(key, **options) | {"_id": f"hold:{key}", "name": "hold"} for key in ("bad", "right")))
    # The one is not trusted any longer than it was, and tried again; the other goes on.
    await until(lambda: bench.state("hold:bad")["failed_cnt"] > 0, message="its lease lapsed")
    state = bench.state("hold:right")
    assert (state["status"], len(state["worker_states"])) == ("RUNNING", 1)


# --- claims in vain ---------------------------------------------------------------------------------------------


async def test_task_that_is_claimed_in_vain_again_and_again_is_tried_ever_more_rarely(bench: Bench) -> None:
    worker: Any = bench.worker
    guard = worker.parts.scope.served.guard
    worker.parts.scope.served.guard = lambda valid_until: {
        **guard(valid_until),
        "key": {"$ne": "never"},
    }  # the server sees what the rules do not
    insert(bench, good("never"))
    left_alone_until = worker.parts.quarantine.left_alone_until
    # Six losses bring the look at the whole of it; it looks well, and is left alone for long.
    await until(lambda: left_alone_until("noop:never") > monotonic() + 5.0, message="left alone for long")
    lost = worker.parts.sender.lost_cnt
    assert 6 <= lost <= 8
    insert(bench, *(good(f"{number}") for number in range(20)))
    for number in range(20):
        await bench.status(f"noop:{number}", "SUCCESS")
    assert worker.parts.sender.lost_cnt <= lost + 1


# --- what is as large as it can be --------------------------------------------------------------------------------


def filled(document: Document, left: int) -> Document:
    """Return the document with so many bytes left of what the server takes."""
    document["task_option"] |= {"ping_interval_ms": 300, "worker_timeout_ms": 1_000}
    document["padding"] = ""
    document["padding"] = "x" * (_MAX_BYTES - left - len(encode(document)))
    return document


@pytest.mark.parametrize(
    "left", [pytest.param(left, marks=() if left == 150 else pytest.mark.long) for left in (0, 40, 150, 190, 230)]
)
async def test_task_that_leaves_no_room_for_a_claim_or_an_end_is_not_left_open_and_keeps_what_it_holds(
    bench: Bench, left: int
) -> None:
    """Into the last ones the claim fits, and into the very last its end as well."""
    large = filled(good("large"), left)
    insert(bench, good("beside"), large, good("another"))
    await bench.status("noop:beside", "SUCCESS")
    await bench.status("noop:another", "SUCCESS")
    await until(lambda: bench.state("noop:large")["status"] in ("FAIL", "SUCCESS"), message="it is over")
    state = bench.state("noop:large")
    assert "next_preempt_time" not in state
    assert state["status"] == "FAIL" or left >= 150
    assert bench.document("noop:large")["padding"] == large["padding"]


async def test_lapsed_run_that_cannot_be_closed_for_want_of_room_is_failed_and_holds_up_no_other(bench: Bench) -> None:
    run = build.run("RUNNING", _AGO, _AGO, worker_id="gone")

    def lapsed(key: str) -> Document:
        # Nobody here may take it: only whoever scans settles it.
        options = {"task_option__specific_worker_ids": ["gone"], "task_option__max_unexpected_retries": 0}
        return changed(key, task_state__status="RUNNING", task_state__worker_states=[run], **options)

    insert(bench, filled(lapsed("large"), 10), lapsed("small"))
    bench.worker.parts.scans.ask_full()
    await bench.status("noop:small", "FAIL")
    await bench.status("noop:large", "FAIL")
    assert "lease lapsed" in bench.state("noop:small")["worker_states"][-1]["fail_reason"]


#: What the validator takes of a task that has begun, and refuses of one that waits.
_BROKEN_WHILE_RUNNING: dict[str, Any] = {
    "priority": {"task_option__priority": "high"},
    "create_time": {"task_state__create_time": "yesterday"},
    "key": {"key": "another"},
}


@pytest.mark.parametrize("damage", _BROKEN_WHILE_RUNNING)
async def test_lapsed_run_of_a_task_that_somebody_broke_meanwhile_holds_up_no_other(bench: Bench, damage: str) -> None:
    run = build.run("RUNNING", _AGO, _AGO, worker_id="gone")

    def lapsed(key: str, /, **changes: Any) -> Document:
        # Nobody here may take it: only whoever scans settles it.
        options = {"task_option__specific_worker_ids": ["gone"], **changes}
        return changed(key, quiet_time=_AGO, task_state__status="RUNNING", task_state__worker_states=[run], **options)

    bench.tasks.insert_many([lapsed("broken", **_BROKEN_WHILE_RUNNING[damage]), lapsed("sound")])
    bench.worker.parts.scans.ask_full()
    await bench.status("noop:sound", "INIT")
    await bench.status("noop:broken", "FAIL")
    assert "malformed" in bench.state("noop:broken")["worker_states"][-1]["fail_reason"]


@pytest.mark.parametrize("damage", _BROKEN_WHILE_RUNNING)
async def test_task_that_its_own_handler_breaks_is_not_tried_again_but_keeps_its_reason(
    working: Working, app: App, mongo: Client, database_name: str, damage: str
) -> None:
    tasks = mongo[database_name]["tasks"]
    broken = {path.replace("__", "."): value for path, value in _BROKEN_WHILE_RUNNING[damage].items()}

    gate = asyncio.Event()

    @app.task
    async def break_it(context: Context) -> None:
        await gate.wait()
        tasks.update_one({"_id": context.task.id}, {"$set": broken})
        raise ValueError("no such mailbox")

    async with outliving(working, app) as bench:
        insert(bench, changed("own", name="break_it", _id="break_it:own"))
        await bench.status("break_it:own", "RUNNING")
        bench.stop_stream()  # else its event may lead to an examination that marks the task first
        gate.set()
        await bench.status("break_it:own", "FAIL")
        (run,) = bench.state("break_it:own")["worker_states"]
        assert "no such mailbox" in run["fail_reason"]
        assert "it breaks the schema" in run["fail_reason"]


async def test_malformed_documents_are_examined_one_by_one(bench: Bench) -> None:
    read = between(bench.store, "read", only=lambda given: "document_id" in given)
    keys = [f"bad-{number}" for number in range(30)]
    insert(bench, *(changed(key, task_state__status=7) for key in keys))
    bench.worker.parts.scans.ask_full()
    await failed(bench, [f"noop:{key}" for key in keys])
    assert read.seen_cnt >= len(keys)


async def test_malformed_tasks_that_a_claim_of_a_group_made_running_are_examined(bench: Bench) -> None:
    """The claim is lost, as their runs count as held until 2099. No scan finds them before."""
    run = {
        "worker_id": "another",
        "attempt": 1,
        "status": "RUNNING",
        "claim_time": _AGO,
        "ping_expire_time": datetime(2099, 1, 1, tzinfo=UTC),
    }
    with bench.backed_up():
        broken = [changed(key, task_state__worker_states=[run]) for key in ("no-run-id-1", "no-run-id-2")]
        insert(bench, good("a"), *broken, good("b"))
    await failed(bench, [document["_id"] for document in broken])
    assert all("run_id" in reason(bench, document["_id"]) for document in broken)


# --- numbers ------------------------------------------------------------------------------------------------------


async def test_control_with_a_number_beyond_64_bits_stops_no_heartbeat(working: Working, app: App) -> None:
    async with outliving(working, app, heartbeat_interval=timedelta(milliseconds=200)) as bench:
        await bench.client.limit("default", concurrency=5)
        controls = bench.mongo[bench.database]["controls"]
        controls.update_one({}, {"$set": {"revision": 1e19}}, bypass_document_validation=True)
        controls.update_one({}, {"$set": {"limit.concurrency": 4}}, bypass_document_validation=True)
        await until(lambda: "queue:default" in str(bench.worker.parts.features.controls._good), message="read")

        def beat() -> datetime:
            found = bench.registry.find_one({"_id": "w1"})
            assert found is not None
            time: datetime = found["heartbeat_time"]
            return time

        first = beat()
        await until(lambda: beat() > first, message="a heartbeat")
        # What is malformed is mended by any change.
        mended = await bench.client.limit("default", concurrency=3)
        assert 0 < mended.revision <= 2**53
