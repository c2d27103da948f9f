"""What the commands print of the library's log."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from mtask.cli.context import _Notices


def test_a_mistake_is_printed_with_its_traceback_and_other_records_on_one_line() -> None:
    printed = io.StringIO()
    logger = logging.getLogger("test of notices")
    logger.propagate = False
    cli = SimpleNamespace(err=Console(file=printed, no_color=True))
    logger.handlers = [_Notices(cast(Any, cli))]
    logger.warning("a worker is silent:\n%s", "\x1b[31mw")
    assert printed.getvalue() == "warning: a worker is silent:\\n\\x1b[31mw\n"
    try:
        raise ValueError("no [red]address")
    except ValueError:
        logger.exception("a request failed")
    lines = printed.getvalue().splitlines()[1:]
    assert lines[:2] == ["error: a request failed", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: no [red]address"
