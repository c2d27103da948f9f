"""Judges the logs of workers: no part of the engine fails by a fault of its own, whatever breaks around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from tests.chaos.judge.record.verdict import Verdict

#: What a loop of the engine logs that goes on after an exception which it does not know.
_FAILED = re.compile(r" ERROR +(.* failed,? and goes on.*)$")
_INDENTED = "    "  #: so begins each line of a traceback


def judge_logs(verdict: Verdict, logs: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Report each part of the engine that failed, with what it raised."""
    for worker, lines in logs:
        for number, line in enumerate(lines, 1):
            if failed := _FAILED.search(line):
                traceback = [*takewhile(lambda each: each.startswith(_INDENTED), lines[number:])]
                raised = traceback[-1].strip() if traceback else "unknown"
                verdict.report("engine_failures", worker, failed[1].strip(), raised=raised)
