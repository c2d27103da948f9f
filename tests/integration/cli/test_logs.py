"""`mtask logs`: the kept lines of runs, for people and for programs."""

from __future__ import annotations

import json
import logging
import re
import threading
from datetime import timedelta

import pytest

from mtask.features.logs import operations as run_logs
from mtask.features.logs.worker import GrowingLog, line_of
from mtask.kernel.driver.stores import SyncStore
from mtask.logs import RunMarks
from tests.clients import claim, succeed
from tests.integration.cli.commands import Commands


def keep(store: SyncStore, run_id: str, *messages: str, attempt: int = 1, most: int = 5, is_over: bool = True) -> None:
    """Store lines as a worker does."""
    marks = RunMarks("mail", "1", run_id, attempt)
    marks.trace_id = "0af7651916cd43dd8448eb211c80319c" if attempt == 2 else None
    log = GrowingLog(marks, most, lambda _: None)
    for message in messages:
        level = logging.ERROR if "bad" in message else logging.INFO
        log.add(line_of(logging.LogRecord("shop", level, __file__, 1, message, (), None)))
    if is_over:
        log.end()
    store.run(run_logs.make_ready())
    store.run(run_logs.write([log.taken("w1")], timedelta(days=1)))


def test_lines_of_each_run_are_printed_and_hostile_ones_steer_nothing(
    mtask: Commands, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    mtask.ok("publish", "mail", "-k", "1")
    assert "--keep-logs" in mtask.ok("logs", "mail", "1").err
    keep(store, "r1", *(f"line {n}" for n in range(7)))
    keep(store, "r2", "bad \x1b[2J thing\nsecond line " + "x" * 100, attempt=2)
    ended = mtask.ok("logs", "mail:1")
    assert re.search(r"^try 1 of w1, run r1, 20\d\d-\d\d-\d\d UTC\n  \(2 earlier lines not kept\)\n", ended.out)
    assert re.search(r"^  \d\d:\d\d:\d\d\.\d{3}  ERROR    bad .x1b\[2J thing\n    second line", ended.out, re.MULTILINE)
    assert "line 1\n" not in ended.out
    assert "line 2\n" in ended.out
    assert "try 2 of w1, run r2, 20" in ended.out
    assert "trace 0af7651916cd43dd8448eb211c80319c" in ended.out.replace("\n", " ")
    assert "\x1b" not in ended.out
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    assert "line 2" not in mtask.ok("logs", "mail", "1", "--run", "last").out
    assert "second line" not in mtask.ok("logs", "mail", "1", "--run", "r1").out
    [first, second] = mtask.ok("logs", "mail", "1", "--json").json
    assert (first["run_id"], first["first"], len(first["lines"])) == ("r1", 2, 5)
    assert second["lines"][0]["level"] == "ERROR"


def test_follow_prints_what_comes_until_the_task_has_ended(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "mail", "-k", "1")
    run_id = claim(store, "mail:1")
    keep(store, run_id, "one", "two", is_over=False)

    def go_on() -> None:
        keep(store, run_id, *"abcdefgh", "last", most=3)
        succeed(store, "mail:1", run_id)

    later = threading.Timer(0.5, go_on)
    later.start()
    out = mtask.ok("logs", "mail", "1", "--follow", "--json").out
    later.join()
    said = [json.loads(line)["message"] for line in out.splitlines()]
    assert said[-1] == "last"
    assert len(said) == len(set(said)), "no line twice"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("mail", "nobody"), 4, "there is no task mail:nobody"),
        (("mail", "1", "--run", ""), 2, "--run is empty"),
        (("mail",), 2, "mail"),
        (("a b", "1"), 2, "name"),
    ],
)
def test_nonsense_is_told(mtask: Commands, arguments: tuple[str, ...], code: int, message: str) -> None:
    ended = mtask("logs", *arguments)
    assert ended.code == code
    assert message in ended.err
