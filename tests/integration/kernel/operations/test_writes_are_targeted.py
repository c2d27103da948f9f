"""Every write names its documents by `_id`: a sharded cluster sends it only to the shards that hold them.

The commands are those that the drivers send, of a worker and of all clients, as they tell a listener. The scenario is
complete: each function of an operation that writes has its turn in it.
"""

from __future__ import annotations

import ast
import asyncio
import logging
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

import mtask
from mtask import App, Client, Context, Flow, TaskSpec
from mtask.errors import MalformedTask, OperationFailed
from mtask.features.flows import change as operating
from mtask.features.flows import publish as adding
from mtask.features.flows import retention
from mtask.features.flows import settle as settling
from mtask.features.limits.operations import PermitPool
from mtask.features.logs.options import LogOptions
from mtask.features.metrics import operations as tallies
from mtask.features.registry import operations as registry
from mtask.features.registry.rules import declared_by
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver import connect
from mtask.kernel.driver.operation import Call
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import transactions
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from mtask.parts.relays import RELAYS
from tests import build
from tests.clients import claim, server_now
from tests.integration.stores import lapse, publish, stored
from tests.integration.worker_harness import Bench, Document, Working
from tests.mongo import Client as Mongo
from tests.mongo import eventually, until

#: What may write without an `_id`, by function, and what bounds it.
EXCEPTED = {
    "testing.bench.bring_nearer": "`advance` of mtask.testing moves all that waits in a test's own database",
}
#: Methods of a call that change no document.
READS = frozenset({"find", "find_one", "rows", "count_documents", "estimated_document_count", "create_indexes"})
HOUSE = Path(mtask.__file__).parent
OURS = frozenset(
    {"tasks", "workers", "schedules", "controls", "places", "actions", "bulks", "metrics", "logs", "handlers"}
)


class Writes(CommandListener):
    """The writes that drivers send to our collections."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Document]] = []  #: command, collection, filter

    def started(self, event: CommandStartedEvent) -> None:
        command = event.command
        collection = command.get(event.command_name)
        if not isinstance(collection, str) or collection not in OURS:
            return
        matched: list[Document] = []
        if event.command_name in ("findAndModify", "findandmodify"):
            matched = [command["query"]]
        elif event.command_name == "update":
            matched = [update["q"] for update in command["updates"]]
        elif event.command_name == "delete":
            matched = [delete["q"] for delete in command["deletes"]]
        elif event.command_name == "insert":
            matched = [{"_id": document["_id"]} for document in command["documents"]]
        self.seen += [(event.command_name, collection, each) for each in matched]

    def succeeded(self, event: CommandSucceededEvent) -> None: ...

    def failed(self, event: CommandFailedEvent) -> None: ...


class Turns:
    """Which functions of the store have made a call that writes."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def note(self, call: Call) -> None:
        if call.method not in READS:
            frame = sys._getframe(3)  # note, the initialiser, the collection's function, and who called that
            self.taken.add(function_of(Path(frame.f_code.co_filename), frame.f_code.co_name))


def function_of(path: Path, name: str) -> str:
    """Return a function's name with its module, such as `kernel.operations.claim.finish`."""
    place = path.relative_to(HOUSE) if path.is_relative_to(HOUSE) else Path(path.name)
    return ".".join((*place.with_suffix("").parts, name))


def is_targeted(matched: Document) -> bool:
    """Whether the filter says which documents at most it matches, by `_id`."""
    wanted = matched.get("_id")
    if "_id" in matched and (not isinstance(wanted, dict) or bool({"$in", "$eq"} & set(wanted))):
        return True
    return any(is_targeted(part) for part in matched.get("$and", ()))


def functions_that_write() -> set[str]:
    """Return the functions of operations in whose source a call is made that is none of those that read."""
    found = set()
    for path in HOUSE.rglob("*.py"):
        source = path.read_text()
        if "from mtask.kernel.driver.operation import" not in source:
            continue
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                    continue
                place = {**dict.fromkeys(OURS, 0), "on": 1}.get(node.func.id)
                if place is None or len(node.args) <= place:
                    continue
                method = node.args[place]
                is_read = isinstance(method, ast.Constant) and method.value in READS
                is_choice = isinstance(method, ast.Constant) and not isinstance(method.value, str)
                if not is_read and not is_choice:
                    found.add(function_of(path, function.name))
    return found


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    """Listen to every client that is made from now on."""
    writes, options = Writes(), connect.client_options

    def listened(app_name: str, extra: dict[str, Any]) -> dict[str, Any]:
        return {**options(app_name, extra), "event_listeners": [writes]}

    monkeypatch.setattr(connect, "client_options", listened)
    return writes


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    turns, initialise = Turns(), Call.__init__

    def noted(call: Call, *args: Any, **kwargs: Any) -> None:
        initialise(call, *args, **kwargs)
        turns.note(call)

    monkeypatch.setattr(Call, "__init__", noted)
    return turns


class Handlers:
    """The app of the scenario."""

    def __init__(self) -> None:
        self.app = App()
        self.gate = asyncio.Event()
        self.app.task(name="quick")(self._quick)
        self.app.task(name="fail", max_retries=0)(self._fail)
        self.app.task(name="hold")(self._hold)
        self.app.task(name="transact")(self._transact)

    async def _quick(self) -> str:
        logging.getLogger("shop").warning("a line to be kept")
        return "done"

    async def _fail(self) -> None:
        raise ValueError("no luck")

    async def _hold(self) -> None:
        await self.gate.wait()

    async def _transact(self, context: Context, *, fails: bool = False) -> str:
        async with context.transaction():
            pass
        if fails:
            raise ValueError("too late")
        return "added after the commit"


@contextmanager
def opened(uri: str, database: str) -> Iterator[tuple[Client, Mongo]]:
    """Give a client, and a driver's client for the transactions of a caller: both are listened to."""
    source: Mongo = MongoClient(uri, **connect.client_options("caller", {}))
    with source, Client(source, database=database) as client:
        client.init()
        yield client, source


def versions(store: SyncStore) -> None:
    """The handler of a worker that lives gets another version, of which no worker lives."""
    eventually(lambda: stored_versions(store), 40, "the worker has told its versions")
    app = App()
    app.task(name="quick", priority=1)(lambda: None)
    store.run(registry.start("gone", "gone", {"quick": declared_by(app.handlers["quick"])}))
    assert store.run(registry.succeed(store.run(registry.hashes()))) == ["quick"]


def stored_versions(store: SyncStore) -> Any:
    """Return the worker that has told its versions; None: it has not."""
    return store.database["workers"].find_one({"handlers": {"$exists": True}})


def tells(client: Client) -> None:
    """Cancel a task with a callback, and one whose mark cannot be read; then remove them."""
    for key in ("told", "unreadable"):
        client.publish("quick", key=key, callback={"url": "https://hooks.example.com"})
    client.cancel("quick", "told")
    mark: Document = {"callback_owed": [{"number": "one"}]}
    client.tasks.update_one({"_id": "quick:unreadable"}, {"$set": mark}, bypass_document_validation=True)
    with pytest.raises(MalformedTask):
        client.cancel("quick", "unreadable")
    assert client.remove("quick", "told", if_match=client.etag(client.get("quick", "told")))
    assert client.run_bulk(client.plan_bulk("remove", key="unreadable").plan).done_cnt == 1


async def test_every_write_of_workers_and_clients_names_its_documents_by_id(
    working: Working, mongo_uri: str, database_name: str, writes: Writes, turns: Turns
) -> None:
    handlers = Handlers()
    with opened(mongo_uri, database_name) as (client, source):
        async with working(handlers.app, logs=LogOptions(keep=1)) as bench:
            await runs(bench)
            await changes(bench, client)
            await limits(bench)
            await malformed(bench)
            await asyncio.to_thread(controls, client)
            await bench.client.keep("default", success=2, fail=0)
            await until(lambda: bench.count("SUCCESS") == 2, message="all but the newest are removed")
            await asyncio.to_thread(versions, SyncStore(source, database_name))
            handlers.gate.set()
            await bench.at_rest()
        await asyncio.to_thread(without_worker, client, source)
        await asyncio.to_thread(tells, client)
    targeted = [write for write in writes.seen if is_targeted(write[2])]
    assert len(targeted) > 100, "the listener has heard of them"
    assert {command for command, *_ in targeted} == {"findAndModify", "update", "delete", "insert"}
    assert [write for write in writes.seen if not is_targeted(write[2])] == []
    assert functions_that_write() - turns.taken == set(EXCEPTED), "what writes has its turn here, or is excepted above"


async def runs(bench: Bench) -> None:
    """Claims and endings, single and in groups, simple and by all rules; pings; a transaction."""
    client = bench.client
    await client.publish("quick", key="single")
    await bench.status("quick:single", "SUCCESS")
    with bench.backed_up():
        plain = [TaskSpec("quick", key=f"plain/{n}") for n in range(5)]
        other = [TaskSpec("quick", key=f"other/{n}", retry_scope="worker", max_retries=9) for n in range(5)]
        await client.publish_many([*plain, *other])
    await until(lambda: bench.count("SUCCESS") >= 11, message="all done")
    await client.publish("fail", key="k", max_retries=0)
    await bench.status("fail:k", "FAIL")
    await client.publish("transact", key="k")
    await until(lambda: bench.document("transact:k")["task_state"]["worker_states"][-1:] != [], message="claimed")
    await until(
        lambda: bench.state("transact:k")["worker_states"][-1].get("returns") is not None, message="returns are added"
    )
    await client.publish("transact", {"fails": True}, key="late")
    assert (await client.wait("transact", "late")).returns_lost
    await bench.store.run(transactions.lose_returns_of(transactions.OwedReturns(["transact:k"]), ["a dead worker"]))
    await client.publish_many([TaskSpec("hold", key=key, ping_interval=0.1) for key in "abc"])
    for key in "abc":
        state = await bench.status(f"hold:{key}", "RUNNING")
        await pinged(bench, f"hold:{key}", state["worker_states"][-1]["ping_expire_time"])


async def pinged(bench: Bench, task_id: str, lease: datetime) -> None:
    """Wait until the task's lease has moved."""
    await until(lambda: bench.state(task_id)["worker_states"][-1]["ping_expire_time"] > lease, message="pinged")


async def changes(bench: Bench, client: Client) -> None:
    """What clients ask of tasks, some of which run."""
    await bench.client.cancel("hold", "a")
    await bench.status("hold:a", "CANCELED")
    await bench.client.update_option("hold", "b", priority=3)
    assert await bench.client.remove("hold", "b")
    await bench.client.retry("fail", "k")
    await bench.client.rerun("quick", "single")
    await bench.client.publish("quick", priority=1, key="single", if_exists="update", not_update_running=False)
    await bench.client.publish("fail", key="k", clean_failed=True)
    await asyncio.to_thread(client.publish_many, [TaskSpec("quick", key="plain/0")], if_exists="update")


async def limits(bench: Bench) -> None:
    """Places of a queue and of keys: taken one by one and several at once, settled and given back."""
    places = bench.mongo[bench.database]["places"]
    handed_back = {"running": [], "_id": {"$in": [PermitPool("default").id, PermitPool("default", "k1").id]}}
    await bench.client.limit("default", concurrency=5, rate=(100, timedelta(seconds=1)))
    await bench.client.publish("quick", key="limited")
    await bench.status("quick:limited", "SUCCESS")
    await bench.client.limit("default", key_concurrency=1)
    with bench.backed_up():
        several = [TaskSpec("quick", key=f"limited/{n}", limit_key=f"k{n}") for n in range(4)]
        await bench.client.publish_many(several)
    for number in range(4):
        await bench.status(f"quick:limited/{number}", "SUCCESS")
    await until(lambda: places.count_documents(handed_back) == 2, message="their places are free")
    await bench.client.limit("default")


async def malformed(bench: Bench) -> None:
    """A document that cannot be read ends as FAIL."""
    bad = build.task("quick:bad", time=datetime.now(UTC), option={"priority": "high"})
    bench.mongo[bench.database].command("insert", "tasks", documents=[bad], bypassDocumentValidation=True)
    await bench.status("quick:bad", "FAIL")


def controls(client: Client) -> None:
    """Pauses, orders to workers, schedules, a look by the doctor."""
    client.pause(queue="default")
    client.resume(queue="default")
    client.set_worker("w1", concurrency=5)
    client.add_schedule("s", "quick", timedelta(seconds=1))
    eventually(lambda: client.get_schedule("s").schedule_state.fired_cnt, message="the schedule has fired")
    client.pause_schedule("s")
    client.resume_schedule("s")
    assert client.remove_schedule("s")
    client.diagnose()


def flows(client: Client, store: SyncStore) -> None:
    """Steps that are released, canceled, opened again and removed; a flow that fails fast; a child that is owed."""
    flow = Flow("f", fail_fast=True)
    first, second = flow.add("1", "task"), flow.add("2", "task")
    last = flow.add("3", "task", after=[first, second])
    flow.add("4", "task", after=[last], on_failed="run")
    client.publish_flow(flow)
    store.tasks.update_one({"_id": "task:f/3"}, {"$set": {"flow.held_by": "task:f/1"}})
    child = {**stored(store, "f/2"), "_id": "task:f/5", "key": "f/5"}
    store.tasks.update_one({"_id": "task:f/1"}, {"$set": {"owed_tasks": [child]}})
    part = {"key": "f", "step": "6", "after": [], "on_failed": "cancel", "ancestors": ["task:f/1"]}
    fixed = {name: child[name] for name in ("name", "queue", "params", "task_option")}
    added = OwedTask({**fixed, "_id": "task:f/6", "key": "f/6", "flow": part})
    store.run(adding.make_room("f", "task:f/1", [added]))
    assert store.run(adding.add("task:f/1", claim(store, "task:f/1"), [added], lambda: True, RELAYS)) == ["task:f/6"]
    client.cancel("task", "f/1")
    lapse(store, "f/1")
    store.run(claims.settle(["task:f/1"]))
    store.run(settling.settle_all(["task:f/1"]))
    taken = stored(store, "f/4")
    taken["task_state"]["create_time"] -= timedelta(days=1)  # f/4 is another task than the owed one
    owes = {"owed_tasks": [taken], "owed_since": server_now(store)}
    store.tasks.update_one({"_id": "task:f/1"}, {"$set": owes})
    store.run(settling.settle_all(["task:f/1"]))
    client.retry("task", "f/1")
    run_id = claim(store, "task:f/1")
    failed = Outcome("task:f/1", run_id, RunStatus.FAIL, reason="no luck", final=True)
    store.run(claims.finish([failed]))
    store.run(settling.settle_all(["task:f/1"]))
    client.retry("task", "f/1")
    client.remove("task", "f/2")
    refused: Any = [{"$set": {"params": {"$divide": [1, 0]}}}]
    with pytest.raises(OperationFailed):
        store.run(settling.change({"_id": {"$in": ["task:f/1"]}}, refused))
    ended(client, store)


def ended(client: Client, store: SyncStore) -> None:
    """A flow that ends, so that its retention begins, and is opened again."""
    flow = Flow("g")
    flow.add("1", "task", retain_fail=60_000)
    client.publish_flow(flow)
    client.cancel("task", "g/1")
    assert store.run(retention.end_flows()) == 1
    client.retry("task", "g/1")
    assert stored(store, "g/1")["flow"]["end_time"] is None


def operated(client: Client, store: SyncStore) -> None:
    """A flow that is canceled and tried again as a whole, and whose first step is removed."""
    flow = Flow("h")
    flow.add("2", "task", after=[flow.add("1", "task")])
    client.publish_flow(flow)
    client.cancel("task", "h/1")
    assert store.run(operating._own(["task:h/1"])) == ["task:h/2"]
    assert len(client.retry_flow("h").task_ids) == 2
    assert len(client.cancel_flow("h").task_ids) == 2
    assert client.remove("task", "h/1")
    assert client.flow("h").head == "task:h/2"


def asking(spec: TaskSpec) -> Generator[None, Any, None]:
    """Ask for the create_time of a task, as a middleware around its publish."""
    spec.tells_time = True
    yield


def without_worker(client: Client, source: Mongo) -> None:
    """What is published in a caller's transaction, calls that gather, a purge, and leases that lapse."""
    for _ in range(2):
        client.publish("quick", key="gathers", debounce=3600)
        client.publish("quick", key="window", window=3600)
    with source.start_session() as session, session.start_transaction():
        client.publish("quick", key="in/0", session=session)
        client.publish_many([TaskSpec("quick", key="in/1"), TaskSpec("quick", key="in/2")], session=session)
    assert client.purge(status="INIT", name="quick", limit=2) == 2
    with Client(source, database=client.database_name, middleware=(asking,)) as told:
        assert told.publish("quick").create_time is not None
    store = SyncStore(source, client.database_name)
    flows(client, store)
    operated(client, store)
    publish(store, "lapsed")
    claim(store, "task:lapsed")
    lapse(store, "lapsed")
    assert store.run(claims.settle_lapsed(0, 10)) == 1
    assert store.run(tallies.fold()) == 1, "the tally of the worker that has stopped"
    assert client.metrics().queues
