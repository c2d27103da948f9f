"""The decorator of a command, and the arguments and flags that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from mtask.cli.context import Cli
from mtask.cli.flags import POINTER, BriefCommand, Flags, describe, keyword, shared_parameters, taken
from mtask.cli.flags import callback as callback  # commands take it from here, beside `command`
from mtask.cli.values import flag_of, option_from_flag, options_from_pairs
from mtask.kernel.document.identity import is_key_of, own_key, split_task_id, task_id_of
from mtask.kernel.document.options import OPTION_NAMES, check_option_names

_Command = Callable[..., int | None]

TASK_OPTIONS = "Task options"

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
LookupFlag = Annotated[
    list[str],
    typer.Option(
        "--lookup",
        metavar="NAME=VALUE",
        help="A value to find the task by: user_id=7. JSON or text; repeatable.",
        show_default=False,
    ),
]
NamesFlag = Annotated[
    list[str], typer.Option("--name", "-n", metavar="NAME", help="Name; repeatable.", show_default=False)
]
QueuesFlag = Annotated[
    list[str], typer.Option("--queue", metavar="QUEUE", help="Queue; repeatable.", show_default=False)
]
WorkersFlag = Annotated[
    list[str],
    typer.Option("--worker", metavar="ID", help="Tasks with a run of this worker; repeatable.", show_default=False),
]
KeyPrefixFlag = Annotated[str | None, typer.Option("--key-prefix", metavar="TEXT", help="The beginning of the keys.")]
ParamsFlag = Annotated[
    list[str],
    typer.Option("--param", metavar="PATH=VALUE", help="A value in the params: user.id=7.", show_default=False),
]

_OPTION_HELP: Mapping[str, tuple[str, str]] = {
    "priority": ("NUMBER", "Tasks with a higher number go first."),
    "concurrent_worker_cnt": ("NUMBER", "Number of different workers that must succeed, and that may hold it at once."),
    "ping_interval_ms": ("DURATION", "Time between the pings of a run."),
    "worker_timeout_ms": ("DURATION", "Length of the lease; longer than the ping interval."),
    "specific_worker_ids": ("ID,ID", "Only these workers may run it; '' = any."),
    "max_unexpected_retries": ("NUMBER", "Number of failed and timed-out runs to tolerate; -1 = no limit."),
    "unexpected_retry_delay_ms": ("DURATION", "Delay of a retry after a failed run."),
    "retry_backoff": ("FACTOR", "Each further delay is longer by this factor; 1 = constant."),
    "retry_max_delay_ms": ("DURATION", "Longest delay of a retry; 'none' = no limit."),
    "retry_scope": ("task|worker", "Whether the number of retries is for the task or for each worker."),
    "run_timeout_ms": ("DURATION", "A longer run is ended and counts as failed; 'none' = no limit."),
    "retain_success_ms": ("DURATION", "Time from its SUCCESS to its removal; 'none' = kept."),
    "retain_fail_ms": ("DURATION", "Time from its FAIL or CANCELED to its removal; 'none' = kept."),
    "limit_key": ("KEY", "Key under which the queue's limits for each key count it; 'none' = no key."),
}
assert tuple(_OPTION_HELP) == OPTION_NAMES

_Pairs = Annotated[
    list[str],
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="An option by its document name, such as priority=5 or run_timeout_ms=90000; repeatable.",
        rich_help_panel=TASK_OPTIONS,
        show_default=False,
    ),
]


def _option_flag(option: str) -> Any:
    metavar, text = _OPTION_HELP[option]
    made = typer.Option(flag_of(option), metavar=metavar, help=text, rich_help_panel=TASK_OPTIONS)
    return Annotated[str | None, made]


def _option_parameters() -> list[inspect.Parameter]:
    flags = [keyword(f"option_{name}", _option_flag(name), None) for name in OPTION_NAMES]
    return [keyword("option_pairs", _Pairs, ()), *flags]


def read_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the task options of a command line; raise InvalidInput. An option's own flag wins over --option."""
    options = options_from_pairs(given.pop("pairs"))
    check_option_names(options)
    return options | {name: option_from_flag(name, text) for name, text in given.items() if text is not None}


def command(app: typer.Typer, name: str, *, panel: str | None = None) -> Callable[[_Command], _Command]:
    """Register a function `(cli, …) -> exit code or None` as a command that takes the shared flags.

    If the function has a parameter `options`, the command also takes the flags of the task options. It passes the
    options that were given.
    """

    def register(function: _Command) -> _Command:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name not in ("cli", "options")]
        takes_options = "options" in signature.parameters
        extra = _option_parameters() if takes_options else []

        def invoke(shared_context: typer.Context, **given: Any) -> int | None:
            earlier = shared_context.find_object(Flags) or Flags()
            flags = Flags(**taken(given, "shared_")).after(earlier)
            with Cli(flags) as cli:
                if takes_options:
                    given["options"] = read_options(taken(given, "option_"))
                return function(cli, **given)

        context = inspect.Parameter("shared_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        describe(invoke, function, [context, *own, *extra, *shared_parameters()])
        app.command(name, rich_help_panel=panel, cls=BriefCommand, epilog=POINTER)(invoke)
        return function

    return register


def name_and_key(cli: Cli, name: str, key: str | None) -> tuple[str, str]:
    """Return the name and the key from two arguments, or from one argument NAME:KEY; raise InvalidInput.

    With --tenant, the key is the tenant's own. An id that was copied may begin with the tenant: NAME:TENANT:KEY.
    """
    if key is not None:
        return split_task_id(task_id_of(name, key))
    name, key = split_task_id(name)
    tenant = cli.flags.tenant
    return name, own_key(tenant, key) if tenant is not None and is_key_of(tenant, key) else key
