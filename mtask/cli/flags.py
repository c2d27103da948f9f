"""The flags that every command takes.

`mtask --version` and a wrong command line come this far, so this module imports no client, and no model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

GLOBAL = "Everywhere"
#: The last line of each help but that of `mtask`, which lists these flags.
POINTER = "`mtask --help` lists the flags of every command, such as --uri and --json."


@dataclass(slots=True)
class Flags:
    """The flags that every command takes, before or after the command's name. None: the flag was not given."""

    uri: str | None = None
    database: str | None = None
    actor: str | None = None
    tenant: str | None = None
    encryption_key_file: Path | None = None
    json: bool | None = None
    no_color: bool | None = None
    quiet: bool | None = None
    verbose: bool | None = None
    debug: bool | None = None

    def after(self, earlier: Flags) -> Flags:
        """Return these flags. If a flag is not given here, take its value from `earlier`."""
        mine = {flag.name: getattr(self, flag.name) for flag in fields(self)}
        given = {name: value for name, value in mine.items() if value not in (None, False)}
        return Flags(**{name: given.get(name, getattr(earlier, name)) for name in mine})


_Uri = Annotated[
    str | None,
    typer.Option(
        "--uri",
        metavar="URI",
        help="MongoDB URI, or 'local' for the embedded mongod. Else MTASK_URI, else .env, else localhost:27017.",
        rich_help_panel=GLOBAL,
    ),
]
_Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="NAME",
        help="Database. Else MTASK_DATABASE, else the URI's, else 'mtask'.",
        rich_help_panel=GLOBAL,
    ),
]


_Actor = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="NAME",
        help="Your name in the action log. Else MTASK_ACTOR, else the user of the system.",
        rich_help_panel=GLOBAL,
    ),
]


_Tenant = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="NAME",
        help="Whose tasks the command means: it publishes for this tenant, and finds its tasks alone.",
        rich_help_panel=GLOBAL,
    ),
]
_KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--encryption-key-file",
        metavar="FILE",
        help="Master key of encrypted tasks, 96 bytes. Else MTASK_ENCRYPTION_KEY_FILE.",
        rich_help_panel=GLOBAL,
    ),
]


def _switch(*names: str, help: str) -> Any:  # noqa: A002 typer's word
    return Annotated[bool | None, typer.Option(*names, help=help, rich_help_panel=GLOBAL, show_default=False)]


_SHARED: Mapping[str, Any] = {
    "uri": _Uri,
    "database": _Database,
    "actor": _Actor,
    "tenant": _Tenant,
    "encryption_key_file": _KeyFile,
    "json": _switch("--json", help="Print one JSON document on stdout, and errors as JSON on stderr."),
    "no_color": _switch("--no-color", help="No colours. The variable NO_COLOR does the same."),
    "quiet": _switch("--quiet", "-q", help="Print only the answer, no remarks."),
    "verbose": _switch("--verbose", "-v", help="Print more remarks."),
    "debug": _switch("--debug", help="Show the traceback of an error."),
}
assert set(_SHARED) == {flag.name for flag in fields(Flags)}


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return a keyword parameter of the signature that typer reads."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def shared_parameters() -> list[inspect.Parameter]:
    """Return a parameter for each shared flag, named after it: `shared_uri`."""
    return [keyword(f"shared_{name}", annotation, None) for name, annotation in _SHARED.items()]


@contextmanager
def _without_shared(command: Any) -> Iterator[None]:
    shared = [parameter for parameter in command.params if parameter.name.startswith("shared_")]
    for parameter in shared:
        parameter.hidden = True
    try:
        yield
    finally:
        for parameter in shared:
            parameter.hidden = False


class BriefCommand(TyperCommand):
    """A command whose help does not list the shared flags. Shells complete them all the same."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        with _without_shared(self):
            super().format_help(ctx, formatter)


class _BriefGroup(TyperGroup):
    """The same for a group of commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        with _without_shared(self):
            super().format_help(ctx, formatter)


def taken(given: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Remove the values whose names begin with the prefix, and return them without it."""
    names = [name for name in given if name.startswith(prefix)]
    return {name.removeprefix(prefix): given.pop(name) for name in names}


def callback(app: typer.Typer, *, lists_flags: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function `(context, …)` as the app's callback.

    The callback takes the shared flags that stand before a command's name. `lists_flags`: its help lists them.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "context"]

        def invoke(shared_context: typer.Context, **given: Any) -> None:
            earlier = shared_context.find_object(Flags) or Flags()
            shared_context.obj = Flags(**taken(given, "shared_")).after(earlier)
            function(shared_context, **given)

        context = inspect.Parameter("shared_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        describe(invoke, function, [context, *own, *shared_parameters()])
        settings: dict[str, Any] = {} if lists_flags else {"epilog": POINTER, "cls": _BriefGroup}
        app.callback(**settings)(invoke)
        return function

    return register


def describe(invoke: Any, function: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Give the wrapper the function's name and docstring, and the signature that typer reads."""
    invoke.__name__, invoke.__doc__ = function.__name__, function.__doc__
    invoke.__signature__ = inspect.Signature(parameters)
    invoke.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
