"""A replica set on this machine for tests of failover: its nodes can be killed and paused."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pymongo import MongoClient
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError

from mtask.errors import InvalidOption, MongodFailed
from mtask.local import _supervise
from mtask.local.folder import Deadline, find_mongod, wait_until
from mtask.local.node import SMALLEST_CACHE_MB, Node, Security, driver_options, uri_of
from mtask.local.ownership import HOST, STOP_TIMEOUT, free_ports, is_stopped

REPLICA_SET = "mtask"
START_TIMEOUT = timedelta(seconds=60)
PRIMARY_TIMEOUT = timedelta(seconds=30)
ELECTION_TIMEOUT = timedelta(milliseconds=1500)
#: The most attempts to start the nodes. Each attempt uses new ports, because another process may take a port first.
PORT_ATTEMPTS = 5
MOST_NODES = 7


class ReplicaSet:
    """Some mongods on 127.0.0.1 that form one replica set.

    They run until `stop` and outlive this process. `temporary` makes a set that ends with this process.
    """

    def __init__(self, folder: Path, nodes: Sequence[Node]) -> None:
        self.folder = folder
        self.nodes = tuple(nodes)

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        nodes: int = 3,
        mongod: Path | None = None,
        parameters: Mapping[str, str] = MappingProxyType({}),
        cache_mb: int = SMALLEST_CACHE_MB,
        timeout: timedelta = START_TIMEOUT,
        election_timeout: timedelta = ELECTION_TIMEOUT,
        security: Security | None = None,
    ) -> ReplicaSet:
        """Start a new set in an empty folder, and wait until it has a primary that all other nodes follow.

        `parameters` are mongod's server parameters; `{"enableTestCommands": "1"}` allows fail points.
        `election_timeout`: the time without a primary after which the other nodes elect a new one.
        `security`: passwords for users, and TLS if `security` has a certificate.
        Raises MongodNotFound or MongodFailed. After an error, no mongod of the set is left running.
        """
        if not 1 <= nodes <= MOST_NODES:
            raise InvalidOption("nodes", f"a set has 1 to {MOST_NODES} of them", nodes)
        deadline = Deadline(timeout)
        binary = find_mongod(mongod)
        folder = folder.absolute()
        if security is not None:
            security.prepare()
        for attempts_left in reversed(range(PORT_ATTEMPTS)):
            members = [
                Node(
                    binary=binary,
                    folder=folder / f"node-{number}",
                    port=port,
                    replica_set=REPLICA_SET,
                    cache_mb=cache_mb,
                    parameters=parameters,
                    security=security,
                )
                for number, port in enumerate(free_ports(nodes))
            ]
            if launch_all(members, deadline, accept_taken_port=attempts_left > 0):
                break
        replica_set = cls(folder, members)
        try:
            replica_set._join(election_timeout, deadline)
        except BaseException:
            replica_set._kill_all()
            raise
        return replica_set

    def _join(self, election_timeout: timedelta, deadline: Deadline) -> None:
        milliseconds = int(election_timeout.total_seconds() * 1000)
        settings = {"electionTimeoutMillis": milliseconds, "heartbeatIntervalMillis": max(100, milliseconds // 5)}
        try:
            initiate(self.nodes, settings)
        except PyMongoError as error:
            raise self._failed(f"the replica set was not accepted: {error}") from error
        for node in self.nodes:
            if not wait_until(lambda node=node: is_member_ready(node), deadline):  # type: ignore[misc]
                raise self._failed(f"node {node.address} did not join the replica set in time")
        primary = self.wait_primary(timedelta(seconds=deadline.remaining()))
        try:
            make_administrator(primary)
        except PyMongoError as error:
            raise self._failed(f"its first user could not be made: {error}") from error
        for node in self.nodes if len(self.nodes) > 1 else ():
            if not wait_until(partial(make_able_to_roll_back, node), deadline):
                raise self._failed(f"node {node.address} wrote no checkpoint in time")

    @property
    def uri(self) -> str:
        """The connection string with all nodes. With security, it holds the administrator's name and password."""
        return self.uri_as(None)

    def uri_as(self, user: str | None, password: str | None = None) -> str:
        """Return the connection string of a user, or that of the administrator if `user` is None."""
        addresses = ",".join(node.address for node in self.nodes)
        return uri_of(addresses, REPLICA_SET, self.nodes[0].security, user, password)

    def primary(self) -> Node:
        """Return the primary. If there is none, wait for one, as `wait_primary` does."""
        return self.wait_primary()

    def secondaries(self) -> list[Node]:
        """Return all running nodes except the primary."""
        primary = self.primary()
        return [node for node in self.nodes if node != primary and node.is_running()]

    def wait_primary(self, timeout: timedelta = PRIMARY_TIMEOUT, *, other_than: Node | None = None) -> Node:
        """Wait until a node other than `other_than` is primary; return it. Raises MongodFailed after `timeout`."""
        candidates = [node for node in self.nodes if node != other_than]
        primary = wait_until(lambda: primary_of(candidates), Deadline(timeout))
        if primary is None:
            raise self._failed(f"no node became primary within {timeout.total_seconds():g} s")
        return primary

    def kill(self, node: Node) -> None:
        """Kill a node with SIGKILL, like a crash."""
        node.kill()

    def restart(self, node: Node, timeout: timedelta = START_TIMEOUT) -> None:
        """Start a node again, with its port and its data. If the node runs, stop it first.

        The call returns when the node is a ready member. If the other nodes have no primary, it returns as soon as the
        node listens.
        """
        deadline = Deadline(timeout)
        self._shut_down(node)
        node.launch().wait(deadline)
        others = [other for other in self.nodes if other != node]
        if not others or primary_of(others) is not None:
            wait_until(lambda: is_member_ready(node), deadline)

    def pause(self, node: Node) -> None:
        """Freeze a node with SIGSTOP. From then on, its connections are open, but the node does not answer."""
        node.send(signal.SIGSTOP)
        pid = node.pid()
        if pid is not None:
            wait_until(lambda: is_stopped(pid), Deadline(STOP_TIMEOUT))

    def resume(self, node: Node) -> None:
        """Let a paused node continue."""
        node.send(signal.SIGCONT)

    def step_down(self, duration: timedelta = timedelta(seconds=5)) -> Node:
        """Make the primary step down; return the node that was primary. For `duration`, it cannot be elected again.

        Its connections stay open. A set of one node has no primary during that time.
        """
        primary = self.primary()
        seconds = max(1, round(duration.total_seconds()))
        with direct_client(primary, timedelta(seconds=10), as_admin=True) as client, suppress(AutoReconnect):
            try:
                client.admin.command("replSetStepDown", seconds, secondaryCatchUpPeriodSecs=0, force=True)
            except OperationFailure as error:
                raise self._failed(f"node {primary.address} did not step down: {error}") from error
        return primary

    def stop(self, timeout: timedelta = STOP_TIMEOUT) -> None:
        """Stop all nodes in good order, or kill them after the timeout. The data stays."""
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            list(threads.map(lambda node: self._shut_down(node, timeout), self.nodes))

    def _shut_down(self, node: Node, timeout: timedelta = STOP_TIMEOUT) -> None:
        # A command stops the node, because a member that gets SIGTERM first waits 15 s for its clients to leave.
        self.resume(node)
        if node.is_running():
            with direct_client(node, as_admin=True) as client, suppress(PyMongoError):
                client.admin.command("shutdown", 1, force=True, timeoutSecs=0)
        node.stop(timeout)

    def _kill_all(self) -> None:
        for node in self.nodes:
            node.kill()

    def _failed(self, reason: str) -> MongodFailed:
        return MongodFailed(
            str(self.nodes[0].binary),
            reason,
            f"Look into the mongod.log of each node in {self.folder}.",
            failed="does not serve",
        )


def launch_all(nodes: Sequence[Node], deadline: Deadline, *, accept_taken_port: bool) -> bool:
    """Start all nodes at once. Return True if they run, or False if a port was taken.

    Without `accept_taken_port`, a taken port raises an error.
    """
    launches = [node.launch() for node in nodes]
    for launch in launches:
        try:
            launch.wait(deadline)
        except BaseException:
            for other in launches:
                other.abandon()
            if accept_taken_port and launch.is_port_taken():
                return False
            raise
    return True


# --- replication -----------------------------------------------------------------------------------------

# Makes replica sets of running nodes, and finds their primaries.

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


# --- sets that end with their process ---------------------------------------------------------------------

#: Time limit of the wait for the sweep. It is longer than the time limit of the sweep itself.
SWEEP_TIMEOUT = timedelta(seconds=_supervise.SWEEP_SECONDS + 10)


@contextmanager
def temporary(
    nodes: int = 1,
    *,
    mongod: Path | None = None,
    parameters: Mapping[str, str] = MappingProxyType({}),
    cache_mb: int = SMALLEST_CACHE_MB,
    timeout: timedelta = START_TIMEOUT,
    election_timeout: timedelta = ELECTION_TIMEOUT,
    security: Security | None = None,
) -> Iterator[ReplicaSet]:
    """Run a replica set in a folder of its own. At the end everything is removed, even if this process is killed.

    `timeout`: time limit of the start. `security`: passwords and TLS. Raises MongodNotFound and MongodFailed.
    """
    binary = find_mongod(mongod)
    folder = Path(tempfile.mkdtemp(prefix="mtask-")).resolve()
    with swept(folder, binary):
        yield ReplicaSet.start(
            folder,
            nodes=nodes,
            mongod=binary,
            parameters=parameters,
            cache_mb=cache_mb,
            timeout=timeout,
            election_timeout=election_timeout,
            security=security,
        )


@contextmanager
def swept(folder: Path, binary: Path) -> Iterator[None]:
    """Start a small process that removes the folder and its mongods when the block or this process ends."""
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", _supervise.__file__, str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert supervisor.stdin is not None
        supervisor.stdin.close()
        if supervisor.wait(SWEEP_TIMEOUT.total_seconds()) != 0:
            raise MongodFailed(
                str(binary),
                f"its temporary folder {folder} could not be cleared",
                "End the mongod that uses the folder and remove the folder.",
                failed="did not stop",
            )
