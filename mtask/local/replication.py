"""Makes replica sets of running nodes, and finds their primaries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from mtask.local.node import Node
from mtask.local.ports import HOST
from mtask.local.security import driver_options

Reply = Mapping[str, Any]

CALL_TIMEOUT = timedelta(seconds=2)
NOT_YET_INITIALIZED = 94
ALREADY_INITIALIZED = 23


@contextmanager
def direct_client(
    node: Node, timeout: timedelta = CALL_TIMEOUT, *, as_admin: bool = False
) -> Iterator[MongoClient[dict[str, Any]]]:
    """Connect to one node, whatever its role. The timeout applies to each step of a call."""
    milliseconds = int(timeout.total_seconds() * 1000)
    client: MongoClient[dict[str, Any]] = MongoClient(
        HOST,
        node.port,
        directConnection=True,
        serverSelectionTimeoutMS=milliseconds,
        connectTimeoutMS=milliseconds,
        socketTimeoutMS=milliseconds,
        **driver_options(node.security, as_admin=as_admin),
    )
    with client:
        yield client


def ask(node: Node, command: str) -> Reply | None:
    """Return a node's reply to an admin command, or None if it does not answer in time."""
    with direct_client(node) as client:
        try:
            return client.admin.command(command)
        except PyMongoError:
            return None


def initiate(nodes: Sequence[Node], settings: Mapping[str, int]) -> None:
    """Make one replica set of the nodes, unless they are in one already."""
    members = [{"_id": number, "host": node.address} for number, node in enumerate(nodes)]
    configuration = {"_id": nodes[0].replica_set, "members": members, "settings": dict(settings)}
    # If there are several nodes, the first node asks the others. This can take a while.
    with direct_client(nodes[0], timedelta(seconds=20)) as client:
        try:
            client.admin.command("replSetInitiate", configuration)
        except OperationFailure as error:
            if error.code != ALREADY_INITIALIZED:
                raise


def make_administrator(node: Node) -> None:
    """Make the first user of a new set, on its primary.

    MongoDB allows this without a password if the call comes from the same machine.
    """
    if node.security is None:
        return
    with direct_client(node, timedelta(seconds=20)) as client:
        client.admin.command("createUser", node.security.user, pwd=node.security.password, roles=["root"])


def claim_primary(node: Node) -> str | None:
    """Make the only node of a set primary. Return the server's version, or None if the node is not primary yet.

    A new set is initiated. A set that last ran on another port gets its new address.
    """
    with direct_client(node) as client, contextlib.suppress(PyMongoError):
        hello = client.admin.command("hello")
        if hello.get("isWritablePrimary"):
            return str(client.server_info()["version"])
        try:
            configuration = client.admin.command("replSetGetConfig")["config"]
        except OperationFailure as error:
            if error.code == NOT_YET_INITIALIZED:
                initiate([node], {})
            return None
        # First, the node looks for itself at its old address. If a program at that address never answers, the node
        # waits for half a minute.
        if [member["host"] for member in configuration["members"]] != [node.address]:
            client.admin.command("replSetReconfig", readdressed(configuration, node.address), force=True)
    return None


def readdressed(configuration: Reply, address: str) -> dict[str, Any]:
    """Return a configuration in which the node at this address is the only member."""
    return {
        **configuration,
        "version": configuration["version"] + 1,
        "members": [{**configuration["members"][0], "host": address}],
    }


def primary_of(nodes: Sequence[Node]) -> Node | None:
    """Return the current primary. If two nodes claim to be primary, return the one that was elected later."""
    claims: list[tuple[Any, Node]] = []
    for node in nodes:
        reply = ask(node, "hello") if node.is_running() else None
        if reply is not None and reply.get("isWritablePrimary"):
            claims.append((reply["electionId"], node))
    return max(claims, key=lambda claim: claim[0])[1] if claims else None


def is_member_ready(node: Node) -> bool:
    """Whether the node is a ready member: a primary, or a secondary that has caught up at least once."""
    reply = ask(node, "hello")
    return reply is not None and bool(reply.get("isWritablePrimary") or reply.get("secondary"))


def make_able_to_roll_back(node: Node) -> bool:
    """Write a checkpoint of a member; return whether the member can roll back to it.

    A new primary may make a former one roll back. A member without any checkpoint that a majority holds cannot do so
    and aborts. A member writes its first checkpoint by itself only after a minute.
    """
    with direct_client(node, timedelta(seconds=20), as_admin=True) as client, contextlib.suppress(PyMongoError):
        client.admin.command("fsync")
        checkpoint = client.admin.command("replSetGetStatus").get("lastStableRecoveryTimestamp")
        return bool(checkpoint and checkpoint.time)
    return False
