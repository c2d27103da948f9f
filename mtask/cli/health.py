"""`mtask-health`: a probe reads a worker's health file.

It imports neither the driver nor typer: it runs every few seconds beside each worker, and should cost little more than
the start of Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from mtask.health import MAX_AGE, files_of_processes, parsed

_HELP = """Tell whether a worker that runs with --health-file is well.

Without a flag: whether it is alive, so whether its event loop turns. A database that is away does not count: a restart
would not help. With --ready: whether it can take tasks, so whether it runs and the database answers. Of a supervisor's
processes, each must be well.

Exit codes: 0 yes, 1 no, 2 wrong usage.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Probe; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="mtask-health", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", help="the worker's --health-file")
    parser.add_argument("--ready", action="store_true", help="also ask whether it can take tasks now")
    parser.add_argument(
        "--max-age", metavar="SECONDS", type=_seconds, default=MAX_AGE, help=f"greatest age of the file [{MAX_AGE:g}]"
    )
    given = parser.parse_args(arguments)
    path = Path(given.file)
    answers = [_probed(each, given.max_age, wants_ready=given.ready) for each in files_of_processes(path) or [path]]
    refused = [reason for is_well, reason in answers if not is_well]
    for line in refused:
        print(f"no: {line}", file=sys.stderr)  # noqa: T201 a command prints
    if not refused:
        print("\n".join(f"yes: {line}" for _, line in answers))  # noqa: T201 a command prints
    return 1 if refused else 0


def _probed(path: Path, max_age: float, *, wants_ready: bool) -> tuple[bool, str]:
    """Return whether the worker of this file is well, and a line that says so or why not."""
    try:
        health = parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False, f"there is no file {str(path)!r}: the worker has not started, or has stopped"
    except (OSError, ValueError) as error:
        return False, f"{str(path)!r} is no health file that can be read: {error}"
    now = monotonic()
    reason = health.not_ready(now, max_age) if wants_ready else health.not_alive(now, max_age)
    if reason is not None:
        return False, f"worker {health.worker_id!r}: {reason}"
    return True, f"worker {health.worker_id!r} is {health.status}"


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: use a number of seconds up to 86400")
    return value


def run() -> None:
    """Run `mtask-health`."""
    sys.exit(main())


if __name__ == "__main__":
    run()
