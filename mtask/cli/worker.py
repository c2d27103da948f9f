"""The entry point of `mtask-worker`.

A signal that comes before the worker has started ends the process in order, so this module imports little before it
handles signals.
"""

from __future__ import annotations

from mtask.cli import interrupts


def run() -> None:
    """Run `mtask-worker`. This is the entry point."""
    with interrupts.leaving():
        from mtask.cli.workers import command  # this takes most of the time of a start

        command.run()


if __name__ == "__main__":
    run()
