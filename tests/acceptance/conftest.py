"""Fixtures of the acceptance tests: a stage with real workers, and the figures seen on the way."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtask.local import ReplicaSet
from tests.security import accounts, is_secure
from tests.workers import ROOT, Stage, open_stage

REPORT = ROOT / "build" / "acceptance.json"
_FIGURES = pytest.StashKey[dict[str, Any]]()

Report = Callable[[str, Any], None]


@pytest.fixture
def stage(mongo_server: ReplicaSet, database_name: str, tmp_path: Path) -> Iterator[Stage]:
    """Give one test a database of its own on the shared server, and workers that end with it.

    Where the server asks for passwords, its workers have the role worker, its client those of publisher and operator.
    """
    users = accounts(mongo_server, database_name) if is_secure() else None
    with open_stage(mongo_server.uri, database_name, tmp_path, users) as opened:
        yield opened


@pytest.fixture
def report(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Report:
    """Record a figure that was seen and is not asserted: `report("rescue after the lapse, ms", 12.3)`."""
    module = request.node.path.stem.removeprefix("test_")
    figures = request.config.stash.setdefault(_FIGURES, {})

    def record(name: str, value: Any) -> None:
        record_property(name, value)
        figures[f"{module}: {name}"] = value
        REPORT.parent.mkdir(exist_ok=True)
        with REPORT.open("a+") as file:  # which several test processes write
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = json.loads(file.read() or "{}")
            file.truncate(0)
            file.write(json.dumps(dict(sorted({**known, **figures}.items())), indent=2) + "\n")

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures."""
    figures = config.stash.get(_FIGURES, {})
    if figures:
        terminalreporter.write_sep("-", "acceptance figures")
        for name, value in sorted(figures.items()):
            terminalreporter.write_line(f"{name}: {value}")
