"""The code of docs/lookup.md is executed, in its order; before the results are read, the tasks are run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtask.testing.bench import Bench

PAGE = Path(__file__).parents[3] / "docs" / "lookup.md"


def test_code_of_the_page_runs_as_written(
    mongo_uri: str, database_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    blocks = re.findall(r"^```python\n(# goes on, once[^\n]*\n)?(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for is_of_results, block in blocks:
            if is_of_results:
                bench = Bench(names["app"], mongo_uri, database_name)
                with bench.client:
                    bench.run()
            exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    finally:
        names["client"].close()
    printed = capsys.readouterr().out.splitlines()
    assert "a INIT 3" in printed
    assert any(line.startswith("INIT 2 True ") for line in printed), "the two that were published before go first"
    assert {"a 6", "b 8", "c 10"} <= set(printed)
