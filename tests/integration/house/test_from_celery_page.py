"""The code of docs/from-celery.md is executed, in its order, and its tables are those of the bridge."""

from __future__ import annotations

import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mtask.contrib.celery import words
from mtask.contrib.celery.check import check
from mtask.testing.bench import URI_VARIABLE, Bench
from tests.mongo import eventually

PAGE = Path(__file__).parents[3] / "docs" / "from-celery.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_code_of_the_page_runs_as_written(mongo_uri: str, database_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    monkeypatch.setenv(URI_VARIABLE, mongo_uri)
    before, after, both, tested = BLOCKS
    changed = before.replace("from celery import", "from mtask.contrib.celery import")
    assert changed.replace(', broker="redis://localhost/0"', "") == after
    names: dict[str, Any] = {"__name__": "shop"}
    exec(compile(after, str(PAGE), "exec", dont_inherit=True), names)
    app = names["app"]
    try:
        ends: list[int] = []
        bench = Bench(app.mtask, mongo_uri, database_name)
        with bench.client:
            with ThreadPoolExecutor(1) as executor:
                waits = executor.submit(names["main"])
                eventually(lambda: bench.client.count() == 4, message="the chord")
                bench.run()
                ends.append(waits.result())
            exec(compile(both, str(PAGE), "exec", dont_inherit=True), names)
            bench.run()
            assert bench.client.result(names["send_email"], "welcome/42") == "hi to a@b.c"
            assert bench.client.result("shop.price", "42") == 19
        assert ends == [6]
        exec(compile(tested, str(PAGE), "exec", dont_inherit=True), names)
    finally:
        app.close()


def test_commands_and_their_output_are_as_the_page_says(tmp_path: Path) -> None:
    [commands] = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert [shlex.split(line)[0] for line in commands.splitlines()] == ["python", "mtask-worker"]
    [printed] = re.findall(r"^```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    file = tmp_path / "mail.py"
    file.write_text("\n" * 11 + '@shared_task(rate_limit="1/s")\ndef send(): ...\n')
    [finding] = check([file]).findings
    assert printed.splitlines()[0] == str(finding).replace(str(tmp_path), "src")
    before = tmp_path / "shop.py"
    before.write_text(BLOCKS[0])
    [broker] = check([before]).findings
    assert (broker.line, broker.what) == (4, "the broker 'redis://'")


def test_tables_name_what_the_bridge_maps_and_refuses() -> None:
    sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
    mapped, refused = sections["What maps to what"], sections["What is not mapped, and what to write"]
    for option in words.TASK_OPTIONS | words.CALL_OPTIONS | {"beat_schedule", "task_routes", "timezone"}:
        assert option in mapped or option == "name", option
    for option in ("rate_limit", "soft_time_limit", "base", "link", "headers", "update_state"):
        assert option in refused, option
