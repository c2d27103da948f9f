"""`mtask` with a log that tells all: what no line of it may hold, no line of a usual log holds.

`python -m tests.faults.web.verbose web --port 0` is `mtask web --port 0`.
"""

from __future__ import annotations

import logging

from mtask.cli.main import run

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("mtask").setLevel(logging.DEBUG)
    run()
