"""The stop of a worker with executors, where a part of it goes wrong."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.integration.features.isolation.bench import Isolating
from tests.mongo import Client as Mongo
from tests.mongo import eventually


def test_a_stop_that_fails_in_part_ends_the_rest(isolating: Isolating, database_name: str, mongo: Mongo) -> None:
    before = set(threading.enumerate())

    async def scenario() -> None:
        async with isolating(count=1) as it:
            await it.ended(await it.publish("echo", "1"), "SUCCESS")
            await it.ended(await it.publish("thread", "1"), "SUCCESS")
            guard = it.executors._guard
            stop = guard.stop

            def failing() -> None:
                stop()
                raise OSError("cannot wait")

            guard.stop = failing  # type: ignore[method-assign]

    with pytest.raises(OSError, match="cannot wait"):
        asyncio.run(scenario())
    assert [found["status"] for found in mongo[database_name]["workers"].find()] == ["stopped"]
    # A thread of handlers that is left would keep the process alive for good.
    eventually(lambda: set(threading.enumerate()) <= before, message="no thread is left")
