"""One server for each folder. All processes of the user share this server. It is started once and outlives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

from mtask.errors import MongodFailed
from mtask.local._supervise import option
from mtask.local.folder import (
    Deadline,
    LocalServer,
    exclusive,
    find_mongod,
    make_folder,
    read_state,
    resolved,
    rotate_log,
    wait_until,
    write_state,
)
from mtask.local.node import SMALLEST_CACHE_MB, Launch, Node
from mtask.local.ownership import (
    RELEASE_TIMEOUT,
    STOP_TIMEOUT,
    free_ports,
    is_free,
    is_held,
    serving_arguments,
    stop_mongod,
)
from mtask.local.replica_set import PORT_ATTEMPTS, REPLICA_SET, claim_primary

START_TIMEOUT = timedelta(seconds=60)
HAS_ENDED = "has ended"


def start(
    folder: Path | None = None,
    *,
    mongod: Path | None = None,
    timeout: timedelta = START_TIMEOUT,
    cache_mb: int = SMALLEST_CACHE_MB,
    parameters: Mapping[str, str] = MappingProxyType({}),
) -> LocalServer:
    """Start the folder's server. If it runs already, return it, even if its cache and parameters differ.

    The server is detached: it outlives this process and its terminal. It keeps its port from one start to the next,
    unless another process takes that port. Its log is `mongod.log` in the folder. `cache_mb` is at least 256.
    Raises MongodNotFound or MongodFailed. After an error, no mongod that this call started is left running.
    """
    return ensure_started(folder, mongod, timeout, cache_mb, parameters)[0]


def status(folder: Path | None = None) -> LocalServer | None:
    """Return the folder's server if it runs and is ready, else None."""
    chosen = resolved(folder)
    recorded = read_state(chosen)
    serving = serving_arguments(chosen / "data")
    if recorded is None or serving is None or recorded.pid != serving[0]:
        return None
    return recorded


def stop(folder: Path | None = None, *, timeout: timedelta = STOP_TIMEOUT) -> bool:
    """Stop the folder's server in good order, or kill it after `timeout`; return whether it ran. The data stays."""
    chosen = resolved(folder)
    if not chosen.is_dir():
        return False
    with exclusive(chosen, Deadline(timeout + START_TIMEOUT)):
        return stop_mongod(chosen / "data", timeout)


@contextmanager
def running(
    folder: Path | None = None,
    *,
    mongod: Path | None = None,
    timeout: timedelta = START_TIMEOUT,
    cache_mb: int = SMALLEST_CACHE_MB,
    parameters: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[LocalServer]:
    """Run the folder's server during the block. Stop it afterwards only if this call started it."""
    server, is_ours = ensure_started(folder, mongod, timeout, cache_mb, parameters)
    try:
        yield server
    finally:
        if is_ours:
            stop(server.folder)


def ensure_started(
    folder: Path | None,
    mongod: Path | None,
    timeout: timedelta,
    cache_mb: int,
    parameters: Mapping[str, str],
) -> tuple[LocalServer, bool]:
    """Return the folder's server, and whether this call started it."""
    chosen = resolved(folder)
    deadline = Deadline(timeout)
    serving = serving_arguments(chosen / "data")
    # The binary is found before the folder is made, so that a failure leaves no folder.
    binary = Path(serving[1][0]) if serving else find_mongod(mongod)
    make_folder(chosen, binary)
    with exclusive(chosen, deadline):
        serving = serving_arguments(chosen / "data")
        if serving is not None:
            node = adopted(chosen, *serving)
            return ready(node, None, deadline), False
        node, launch = launched(chosen, binary, cache_mb, parameters, deadline)
        try:
            return ready(node, launch, deadline), True
        except BaseException:
            node.kill()
            raise


def launched(
    folder: Path, binary: Path, cache_mb: int, parameters: Mapping[str, str], deadline: Deadline
) -> tuple[Node, Launch]:
    """Start a mongod on the port of the last start, or on another port if that port is taken."""
    rotate_log(folder / "mongod.log")
    port = remembered_port(folder) or free_ports(1)[0]
    for attempts_left in reversed(range(PORT_ATTEMPTS)):
        node = Node(binary, folder, port, REPLICA_SET, cache_mb, parameters)
        launch = node.launch()
        try:
            launch.wait(deadline)
        except MongodFailed:
            if not (attempts_left and launch.is_port_taken()):
                raise
            port = free_ports(1)[0]
        else:
            break
    return node, launch


def remembered_port(folder: Path) -> int | None:
    """Return the port of the last start, or None if another process listens there."""
    wait_until(lambda: not is_held(folder / "data"), Deadline(RELEASE_TIMEOUT))
    recorded = read_state(folder)
    if recorded is None or not wait_until(lambda: is_free(recorded.port), Deadline(RELEASE_TIMEOUT)):
        return None
    return recorded.port


def adopted(folder: Path, pid: int, arguments: list[str]) -> Node:
    """Return the node that runs already. The process that started it may have died before the node was ready."""
    port = option(arguments, "port")
    name = option(arguments, "replSet")
    if port is None or name is None:
        raise MongodFailed(
            arguments[0],
            f"process {pid} uses the data files in {folder} and is not a server of mtask",
            "End that process, or choose another folder.",
        )
    return Node(Path(arguments[0]), folder, int(port), name)


def ready(node: Node, launch: Launch | None, deadline: Deadline) -> LocalServer:
    """Wait until the node is primary, and record it for other processes."""
    # If mongod has died, do not wait any longer.
    version = wait_until(lambda: claim_primary(node) if node.is_running() else HAS_ENDED, deadline)
    pid = node.pid()
    if version is None or version == HAS_ENDED or pid is None:
        if launch is not None:
            raise launch.failure(None if pid else 0)
        raise MongodFailed(
            str(node.binary),
            f"it runs but did not become primary within {deadline.timeout.total_seconds():g} s",
            f"Look into {node.log}; `mtask local stop` ends it.",
            failed="does not serve",
        )
    server = LocalServer(
        folder=node.folder,
        uri=f"mongodb://{node.address}/?replicaSet={node.replica_set}",
        port=node.port,
        pid=pid,
        replica_set=node.replica_set,
        version=version,
    )
    if read_state(node.folder) != server:
        write_state(server)
    return server
