"""Run mtask under faults and prove from the history that nothing was lost and nothing held twice.

`python -m tests.chaos --minutes 15`, or `make chaos MINUTES=15`. Exit code 0: all of the checker's zeros hold;
1: they do not; 2: nothing was proven, because the run itself went wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import report
from tests.chaos.display import Display
from tests.chaos.judge.checker import check
from tests.chaos.nemeses import tracks
from tests.chaos.run import WORKERS, Plan, Run, fresh_folder, seed_of
from tests.processes import heed_signals


def main(given: Sequence[str] | None = None) -> int:
    """Run, check, report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="how long the nemeses work")
    parser.add_argument("--seed", help="repeats an earlier run's faults and load [a fresh one]")
    parser.add_argument("--rate", type=float, default=120.0, help="tasks published a second, if the workers follow")
    parser.add_argument("--nemesis", action="append", default=[], choices=tracks.names(), help="only this one")
    parser.add_argument("--spare", metavar="WORKER", choices=WORKERS, help="a worker that no nemesis ends (w1 to w5)")
    parser.add_argument(
        "--once", action="store_true", help="every nemesis once, then the end; the order of starts is only counted"
    )
    parser.add_argument("--folder", type=Path, help="where history and report go [build/chaos/SEED]")
    arguments = parser.parse_args(given)
    seed = seed_of(arguments.seed)
    folder = fresh_folder(arguments.folder or Path("build/chaos") / str(seed))
    plan = Plan(folder, arguments.minutes, seed, arguments.rate, arguments.nemesis, arguments.once, arguments.spare)
    try:
        with Display() as display:
            history = Run(plan, display).go()
    except KeyboardInterrupt:
        print("interrupted: nothing was proven")
        return 2
    print("checking the history", flush=True)
    verdict = check(history)
    path = report.write(history, verdict)
    print(verdict.describe())
    print(f"report: {path}")
    return 0 if verdict.is_clean else 1


if __name__ == "__main__":
    heed_signals()
    sys.exit(main())
