"""The code of docs/flows.md is executed, in its order; before a flow is waited for, the tasks are run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtask.testing.bench import Bench

PAGE = Path(__file__).parents[3] / "docs" / "flows.md"


def test_code_of_the_page_runs_as_written(
    mongo_uri: str, database_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    blocks = re.findall(r"^```python\n(# goes on, once[^\n]*\n)?(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 7
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for waits, block in blocks:
            if waits:
                bench = Bench(names["app"], mongo_uri, database_name)
                with bench.client:
                    bench.run()
            exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
        assert {row.key for row in names["client"].flows()} == {"import/42", "invoices/2026-03-02", "trip/7"}
    finally:
        names["client"].close()
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tidy WAITING ('count:import/42/part-0',") for line in printed)


def test_the_recipe_of_a_nightly_import_publishes_one_flow(
    mongo_uri: str, database_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    blocks = re.findall(r"^```python\n(?!# goes on)(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    recipe = next(block for block in blocks if "def nightly" in block)
    try:
        exec(compile(blocks[0], str(PAGE), "exec", dont_inherit=True), names)
        exec(compile(recipe, str(PAGE), "exec", dont_inherit=True), names)
        bench = Bench(names["app"], mongo_uri, database_name)
        with bench.client as client:
            client.publish("nightly", key="nightly/2026-03-02")
            bench.run()
            client.rerun("nightly", "nightly/2026-03-02")
            bench.run()
            assert client.flow("nightly/2026-03-02").counts == {"SUCCESS": 12}
            assert client.count(name="nightly") == 1
    finally:
        names["client"].close()
