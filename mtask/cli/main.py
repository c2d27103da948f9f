"""The entry point of `mtask`.

A shell asks for completions at each press of a key, and scripts ask for the version. Both are answered without typer,
so this module imports little.
"""

from __future__ import annotations

import os
import sys
from functools import cache

from mtask.cli import failures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

#: The shells' question for completions is in this variable.
COMPLETE = "_MTASK_COMPLETE"


@cache
def _command() -> Callable[..., Any]:
    """Build the command. It keeps the subcommands that were asked for, so it is built once."""
    import typer

    from mtask.cli.commands import app

    return typer.main.get_command(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. This is the entry point."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    failures.prepare()
    question = os.environ.get(COMPLETE)
    if question:
        from mtask.cli import words

        answer = words.answer(os.environ, question)
        if answer is not None:
            sys.stdout.write(answer.text)
            return answer.code
    if "worker" in given:
        from mtask.cli import words

        if (flags := words.without(given, "worker")) is not None:
            return _run_worker(flags)
    try:
        if given == ["--version"]:
            from mtask.version import __version__

            sys.stdout.write(f"mtask {__version__}\n")
            sys.stdout.flush()
            return failures.OK
        from mtask.cli import interrupts

        with interrupts.ending():
            code = _command()(given or ["--help"], prog_name="mtask", standalone_mode=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return failures.INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        return failures.OK  # the program that reads the output has closed the pipe
    except Exception as error:
        return _failed(error, given)
    finally:
        failures.leave_lost()
    return code if isinstance(code, int) else failures.OK


def _run_worker(given: Sequence[str]) -> int:
    """Run `mtask worker`, which is `mtask-worker`: its signals mean something else than those of other commands."""
    from mtask.cli import worker

    try:
        worker.run(given, "mtask worker")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else failures.OK
    return failures.OK


def _failed(error: Exception, given: Sequence[str]) -> int:
    """Print the error that ended a command; return the exit code."""
    import typer

    if isinstance(error, typer.Abort):
        return failures.INTERRUPTED
    from mtask.cli import output

    flags = given[: given.index("--")] if "--" in given else given
    settings = {"as_json": "--json" in flags, "no_color": "--no-color" in flags, "debug": "--debug" in flags}
    try:
        return output.report(output.of_stdout(error), **settings)
    except OSError:  # stderr takes no text either
        return getattr(error, "exit_code", failures.OTHER)


def run_web() -> int:
    """Run `mtask web` with the arguments of this process. This is the entry point of `mtask-web`."""
    return run(["web", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(run())
