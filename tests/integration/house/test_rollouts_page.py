"""The code of docs/rollouts.md is executed, in its order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stores import ready_store
from tests.mongo import Client as Mongo

PAGE = Path(__file__).parents[3] / "docs" / "rollouts.md"


def test_code_of_the_page_runs_as_written(
    mongo: Mongo,
    mongo_uri: str,
    database_name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready_store(mongo, database_name)
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for number, block in enumerate(blocks):
            exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
            if number in (0, 2, 3):
                names["app"].complete()  # as a worker does that starts
            if number == 0:
                assert names["app"].handlers["send_email"].arguments_of({"to": "a"}, 1) == {"to": "a", "subject": "hi"}
            if number == 2:
                upcast = names["app"].handlers["bill"].arguments_of({"euros": 7}, 1)
                assert upcast == {"cents": 700, "currency": "EUR"}
        assert names["client"].get("greet", "ann").params == {"to": "Ann", "style": "formal"}
    finally:
        if "client" in names:
            names["client"].close()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "2"
    assert "no worker is live" in printed
