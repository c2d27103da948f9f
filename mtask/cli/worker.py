"""The entry point of `mtask-worker`, which `mtask worker` is, too.

A signal that comes before the worker has started ends the process in order, so this module imports little before it
handles signals.
"""

from __future__ import annotations

from mtask.cli import interrupts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str] | None = None, name: str = "mtask-worker") -> None:
    """Run `mtask-worker` with these arguments, by default those of this process. This is the entry point."""
    with interrupts.leaving():
        from mtask.cli.workers import command  # this takes most of the time of a start

        command.run(arguments, name)


if __name__ == "__main__":
    run()
