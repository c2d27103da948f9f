"""One mongod process: its command line, its files, its start and its end."""

from __future__ import annotations

import secrets
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlencode

from mtask.errors import InvalidOption, MongodFailed
from mtask.local.diagnose import EXIT_ADDRESS_IN_USE, Remains, failure
from mtask.local.folder import Deadline, wait_until
from mtask.local.ownership import (
    HOST,
    KILL_TIMEOUT,
    RELEASE_TIMEOUT,
    STOP_TIMEOUT,
    is_free,
    kill_mongods,
    send_signal,
    serving_pid,
    stop_mongod,
)

SMALLEST_CACHE_MB = 256
OPLOG_MB = 256


@dataclass(frozen=True, slots=True)
class Node:
    """One mongod of a replica set. Its files are `data/`, `mongod.log` and `mongod.out` in its folder."""

    binary: Path
    folder: Path
    port: int
    replica_set: str
    cache_mb: int = SMALLEST_CACHE_MB
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    security: Security | None = None

    def __post_init__(self) -> None:
        if self.cache_mb < SMALLEST_CACHE_MB:
            raise InvalidOption("cache_mb", f"MongoDB needs {SMALLEST_CACHE_MB} or more", self.cache_mb)

    @property
    def address(self) -> str:
        """The address as host:port, as in the replica set's configuration."""
        return f"{HOST}:{self.port}"

    @property
    def data(self) -> Path:
        """The folder of the data files."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        """The log file. Each start appends to it until it is rotated."""
        return self.folder / "mongod.log"

    @property
    def output(self) -> Path:
        """The file with the standard output and standard error of the last start."""
        return self.folder / "mongod.out"

    def command(self) -> list[str]:
        """Return the command line. Options have the form --name=value, which can be read from the process list."""
        parameters = {"diagnosticDataCollectionEnabled": "false", **self.parameters}
        return [
            str(self.binary),
            "--fork",
            "--quiet",
            f"--dbpath={self.data}",
            f"--logpath={self.log}",
            "--logappend",
            f"--bind_ip={HOST}",
            f"--port={self.port}",
            "--nounixsocket",
            f"--replSet={self.replica_set}",
            f"--oplogSize={OPLOG_MB}",
            f"--wiredTigerCacheSizeGB={self.cache_mb / 1024:g}",
            *(f"--setParameter={name}={value}" for name, value in parameters.items()),
            *(self.security.arguments() if self.security is not None else ()),
        ]

    def pid(self) -> int | None:
        """Return the pid of the process that serves this node's data, or None."""
        return serving_pid(self.data)

    def is_running(self) -> bool:
        """Whether a process serves this node's data. It may be paused."""
        return self.pid() is not None

    def launch(self) -> Launch:
        """Start the process, detached from this one. Use `Launch.wait` to wait for it."""
        try:
            self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
            offset = self.log.stat().st_size if self.log.exists() else 0
            with self.output.open("wb") as output:
                process = subprocess.Popen(
                    self.command(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise start_refused(self, error) from error
        return Launch(self, process, offset)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to the process; return whether there was a process."""
        pid = self.pid()
        if pid is None:
            return False
        send_signal(self.data, pid, number)
        return True

    def kill(self) -> None:
        """Kill the process, even if it is just starting, and wait until it has ended."""
        kill_mongods(self.data)
        wait_until(lambda: is_free(self.port), Deadline(RELEASE_TIMEOUT))

    def stop(self, timeout: timedelta = STOP_TIMEOUT) -> bool:
        """Stop the process in good order, or kill it after the timeout; return whether there was a process."""
        return stop_mongod(self.data, timeout)


class Launch:
    """The start of a node. It may still be under way."""

    def __init__(self, node: Node, process: subprocess.Popen[bytes], log_offset: int) -> None:
        self.node = node
        self._process = process
        self._log_offset = log_offset

    def wait(self, deadline: Deadline) -> None:
        """Wait until the node listens. If it does not, kill its processes and raise MongodFailed."""
        # With --fork, the process exits with 0 as soon as its daemon listens. If the daemon ends earlier, the process
        # exits with the daemon's exit code.
        try:
            self._process.wait(deadline.remaining())
        except subprocess.TimeoutExpired:
            self.abandon()
            raise self.failure(None) from None
        except BaseException:
            self.abandon()
            raise
        if self._process.returncode != 0:
            raise self.failure(self._process.returncode)

    def abandon(self) -> None:
        """Kill all processes of this start."""
        self._process.kill()
        self._process.wait(KILL_TIMEOUT.total_seconds())
        self.node.kill()

    def is_port_taken(self) -> bool:
        """Whether the start failed because another process listens on the port."""
        return self._process.returncode == EXIT_ADDRESS_IN_USE

    def failure(self, exit_code: int | None) -> MongodFailed:
        """Return the error that explains why this start failed."""
        node = self.node
        return failure(
            Remains(
                binary=node.binary,
                folder=node.folder,
                port=node.port,
                exit_code=exit_code,
                output=text_from(node.output),
                log=text_from(node.log, self._log_offset),
            )
        )


def start_refused(node: Node, error: OSError) -> MongodFailed:
    """Return the error for a start that the operating system refused."""
    if error.filename == str(node.binary):
        return MongodFailed(
            str(node.binary),
            f"it cannot be executed: {error.strerror}",
            "Name a mongod for this machine: set MTASK_MONGOD to its path.",
        )
    return MongodFailed(
        str(node.binary),
        f"its folder {node.folder} cannot be used: {error.strerror}",
        "Choose a folder that this user can write to.",
    )


def text_from(path: Path, offset: int = 0) -> str:
    """Return the text of a file from an offset on, or an empty string if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


# --- security --------------------------------------------------------------------------------------------

# Access control and TLS of an embedded replica set, for tests with users who have few rights.

#: The number of random bytes in the key. The key is written in hex, and MongoDB accepts 6 to 1024 characters.
_KEY_BYTES = 48


@dataclass(frozen=True, slots=True)
class Security:
    """The protection of a replica set.

    Users have passwords. When the set is started, an administrator is made as its first user. The members authenticate
    with `key_file`. If this file is missing, it is made. With `certificate`, every connection uses TLS. `certificate`
    is a PEM file with a private key and the certificate for it. The certificate is for 127.0.0.1, and valid for servers
    and clients. `ca` is the PEM file of the authority that signed the certificate.
    """

    key_file: Path
    certificate: Path | None = None
    ca: Path | None = None
    user: str = "admin"
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    def prepare(self) -> None:
        """Make the key file if it is missing. MongoDB demands that no other user can read it."""
        if not self.key_file.exists():
            self.key_file.touch(mode=0o600)
            self.key_file.write_text(secrets.token_hex(_KEY_BYTES))

    def arguments(self) -> list[str]:
        """Return mongod's arguments as --name=value. They contain no secret."""
        given = ["--auth", f"--keyFile={self.key_file}"]
        if self.certificate is not None:
            given += ["--tlsMode=requireTLS", f"--tlsCertificateKeyFile={self.certificate}"]
            given += ["--tlsAllowConnectionsWithoutCertificates", *([f"--tlsCAFile={self.ca}"] if self.ca else [])]
        return given

    def options(self) -> dict[str, str]:
        """Return the options of a connection string for these servers, without a user."""
        if self.certificate is None:
            return {}
        return {"tls": "true", **({"tlsCAFile": str(self.ca)} if self.ca else {})}

    def credentials(self) -> dict[str, str]:
        """Return the driver's arguments to connect as the administrator."""
        return {"username": self.user, "password": self.password, "authSource": "admin"}


def uri_of(
    addresses: str, replica_set: str, security: Security | None, user: str | None = None, password: str | None = None
) -> str:
    """Return the connection string of a replica set. With security, it is for `user`, by default the administrator."""
    if security is None:
        return f"mongodb://{addresses}/?replicaSet={replica_set}"
    name, word = (security.user, security.password) if user is None else (user, password or "")
    options = {"replicaSet": replica_set, "authSource": "admin", **security.options()}
    return f"mongodb://{quote(name, safe='')}:{quote(word, safe='')}@{addresses}/?{urlencode(options, safe='/')}"


def driver_options(security: Security | None, *, as_admin: bool) -> Mapping[str, Any]:
    """Return the driver's options to connect to one node."""
    if security is None:
        return {}
    options: dict[str, Any] = {**security.options(), **(security.credentials() if as_admin else {})}
    return {**options, "tls": True} if "tls" in options else options
