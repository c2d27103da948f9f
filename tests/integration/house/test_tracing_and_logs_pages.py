"""docs/tracing.md and docs/logs.md: their code runs, and their names, lines and flags are those of the code."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mtask import App
from mtask.cli.workers.command import cli
from mtask.features.logs import worker as keeper
from mtask.features.logs.operations import MAX_RUNS
from mtask.features.logs.rules import MAX_BYTES, MAX_TEXT
from mtask.kernel.worker.process.log import FieldFormatter, JsonFormatter
from mtask.logs import RUN, RunMarks
from tests.workers import ROOT

TRACING, LOGS = ((ROOT / "docs" / name).read_text() for name in ("tracing.md", "logs.md"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_code_of_the_page_on_tracing_is_executed(mongo_uri: str) -> None:
    first, second = blocks(TRACING, "python")
    for code in (first, second):
        names: dict[str, Any] = {}
        exec(compile(code, "docs/tracing.md", "exec"), names)
        with names["client"](mongo_uri) as client:
            assert client.server_time().tzinfo is not None
        if code is first:
            assert isinstance(names["app"], App)
            assert names["app"].tracer is not None


def test_attributes_of_the_page_are_those_of_the_code() -> None:
    code = Path(ROOT / "mtask" / "otel.py").read_text()
    used = set(re.findall(r'"((?:mtask|messaging)\.[a-z_.]+|error\.type)"', code))
    told = set(re.findall(r"`((?:mtask|messaging)\.[a-z_.]+|error\.type)`", TRACING))
    told |= {"messaging.operation.type", "messaging.operation.name"}
    assert used - {"mtask.task.key"} == told - {"mtask.otel"}


@pytest.fixture
def record() -> Iterator[logging.LogRecord]:
    made = logging.LogRecord("shop", logging.INFO, __file__, 1, "sent %d mails", (3,), None)
    made.created = datetime(2030, 1, 2, 3, 4, 5, 678_000, UTC).timestamp()
    made.msecs = 678.0
    token = RUN.set(RunMarks("send_email", "welcome/42", "5f1c", 1))
    yield made
    RUN.reset(token)


def test_lines_of_the_page_on_logs_are_those_of_the_formatters(record: logging.LogRecord) -> None:
    [line] = blocks(LOGS, "json")
    assert line.strip() == JsonFormatter().format(record)
    assert json.loads(line)["message"] == "sent 3 mails"
    [text] = blocks(LOGS, "text")
    assert text.strip().partition("INFO")[2] == FieldFormatter().format(record).partition("INFO")[2]


def test_flags_and_bounds_of_the_page_on_logs_are_those_of_the_code() -> None:
    known = {flag for command in cli.registered_commands for flag in flags_of(command.callback)}
    used = {flag for block in blocks(LOGS, "bash") for line in block.splitlines() if "mtask-worker" in line
            for flag in re.findall(r"--[a-z-]+", line)}  # fmt: skip
    assert used <= known, used - known
    assert f"{MAX_BYTES // 1024} KiB" in LOGS
    assert f"at most {MAX_TEXT:,} characters" in LOGS.replace("\n", " ")
    assert f"newest {MAX_RUNS} runs" in LOGS
    assert f"up to {keeper.MAX_WAITING_BYTES // 2**20} MiB" in LOGS
    assert keeper.EVERY == 3.0


def flags_of(callback: Any) -> Iterator[str]:
    for name in callback.__annotations__:
        yield f"--{name.replace('_', '-')}"
