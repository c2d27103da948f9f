"""The pytest plugin. It imports and starts nothing before a test uses the fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mtask.app.app import App
    from mtask.testing import Bench


@pytest.fixture
def mtask_bench() -> Iterator[Callable[[App], Bench]]:
    """Provide a function that makes a bench for an app. The bench's database is dropped after the test."""
    from mtask.testing import bench

    with ExitStack() as stack:
        yield lambda app: stack.enter_context(bench(app))
