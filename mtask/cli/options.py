"""The decorator of a command, and the arguments and flags that several commands share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, get_args, get_origin, is_typeddict

import typer

from mtask.cli import values
from mtask.cli.context import Cli
from mtask.cli.flags import POINTER, BriefCommand, Flags, callback, keyword, taken, with_shared_flags
from mtask.cli.values import flag_of, option_from_flag, options_from_pairs
from mtask.errors import InvalidInput
from mtask.kernel.document.identity import is_key_of, own_key, split_task_id, task_id_of
from mtask.kernel.document.options import (
    DURATIONS,
    TASK_OPTIONS,
    TaskOptions,
    check_option_names,
    with_new_names,
)
from mtask.says import Says, hints_of

_Command = Callable[..., int | None]

TaskArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the task, or its id NAME:KEY.", show_default=False)
]
KeyArgument = Annotated[str | None, typer.Argument(metavar="KEY", help="Key of the task.", show_default=False)]

TimeoutFlag = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        "-t",
        metavar="DURATION",
        help="Give up after this time, with exit code 6. Else wait without limit.",
        show_default=False,
    ),
]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
_Pairs = Annotated[
    list[str],
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="An option by its name in Python, such as priority=5 or run_timeout=90s; repeatable.",
        rich_help_panel=TASK_OPTIONS,
        show_default=False,
    ),
]


def _parameter(argument: str, name: str, told: Any, said: Says) -> inspect.Parameter:
    """Return the flag of one declared argument, as typer reads it: a switch, a number by its default, or text."""
    choices = get_args(told) if get_origin(told) is Literal else ()
    flags = said.flag.split() if said.flag else [flag_of(name)]
    is_switch, several = told is bool or flags[0].removeprefix("--") in choices, _takes_several(told)
    made = typer.Option(
        *flags,
        metavar=None if is_switch else said.metavar or "|".join(choices) or None,
        help=said.help,
        rich_help_panel=said.panel,
        show_default=not several,
    )
    text = int if isinstance(said.default, int) else str | None
    kind, default = (bool, False) if is_switch else (list[str], ()) if several else (text, said.default)
    return keyword(f"{argument}_{name}", Annotated[kind, made], default)


#: The flags of options until mtask 0.2, where those of today are called something else. They go with mtask 1.0.
_OLD_FLAGS = [
    keyword(
        f"options_{old}",
        Annotated[str | None, typer.Option(flag, hidden=True, help=f"The former name of {new}.")],
        None,
    )
    for old, flag, new in (
        ("max_unexpected_retries", "--max-unexpected-retries", "--max-retries"),
        ("unexpected_retry_delay_ms", "--unexpected-retry-delay", "--retry-delay"),
    )
]


def _takes_several(told: Any) -> bool:
    return Sequence[str] in get_args(told) or Mapping[str, Any] in get_args(told)


def _declared(argument: str, declared: Any) -> list[inspect.Parameter]:
    """Return the flags of an argument whose type is a TypedDict."""
    said = {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints_of(declared)}
    flags = [_parameter(argument, name, *of_name) for name, of_name in said.items() if of_name[1].flag != ""]
    return [keyword("options_pairs", _Pairs, ()), *flags, *_OLD_FLAGS] if declared is TaskOptions else flags


def _read(cli: Cli, declared: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that were given by flags, as the client takes them; raise InvalidInput."""
    if declared is TaskOptions:
        return read_options(cli, given)
    hints = dict(hints_of(declared))
    read = {name: _value(name, hints[name], value) for name, value in given.items() if value is not None}
    return {name: value for name, value in read.items() if value is not None and value is not False and value != []}


def _value(name: str, hint: Any, given: Any) -> Any:
    told, flag = hint.__origin__, hint.__metadata__[0].flag
    kinds = get_args(told)
    if given is True and Literal is get_origin(told):
        return kinds[-1]  # a switch for the other of two values
    if Sequence[str] in kinds:
        texts = values.separated(given)
        return [text.upper() for text in texts] if name == "status" else texts
    if Mapping[str, Any] in kinds:
        return values.lookup_from_pairs(given)
    if timedelta in kinds and datetime in kinds:
        return values.expiry(given, name)
    read = values.duration if timedelta in kinds else values.instant if datetime in kinds else None
    return given if read is None else read(given, flag.removeprefix("--") if flag else name)


def read_options(cli: Cli, given: dict[str, Any]) -> dict[str, Any]:
    """Return the task options of a command line; raise InvalidInput. An option's own flag wins over --option."""

    def tell_of_pair(old: str, new: str) -> None:
        unit = ", in seconds" if new in DURATIONS else ""
        cli.notice(f"--option {old} is called {new} now{unit}. The old name goes with mtask 1.0.", style="yellow")

    def tell_of_flag(old: str, new: str) -> None:
        cli.notice(
            f"{flag_of(old.removesuffix('_ms'))} is called {flag_of(new)} now. The old flag goes with mtask 1.0.",
            style="yellow",
        )

    pairs = options_from_pairs(given.pop("pairs"))
    check_option_names(pairs)
    flags = {name: option_from_flag(name, text) for name, text in given.items() if text is not None}
    return with_new_names(pairs, tell_of_pair) | with_new_names(flags, tell_of_flag)


def commands(panel: str, functions: Mapping[str, _Command]) -> Callable[[typer.Typer], None]:
    """Return what adds these functions to the command line as commands, by name. See `command`."""

    def register(app: typer.Typer) -> None:
        for name, function in functions.items():
            command(app, name, function, panel)

    return register


def command_group(
    name: str, panel: str, about: str, functions: Mapping[str, _Command]
) -> Callable[[typer.Typer], None]:
    """Return what adds a group of commands to the command line. Alone, the group shows its help."""

    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    show_help.__doc__ = about

    def register(parent: typer.Typer) -> None:
        group = typer.Typer(name=name, invoke_without_command=True)
        callback(group)(show_help)
        for each, function in functions.items():
            command(group, each, function)
        parent.add_typer(group, name=name, rich_help_panel=panel, help=about)

    return register


def command(app: typer.Typer, name: str, function: _Command, panel: str | None = None) -> None:
    """Add a function `(cli, …) -> exit code or None` as a command that takes the shared flags.

    A parameter whose type is a TypedDict stands for the flags of its arguments. It gets those that were given.
    """
    parameters = [each for each in inspect.signature(function, eval_str=True).parameters.values() if each.name != "cli"]
    declared = {each.name: each.annotation for each in parameters if is_typeddict(each.annotation)}
    own: list[inspect.Parameter] = []
    # The options of tasks have a panel of their own, the last one.
    for parameter in sorted(parameters, key=lambda each: each.annotation is TaskOptions):
        if parameter.name in declared:
            own += _declared(parameter.name, parameter.annotation)
        else:
            own.append(parameter)

    def call(_: typer.Context, flags: Flags, given: dict[str, Any]) -> int | None:
        with Cli(flags) as cli:
            for argument, cls in declared.items():
                given[argument] = _read(cli, cls, taken(given, f"{argument}_"))
            return function(cli, **given)

    made = with_shared_flags(function, own, call)
    app.command(name, rich_help_panel=panel, cls=BriefCommand, epilog=POINTER)(made)


def name_and_key(cli: Cli, name: str, key: str | None) -> tuple[str, str]:
    """Return the name and the key from two arguments, or from one argument NAME:KEY; raise InvalidInput.

    With --tenant, the key is the tenant's own. An id that was copied may begin with the tenant: NAME:TENANT:KEY.
    """
    if key is not None:
        return split_task_id(task_id_of(name, key))
    name, key = split_task_id(name)
    tenant = cli.flags.tenant
    return name, own_key(tenant, key) if tenant is not None and is_key_of(tenant, key) else key


def is_confirmed(
    cli: Cli, question: str, *, risk: str | None = None, field: str | None = "yes", refusal: str = "not removed"
) -> bool:
    """Ask the question on a terminal; return the answer. A refusal is printed.

    Without a terminal, the answer is yes. With a `risk`, it takes --yes instead: raises InvalidInput.
    """
    if not sys.stdin.isatty():
        if risk is not None:
            raise InvalidInput(f"{risk}: without a terminal, confirm with --yes.", field=field)
        return True
    is_yes = typer.confirm(question, err=True)
    if not is_yes:
        cli.notice(refusal)
    return is_yes
