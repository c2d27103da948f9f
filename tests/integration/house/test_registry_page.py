"""The code of docs/registry.md is executed, in its order; the handlers of its app are registered as a worker does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtask.kernel.driver.stores import SyncStore
from tests.integration.features.registry.apps import registered
from tests.integration.stores import ready_store
from tests.mongo import Client as Mongo

PAGE = Path(__file__).parents[3] / "docs" / "registry.md"


def test_code_of_the_page_runs_as_written(
    mongo: Mongo,
    mongo_uri: str,
    database_name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store: SyncStore = ready_store(mongo, database_name)
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for number, block in enumerate(blocks):
            exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
            if number == 0:
                registered(store, names["app"])
    finally:
        for name in ("client", "strict"):
            if name in names:
                names[name].close()
    printed = capsys.readouterr().out
    assert "mail 5 {'user_id': [7]}" in printed
    assert re.search(r"user_id: Field required \(expected to, user_id, subject\)", printed)
    assert "no handler is registered under 'send_mail'; did you mean 'send_email'?" in printed
    assert "send_email mail None" in printed or "send_email mail 2026.11.1" in printed
