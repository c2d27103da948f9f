"""Draws runs as bars on a time axis, as wide as the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rich.cells import cell_len
from rich.text import Text

from mtask.cli.output import STATUS_STYLES, clean, compact, fit, hanging, lasting, relative
from mtask.kernel.document import rules
from mtask.kernel.document.task import Run, Task

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
    elif run.status == "SUCCESS" and run.returns is not None:
        yield Text(f"returns {compact(run.returns, None if limit is None else limit - len('returns '))}", style="green")
