"""The files that the demo counts, and the keys of their tasks."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mtask.errors import InvalidInput
from mtask.kernel.document.identity import MAX_KEY_BYTES

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
