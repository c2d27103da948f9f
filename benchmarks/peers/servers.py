"""The servers of the peers: Redis and PostgreSQL from the system's packages, and mtask's embedded mongod.

Each lives in a folder of its own, listens on 127.0.0.1 only, and can be killed and started again on the same data.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from pymongo import MongoClient

from benchmarks.measuring.server import NotMeasured, wait_until
from benchmarks.peers.processes import cpu_of_tree, end_with_parent, tree_of
from mtask.local import ReplicaSet
from mtask.local.folder import Deadline
from mtask.local.ownership import free_ports
from mtask.settings import read_settings

_HOST = "127.0.0.1"
_PATIENCE = 60.0
_START = timedelta(seconds=60)
#: Databases of one Redis server; each trial takes the next one.
_REDIS_DATABASES = 64


class MissingServer(NotMeasured):
    """The server's program is not installed; the message names the command that installs it."""


class PeerServer(ABC):
    """A server that belongs to this run alone."""

    title: str
    #: What `commands` counts.
    counts: str = "commands"

    @property
    @abstractmethod
    def pid(self) -> int:
        """The pid of its main process."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Its version."""

    @abstractmethod
    def fresh(self) -> str:
        """Make an empty database; return its URI."""

    @abstractmethod
    def drop(self, uri: str) -> None:
        """Remove a database that `fresh` made."""

    @abstractmethod
    def commands(self) -> float:
        """Return the commands that it has run since its start."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it with SIGKILL, and wait for its end."""

    @abstractmethod
    def start(self) -> None:
        """Start it on the data that are there, and wait until it answers."""

    def cpu(self) -> float:
        """Return the CPU seconds of its processes so far."""
        return cpu_of_tree(self.pid)

    def stop(self) -> None:
        """End it."""
        self.kill()


class Mongo(PeerServer):
    """A replica set of one mongod; writes are journaled before they are acknowledged."""

    title = "MongoDB"

    def __init__(self, folder: Path, cache_mb: int) -> None:
        self._set = ReplicaSet.start(
            folder / "mongo", nodes=1, mongod=read_settings().mongod, cache_mb=cache_mb, timeout=_START
        )
        self._node = self._set.nodes[0]
        self._client = self._connected()

    def _connected(self) -> MongoClient[dict[str, object]]:
        return MongoClient(self._set.uri, serverMonitoringMode="poll", heartbeatFrequencyMS=600_000)

    @property
    def pid(self) -> int:
        pid = self._node.pid()
        if pid is None:
            raise NotMeasured("The embedded mongod has ended.")
        return pid

    @property
    def version(self) -> str:
        return str(self._client.server_info()["version"])

    def fresh(self) -> str:
        address = urlsplit(self._set.uri)
        return address._replace(path=f"/mtask_peers_{uuid.uuid4().hex[:8]}").geturl()

    def drop(self, uri: str) -> None:
        name = urlsplit(uri).path[1:]
        for database in (name, f"{name}_signal", f"{name}_stats"):  # keuss makes the last two
            self._client.drop_database(database)

    def commands(self) -> float:
        return float(self._client.admin.command("serverStatus")["network"]["numRequests"])

    def kill(self) -> None:
        self._client.close()
        self._node.kill()

    def start(self) -> None:
        self._node.launch().wait(Deadline(_START))
        self._set.wait_primary(_START)
        self._client = self._connected()

    def stop(self) -> None:
        self._client.close()
        self._set.stop()


class Redis(PeerServer):
    """Redis with the persistence of its own defaults (snapshots), or with `appendfsync always`."""

    title = "Redis"

    def __init__(self, folder: Path, *, is_durable: bool = False) -> None:
        self._binary = program("redis-server", "redis-server")
        self._folder = folder / ("redis-durable" if is_durable else "redis")
        self._folder.mkdir()
        self._port = free_ports(1)[0]
        lasting = ["--appendonly", "yes", "--appendfsync", "always"] if is_durable else []
        self._command = [self._binary, "--port", str(self._port), "--bind", _HOST, "--dir", str(self._folder)]
        self._command += ["--databases", str(_REDIS_DATABASES), "--save", "3600 1 300 100 60 10000", *lasting]
        self._databases = itertools.cycle(range(_REDIS_DATABASES))
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def version(self) -> str:
        return self._info("redis_version")

    def fresh(self) -> str:
        uri = f"redis://{_HOST}:{self._port}/{next(self._databases)}"
        self.drop(uri)
        return uri

    def drop(self, uri: str) -> None:
        self._ask("SELECT " + urlsplit(uri).path[1:], "FLUSHDB")

    def commands(self) -> float:
        return float(self._info("total_commands_processed"))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        wait_until(lambda: self._answers(), _PATIENCE, "Redis to start")

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            tail = (self._folder / "redis.log").read_text(errors="replace")[-1_000:]
            raise NotMeasured(f"redis-server ended with {self._process.returncode}. The end of its log:\n{tail}")
        try:
            # An error while it loads its data begins with "-LOADING".
            return self._ask("PING").startswith("+PONG")
        except OSError:
            return False

    def _info(self, name: str) -> str:
        for line in self._ask("INFO").splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2]
        raise NotMeasured(f"Redis reports no {name}.")

    def _ask(self, *commands: str) -> str:
        """Send inline commands and QUIT; return all answers."""
        with socket.create_connection((_HOST, self._port), timeout=10) as connection:
            connection.sendall("".join(f"{command}\r\n" for command in (*commands, "QUIT")).encode())
            parts = []
            while part := connection.recv(65_536):
                parts.append(part)
        return b"".join(parts).decode(errors="replace")


class Postgres(PeerServer):
    """PostgreSQL at its defaults: a commit is on disk before it is acknowledged."""

    title = "PostgreSQL"
    counts = "transactions"
    _USER = "postgres"

    def __init__(self, folder: Path) -> None:
        self._binaries = _postgres_binaries()
        # PostgreSQL refuses to run as root; its package has made this user.
        self._user = self._USER if os.geteuid() == 0 else None
        self._folder = folder / "postgres"
        self._folder.mkdir()
        if self._user:
            folder.chmod(0o711)
            shutil.chown(self._folder, self._user, self._user)
        self._port = free_ports(1)[0]
        made = self._run("initdb", "-D", str(self._data), "-U", self._USER, "-A", "trust", "-E", "UTF8", "--no-locale")
        if made.returncode != 0:
            raise NotMeasured(f"initdb failed: {made.stderr[-1_000:]}")
        self.start()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def version(self) -> str:
        return self._query("SHOW server_version").split()[0]

    def fresh(self) -> str:
        name = f"peers_{uuid.uuid4().hex[:8]}"
        self._query(f"CREATE DATABASE {name}")
        return f"postgresql://{self._USER}@{_HOST}:{self._port}/{name}"

    def drop(self, uri: str) -> None:
        self._query(f"DROP DATABASE {urlsplit(uri).path[1:]} WITH (FORCE)")

    def commands(self) -> float:
        return float(self._query("SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database"))

    def kill(self) -> None:
        # All of its processes: those left over would end in good order.
        for pid in tree_of(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def start(self) -> None:
        command = [str(self._binaries / "postgres"), "-D", str(self._data), "-p", str(self._port), "-h", _HOST]
        command += ["-k", str(self._folder)]
        with (self._folder.parent / "postgres.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=self._user,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        wait_until(lambda: self._run("pg_isready", "-h", _HOST, "-p", str(self._port)).returncode == 0, _PATIENCE, "it")

    def _query(self, statement: str) -> str:
        asked = ("psql", "-h", _HOST, "-p", str(self._port), "-U", self._USER, "-At", "-c", statement, "postgres")
        answer = self._run(*asked)
        if answer.returncode != 0:
            raise NotMeasured(f"PostgreSQL refused {statement!r}: {answer.stderr.strip()}")
        return answer.stdout.strip()

    def _run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self._binaries / name), *arguments],
            capture_output=True,
            text=True,
            user=self._user,
            cwd=self._folder,
            timeout=_PATIENCE,
            check=False,
        )


def program(name: str, package: str) -> str:
    """Return the path of a program; raise MissingServer with the command that installs it."""
    path = shutil.which(name)
    if path is None:
        raise missing(name, package)
    return path


def missing(name: str, package: str) -> MissingServer:
    """Return the error for a program that is not there."""
    return MissingServer(f"{name} is not installed. Run: apt-get install {package}")


def _postgres_binaries() -> Path:
    found: Sequence[Path] = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if found:
        return found[-1].parent
    return Path(program("postgres", "postgresql")).parent


#: How each server is started, by the name that the catalogue uses.
Start = Callable[[Path], PeerServer]
