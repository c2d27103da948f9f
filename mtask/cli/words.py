"""The words of the command line: all commands with their flags, as a table, and how a shell completes them.

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


# --- completing ------------------------------------------------------------------------------------------

# The answer is that of typer, whose scripts `mtask --install-completion` installs, without an import of typer. What the
# table cannot answer alone is left to typer: values that can be completed, a line with an unknown word, other shells.

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    #: Each word that may stand here, with its help.
    Completions = list[tuple[str, str]]


class Answer:
    """What a shell gets: the text on stdout, and the exit code."""

    def __init__(self, text: str, code: int = 0) -> None:
        self.text = text
        self.code = code


def answer(environment: Mapping[str, str], question: str) -> Answer | None:
    """Answer the question of a shell, "complete_bash", for example. None: typer must answer it."""
    if question == "complete_bash":
        line, at = environment.get("COMP_WORDS", ""), environment.get("COMP_CWORD", "")
        given = _split(line)
        if given is None or not at.isdecimal() or not 1 <= int(at) <= len(given):
            return None
        found = completions(given[1 : int(at)], given[int(at)] if int(at) < len(given) else "")
        return None if found is None else Answer("".join(f"{word}\n" for word, _ in found))
    if question not in ("complete_zsh", "complete_fish"):
        return None
    line = environment.get("_TYPER_COMPLETE_ARGS", "")
    given = _split(line)
    if not given:
        return None
    before, last = (given[1:], "") if len(given) == 1 or line[-1:] == " " else (given[1:-1], given[-1])
    found = completions(before, last)
    if found is None:
        return None
    if question == "complete_zsh":
        return Answer(_for_zsh(found))
    return _for_fish(found, environment.get("_TYPER_COMPLETE_FISH_ACTION", ""))


def _split(line: str) -> list[str] | None:
    """Return the words of a command line; None: a shell's rules for quoted words are needed."""
    return None if any(letter in line for letter in "\"'\\") else line.split()


def _for_zsh(found: Completions) -> str:
    if not found:
        return "_files\n"
    lines = "\n".join(
        f'"{_escaped(word)}":"{_escaped(text)}"' if text else f'"{_escaped(word)}"' for word, text in found
    )
    return f"_arguments '*: :(({lines}))'\n"


def _escaped(text: str) -> str:
    made = text.replace('"', '""').replace("'", "''").replace("$", "\\$").replace("`", "\\`")
    return made.replace(":", "\\\\:")


def _for_fish(found: Completions, action: str) -> Answer | None:
    if action == "get-args":
        return Answer("".join(f"{word}\t{text}\n" if text else f"{word}\n" for word, text in found) or "\n")
    if action == "is-args":
        return Answer("", 0 if found else 1)
    return None


def completions(before: Sequence[str], last: str) -> Completions | None:
    """Return the words that may stand in the place of the last, unfinished word. None: the table does not tell."""
    table = read()
    path, command, given = "", table[""], set[str]()
    pending: Flag | None = None  # the flag whose value comes next
    for word in before:
        if pending is not None:
            if word.startswith("-"):
                return None
            pending = None
        elif word.startswith("-"):
            flag = _flag(command, word)
            if flag is None:
                return None
            given.update(flag.names)
            pending = flag if flag.takes_value else None
        elif command.commands is not None:
            if word not in command.commands:
                return None
            path = f"{path} {word}".lstrip()
            command, given = table[path], set()
        elif not command.is_free:
            return None
    if pending is not None:
        return [] if pending.is_free and last[:1] not in ("-", "=") else None
    if last.startswith("-"):
        return None if "=" in last else _flags(command, given, last)
    if last and not last[0].isalnum():
        return None
    if command.commands is None:
        return [] if command.is_free else None
    return [(name, table[f"{path} {name}".lstrip()].short) for name in command.commands if name.startswith(last)]


def without(given: Sequence[str], name: str) -> list[str] | None:
    """Return a command line of `mtask` without the name of its command. None: it is a line of another command."""
    root = read()[""]
    is_value = False
    for place, word in enumerate(given):
        if not is_value and not word.startswith("-"):
            return [*given[:place], *given[place + 1 :]] if word == name else None
        flag = None if is_value else _flag(root, word)
        is_value = flag is not None and flag.takes_value
    return None


def _flag(command: Command, word: str) -> Flag | None:
    return next((flag for flag in command.flags if word in flag.names), None)


def _flags(command: Command, given: set[str], begun: str) -> Completions:
    """Return the flags that begin so. A flag that was given is left out, unless it may be repeated."""
    return [
        (name, flag.help)
        for flag in command.flags
        if flag.is_repeatable or not given.intersection(flag.names)
        for name in flag.names
        if name.startswith(begun)
    ]
