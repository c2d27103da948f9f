"""The commands of `mtask` and their modules. A module is imported when one of its commands is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

#: Each module with the commands and groups that its `register` adds. `mtask --help` lists them in this order.
MODULES: Mapping[str, tuple[str, ...]] = {
    "mtask.cli.database.demo": ("demo",),
    "mtask.cli.tasks.publish": ("publish",),
    "mtask.cli.queues.purge": ("purge",),
    "mtask.cli.tasks.bulk": ("bulk",),
    "mtask.cli.tasks.show": ("show",),
    "mtask.cli.tasks.tail": ("tail",),
    "mtask.cli.tasks.logs": ("logs",),
    "mtask.cli.tasks.find": ("find", "list", "stats"),
    "mtask.cli.tasks.wait": ("wait",),
    "mtask.cli.tasks.result": ("result",),
    "mtask.cli.tasks.position": ("position",),
    "mtask.cli.tasks.change": ("cancel", "retry", "rerun", "update", "remove"),
    "mtask.cli.workers.workers": ("workers", "stop-worker", "set-worker"),
    "mtask.cli.workers.top": ("top",),
    "mtask.cli.queues.controls": ("pause", "resume", "limit", "fair", "keep", "controls"),
    "mtask.cli.database.log": ("log",),
    "mtask.cli.database.keys": ("keys",),
    "mtask.cli.database.setup": ("init", "roles", "schema"),
    "mtask.cli.database.doctor": ("doctor",),
    "mtask.cli.database.web": ("web",),
    "mtask.cli.database.metrics": ("metrics",),
    "mtask.cli.flows.flow": ("flow",),
    "mtask.cli.schedules.schedule": ("schedule",),
    "mtask.cli.database.local": ("local",),
}
_MODULE_OF = {name: module for module, names in MODULES.items() for name in names}


class Commands(TyperGroup):
    """The group of all commands. A command needs its own module only; the help of `mtask` needs all of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(_MODULE_OF)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if there is none of this name."""
        if cmd_name not in self.commands:
            # For a wrong name, all commands are made: typer suggests the nearest of them.
            self._make([_MODULE_OF[cmd_name]] if cmd_name in _MODULE_OF else MODULES)
        return self.commands.get(cmd_name)

    def _make(self, modules: Iterable[str]) -> None:
        for module in modules:
            self.commands.update(made_by(module, self.rich_markup_mode))


def made_by(module: str, markup: Any = None) -> dict[str, Any]:
    """Return the commands that a module registers, by name."""
    app = typer.Typer(add_completion=False, rich_markup_mode=markup)
    app.callback()(lambda: None)  # with a callback, one command makes a group, too
    import_module(module).register(app)
    group: Any = typer.main.get_command(app)
    return dict(group.commands)
