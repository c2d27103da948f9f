"""The engine's logger: a line tells where it was logged, and logging that raises disturbs nobody."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mtask.logs import SureLogger, fields

RAISED = [RuntimeError("broken"), SystemExit(3)]


@pytest.fixture
def sure() -> Iterator[SureLogger]:
    made = SureLogger("mtask.tests")
    yield made
    made.logger.handlers.clear()
    made.logger.filters.clear()


def breaking(logger: logging.Logger, raised: BaseException) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise raised

    logger.addFilter(refuse)


def test_line_tells_where_it_was_logged_and_keeps_its_fields(
    sure: SureLogger, caplog: pytest.LogCaptureFixture
) -> None:
    sure.warning("something", extra=fields(task="mail:1"))
    (record,) = caplog.records
    assert (record.filename, record.funcName) == (
        "test_logs.py",
        "test_line_tells_where_it_was_logged_and_keeps_its_fields",
    )
    assert record.__dict__["mtask_fields"] == {"task": "mail:1"}


@pytest.mark.parametrize("raised", RAISED, ids=repr)
def test_line_that_logging_refuses_goes_to_stderr(
    sure: SureLogger, capsys: pytest.CaptureFixture[str], raised: BaseException
) -> None:
    breaking(sure.logger, raised)
    sure.exception("ping failed", extra=fields(reason="mongodb://u:secret@h/"))
    told = capsys.readouterr().err
    assert told.startswith("mtask: ping failed {'reason': 'mongodb://***@h/'}")
    assert repr(raised) in told


def test_interrupt_of_the_user_passes(sure: SureLogger) -> None:
    breaking(sure.logger, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        sure.error("slow")
