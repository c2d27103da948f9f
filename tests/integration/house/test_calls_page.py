"""The code of docs/calls.md is executed, in its order; before results are read, the tasks are run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtask.testing.bench import Bench

PAGE = Path(__file__).parents[3] / "docs" / "calls.md"


def test_code_of_the_page_runs_as_written(
    mongo_uri: str, database_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    blocks = re.findall(r"^```python\n(# goes on, once[^\n]*\n)?(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for waits, block in blocks:
            if waits:
                bench = Bench(names["app"], mongo_uri, database_name)
                with bench.client:
                    bench.run()
            exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
        names["client"].publish("check_out", {"order": 7}, key="7")
        names["client"].remove_schedule("newsletter")
    finally:
        names["client"].close()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "True send_email welcome/42"
    assert printed[1:3] == ["news to a@b.c", "700"]
    assert printed[3].endswith(" SUCCESS SUCCESS")
    assert printed[4] == "[]"
    assert printed[5:] == ["{'SUCCESS': 2}", "42 paid to a@b.c"]
