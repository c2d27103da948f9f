"""Turns the exit code and the logs of a failed mongod into an error that names the cause."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mtask.errors import MongodFailed

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
    "libssl.so.1.1": "libssl1.1",
    "libcrypto.so.1.1": "libssl1.1",
    "libgssapi_krb5.so.2": "libgssapi-krb5-2",
    "libldap-2.5.so.0": "libldap-2.5-0",
    "libsasl2.so.2": "libsasl2-2",
}


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
    for check in CHECKS:
        cause = check(remains)
        if cause is not None:
            break
    else:
        cause = unknown_cause(remains)
    quoted = quoted_tail(remains.log) or quoted_tail(remains.output)
    return MongodFailed(str(remains.binary), cause.reason, cause.remedy, log_tail=quoted)


def missing_library(remains: Remains) -> Cause | None:
    """Recognize a shared library that is missing."""
    found = re.search(r"error while loading shared libraries: ([^\s:]+)", remains.output)
    if found is None:
        return None
    library = found[1]
    package = APT_PACKAGES.get(library)
    if package is None:
        remedy = f"Install the system package that provides {library}, then start again."
    else:
        remedy = f"Install it, on Debian and Ubuntu with `apt-get install {package}`, then start again."
    return Cause(f"the shared library {library} is missing", remedy)


def old_system(remains: Remains) -> Cause | None:
    """Recognize a C library that is too old for the binary."""
    found = re.search(r"version [`'](GLIBC[A-Z]*_[\d.]+)' not found", remains.output)
    if found is None:
        return None
    return Cause(
        f"this system's C library lacks {found[1]}, which the binary needs",
        "Use a newer system, or a mongod built for this one: set MTASK_MONGOD to its path.",
    )


def old_processor(remains: Remains) -> Cause | None:
    """Recognize a processor without the instructions that the binary uses."""
    text = remains.output + remains.log
    if remains.exit_code not in (-signal.SIGILL, 128 + signal.SIGILL) and "Illegal instruction" not in text:
        return None
    return Cause(
        "the processor lacks instructions that it uses (MongoDB 5.0 and later need AVX)",
        "Use a machine with AVX; in a virtual machine, choose the host's CPU model. Or use a mongod built without AVX: "
        "set MTASK_MONGOD to its path.",
    )


def full_disk(remains: Remains) -> Cause | None:
    """Recognize a disk without space."""
    if "No space left on device" not in remains.output + remains.log:
        return None
    return Cause(
        f"no space is left on the disk of {remains.folder}",
        "Free some space, 500 MB or more, or choose another folder.",
    )


def taken_port(remains: Remains) -> Cause | None:
    """Recognize a port on which another process listens."""
    if remains.exit_code != EXIT_ADDRESS_IN_USE and "Address already in use" not in remains.log:
        return None
    return Cause(
        f"port {remains.port} of 127.0.0.1 is in use",
        "End the process that listens there, then start again.",
    )


def taken_folder(remains: Remains) -> Cause | None:
    """Recognize data files that another mongod uses."""
    if remains.exit_code != EXIT_DATA_IN_USE or "DBPathInUse" not in remains.log:
        return None
    return Cause(
        f"another mongod uses the data files in {remains.folder}",
        "End that mongod, which may be in another container, or choose another folder.",
    )


def closed_folder(remains: Remains) -> Cause | None:
    """Recognize a folder that cannot be written."""
    found = re.search(r"Permission denied|Read-only file system|Operation not permitted", remains.output + remains.log)
    if found is None:
        return None
    return Cause(
        f"{found[0]} in {remains.folder}",
        "Give this user the right to write there, or choose another folder.",
    )


def foreign_files(remains: Remains) -> Cause | None:
    """Recognize data files of another MongoDB version."""
    text = remains.log
    if remains.exit_code != EXIT_FILES_OF_ANOTHER_VERSION and "UPGRADE PROBLEM" not in text:
        return None
    return Cause(
        f"the data files in {remains.folder} are those of another MongoDB version",
        "Run the version that wrote them: set MTASK_MONGOD to its path; or choose another folder.",
    )


def killed(remains: Remains) -> Cause | None:
    """Recognize a process that the kernel or another process has killed."""
    # When mongod crashes, it logs the signal. SIGKILL leaves no trace.
    vanished = remains.exit_code == EXIT_DAEMON_GOT_SIGNAL and "Got signal" not in remains.log
    if not vanished and remains.exit_code not in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return None
    return Cause(
        "it was killed while it started, perhaps by the kernel for want of memory",
        "Look into the system's log, and free some memory: it needs about 300 MB.",
    )


def too_slow(remains: Remains) -> Cause | None:
    """Recognize a start that did not end before its deadline."""
    if remains.exit_code is not None:
        return None
    return Cause(
        "it was not ready within the timeout",
        f"Allow it more time; {remains.folder / 'mongod.log'} may say what it waits for.",
    )


CHECKS: tuple[Callable[[Remains], Cause | None], ...] = (
    missing_library,
    old_system,
    old_processor,
    full_disk,
    taken_port,
    taken_folder,
    foreign_files,
    closed_folder,
    killed,
    too_slow,
)


def unknown_cause(remains: Remains) -> Cause:
    """Return the exit code as the cause, for a failure that no check recognizes."""
    code = remains.exit_code
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
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
