"""The two versions that work beside each other: the one in this repository, and the last one before flows."""

from __future__ import annotations

import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from mtask.kernel.document.task import SCHEMA_REVISION
from tests.workers import ROOT

ARCHIVE = ROOT / "tests/data/mtask-0.1.0-revision-4.tar.xz"


@dataclass(frozen=True, slots=True)
class Version:
    """A version of mtask: the folders that its processes import from, and the revision that its workers register."""

    name: str
    folders: tuple[Path, ...]
    revision: int | None

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process of this version. Its working folder must hold no other mtask."""
        return {"PYTHONPATH": ":".join(map(str, self.folders)), "MTASK_UPGRADE_VERSION": self.name}

    def module(self, name: str, *arguments: str) -> list[str]:
        """Return the command that runs a module with this version."""
        return [sys.executable, "-m", name, *arguments]


NEW = Version("new", (ROOT,), SCHEMA_REVISION)


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:  # Python 3.11.2, Debian's, has no filters yet
        archive.extractall(folder)


def former(folder: Path) -> Version:
    """Unpack the former version into this folder."""
    with tarfile.open(ARCHIVE) as archive:
        _unpack(archive, folder)
    return Version("old", (folder, ROOT), None)
