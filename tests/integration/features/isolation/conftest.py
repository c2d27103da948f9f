"""The worker of these tests: its handlers run in child processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.integration.features.isolation.bench import Isolating, isolating_by
from tests.integration.worker_harness import Working


@pytest.fixture
def isolating(working: Working, tmp_path: Path) -> Isolating:
    """Return what runs a worker with executors on the test's database: `async with isolating() as it`."""
    return partial(isolating_by, working, tmp_path)
