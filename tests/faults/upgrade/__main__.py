"""Roll a fleet of workers from the former version to this one and back, under load, and prove that nothing was lost.

`python -m tests.faults.upgrade --minutes 5 --seed 1`, or `make upgrade MINUTES=5`. Workers are stopped in order or
killed, publishers of both versions publish, and handlers note what they do. Exit code 0: nothing was lost, and nothing
happened twice; 1: not so.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mtask.local import temporary
from tests.chaos.run import fresh_folder, seed_of
from tests.faults.upgrade.run import Plan, run


def main(given: Sequence[str] | None = None) -> int:
    """Run, judge, tell the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="least time; a roll there and back is finished [5]")
    parser.add_argument("--seed", help="repeats an earlier run's load and kills [a fresh one]")
    parser.add_argument("--workers", type=int, default=3, help="worker processes [3]")
    parser.add_argument("--rate", type=float, default=20.0, help="tasks that each publisher publishes a second [20]")
    arguments = parser.parse_args(given)
    seed = seed_of(arguments.seed)
    print(f"seed {seed}", flush=True)
    folder = fresh_folder(Path("build/upgrade") / str(seed)).resolve()
    plan = Plan(folder, seed, arguments.workers, arguments.rate, arguments.minutes * 60)
    with temporary() as server:
        verdict = run(server.uri, "upgrade", plan)
    print(verdict.describe())
    print(f"ledgers and logs: {folder}")
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the workers end, too
    sys.exit(main())
