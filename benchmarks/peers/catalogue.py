"""The peers: what each is, how it is installed and started, and the settings that were chosen for it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import mtask
from benchmarks.measuring.fleet import ROOT
from benchmarks.peers.installing import PROGRAMS, node_folder, pinned_versions, python_of
from benchmarks.peers.processes import Program

MTASK = "mtask"
MONGO, REDIS, POSTGRES = "mongo", "redis", "postgres"
#: Arguments: the interpreter, the URI, and the seconds of the lease or None. Returns the worker's command line.
Command = Callable[[str, str, int | None], list[str]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One queue on one server."""

    name: str
    title: str
    server: str
    language: str
    #: Its program in `programs/`, without the suffix.
    program: str
    #: `file/package` of the requirements, or `node/package`.
    package: str
    #: The settings of all trials but those of the lasting one, in words.
    setting: str
    #: What its documentation calls for where a task must survive its worker, in words; LEASE stands for the seconds.
    lasting: str
    #: When a dead worker's tasks are due again by default, in words.
    usual: str
    command: Command | None = None
    #: Seconds of the shortest lease that makes sense for it.
    shortest_lease: int = 0
    #: Variables of its worker's environment in drains. Elsewhere, what they change would cost tasks or latency.
    in_drains: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The pinned version."""
        file, _, package = self.package.partition("/")
        if file == MTASK:
            return mtask.__version__
        if file == "node":
            pinned: dict[str, str] = json.loads((PROGRAMS / "package.json").read_text())["dependencies"]
            return pinned[package]
        return pinned_versions(self.package)

    def lease(self, wanted: int) -> int:
        """Return the seconds of the lease of the lasting setting."""
        return max(wanted, self.shortest_lease)

    def install(self, build: Path) -> None:
        """Install it, unless that was done before; raise NotMeasured with the reason if that fails."""
        self._interpreter(build)

    def _interpreter(self, build: Path) -> str:
        file = self.package.partition("/")[0]
        if file == MTASK:
            return sys.executable
        if file == "node":
            node_folder(build)
            return "node"
        return str(python_of(file, build))

    def open(self, build: Path, folder: Path, uri: str, lease: int | None, trial: str) -> Program:
        """Return its programs for one trial, whose name they get; with a lease they have the lasting setting."""
        interpreter = self._interpreter(build)
        environment = {"PEER_URI": uri, "PEER_LEASE": "" if lease is None else str(lease), "PEER_TRIAL": trial}
        if interpreter == "node":
            script = str(node_folder(build) / f"{self.program}.mjs")
        else:
            script = str(PROGRAMS / f"{self.program}.py")
            path = [str(PROGRAMS), *([str(ROOT)] if self.name == MTASK else [])]
            environment |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        if trial == "drain":
            environment |= self.in_drains
        worker = [interpreter, script, "worker"] if self.command is None else self.command(interpreter, uri, lease)
        return Program(worker, [interpreter, script], folder, environment)


def _mtask(python: str, uri: str, _lease: int | None) -> list[str]:
    address = urlsplit(uri)
    return [python, "-m", "mtask.cli.worker", "peer_mtask:app", "--uri", uri, "--database", address.path[1:]]


def _celery(python: str, _uri: str, lease: int | None) -> list[str]:
    # Without a pool it is fastest: no task passes from process to process. Where acks are late, tasks run side by side.
    pool = ["--pool", "solo"] if lease is None else ["--pool", "prefork", "--concurrency", "4"]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING"]
    return [python, "-m", "celery", "-A", "peer_celery", "worker", *pool, *quiet]


def _dramatiq(python: str, _uri: str, _lease: int | None) -> list[str]:
    return [python, "-m", "dramatiq", "peer_dramatiq", "--processes", "1", "--threads", "8"]


def _rq(python: str, uri: str, lease: int | None) -> list[str]:
    # A worker looks for abandoned jobs between two waits for jobs; a wait is 15 s shorter than the worker-ttl.
    times = [] if lease is None else ["--maintenance-interval", str(lease), "--worker-ttl", str(15 + lease)]
    return [python, "-m", "rq.cli", "worker", "-w", "rq.worker.SimpleWorker", "-u", uri, "--quiet", *times]


def _arq(python: str, _uri: str, _lease: int | None) -> list[str]:
    return [python, "-m", "arq", "peer_arq.WorkerSettings"]


PEERS: Sequence[Peer] = (
    Peer(
        MTASK,
        "mtask",
        MONGO,
        "Python",
        "peer_mtask",
        "mtask/mtask",
        "its defaults: majority writes, async handler",
        "worker_timeout of LEASE s",
        "after the lease, 60 s",
        _mtask,
    ),
    Peer(
        "celery-redis",
        "Celery",
        REDIS,
        "Python",
        "peer_celery",
        "celery/celery",
        "no results, solo pool, prefetch 64 (4 where it is killed)",
        "acks_late, reject_on_worker_lost, prefetch 1, visibility_timeout of LEASE s, 4 processes",
        "running ones never; prefetched ones after the visibility timeout, 1 h",
        _celery,
    ),
    Peer(
        "celery-mongodb",
        "Celery",
        MONGO,
        "Python",
        "peer_celery",
        "celery/celery",
        "no results, solo pool, prefetch 64 (4 where it is killed)",
        "acks_late, reject_on_worker_lost, prefetch 1, 4 processes",
        "never",
        _celery,
    ),
    Peer(
        "dramatiq",
        "Dramatiq",
        REDIS,
        "Python",
        "peer_dramatiq",
        "dramatiq/dramatiq",
        "1 process, 8 threads, dramatiq_queue_prefetch=256 in the drain",
        "heartbeat_timeout of LEASE s, maintenance_chance 10 %",
        "after 60 s without a heartbeat",
        _dramatiq,
        # By default it holds at most 16 messages and pauses whenever it has them: 2,000 tasks a second at most here.
        in_drains={"dramatiq_queue_prefetch": "256"},
    ),
    Peer(
        "procrastinate",
        "Procrastinate",
        POSTGRES,
        "Python",
        "peer_procrastinate",
        "procrastinate/procrastinate",
        "async tasks, 100 at once, finished jobs deleted",
        "its guide's periodic retry of stalled jobs, every 2 s, after LEASE s without a heartbeat",
        "never; the guide adds a periodic task",
    ),
    Peer(
        "rq",
        "RQ",
        REDIS,
        "Python",
        "peer_rq",
        "rq/rq",
        "SimpleWorker, results not kept",
        "Retry(max=3), job_timeout and maintenance-interval of LEASE s, worker-ttl of LEASE + 15 s",
        "never; marked as failed",
        _rq,
    ),
    Peer(
        "arq",
        "arq",
        REDIS,
        "Python",
        "peer_arq",
        "arq/arq",
        "100 jobs at once, polls every 10 ms, results not kept",
        "job_timeout so that a job is due again after LEASE s",
        "after job_timeout and 10 s: 310 s",
        _arq,
        shortest_lease=15,
    ),
    Peer(
        "agenda",
        "Agenda",
        MONGO,
        "Node",
        "peer_agenda",
        "node/agenda",
        "change stream, 100 at once, polls every 1 s, done jobs removed, lock limit 100 except in the drain",
        "defaultLockLifetime of LEASE s",
        "after the lock's lifetime, 10 min",
    ),
    Peer(
        "keuss",
        "keuss",
        MONGO,
        "Node",
        "peer_keuss",
        "node/keuss",
        "backend mongo, pop, 10 consumers",
        "reserve and commit, reserve_delay of LEASE s",
        "never: pop removes the task first",
    ),
    Peer(
        "mongodb-queue",
        "mongodb-queue",
        MONGO,
        "Node",
        "peer_mongodb_queue",
        "node/mongodb-queue",
        "10 loops of get and ack, polls every 20 ms",
        "visibility of LEASE s",
        "after the visibility window, 30 s",
    ),
    Peer(
        "bullmq",
        "BullMQ",
        REDIS,
        "Node",
        "peer_bullmq",
        "node/bullmq",
        "100 at once, done jobs removed",
        "lockDuration and stalledInterval of LEASE s",
        "after the lock, 30 s, at the next check for stalled jobs, 30 s",
    ),
)
NAMES = tuple(peer.name for peer in PEERS)
