"""The files that a run of benchmarks writes: JSON and pictures in one folder."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pymongo

import mtask
from benchmarks.report.figures import Result
from mtask.errors import InvalidInput

ALL = "all"


def environment(server_version: str) -> dict[str, Any]:
    """Return versions and cores: the figures depend on them, too."""
    return {
        "mtask": mtask.__version__,
        "pymongo": pymongo.version,
        "python": platform.python_version(),
        "mongod": server_version,
        "cores": len(os.sched_getaffinity(0)),
    }


def make_folder(folder: Path) -> Path:
    """Make the folder for the report; raise InvalidInput if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"--folder {folder} cannot be made: {error.strerror}. Name another one.", field="folder"
        ) from None
    return folder


def document(result: Result, around: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result for JSON."""
    return {**result.document(), "environment": dict(around)}


def write(result: Result, around: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write one result; return the files."""
    from benchmarks.report import plots  # here, because importing matplotlib is slow

    return [
        _write_json(document(result, around), folder / f"{result.benchmark}.json"),
        plots.draw(result, folder / f"{result.benchmark}.png"),
    ]


def write_together(results: Sequence[Result], around: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the results of several benchmarks into one JSON file and one picture; return the files."""
    from benchmarks.report import plots

    together = {"environment": dict(around), "benchmarks": [result.document() for result in results]}
    return [
        _write_json(together, folder / f"{ALL}.json"),
        plots.draw_overview(results, folder / f"{ALL}.png"),
    ]


def _write_json(content: Mapping[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return path
