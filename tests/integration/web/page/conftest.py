"""One server, one worker and one browser for all tests of a module."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from tests.integration.web.page.browser import Browser, browsing
from tests.integration.web.page.stage import Stage, fill, staged


@pytest.fixture(scope="module")
def stage(mongo_uri: str, dropping: Callable[[str], Future[None]]) -> Iterator[Stage]:
    """Serve a filled database, with a worker."""
    database = f"test_{uuid.uuid4().hex}"
    with staged(mongo_uri, database) as made:
        fill(made)
        yield made
        made.gates.open_all()
    dropping(database)


@pytest.fixture(scope="module")
def window(stage: Stage) -> Iterator[Browser]:
    """Run a browser."""
    with browsing(stage.url) as made:
        yield made


@pytest.fixture
def browser(window: Browser, stage: Stage) -> Iterator[Browser]:
    """Give the browser to a test. The test fails if a page complains, or asks another host."""
    window.size(1360)
    window.dark(False)
    window.sign_in("operate")
    yield window
    assert window.complaints() == []
    assert window.hosts() <= {stage.url.removeprefix("http://")}
