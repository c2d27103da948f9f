"""The command `mtask`, its commands and their modules. A module is imported when one of its commands is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mtask.cli import failures, words
from mtask.cli.flags import callback
from mtask.parts.surfaces import CONTRIB, FEATURES

#: Each module with the commands and groups that its `register` adds: those of the queue, then those of features and of
#: contrib. `mtask --help` lists them in this order.
MODULES: Mapping[str, tuple[str, ...]] = {
    "mtask.cli.database.demo": ("demo",),
    "mtask.cli.tasks.publish": ("publish",),
    "mtask.cli.tasks.show": ("show",),
    "mtask.cli.tasks.find": ("find", "list", "stats"),
    "mtask.cli.tasks.wait": ("wait", "result", "position"),
    "mtask.cli.tasks.change": ("cancel", "retry", "rerun", "update", "remove"),
    "mtask.cli.workers.command": ("worker",),
    "mtask.cli.workers.workers": ("workers", "stop-worker", "set-worker"),
    "mtask.cli.database.setup": ("init", "roles", "schema"),
    "mtask.cli.database.doctor": ("doctor",),
    "mtask.cli.database.web": ("web",),
    "mtask.cli.database.local": ("local",),
    **{f"mtask.features.{name}.cli": feature.commands for name, feature in FEATURES.items() if feature.commands},
    **{f"mtask.contrib.{name}.cli": joined.commands for name, joined in CONTRIB.items() if joined.commands},
}
_MODULE_OF = {name: module for module, names in MODULES.items() for name in names}


class Commands(TyperGroup):
    """The group of all commands. A command imports its own module only; the help of `mtask` imports none."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._made: dict[str, Any] = {}
        self._is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(_MODULE_OF)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if there is none of this name."""
        if cmd_name not in _MODULE_OF:
            self.commands = dict.fromkeys(_MODULE_OF, self)  # typer suggests the nearest of these names
            return None
        if self._is_listing:
            return outline(cmd_name, self.rich_markup_mode)
        return self._command(cmd_name)

    def _command(self, cmd_name: str) -> Any:
        if cmd_name not in self._made:
            self._made.update(made_by(_MODULE_OF[cmd_name], self.rich_markup_mode))
        return self._made[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help. It lists the commands by the table of words."""
        with self._listing():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the completions of a command's name or of a flag."""
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _listing(self) -> Iterator[None]:
        self._is_listing = True
        try:
            yield
        finally:
            self._is_listing = False


_words = cache(words.read)


def outline(name: str, markup: Any) -> Any:
    """Return a command that has a name and help, but nothing to run."""
    row = _words()[name]
    return TyperCommand(name, help=row.help, rich_help_panel=row.panel, rich_markup_mode=markup)


def made_by(module: str, markup: Any = None) -> dict[str, Any]:
    """Return the commands that a module registers, by name."""
    app = typer.Typer(add_completion=False, rich_markup_mode=markup)
    app.callback()(lambda: None)  # with a callback, one command makes a group, too
    import_module(module).register(app)
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


# --- root ------------------------------------------------------------------------------------------------

# The command `mtask` with its flags, as typer reads them. `mtask.cli.main` runs it.

_CODES = "\n".join(f"- {code}: {meaning}" for code, meaning in failures.EXIT_CODES.items())
EPILOG = (
    "Flags win over the environment (MTASK_URI, MTASK_DATABASE, MTASK_LOCAL_FOLDER, ...), and the environment over "
    "`.env` in the working folder. MTASK_MONGOD names a program, so it is not read from `.env`. Put a URI with a "
    f"password into MTASK_URI: every user of the machine can read command lines.\n\nExit codes:\n\n{_CODES}"
)

app = typer.Typer(
    name="mtask",
    cls=Commands,
    help="A task queue on MongoDB: publish and inspect tasks, and manage their workers.",
    epilog=EPILOG,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from mtask.version import __version__

        typer.echo(f"mtask {__version__}")
        raise typer.Exit


@callback(app, lists_flags=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """A task queue on MongoDB: publish and inspect tasks, and manage their workers."""
