"""A worker that is asked to stop before it has started."""

from __future__ import annotations

from typing import Any

import pytest

from mtask import App
from mtask.kernel.worker.process.registration import Registrar
from mtask.parts.assembly import Worker
from mtask.parts.worker import WorkerOptions
from tests.mongo import Client as Mongo


@pytest.mark.parametrize("is_registered", [False, True], ids=["before it registers", "while it registers"])
async def test_stop_before_the_start_leaves_nothing_registered(
    mongo: Mongo, mongo_uri: str, database_name: str, app: App, monkeypatch: pytest.MonkeyPatch, is_registered: bool
) -> None:
    begun: list[str] = []
    app.on_start(lambda: begun.append("hook"))
    worker = Worker(app, WorkerOptions(mongo_uri, database_name, worker_id="w"))
    register = Registrar.register

    async def stopping(registrar: Registrar) -> dict[str, Any]:
        begun.append("registered")
        document = await register(registrar)
        worker.stop("asked meanwhile")
        return document

    monkeypatch.setattr(Registrar, "register", stopping)
    if not is_registered:
        worker.stop("asked before")
    await worker.run()
    assert not worker.has_stuck_threads
    found = mongo[database_name]["workers"].find_one({"_id": "w"})
    assert begun == (["registered"] if is_registered else [])
    assert (found and found["status"]) == ("stopped" if is_registered else None)
