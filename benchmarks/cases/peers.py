"""peers: mtask beside other task queues, each on its own server, in turn and in one run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.measuring.server import NotMeasured
from benchmarks.peers import trials
from benchmarks.peers.catalogue import MONGO, MTASK, NAMES, PEERS, POSTGRES, REDIS, Peer
from benchmarks.peers.lines import Survival
from benchmarks.peers.servers import Mongo, PeerServer, Postgres, Redis
from benchmarks.peers.trials import Bench, Drain, Quiet, Sizes
from benchmarks.report.figures import turns
from mtask.errors import InvalidInput, MtaskError
from mtask.local.folder import find_mongod
from mtask.local.replica_set import swept
from mtask.settings import read_settings

T = TypeVar("T")
TASKS = 1_000
RUNS = 3
BUILD = Path("build/peers")
REDIS_DURABLE = "redis, appendfsync always"
#: Kills of workers that are tried at once: they mostly wait.
_KILLS_AT_ONCE = 3


@dataclass(slots=True)
class Measured:
    """All that was measured of one peer."""

    peer: Peer
    drains: list[Drain] = field(default_factory=list)
    #: On Redis that writes each change to disk before it answers.
    durable_drains: list[Drain] = field(default_factory=list)
    #: With the lasting setting, on a server that writes to disk before it answers: no kill loses a task.
    kept_drains: list[Drain] = field(default_factory=list)
    quiets: list[Quiet] = field(default_factory=list)
    worker_killed: Survival | None = None
    worker_killed_lasting: Survival | None = None
    server_killed: Survival | None = None
    server_killed_durable: Survival | None = None
    #: Why something was not measured.
    failures: list[str] = field(default_factory=list)

    @property
    def is_there(self) -> bool:
        """Whether anything was measured."""
        return bool(self.drains or self.quiets or self.worker_killed or self.server_killed)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a run."""

    sizes: Sizes
    runs: int
    measured: Sequence[Measured]
    #: Versions of the servers, by title.
    servers: Mapping[str, str]
    #: The load of the machine before and after the run: processes that want a core, of the last minute.
    load: tuple[float, float]


def chosen(names: str | None) -> list[Peer]:
    """Return the peers of these names, separated by commas, mtask always among them; raise InvalidInput."""
    if names is None:
        return list(PEERS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in NAMES]
    if unknown or not wanted:
        said = f"no peer is called {', '.join(unknown)}" if unknown else "it names none"
        raise InvalidInput(f"--peers: {said}. Choose from {', '.join(NAMES)}.", field="peers")
    return [peer for peer in PEERS if peer.name in wanted or peer.name == MTASK]


def measure(
    peers: Sequence[Peer],
    servers: Servers,
    sizes: Sizes,
    runs: int,
    say: Callable[[str], None],
    *,
    has_kills: bool = True,
) -> Comparison:
    """Measure these peers; whatever cannot be measured is noted, and the rest goes on."""
    before = os.getloadavg()[0]
    measured = [Measured(peer) for peer in peers]
    there = [one for one in measured if _prepare(one, servers, say)]
    for run in range(runs):
        for one in turns(there, run) if there else ():
            say(f"peers: run {run + 1} of {runs}, {one.peer.title} on {one.peer.server}")
            _measure_pace(one, servers, sizes)
    if has_kills:
        _kill_workers(there, servers, sizes, say)
        _kill_servers(there, servers, sizes, say)
    versions = {server.title: server.version for server in servers.started}
    return Comparison(sizes, runs, measured, versions, (before, os.getloadavg()[0]))


class Servers:
    """The servers, each started when the first peer asks for it; `close` stops them."""

    def __init__(self, starts: Mapping[str, Callable[[], PeerServer]], build: Path, scratch: Path) -> None:
        self.build = build
        self.scratch = scratch
        self._starts = starts
        self._found: dict[str, PeerServer | NotMeasured] = {}

    @property
    def started(self) -> list[PeerServer]:
        """All that run."""
        return [server for server in self._found.values() if isinstance(server, PeerServer)]

    def get(self, name: str) -> PeerServer:
        """Return a server; raise NotMeasured if it cannot be started."""
        if name not in self._found:
            try:
                server = self._starts[name]()
            except NotMeasured as error:
                self._found[name] = error
            else:
                self._found[name] = server
        found = self._found[name]
        if isinstance(found, NotMeasured):
            raise found
        return found

    def bench(self, peer: Peer, *, is_durable: bool = False) -> Bench:
        """Return the bench of a peer on its server."""
        server = self.get(REDIS_DURABLE if is_durable and peer.server == REDIS else peer.server)
        return Bench(peer, server, self.build, self.scratch)

    def close(self) -> None:
        """Stop all that run."""
        for server in self.started:
            server.stop()


@contextmanager
def open_servers(cache_mb: int, say: Callable[[str], None]) -> Iterator[Servers]:
    """Make a folder for servers and trials; at the end stop the servers and remove it."""
    binary = find_mongod(read_settings().mongod)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="mtask-peers-")).resolve()
        stack.enter_context(swept(folder, binary))  # removes the folder, even if this process is killed
        folder.chmod(0o711)  # PostgreSQL's user must reach its part
        scratch = folder / "trials"
        scratch.mkdir()
        say("peers: starting the servers")
        starts: dict[str, Callable[[], PeerServer]] = {
            MONGO: lambda: Mongo(folder, cache_mb),
            POSTGRES: lambda: Postgres(folder),
            REDIS: lambda: Redis(folder),
            REDIS_DURABLE: lambda: Redis(folder, is_durable=True),
        }
        BUILD.mkdir(parents=True, exist_ok=True)
        servers = Servers(starts, BUILD.absolute(), scratch)
        stack.callback(servers.close)
        yield servers


def _prepare(one: Measured, servers: Servers, say: Callable[[str], None]) -> bool:
    """Install a peer and start its server; return False, with the reason noted, if that fails."""
    say(f"peers: installing {one.peer.title}, unless it is there")

    def prepare() -> bool:
        one.peer.install(servers.build)
        servers.get(one.peer.server)
        return True

    return bool(_tried(one, "not measured", prepare))


def _measure_pace(one: Measured, servers: Servers, sizes: Sizes) -> None:
    bench = servers.bench(one.peer)
    _keep(one.drains, _tried(one, "drain", lambda: trials.drain(bench, sizes)))
    _keep(one.quiets, _tried(one, "latency", lambda: trials.latency_and_idle(bench, sizes)))
    if one.peer.server == REDIS:
        durable = servers.bench(one.peer, is_durable=True)
        _keep(one.durable_drains, _tried(one, f"drain, {REDIS_DURABLE}", lambda: trials.drain(durable, sizes)))
    keeping = servers.bench(one.peer, is_durable=True)
    _keep(
        one.kept_drains, _tried(one, "drain, lasting setting", lambda: trials.drain(keeping, sizes, trials.KEPT_LEASE))
    )


def _kill_workers(there: Sequence[Measured], servers: Servers, sizes: Sizes, say: Callable[[str], None]) -> None:
    say(f"peers: killing workers, and waiting up to {sizes.patience:g} s for their tasks")

    def kill(one: Measured) -> None:
        bench = servers.bench(one.peer)
        one.worker_killed_lasting = _tried(
            one, "worker killed, lasting setting", lambda: trials.kill_worker(bench, sizes, is_lasting=True)
        )
        one.worker_killed = _tried(one, "worker killed", lambda: trials.kill_worker(bench, sizes, is_lasting=False))

    with ThreadPoolExecutor(_KILLS_AT_ONCE) as pool:
        list(pool.map(kill, there))


def _kill_servers(there: Sequence[Measured], servers: Servers, sizes: Sizes, say: Callable[[str], None]) -> None:
    for one in there:
        say(f"peers: killing the server of {one.peer.title}")
        one.server_killed = _tried(one, "server killed", partial(trials.kill_server, servers.bench(one.peer), sizes))
        if one.peer.server == REDIS:
            durable = servers.bench(one.peer, is_durable=True)
            what = f"server killed, {REDIS_DURABLE}"
            one.server_killed_durable = _tried(one, what, partial(trials.kill_server, durable, sizes))


def _keep(values: list[T], value: T | None) -> None:
    if value is not None:
        values.append(value)


def _tried(one: Measured, what: str, measure: Callable[[], T]) -> T | None:
    """Return what this measures; if it fails, note why and return None."""
    try:
        return measure()
    except Exception as error:  # whatever one peer or its server breaks, the rest goes on
        kind = "" if isinstance(error, MtaskError) else f"{type(error).__name__}: "
        reason = f"{what}: {kind}{error}"
        if reason not in one.failures:
            one.failures.append(reason)
        return None
