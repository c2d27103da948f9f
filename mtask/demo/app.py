"""The demo's app: one handler, which counts one file. Workers are started with `mtask-worker mtask.demo.app:app`."""

from __future__ import annotations

import hashlib
import keyword
import os
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from mtask import App, Context, Fail
from mtask.errors import InvalidInput
from mtask.kernel.document.identity import MAX_KEY_BYTES

app = App()

_PAUSE_STEP = 0.05


# The leases are short, so that a killed worker's tasks are soon preempted. On a busy machine, leases of living workers
# may lapse, too.
@app.task(
    queue="demo",
    ping_interval=0.8,
    worker_timeout=2.5,
    max_retries=20,
    retry_delay=0.2,
)
def count(context: Context, file: str | bytes, pause_ms: int = 0) -> dict[str, Any]:
    """Count one file. Before that, the first try waits for `pause_ms` milliseconds, like a slow task."""
    end = time.monotonic() + (pause_ms / 1000 if context.attempt == 1 else 0)
    while time.monotonic() < end and not context.is_cancelled:
        time.sleep(_PAUSE_STEP)
    try:
        return count_file(Path(os.fsdecode(file)))
    except OSError as error:
        raise Fail(unreadable(error)) from error


# --- counting --------------------------------------------------------------------------------------------

# Counts the bytes, lines, words and identifiers of a file, and sums the counts of many files.

Counted = dict[str, Any]
BLOCK_BYTES = 1 << 20
#: The greatest size of a file that is counted as Python source, in bytes. A larger file is counted like any other text.
SOURCE_BYTES = 4 << 20
#: The length of the first part of a text in which identifiers are counted, in bytes. It bounds the memory.
IDENTIFIER_BYTES = 64 << 20
MOST_FREQUENT = 20
TOP = 10

_PYTHON = frozenset({".py", ".pyi", ".pyw"})
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
#: The pattern of a name in Python source. It also matches comments, strings and numbers, but its group contains only
#: names.
_SOURCE_NAME = re.compile(
    r"""
      \#[^\n]*
    | (?: \b[bBfFrRuU]{1,2} )?
      (?: \"{3} [^\\"]* (?: (?: \\. | "(?!"") ) [^\\"]* )* \"{3}
        | '{3} [^\\']* (?: (?: \\. | '(?!'') ) [^\\']* )* '{3}
        | " (?: [^"\\\n] | \\. )* "
        | ' (?: [^'\\\n] | \\. )* '
      )
    | \d\w*
    | ( [^\W\d]\w* )
    """,
    re.DOTALL | re.VERBOSE,
)


def count_file(path: Path) -> Counted:
    """Return a file's hash and size, the numbers of its lines and words, and its most frequent identifiers.

    Raises OSError. Lines and words are counted as by `wc`. The identifiers of a Python source are its names, without
    keywords, strings and comments. In any other text, every word is an identifier. A file with a NUL byte in its first
    block is binary: only its hash and its size are computed.
    """
    sha, size, lines, words = hashlib.sha256(), 0, 0, 0
    names: Counter[str] = Counter()
    with path.open("rb") as file:
        head = file.read(SOURCE_BYTES if path.suffix in _PYTHON else BLOCK_BYTES)
        is_source = path.suffix in _PYTHON and len(head) < SOURCE_BYTES
        is_binary = b"\0" in head
        for part in [head] if is_source else _whole_lines(head, iter(lambda: file.read(BLOCK_BYTES), b"")):
            sha.update(part)
            size += len(part)
            if is_binary:
                continue
            lines += part.count(b"\n")
            words += len(part.split())
            if size <= IDENTIFIER_BYTES:
                names.update(_names(part.decode("utf-8", "replace"), is_source))
    return {
        "sha256": sha.hexdigest(),
        "kind": "binary" if is_binary else "python" if is_source else "text",
        "bytes": size,
        "lines": lines,
        "words": words,
        "identifiers": dict(names.most_common(MOST_FREQUENT)),
    }


def _whole_lines(head: bytes, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in blocks that end with a line. So no word is cut. A block without any line end stays."""
    rest = head
    for block in blocks:
        end = rest.rfind(b"\n") + 1 or len(rest)
        yield rest[:end]
        rest = rest[end:] + block
    yield rest


def _names(text: str, is_source: bool) -> list[str]:
    if not is_source:
        return _IDENTIFIER.findall(text)
    return [name for name in _SOURCE_NAME.findall(text) if name and not keyword.iskeyword(name)]


def unreadable(error: OSError) -> str:
    """Return why a file could not be read."""
    return f"cannot be read: {error.strerror or error}"


@dataclass(slots=True)
class Totals:
    """The sums of the counts of many files. The hashes and the failures are stored under the files' keys."""

    bytes: int = 0
    lines: int = 0
    words: int = 0
    identifiers: Counter[str] = field(default_factory=Counter)
    hashes: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, counted: Counted) -> None:
        """Add the counts of one file."""
        self.bytes += counted["bytes"]
        self.lines += counted["lines"]
        self.words += counted["words"]
        self.identifiers.update(counted["identifiers"])
        self.hashes[key] = counted["sha256"]

    def fail(self, key: str, reason: str) -> None:
        """Add a file that could not be counted."""
        self.failures[key] = reason

    @property
    def digest(self) -> str:
        """One hash for all files: the SHA-256 of the lines that `sha256sum` prints for them, sorted by key."""
        lines = (f"{self.hashes[key]}  {key}\n" for key in sorted(self.hashes))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def top(self) -> list[tuple[str, int]]:
        """The most frequent identifiers. Only the most frequent identifiers of each file are summed up."""
        return sorted(self.identifiers.items(), key=lambda item: (-item[1], item[0]))[:TOP]

    def rows(self) -> list[tuple[str, int | str]]:
        """Return the names and the values of the figures to compare."""
        return [
            ("files", len(self.hashes)),
            ("files that failed", len(self.failures)),
            ("bytes", self.bytes),
            ("lines", self.lines),
            ("words", self.words),
            *((name, count) for name, count in self.top),
            ("digest of all hashes", self.digest),
        ]

    def document(self) -> dict[str, Any]:
        """Return the totals as a document."""
        return {
            "files": len(self.hashes),
            "failed": len(self.failures),
            "bytes": self.bytes,
            "lines": self.lines,
            "words": self.words,
            "identifiers": [{"identifier": name, "count": count} for name, count in self.top],
            "digest": self.digest,
        }


def differences(tasks: Totals, direct: Totals) -> list[str]:
    """Return the differences between the tasks' totals and the direct totals: first by file, then in the sums."""
    found = []
    for key in sorted({*tasks.hashes, *direct.hashes, *tasks.failures, *direct.failures}):
        ours, theirs = (_result(totals, key) for totals in (tasks, direct))
        if ours != theirs:
            found.append(f"{key}: {ours} by its task, {theirs} directly")
    sums = ("bytes", "lines", "words", "identifiers")
    return [*found, *(f"the {name} differ" for name in sums if getattr(tasks, name) != getattr(direct, name))]


def _result(totals: Totals, key: str) -> str:
    if key in totals.hashes:
        return f"SHA-256 {totals.hashes[key][:12]}"
    return totals.failures.get(key, "absent")


# --- files -----------------------------------------------------------------------------------------------

# The files that the demo counts, and the keys of their tasks.

SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__"})
_READABLE_BYTES = 400


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to count. `path` is absolute. Bytes of the path that are not UTF-8 are surrogates in `path`."""

    key: str
    path: Path

    @property
    def argument(self) -> str | bytes:
        """The path, as it stands in the task's params: text, or bytes if the path is not UTF-8."""
        encoded = os.fsencode(self.path)
        try:
            return encoded.decode()
        except UnicodeDecodeError:
            return encoded


def default_folder() -> Path:
    """Return the folder of Python's own standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(folder: Path, limit: int | None = None) -> list[SourceFile]:
    """Return the regular files in a folder and in its subfolders, at most `limit`, in order; raise InvalidInput.

    Links are not followed. Folders of installed packages and of bytecode are left out.
    """
    root = folder.expanduser().absolute()
    if not root.is_dir():
        raise InvalidInput(f"{root} is not a folder: name a folder with files in it.", field="folder")
    found = list(islice(_walk(root), limit))
    if not found:
        raise InvalidInput(f"{root} holds no file to count: name a folder with files in it.", field="folder")
    return found


def _walk(root: Path) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield SourceFile(key_of(path.relative_to(root).as_posix()), path)


def key_of(relative: str) -> str:
    """Return the key of a file's task: the file's path.

    If the path is too long or not UTF-8, the key is the beginning of the path and a hash.
    """
    encoded = os.fsencode(relative)
    try:
        if len(encoded) <= MAX_KEY_BYTES:
            return encoded.decode()
    except UnicodeDecodeError:
        pass
    readable = encoded[:_READABLE_BYTES].decode("utf-8", "ignore")
    return f"{readable}... sha256:{hashlib.sha256(encoded).hexdigest()}"
