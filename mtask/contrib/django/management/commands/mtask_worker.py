"""`manage.py mtask_worker`: becomes an `mtask-worker` for the tasks of this project."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from mtask.contrib.django.connections import client_of, uri_of
from mtask.contrib.django.targets import DEFAULT, backends


class Command(BaseCommand):
    """Runs the tasks of a backend, in its queues."""

    help = "Run the tasks of a backend. Other flags are those of mtask-worker, such as --processes 4."

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return a parser that keeps flags that it does not know: they are those of `mtask-worker`."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parse = parser.parse_known_args

        def parse_args(*given: Any, **named: Any) -> Namespace:
            found: Namespace
            found, found.flags = parse(*given, **named)
            return found

        parser.parse_args = parse_args  # type: ignore[assignment,method-assign]
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the flags that this command knows."""
        parser.add_argument("--backend", default=DEFAULT, help="Name in TASKS. [default]")
        parser.add_argument("-Q", "--queues", help="Queues to serve, comma-separated. [those of the backend]")
        parser.add_argument("-c", "--concurrency", help="Tasks that run at once. [100]")
        parser.add_argument("-l", "--log-level", help="DEBUG, INFO, WARNING or ERROR. [INFO]")

    def handle(self, *_: Any, **options: Any) -> None:
        """Become the worker. Raises CommandError."""
        try:
            arguments, variables = worker_process(**options)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **variables})


def worker_process(
    backend: str,
    queues: str | None = None,
    concurrency: str | None = None,
    log_level: str | None = None,
    flags: list[str] | None = None,
    **_: Any,
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of Python for a worker, and its variables. Others could read a URI on the command line.

    Raises ImproperlyConfigured.
    """
    chosen = next((made for made in backends() if made.alias == backend), None)
    if chosen is None:
        raise ImproperlyConfigured(
            f"TASKS[{backend!r}] is no mtask.contrib.django.MtaskBackend: name one by --backend."
        )
    app = "app" if backend == DEFAULT else f"backends.{backend}"
    given = {
        "--queues": queues or ",".join(sorted(chosen.queues)),
        "--concurrency": concurrency,
        "--log-level": log_level and log_level.upper(),
    }
    named = [part for flag, value in given.items() if value for part in (flag, value)]
    variables = {
        "MTASK_URI": uri_of(chosen.target),
        "MTASK_DATABASE": client_of(chosen.target).database_name,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # manage.py stands first in it
    }
    return ["-m", "mtask.cli.worker", f"mtask.contrib.django.worker:{app}", *named, *(flags or [])], variables
