"""The words of the command line: all commands with their flags, as a table.

The table lists and completes commands without the modules that make them. `make generate` writes it from the commands,
and a test compares. A shell waits for this module at each press of a key, so it imports neither typing nor dataclasses.
"""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FILE = os.path.join(os.path.dirname(__file__), "words.json")


class Flag:
    """A flag of a command."""

    def __init__(self, names: Sequence[str], text: str, takes_value: bool, is_repeatable: bool, is_free: bool) -> None:
        self.names = names
        self.help = text
        self.takes_value = takes_value
        self.is_repeatable = is_repeatable
        #: Whether the value is free text, so that no shell can complete it.
        self.is_free = is_free


class Command:
    """A command, or a group of commands."""

    def __init__(
        self,
        text: str,
        short: str,
        flags: Sequence[Flag],
        is_free: bool,
        panel: str | None,
        commands: Sequence[str] | None = None,
    ) -> None:
        self.help = text  #: the first paragraph of the help
        self.short = short  #: the same in a few words, as shells show it
        self.flags = flags
        self.is_free = is_free  #: whether all arguments are free text
        self.panel = panel  #: the heading under which the help of the group lists the command
        self.commands = commands  #: the commands of a group


def read() -> dict[str, Command]:
    """Return all commands by path: "schedule add", for example. The path of `mtask` itself is empty."""
    with open(FILE, encoding="utf-8") as file:
        stored = json.load(file)
    flags = [Flag(*flag) for flag in stored["flags"]]
    return {
        path: Command(text, short, [flags[number] for number in numbers], *more)
        for path, (text, short, numbers, *more) in stored["commands"].items()
    }
