"""The flags that every command takes.

`mtask --version` and a wrong command line come this far, so this module imports no client, and no model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
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


def _flag(names: str, told: str, metavar: str | None = None, kind: Any = str) -> Any:
    """Return what typer reads of a flag: its names with spaces between, its help, and what its value is."""
    made = typer.Option(*names.split(), metavar=metavar, help=told, rich_help_panel=GLOBAL, show_default=False)
    return Annotated[kind | None, made]


_SHARED: Mapping[str, Any] = {
    "uri": _flag(
        "--uri",
        "MongoDB URI, or 'local' for the embedded mongod. Else MTASK_URI, else .env, else localhost:27017.",
        "URI",
    ),
    "database": _flag("--database", "Database. Else MTASK_DATABASE, else the URI's, else 'mtask'.", "NAME"),
    "actor": _flag("--as", "Your name in the action log. Else MTASK_ACTOR, else the user of the system.", "NAME"),
    "tenant": _flag(
        "--tenant", "Whose tasks the command means: it publishes for this tenant, and finds its tasks alone.", "NAME"
    ),
    "encryption_key_file": _flag(
        "--encryption-key-file",
        "Master key of encrypted tasks, 96 bytes. Else MTASK_ENCRYPTION_KEY_FILE.",
        "FILE",
        Path,
    ),
    "json": _flag("--json", "Print one JSON document on stdout, and errors as JSON on stderr.", kind=bool),
    "no_color": _flag("--no-color", "No colours. The variable NO_COLOR does the same.", kind=bool),
    "quiet": _flag("--quiet -q", "Print only the answer, no remarks.", kind=bool),
    "verbose": _flag("--verbose -v", "Print more remarks.", kind=bool),
    "debug": _flag("--debug", "Show the traceback of an error.", kind=bool),
}
assert set(_SHARED) == {flag.name for flag in fields(Flags)}


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return a keyword parameter of the signature that typer reads."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


class _Brief:
    """A command, or a group, whose help does not list the shared flags. Shells complete them all the same."""

    params: list[Any]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        shared = [parameter for parameter in self.params if parameter.name.startswith("shared_")]
        for parameter in shared:
            parameter.hidden = True
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]  # of the command, or of the group
        finally:
            for parameter in shared:
                parameter.hidden = False


class BriefCommand(_Brief, TyperCommand):
    """A command with brief help."""


class _BriefGroup(_Brief, TyperGroup):
    """A group of commands with brief help."""


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

        def call(context: typer.Context, flags: Flags, given: dict[str, Any]) -> None:
            context.obj = flags
            function(context, **given)

        settings: dict[str, Any] = {} if lists_flags else {"epilog": POINTER, "cls": _BriefGroup}
        app.callback(**settings)(with_shared_flags(function, own, call))
        return function

    return register


def with_shared_flags(
    function: Callable[..., Any],
    own: Iterable[inspect.Parameter],
    call: Callable[[typer.Context, Flags, dict[str, Any]], Any],
) -> Callable[..., Any]:
    """Return what typer calls for a function: it takes the function's own parameters, and the shared flags.

    `call` gets the context, the shared flags before and after the command's name, and the other values.
    """

    def invoke(shared_context: typer.Context, **given: Any) -> Any:
        earlier = shared_context.find_object(Flags) or Flags()
        return call(shared_context, Flags(**taken(given, "shared_")).after(earlier), given)

    context = inspect.Parameter("shared_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    shared = [keyword(f"shared_{name}", annotation, None) for name, annotation in _SHARED.items()]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    describe(invoke, function, [context, *own, *shared])
    return invoke


def describe(invoke: Any, function: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Give the wrapper the function's name and docstring, and the signature that typer reads."""
    invoke.__name__, invoke.__doc__ = function.__name__, function.__doc__
    invoke.__signature__ = inspect.Signature(parameters)
    invoke.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
