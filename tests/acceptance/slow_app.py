"""An app whose import takes until its stdin is closed. It tells on stdout when that begins."""

from __future__ import annotations

import sys

from mtask import App

app = App()


@app.task
def noop() -> None:
    """Do nothing."""


sys.stdout.write("importing\n")
sys.stdout.flush()
sys.stdin.read()
