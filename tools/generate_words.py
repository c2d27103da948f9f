"""Write the table of commands and flags, from which the command line is listed and completed: `make generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from mtask.cli.commands import app
from mtask.cli.words import FILE, Command, Flag


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    yield " ".join(path), command
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from _commands(command.get_command(None, name), (*path, name))


def _completes(parameter: Any, context: Any) -> bool:
    """Whether a shell can complete values of this parameter."""
    return bool(parameter.shell_complete(context, ""))


def _flag(option: Any, context: Any) -> Flag:
    takes_value = not (option.is_flag or option.count)
    return Flag(
        # Long names first: the order of those of --help is random.
        sorted([*option.opts, *option.secondary_opts], key=lambda name: not name.startswith("--")),
        option.help or "",
        takes_value,
        bool(option.multiple),
        takes_value and not _completes(option, context),
    )


def _panel(command: Any) -> str | None:
    panel = getattr(command, "rich_help_panel", None)
    return panel if isinstance(panel, str) else None  # else it is typer's word for "none given"


def _row(command: Any, path: str) -> Command:
    context = command.make_context(path or "mtask", [], resilient_parsing=True)
    parameters = command.get_params(context)
    flags = [_flag(each, context) for each in parameters if each.param_type_name == "option" and not each.hidden]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    return Command(
        (command.help or "").partition("\n\n")[0],
        command.get_short_help_str(),
        flags,
        not any(_completes(each, context) for each in arguments),
        _panel(command),
        command.list_commands(context) if hasattr(command, "list_commands") else None,
    )


def rows() -> dict[str, Command]:
    """Return all commands as the table should have them, by path."""
    return {path: _row(command, path) for path, command in _commands(typer.main.get_command(app))}


def _stored(flag: Flag) -> str:
    return json.dumps([list(flag.names), flag.help, flag.takes_value, flag.is_repeatable, flag.is_free])


def generated() -> str:
    """Return the text of the table. Each flag is stored once: most commands share theirs."""
    made = rows()
    pool: dict[str, int] = {}
    lines = []
    for path, row in made.items():
        numbers = [pool.setdefault(_stored(flag), len(pool)) for flag in row.flags]
        value: list[Any] = [row.help, row.short, numbers, row.is_free, row.panel]
        if row.commands is not None:
            value.append(list(row.commands))
        lines.append(f"{json.dumps(path)}: {json.dumps(value)}")
    return '{"flags": [\n%s\n],\n"commands": {\n%s\n}}\n' % (",\n".join(pool), ",\n".join(lines))  # noqa: UP031


if __name__ == "__main__":
    Path(FILE).write_text(generated(), encoding="utf-8")
