"""`mtask-health`: a probe reads a worker's health file.

It imports neither the driver nor typer: it runs every few seconds beside each worker, and should cost little more than
the start of Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from time import monotonic

from mtask.model.health import MAX_AGE, parsed

_HELP = """Tell whether a worker that runs with --health-file is well.

Without a flag: whether it is alive, so whether its event loop turns. A database that is away does not count: a restart
would not help. With --ready: whether it can take tasks, so whether it runs and the database answers.

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
    try:
        with open(given.file, encoding="utf-8") as file:
            health = parsed(file.read())
    except FileNotFoundError:
        return _say(f"no: there is no file {given.file!r}: the worker has not started, or has stopped")
    except (OSError, ValueError) as error:
        return _say(f"no: {given.file!r} is no health file that can be read: {error}")
    now = monotonic()
    reason = health.not_ready(now, given.max_age) if given.ready else health.not_alive(now, given.max_age)
    if reason is not None:
        return _say(f"no: {reason}")
    print(f"yes: worker {health.worker_id!r} is {health.status}")  # noqa: T201 a command prints
    return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: use a number of seconds up to 86400")
    return value


def _say(message: str) -> int:
    print(message, file=sys.stderr)  # noqa: T201 a command prints
    return 1


def run() -> None:
    """Run `mtask-health`."""
    sys.exit(main())


if __name__ == "__main__":
    run()
