"""`mtask show` shows one task, with its runs on a time axis."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.text import Text

from mtask.cli.context import Cli, spaced
from mtask.cli.options import KeyArgument, TaskArgument, commands, name_and_key
from mtask.cli.output import (
    STATUS_STYLES,
    as_json_types,
    clean,
    compact,
    counted,
    fit,
    hanging,
    lasting,
    moment,
    relative,
    status_text,
    task_document,
)
from mtask.doctor.explain import Inspected
from mtask.errors import InvalidInput, TaskNotFound
from mtask.kernel.document import rules
from mtask.kernel.document.options import CODE_NAMES, DEFAULT_OPTION, DURATIONS, TaskOption
from mtask.kernel.document.task import FlowStep, Gathering, Run, Task
from mtask.kernel.driver.extended_json import extended

#: The greatest width of a timeline, in characters. A wider timeline is hard to follow.
MAX_WIDTH = 140
_LABEL = 11
#: The most dependencies of a step to name.
MAX_AFTER = 10


def show(
    cli: Cli,
    name: TaskArgument,
    key: KeyArgument = None,
    runs: Annotated[int, typer.Option("--runs", min=0, help="Number of runs to draw, the newest; 0 = all.")] = 20,
    full: Annotated[bool, typer.Option("--full", help="Print params, returns and tracebacks in full.")] = False,
) -> None:
    """Show a task: why it waits, its options and params, and its runs as bars on a time axis.

    A malformed document is printed as it is stored, with a description of the fault.
    """
    seen = _inspect(cli, name, key)
    if seen.task is None:
        _show_malformed(cli, seen)
        return
    if cli.is_json:
        reasons = [{"reason": r.code, "message": r.message, "until": r.until} for r in seen.reasons]
        cli.json({"task": task_document(seen.task), "waits_for": reasons, "server_time": seen.now, "malformed": None})
        return
    width = min(cli.out.width, MAX_WIDTH)
    limit = None if full else width - _LABEL
    heading = Text.assemble((clean(seen.task.id), "bold"), "  ", status_text(seen.task.status))
    cli.say(heading, *_labelled(cli, _header(seen.task, seen, limit)))
    shown = seen.task.runs[-runs:] if runs else seen.task.runs
    if shown:
        hidden = len(seen.task.runs) - len(shown)
        earlier = f" ({hidden} earlier not shown; --runs 0 draws all)" if hidden else ""
        cli.say("", Text(f"runs{earlier}", style="bold"))
        is_ascii = not cli.out.encoding.lower().startswith("utf")
        cli.say(*timeline(seen.task, shown, seen.now, width, is_ascii=is_ascii, is_full=full))


def _inspect(cli: Cli, name: str, key: str | None) -> Inspected:
    client = cli.client(reads_only=True)
    if key is None and ":" not in name:
        # An id without a colon can only belong to a malformed document.
        try:
            return client.inspect(name)
        except TaskNotFound:
            raise InvalidInput(f"give NAME and KEY, or NAME:KEY: {name!r} is no task's id.", field="key") from None
    return client.inspect(cli.task_id(*name_and_key(cli, name, key)))


def _show_malformed(cli: Cli, seen: Inspected) -> None:
    if cli.is_json:
        document = extended(seen.document)
        cli.json({"task": document, "waits_for": [], "server_time": seen.now, "malformed": seen.malformed})
        return
    cli.say(
        Text.assemble((clean(seen.document.get("_id")), "bold"), "  ", ("MALFORMED", "bold red")),
        *_labelled(
            cli,
            [
                ("wrong", Text(clean(seen.malformed), style="red")),
                ("to do", "mend it by hand, or remove it and publish it again"),
            ],
        ),
        "",
        *json.dumps(extended(seen.document), indent=2).splitlines(),
    )


def _labelled(cli: Cli, pairs: list[tuple[str, str | Text]]) -> list[Text]:
    return [
        line
        for label, text in pairs
        for line in hanging(cli.out.width, Text(f"{label:<{_LABEL}}", style="bright_black"), text)
    ]


def _header(task: Task, seen: Inspected, limit: int | None) -> list[tuple[str, str | Text]]:
    state, now = task.task_state, seen.now
    lines: list[tuple[str, str | Text]] = [
        ("queue", clean(task.queue)),
        ("created", _when(state.create_time, now)),
    ]
    if task.flow is not None:
        lines += _flow_lines(task.flow, now)
    if state.start_time is not None:
        lines.append(("start_time", _when(state.start_time, now)))
    if state.not_after is not None:
        lines.append(("not_after", _when(state.not_after, now)))
    if state.finish_time is not None:
        lived = lasting(state.finish_time - state.create_time)
        lines.append(("finished", f"{_when(state.finish_time, now)}, {lived} after its creation"))
    if task.expire_time is not None:
        lines.append(("expires", _when(task.expire_time, now)))
    for index, reason in enumerate(seen.reasons):
        until = f" until {_when(reason.until, now)}" if reason.until else ""
        lines.append(("now" if index == 0 else "", Text(clean(reason.message) + until, style="yellow")))
    if state.failed_cnt:
        tolerated = task.task_option.max_unexpected_retries
        of = "no limit" if tolerated < 0 else f"{tolerated} tolerated"
        lines.append(("failed", f"{counted(state.failed_cnt, 'failed or timed-out run')}, {of}"))
    if task.tenant is not None:
        lines.append(("tenant", clean(task.tenant)))
    if task.version is not None:
        lines.append(("version", f"{task.version} of the handler"))
    if task.declared is not None:
        lines.append(("declared", f"{clean(task.declared)}: `mtask handlers {clean(task.name)}` lists the versions"))
    changed = changed_options(task.task_option)
    if changed:
        lines.append(("options", spaced([f"{name} {clean(value)}" for name, value in changed.items()], ", ")))
    if task.gather is not None and task.gather.newest is not None:
        lines.append(("gathers", _gathered(task.gather, now)))
    if task.again is not None:
        lines.append(("again", f"{_gathered(task.again.gather, now)}: {compact(task.again.params, limit)}"))
    if state.unpublished:
        lines.append(("unpublished", f"{clean(', '.join(state.unpublished))}: other tasks have these ids"))
    if task.lookup:
        lines.append(("lookup", compact(task.lookups, limit)))
    if task.params is not None:
        lines.append(("params", compact(task.params, limit)))
    lines += [
        ("formerly", f"{compact(former.params, limit)}, until {_when(former.until, now)}")
        for former in task.former_params
    ]
    reason_text = task.fail_reason
    if task.status == "SUCCESS" and task.returns_lost is not None:
        lines.append(("returns", Text(f"lost: {clean(task.returns_lost)}", style="yellow")))
    elif task.status == "SUCCESS" and not task.is_complete:
        lines.append(("returns", "still to come: the handler goes on after its transaction"))
    elif task.status == "SUCCESS" and task.returns is not None:
        lines.append(("returns", compact(task.returns, limit)))
    elif reason_text and (task.status == "FAIL" or state.reason is not None):
        lines.append(("reason", Text(clean(reason_text), style="red")))
    return lines


def _flow_lines(flow: FlowStep, now: datetime) -> list[tuple[str, str | Text]]:
    lines: list[tuple[str, str | Text]] = [("flow", f"{clean(flow.key)}, step {clean(flow.step)}")]
    if flow.after:
        more = f" and {len(flow.after) - MAX_AFTER} more" if len(flow.after) > MAX_AFTER else ""
        on_failed = "" if flow.on_failed == "cancel" else f"; on_failed {flow.on_failed}"
        lines.append(("after", f"{', '.join(map(clean, flow.after[:MAX_AFTER]))}{more}{on_failed}"))
    if flow.ancestors:
        lines.append(("added by", clean(flow.ancestors[-1])))
    if flow.after and flow.release_time is not None:
        lines.append(("released", _when(flow.release_time, now)))
    return lines


def _gathered(gather: Gathering, now: datetime) -> str:
    """Return what a round has gathered, as text."""
    newest = gather.newest
    last = f"the newest call {_when(newest.asked_time, now)}" if newest else "no call"
    if gather.kind != "calls":
        return last
    return f"{counted(len(gather.ids), 'call')}{', full' if gather.full else ''}, {last}"


def _when(instant: datetime, now: datetime) -> str:
    return f"{moment(instant)} ({relative(instant, now)})"


def changed_options(option: TaskOption) -> dict[str, Any]:
    """Return the options that differ from their defaults, by their names in flags, with values for people."""
    changed = {}
    for name, code in CODE_NAMES.items():
        value = getattr(option, name)
        if value == getattr(DEFAULT_OPTION, name):
            continue
        if isinstance(value, list):
            changed[code] = ",".join(value)
        elif code in DURATIONS and value is not None:
            changed[code] = f"{value / 1000:g}s"
        else:
            changed[code] = as_json_types(value)
    return changed


# --- timeline --------------------------------------------------------------------------------------------

# Draws runs as bars on a time axis, as wide as the terminal.

MIN_BAR = 12


@dataclass(frozen=True, slots=True)
class Scale:
    """The span of time that a bar covers, and its width in characters."""

    begin: datetime
    end: datetime
    width: int

    def column(self, instant: datetime) -> int:
        """Return the column of the bar in which the instant lies."""
        whole = self.end - self.begin
        share = (instant - self.begin) / whole if whole > timedelta(0) else 0.0
        return min(max(int(share * self.width), 0), self.width - 1)


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a bar."""

    run: str
    open_end: str
    waiting: str
    before: str


UNICODE = Glyphs(run="█", open_end="▶", waiting="─", before="·")
ASCII = Glyphs(run="#", open_end=">", waiting="-", before=".")


def timeline(
    task: Task, runs: Sequence[Run], now: datetime, width: int, *, is_ascii: bool = False, is_full: bool = False
) -> list[Text]:
    """Return the lines to print: a time axis, and then the bar and the result of each run."""
    glyphs = ASCII if is_ascii else UNICODE
    begin = task.task_state.create_time
    end = max([task.task_state.finish_time or now, *(_end(run, now) for run in runs)])
    cells = [_cells(run, begin, now) for run in runs]
    widths = [max(cell_len(row[column]) for row in cells) for column in range(len(cells[0]))]
    taken = sum(widths) + 2 * len(widths)
    bar_width = width - taken
    is_beside = bar_width >= MIN_BAR
    if not is_beside:
        bar_width, taken = max(width - 2, MIN_BAR), 2
    scale = Scale(begin, end, bar_width)
    lines = [_axis(scale, task.task_state.finish_time is not None, taken)]
    for run, row in zip(runs, cells, strict=True):
        style = STATUS_STYLES.get("LAPSED" if run.is_lapsed(now) else run.status, "")
        label = Text()
        for column, cell in enumerate(row):
            padded = fit(
                Text(cell, style=style if column == 1 else ""), widths[column] if is_beside else cell_len(cell)
            )
            label.append_text(padded).append("  ")
        bar = _bar(task, run, scale, now, glyphs, style)
        if run.past:
            label.stylize("dim")
            bar.stylize("dim")
        if is_beside:
            lines.append(Text.assemble(label, bar))
        else:
            label.rstrip()
            lines.append(label)
            lines.append(Text.assemble("  ", bar))
        indent = Text(" " * (widths[0] + 2))
        for told in _told(run, now, None if is_full else max(width - len(indent), 20)):
            lines += hanging(width, indent, told)
    return lines


def _end(run: Run, now: datetime) -> datetime:
    """Return the end of the run; for a lapsed run, the end of its lease."""
    if run.end_time is not None:
        return run.end_time
    return run.ping_expire_time if run.is_lapsed(now) else now


def _cells(run: Run, begin: datetime, now: datetime) -> list[str]:
    status = "LAPSED" if run.is_lapsed(now) else str(run.status)
    return [
        f"#{run.attempt}",
        status + (" (past)" if run.past else ""),
        clean(run.worker_id),
        f"+{lasting(max(run.claim_time - begin, timedelta(0)))}",
        lasting(max(_end(run, now) - run.claim_time, timedelta(0))),
    ]


def _axis(scale: Scale, is_finished: bool, indent: int) -> Text:
    left, right = "created", f"{'finished' if is_finished else 'now'} +{lasting(scale.end - scale.begin)}"
    gap = scale.width - len(left) - len(right)
    if gap < 1:
        left, gap = "", max(scale.width - len(right), 0)
    return Text(" " * indent + left + " " * gap + right, style="bright_black")


def _bar(task: Task, run: Run, scale: Scale, now: datetime, glyphs: Glyphs, style: str) -> Text:
    first, last = scale.column(run.claim_time), scale.column(_end(run, now))
    due = scale.column(rules.due_time(task))
    before = min(max(due, 0), scale.width) * glyphs.before
    drawn = list(before + (scale.width - len(before)) * glyphs.waiting)
    drawn[first : last + 1] = glyphs.run * (last + 1 - first)
    if run.is_live(now):
        drawn[last] = glyphs.open_end
    bar = Text("".join(drawn), style="bright_black")
    bar.stylize(style, first, last + 1)
    return bar


def _told(run: Run, now: datetime, limit: int | None) -> Iterator[Text]:
    """Return what the run has reported, and its result. A reason is not cut."""
    if run.progress is not None and run.status != "SUCCESS":
        share = "" if run.progress.fraction is None else f"{run.progress.fraction:.0%}"
        parts = [share, clean(run.progress.message or ""), f"({relative(run.progress.time, now)})"]
        yield Text(" ".join(filter(None, ["progress", *parts])), style="yellow")
    if run.fail_reason is not None:
        yield Text(clean(f"{'final: ' if run.final else ''}{run.fail_reason}"), style="red")
        if run.error is not None and limit is None:
            yield from (Text(clean(line), style="bright_black") for line in str(run.error.traceback).splitlines())
    elif run.status == "SUCCESS" and run.returns is not None:
        yield Text(f"returns {compact(run.returns, None if limit is None else limit - len('returns '))}", style="green")


register = commands("Tasks", {"show": show})
