"""The faulty network that other tests rely on: nobody gets around it, and each fault does what it says."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import bson
import pymongo
import pytest
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.errors import AutoReconnect, NetworkTimeout, PyMongoError

from mtask import App, Context
from mtask.local import ReplicaSet
from mtask.local.node import Node
from mtask.local.replica_set import direct_client
from tests.chaos.nemeses import wire
from tests.chaos.nemeses.links import Direction, Link
from tests.chaos.nemeses.network import ReplicaSetProxy
from tests.integration.worker_harness import Bench, working_on
from tests.mongo import PATIENCE, Client, Document, eventually

APP = "victim"
INTRODUCTION: Document = {
    "hello": 1,
    "client": {
        "application": {"name": APP},
        "driver": {"name": "none", "version": "1"},
        "os": {"type": "Linux"},
    },
}
#: How long nothing comes before it is taken for silence, in seconds.
SILENCE = 0.3


@pytest.fixture
def proxy(replica_set: ReplicaSet) -> Iterator[ReplicaSetProxy]:
    with ReplicaSetProxy(replica_set, seed=1) as proxy:
        yield proxy


@contextmanager
def connected(uri: str, app: str = APP, **options: Any) -> Iterator[Client]:
    """Connect as an application of that name, which sends nothing twice by itself."""
    given = {
        "serverSelectionTimeoutMS": 30_000,
        "heartbeatFrequencyMS": 500,
        "retryWrites": False,
        "retryReads": False,
        **options,
    }
    client: Client = MongoClient(uri, appname=app, **given)
    with client:
        yield client


@pytest.fixture
def direct(replica_set: ReplicaSet) -> Iterator[Client]:
    with connected(replica_set.uri, "direct", retryWrites=True, retryReads=True) as client:
        yield client


@pytest.fixture
def victim(proxy: ReplicaSetProxy) -> Iterator[Client]:
    with connected(proxy.uri) as client:
        client.admin.command("ping")
        yield client


class Raw:
    """A connection without a driver: what it sends and gets is seen as it is."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        self._frames = wire.Frames()
        self._messages: list[bytes] = []
        self._number = 0

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, command: Document, flags: int = 0) -> int:
        """Send a command and return its number."""
        self._number += 1
        body = b"\0" + bson.encode({**command, "$db": "admin"})
        has_checksum = flags & 1
        size = 20 + len(body) + 4 * has_checksum
        message = struct.pack("<iiiiI", size, self._number, 0, wire.OP_MSG, flags) + body
        self._socket.sendall(message + (struct.pack("<I", crc32c(message)) if has_checksum else b""))
        return self._number

    def receive(self) -> bytes:
        """Return the next message; raise ConnectionError where the connection ends instead."""
        while not self._messages:
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionAbortedError("ended in order")
            self._messages.extend(self._frames.feed(received))
        return self._messages.pop(0)

    def is_silent(self) -> bool:
        """Tell whether nothing comes, not even an end."""
        self._socket.settimeout(SILENCE)
        try:
            return not self._socket.recv(1)
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(PATIENCE)


def crc32c(message: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in message:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ 0x82F63B78 * (register & 1)
    return register ^ 0xFFFFFFFF


def seen_by_members(replica_set: ReplicaSet, app: str) -> set[str]:
    """Return the addresses from which the members that live see connections of this app come, idle ones too."""
    found = set()
    for node in replica_set.nodes:
        with direct_client(node, timedelta(seconds=PATIENCE)) as client:
            pipeline: list[Document] = [
                {"$currentOp": {"allUsers": True, "idleConnections": True}},
                {"$match": {"appName": app}},
            ]
            found |= {operation["client"] for operation in client.admin.aggregate(pipeline)}
    return found


def assert_all_behind(proxy: ReplicaSetProxy, replica_set: ReplicaSet, app: str, *, at_least: int) -> None:
    """All of this app's connections, its monitoring too, come through the proxy."""

    def all_behind() -> bool:
        seen = seen_by_members(replica_set, app)  # some may end before we ask the proxy: then once more
        return len(seen) >= at_least and seen <= proxy.connections(app=app)

    eventually(all_behind, PATIENCE, f"{app}'s connections, all of them through the proxy")


# --- where connections lead ---------------------------------------------------------------------------------------


def test_client_finds_all_members_behind_the_proxy_and_none_beside_it(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet, victim: Client
) -> None:
    places = {proxy.address(node) for node in replica_set.nodes}
    eventually(lambda: {f"{host}:{port}" for host, port in victim.nodes} == places, PATIENCE, "all members found")
    eventually(lambda: len(victim.secondaries) == 2, PATIENCE, "two secondaries")
    victim["t"]["t"].insert_one({})
    # A streaming monitor for each member, and at least the connection that has just written.
    assert_all_behind(proxy, replica_set, APP, at_least=4)
    assert not places & {node.address for node in replica_set.nodes}


def test_hello_names_the_proxys_ports_and_is_else_what_the_member_said(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet
) -> None:
    node = replica_set.primary()
    places = {member.address: proxy.address(member) for member in replica_set.nodes}
    with Raw(proxy.address(node)) as raw, Raw(node.address) as other:
        told = ask(raw, {"hello": 1, "compression": ["zlib"]})
        plain = ask(other, {"hello": 1, "compression": ["zlib"]})
    assert told["hosts"] == [places[address] for address in plain["hosts"]]
    assert (told["me"], told["primary"]) == (places[plain["me"]], places[plain["primary"]])
    changing = ("localTime", "lastWrite", "connectionId", "$clusterTime", "operationTime")
    assert list(told) == [name for name in plain if name != "compression"], "no compression, which could not be read"
    for name in told:
        if name not in ("hosts", "me", "primary", *changing):
            assert told[name] == plain[name], name


def ask(raw: Raw, command: Document, flags: int = 0) -> Document:
    raw.send(command, flags)
    return wire.body(raw.receive())


def test_replies_that_stream_and_those_with_a_checksum_name_the_proxys_ports_too(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet
) -> None:
    node = replica_set.primary()
    with Raw(proxy.address(node)) as raw:
        first = ask(raw, {"hello": 1}, flags=1)
        number = raw.send({"hello": 1, "topologyVersion": first["topologyVersion"], "maxAwaitTimeMS": 50}, 1 << 16)
        assert first["me"] == proxy.address(node)
        for _ in range(3):
            message = raw.receive()
            assert (wire.has_more_to_come(message), wire.response_to(message)) == (True, number)
            assert wire.body(message)["me"] == proxy.address(node)
            number = wire.request_id(message)
    with Raw(proxy.address(node)) as raw:
        assert ask(raw, {"ping": 1}, flags=1)["ok"] == 1, "the checksum of what is passed on is still there and right"


def test_what_a_client_sends_before_the_members_connection_is_there_reaches_the_member(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial = Link.dial

    async def dial_late(link: Link) -> None:
        while not link.client._early:  # noqa: ASYNC110 read, whether or not this Python's asyncio heeds a pause
            await asyncio.sleep(0.01)
        await dial(link)

    monkeypatch.setattr(Link, "dial", dial_late)
    with Raw(proxy.address(replica_set.nodes[0])) as raw:
        sent = [raw.send({"ping": 1}) for _ in range(5)]
        assert [wire.response_to(raw.receive()) for _ in sent] == sent


def test_step_down_is_followed_behind_the_proxy(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet, victim: Client
) -> None:
    victim["t"]["t"].insert_one({})
    former = replica_set.step_down(timedelta(seconds=10))
    successor = replica_set.wait_primary(other_than=former)

    def is_written() -> bool:
        with suppress(PyMongoError):
            return victim["t"]["t"].insert_one({}).acknowledged
        return False

    eventually(is_written, PATIENCE, "a write after the step-down")
    assert victim.address is not None
    assert f"{victim.address[0]}:{victim.address[1]}" == proxy.address(successor)
    assert_all_behind(proxy, replica_set, APP, at_least=4)


def test_member_that_is_killed_refuses_and_is_found_again_when_it_is_back(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet, victim: Client
) -> None:
    node = replica_set.secondaries()[0]
    eventually(lambda: len(victim.nodes) == 3, PATIENCE, "all members found")
    replica_set.kill(node)
    try:
        eventually(lambda: is_refused(proxy.address(node)), PATIENCE, "the dead member's port refuses")
        victim["t"]["t"].insert_one({})
    finally:
        replica_set.restart(node)
    eventually(lambda: not is_refused(proxy.address(node)), PATIENCE, "the port serves again")
    with Raw(proxy.address(node)) as raw:
        assert ask(raw, {"hello": 1})["me"] == proxy.address(node)
    eventually(lambda: address_of(proxy, node) in victim.secondaries, PATIENCE, "the client found it again")


def address_of(proxy: ReplicaSetProxy, node: Node) -> tuple[str, int]:
    host, port = proxy.address(node).split(":")
    return host, int(port)


def is_refused(address: str) -> bool:
    try:
        Raw(address).__exit__()
    except ConnectionRefusedError:
        return True
    return False


# --- faults -------------------------------------------------------------------------------------------------------


def test_cut_resets_all_connections_of_the_app_and_no_others(proxy: ReplicaSetProxy, victim: Client) -> None:
    with connected(proxy.uri, "bystander") as bystander, Raw(proxy.uri.split("/")[2].split(",")[0]) as raw:
        bystander.admin.command("ping")
        before, spared = proxy.connections(app=APP), proxy.connections(app="bystander")
        assert ask(raw, INTRODUCTION)["ok"] == 1

        assert proxy.cut(app=APP) >= len(before) + 1

        with pytest.raises(ConnectionResetError):
            raw.receive()
        assert not before & proxy.connections(app=APP)
        assert spared <= proxy.connections(app="bystander")
        assert proxy.counts().cut >= len(before) + 1
        bystander.admin.command("ping")
        eventually(lambda: is_alive(victim), PATIENCE, "the app connects anew")


def is_alive(client: Client) -> bool:
    with suppress(PyMongoError), pymongo.timeout(1):
        return bool(client.admin.command("ping")["ok"])
    return False


def test_refusal_of_all_is_a_port_on_which_nobody_listens_until_healed(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet, victim: Client
) -> None:
    node, other, _ = replica_set.nodes
    one = proxy.refuse(node)
    assert (is_refused(proxy.address(node)), is_refused(proxy.address(other))) == (True, False)
    everything = proxy.refuse()
    assert is_refused(proxy.address(other))
    assert not proxy.connections()
    assert not is_alive(victim)
    proxy.heal(everything)
    assert (is_refused(proxy.address(node)), is_refused(proxy.address(other))) == (True, False)
    proxy.heal(one)
    assert not is_refused(proxy.address(node))
    eventually(lambda: is_alive(victim), PATIENCE, "the app connects anew")


def test_refusal_of_one_app_resets_its_connections_and_spares_others(proxy: ReplicaSetProxy, victim: Client) -> None:
    with connected(proxy.uri, "bystander") as bystander:
        bystander.admin.command("ping")
        proxy.refuse(app="vic*")
        assert not proxy.connections(app=APP)
        with connected(proxy.uri) as late:
            eventually(lambda: proxy.counts().refused > 0, PATIENCE, "one that comes late is refused")
            assert not is_alive(late)
            assert not proxy.connections(app=APP)
        bystander.admin.command("ping")
        proxy.heal()
        eventually(lambda: is_alive(victim), PATIENCE, "the app connects anew")


def test_delay_holds_messages_back_in_both_directions_and_keeps_their_order(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet
) -> None:
    with Raw(proxy.address(replica_set.nodes[0])) as raw:
        ask(raw, INTRODUCTION)
        proxy.delay(0.1, 0.2, app=APP)
        begin = time.monotonic()
        sent = [raw.send({"ping": 1}) for _ in range(20)]
        answered = [wire.response_to(raw.receive()) for _ in sent]
        assert time.monotonic() - begin >= 0.2
        assert answered == sent
        assert proxy.counts().messages_delayed == 40
        proxy.heal()
        assert ask(raw, {"ping": 1})["ok"] == 1
        assert proxy.counts().messages_delayed == 40


WRITES: dict[str, Callable[[Collection[Document]], Any]] = {
    "insert": lambda lost: lost.insert_one({"_id": 1}),
    "update": lambda lost: lost.update_one({"_id": 1}, {"$set": {"x": 1}}, upsert=True),
    "findAndModify": lambda lost: lost.find_one_and_update({"_id": 1}, {"$set": {"x": 1}}, upsert=True),
}


@pytest.mark.parametrize("command", WRITES)
def test_lost_reply_is_one_of_a_write_that_was_carried_out(
    proxy: ReplicaSetProxy, victim: Client, direct: Client, command: str
) -> None:
    direct["t"]["lost"].drop()
    with connected(proxy.uri, "bystander") as bystander:
        loss = proxy.drop_replies(1, app=APP, text=b"_id")
        bystander["t"]["other"].insert_one({})
        victim["t"]["lost"].update_many({"_id": "none"}, {"$set": {"x": 1}})  # changes nothing: it has no reply to lose
        with pytest.raises(AutoReconnect):
            WRITES[command](victim["t"]["lost"])
        assert loss.is_done.is_set()
        (dropped,) = loss.dropped
        assert (dropped.command, dropped.app, dropped.reply["ok"]) == (command, APP, 1.0)
        assert direct["t"]["lost"].count_documents({"_id": 1}) == 1, "the server had carried it out"
        assert proxy.counts().replies_dropped == 1
        victim["t"]["lost"].update_one({"_id": 1}, {"$set": {"y": 1}})  # once was all


def test_lost_reply_of_a_commit_leaves_the_transaction_committed(
    proxy: ReplicaSetProxy, victim: Client, direct: Client
) -> None:
    direct["t"]["lost"].drop()
    direct["t"].create_collection("lost")
    loss = proxy.drop_replies(1, commands=["commitTransaction"], app=APP)
    with victim.start_session() as session, session.start_transaction():  # the driver commits again by itself
        victim["t"]["lost"].insert_one({"_id": 1}, session=session)
    assert [dropped.command for dropped in loss.dropped] == ["commitTransaction"]
    assert direct["t"]["lost"].count_documents({}) == 1


def test_share_of_replies_is_lost_until_healed(proxy: ReplicaSetProxy, victim: Client) -> None:
    loss = proxy.drop_replies(share=0.5, app=APP)
    failures = 0
    for _ in range(4):  # with this seed, the first and the last
        try:
            victim["t"]["t"].insert_one({})
        except AutoReconnect:
            failures += 1
    assert failures == len(loss.dropped) == 2
    proxy.heal(loss)
    for _ in range(10):
        victim["t"]["t"].insert_one({})
    assert len(loss.dropped) == 2


@pytest.mark.parametrize(("direction", "arrives"), [("both", 0), ("requests", 0), ("replies", 1)])
def test_black_hole_swallows_and_keeps_connections_open_until_it_is_healed(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet, direct: Client, direction: Direction, arrives: int
) -> None:
    direct["t"]["hole"].drop()
    address = proxy.address(replica_set.primary())
    with Raw(address) as before, connected(proxy.uri, socketTimeoutMS=400) as victim:
        eventually(lambda: is_alive(victim), PATIENCE, "the app has connected")
        ask(before, INTRODUCTION)
        proxy.black_hole(direction, app=APP)
        with pytest.raises(NetworkTimeout):
            victim["t"]["hole"].insert_one({})
        assert direct["t"]["hole"].count_documents({}) == arrives
        with Raw(address) as after:
            after.send(INTRODUCTION)
            before.send({"ping": 1})
            assert (before.is_silent(), after.is_silent()) == (True, True)
            with connected(proxy.uri, "bystander") as bystander:
                bystander.admin.command("ping")
            counts = proxy.counts()
            assert counts.bytes_swallowed > 0
            assert counts.held >= 2
            assert counts.cut == 0
            proxy.heal()
            for raw in (before, after):
                with pytest.raises(ConnectionResetError):
                    raw.receive()
        eventually(lambda: is_alive(victim), PATIENCE, "the app connects anew")


def test_end_of_a_connection_in_a_black_hole_is_not_told_either(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet
) -> None:
    node = replica_set.nodes[0]
    with Raw(proxy.address(node)) as raw:
        ask(raw, INTRODUCTION)
        (seen,) = proxy.connections(app=APP)
        proxy.black_hole(app=APP)
    time.sleep(0.1)  # an end that was told would be there at once
    assert seen in seen_by_members(replica_set, APP)
    proxy.heal()
    eventually(lambda: seen not in seen_by_members(replica_set, APP), PATIENCE, "healed, it is told")


# --- a worker -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_worker_goes_on_behind_the_proxy_after_every_fault_and_runs_no_task_twice(
    proxy: ReplicaSetProxy, replica_set: ReplicaSet, direct: Client
) -> None:
    app, database = App(), "behind_proxy"
    started: list[str] = []

    @app.task
    async def work(context: Context) -> None:
        started.append(context.task.id)
        await asyncio.sleep(0.01)

    faults: dict[str, Callable[[str], Any]] = {
        "cut": lambda name: proxy.cut(app=name),
        "refuse": lambda name: proxy.refuse(app=name),
        "delay": lambda name: proxy.delay(0.02, 0.05, app=name),
        "claim": lambda name: proxy.drop_replies(2, text=b"claim_time", app=name),
        "finish": lambda name: proxy.drop_replies(2, text=b"success_time", app=name),
        "hole": lambda name: proxy.black_hole(app=name),
        "replies": lambda name: proxy.black_hole("replies", app=name),
    }

    async def done(bench: Bench, task_ids: list[str]) -> None:
        for task_id in task_ids:
            await bench.status(task_id, "SUCCESS", PATIENCE)

    async def scenario() -> None:
        async with working_on(proxy.uri, database, direct, app) as bench:
            # Three clients with a monitor each per member; the one in use streams, on a connection of its own.
            await asyncio.to_thread(assert_all_behind, proxy, replica_set, bench.app_name, at_least=9)
            published: list[str] = []
            for fault, begin in faults.items():
                begin(bench.app_name)
                some = [(await bench.client.publish("work", key=f"{fault}/{number}")).task_id for number in range(5)]
                published += some
                await asyncio.sleep(0.3)
                proxy.heal()
                await done(bench, some)
            assert sorted(started) == sorted(published)
            for task_id in published:
                (run,) = bench.state(task_id)["worker_states"]
                assert run["status"] == "SUCCESS"
        counts = proxy.counts()
        assert min(counts.cut, counts.replies_dropped, counts.messages_delayed, counts.bytes_swallowed, counts.held) > 0
        assert counts.replies_dropped >= 2

    asyncio.run(scenario())
