"""Publishes the tasks in a file of JSON lines, and prints a result for each task."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from mtask.arguments.publish import TaskArguments, TaskSpec
from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.output import clean, counted
from mtask.client.sync import Client
from mtask.errors import GatherConflict, GatherFull, InvalidInput, MtaskError, TaskExists
from mtask.features.gathering.client import collects
from mtask.kernel.document.options import as_keywords
from mtask.kernel.driver.extended_json import parse_extended
from mtask.kernel.operations.publish import Published, PublishPolicy

#: The most tasks in one call of the client's `publish_many`.
BATCH = 1000
#: The most names of which it is said that no worker serves them.
_MAX_UNSERVED = 5
#: The members of a line.
FIELDS = ("name", "params", *TaskArguments.__annotations__, "task_option")
_STYLES = {"created": "green", "updated": "yellow", "unchanged": "bright_black", "exists": "red", "running": "red"}
#: Results of publishing that gathers. The summary holds them only where there are any.
_GATHERED = {"full": "red", "conflict": "red"}
Numbered = tuple[int, TaskSpec]


def word(result: object) -> str:
    """Return the result of a publish, in one word."""
    if isinstance(result, Published):
        return "created" if result.created else "updated" if result.updated else "unchanged"
    for error, name in ((TaskExists, "exists"), (GatherFull, "full"), (GatherConflict, "conflict")):
        if isinstance(result, error):
            return name
    return "running"


def read(
    text: str, name: str | None, defaults: Mapping[str, Any], options: Mapping[str, Any], policy: PublishPolicy
) -> list[Numbered]:
    """Return the number and the task of each line. Raise InvalidInput for the first bad line, before any publish."""
    specs = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            parsed = parse_extended(line, "many")
            spec = _spec(parsed, name, defaults, options)
            spec.prepare(policy, _named)
            if "params" not in parsed:
                check_no_params(policy, "the line params")
        except MtaskError as error:
            error.add_note(f"That is line {number}; nothing was published.")
            raise
        specs.append((number, spec))
    return specs


def check_no_params(policy: PublishPolicy, wanted: str) -> None:
    """Check that a call may have no params; raise InvalidInput, which asks for what is wanted."""
    if collects(policy):
        message = f"--collect adds the params of each call to a list: give {wanted}, or null if a call has none."
        raise InvalidInput(message, field="params")


def _named(argument: str) -> str:
    """Return how the user writes an argument of `client.publish`: as a field of a line, or as a flag."""
    return argument if argument in FIELDS else values.flag_of_argument(argument)


def _spec(line: Any, name: str | None, defaults: Mapping[str, Any], options: Mapping[str, Any]) -> TaskSpec:
    if not isinstance(line, dict):
        raise InvalidInput(f"a line is a JSON object with {', '.join(FIELDS)}.", field="many")
    unknown = [field for field in line if field not in FIELDS]
    if unknown:
        raise InvalidInput(f"a line has no field {unknown[0]!r}: use {', '.join(FIELDS)}.", field="many")
    task = line.get("name", name)
    if task is None:
        raise InvalidInput("the line has no name: add it, or name all tasks on the command line.", field="name")
    own_option = line.get("task_option") or {}
    if not isinstance(own_option, dict):
        raise InvalidInput("task_option is an object of options.", field="task_option")
    given: dict[str, Any] = {name: line.get(name) or defaults.get(name) for name in ("queue", "lookup", "callback")}
    given |= _start(line) or _start(defaults)
    expires = line.get("expires", defaults.get("expires"))
    given["expires"] = values.expiry(expires, "expires", is_flag=False) if isinstance(expires, str) else expires
    return TaskSpec(
        task,
        line.get("params"),
        key=line.get("key"),
        tenant=line.get("tenant"),
        **given,
        **{**options, **as_keywords(own_option)},
    )


def _start(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the start_time or delay of a line, if the line has one."""
    start: dict[str, Any] = {}
    for field, read_text in (("delay", values.duration), ("start_time", values.instant)):
        value = given.get(field)
        if value is not None:
            start[field] = read_text(value, field, is_flag=False) if isinstance(value, str) else value
    return start


def warn_of_unserved(cli: Cli, client: Client, names: Iterable[str]) -> None:
    """Say which of the names no handler is registered for, and which no live worker serves. This costs one read."""
    names = set(names)
    unknown = {name: told for name in names if (told := client.unknown_name(name)) is not None}
    for name in sorted(unknown)[:_MAX_UNSERVED]:
        cli.notice(str(unknown[name]), style="yellow")
    names.difference_update(unknown)
    if cli.is_json or cli.flags.quiet or not names:
        return
    try:
        served = sorted({name for worker in client.workers() for name in worker.names})
    except MtaskError:  # perhaps this user may only publish
        return
    if not served:
        return  # publishing before the first worker starts is usual
    for name in sorted(names.difference(served))[:_MAX_UNSERVED]:
        nearest = difflib.get_close_matches(name, served, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "; it waits for a worker that does"
        cli.notice(f"no live worker serves {name!r}{hint}", style="yellow")


def publish(cli: Cli, specs: Sequence[Numbered], policy: Mapping[str, Any]) -> int:
    """Publish all tasks, print the result of each, and return the exit code."""
    client = cli.client()
    counts: Counter[str] = Counter()
    styles = {**_STYLES, **_GATHERED}
    published: list[dict[str, Any]] = []
    is_lost = False
    for start in range(0, len(specs), BATCH):
        batch = specs[start : start + BATCH]
        results = client.publish_many([spec for _, spec in batch], **policy)
        for (number, _), result in zip(batch, results, strict=True):
            what = word(result)
            counts[what] += 1
            if cli.is_json:
                published.append({"line": number, "task_id": result.task_id, "result": what})
            elif not cli.flags.quiet and not is_lost:
                line = Text.assemble((f"{what:9}", styles[what]), "  ", clean(result.task_id))
                try:
                    cli.out.print(line, soft_wrap=True)
                except OSError:  # the rest is published, too, and the summary tells it
                    is_lost = True
    told = {name: counts[name] for name in styles if name in _STYLES or counts[name]}
    parts = [f"{counts[name]} {name}" for name in styles if counts[name]]
    cli.answer(
        {"tasks": published, "summary": {"total": len(specs), **told}},
        counted(len(specs), "task") + (": " + ", ".join(parts) if parts else ": nothing to do"),
    )
    warn_of_unserved(cli, client, [str(spec.task) for _, spec in specs])
    is_conflict = any(counts[name] for name in ("exists", "running", *_GATHERED))
    return failures.CONFLICT if is_conflict else failures.OK
