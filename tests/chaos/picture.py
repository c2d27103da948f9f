"""A run under faults as one picture: what was done to it above, what became of it below, on one axis of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, NullFormatter

from benchmarks.report.style import FAINT, INK, STYLE
from tests.chaos.judge.record.verdict import Distribution, Rescue

#: What the project promises while the database is up, in seconds.
PROMISE = 0.5
_WIDTH = 16.0
_PUBLISHED, _FINISHED, _FAILED, _RUNNING = "#2f6fde", "#2da44e", "#d1242f", "#8250df"
_AWAY = "#f2c572"
#: How rescues are told apart: by whether database and workers were there, and whether just any worker could come.
UP, AWAY, NO_WORKER, NAMED = "database up", "database away", "all workers killed", "for named workers only"
_DOTS = ("#2f6fde", "#bc6c00", "#bf3989", "#8b949e")
_LANES = (
    *("#d1242f", "#2f6fde", "#8250df", "#bc4c00", "#1b7c83", "#bf3989", "#4d7c0f", "#6e5a1e"),
    *("#0b5cad", "#e5534b", "#986ee2", "#57606a", "#b08800", "#1f883d", "#a0522d", "#5f6caf"),
)
_SLOTS = ("#2f6fde", "#d1242f", "#2da44e", "#8250df", "#bc6c00", "#1b7c83", "#bf3989", "#57606a", "#7aa000", "#5f6caf")

#: A value and when it was measured, in seconds since the run began.
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """One fault; instants in seconds since the run began."""

    nemesis: str
    target: str
    start: float
    end: float
    is_database_away: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """What there is to see of a run. Instants in seconds since it began; flows per second, from its first on."""

    title: str
    verdict: str
    is_clean: bool
    seconds: float
    published: Sequence[float] = ()
    succeeded: Sequence[float] = ()
    failed: Sequence[float] = ()
    faults: Sequence[Span] = ()
    backlog: Sequence[Point] = ()
    running: Sequence[Point] = ()
    rescues: Sequence[Rescue] = ()
    #: Resident MiB by worker slot: one series for each process that filled it.
    memory: Mapping[str, Sequence[Sequence[Point]]] = field(default_factory=dict)


def draw(scene: Scene, path: Path) -> None:
    """Draw the run and write the picture, 1600 pixels wide."""
    kinds = lanes_of(scene.faults)
    lanes = max(1, len(kinds)) * 0.24 + 0.2
    heights = [3.0, lanes, 1.7, 2.6, 2.4]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, sum(heights) + 2.6), dpi=100, facecolor="white")
        total = figure.get_figheight()
        grid = figure.add_gridspec(
            5,
            2,
            height_ratios=heights,
            width_ratios=[5.2, 1],
            left=0.105,
            right=0.98,
            top=1 - 1.0 / total,
            bottom=0.55 / total,
            hspace=0.17,
            wspace=0.04,
        )
        axes = [figure.add_subplot(grid[0, 0])]
        axes += [figure.add_subplot(grid[row, 0], sharex=axes[0]) for row in range(1, 5)]
        sides = [figure.add_subplot(grid[row, 1]) for row in range(5)]
        _head(figure, scene, total)
        for panel, side, show in zip(axes, sides, _PANELS, strict=True):
            for span in scene.faults:
                if span.is_database_away:
                    panel.axvspan(span.start, max(span.end, span.start + 0.5), color=_AWAY, alpha=0.28, linewidth=0)
            show(panel, side, scene)
        _time_axis(axes, scene.seconds)
        figure.savefig(path)


def lanes_of(faults: Sequence[Span]) -> dict[str, list[Span]]:
    """Return the faults by kind: what the workers suffer first, then what the database does."""
    found: dict[str, list[Span]] = {}
    for fault in faults:
        found.setdefault(fault.nemesis, []).append(fault)
    return dict(sorted(found.items(), key=lambda lane: (any(span.is_database_away for span in lane[1]), lane[0])))


def _head(figure: Figure, scene: Scene, total: float) -> None:
    figure.text(0.015, 1 - 0.34 / total, scene.title, size=15, weight="bold", va="center")
    colour = _FINISHED if scene.is_clean else _FAILED
    figure.text(0.015, 1 - 0.66 / total, scene.verdict, size=12, weight="bold", color=colour, va="center")


# --- panels -------------------------------------------------------------------------------------------------------


def _throughput(panel: Axes, side: Axes, scene: Scene) -> None:
    finished = [ok + bad for ok, bad in zip(scene.succeeded, scene.failed, strict=True)]
    flows = [smoothed(values) for values in (finished, scene.failed, scene.published)]
    seconds = [second + 0.5 for second in range(len(finished))]
    panel.fill_between(seconds, flows[0], color=_FINISHED, alpha=0.3, linewidth=0)
    panel.plot(seconds, flows[0], color=_FINISHED, linewidth=1.6, label="runs ended")
    panel.plot(seconds, flows[1], color=_FAILED, linewidth=1.4, label="of these failed")
    seconds = [second + 0.5 for second in range(len(scene.published))]
    panel.plot(seconds, flows[2], color=_PUBLISHED, linewidth=1.1, label="tasks published")
    panel.set_ylim(0, max([1.0, *flows[0], *flows[2]]) * 1.06)
    _name(panel, "per second")
    _legend(panel, side)
    side.plot([], [], color=_AWAY, alpha=0.6, linewidth=7, label="database away")
    side.legend(
        *_handles(panel, side), loc="upper left", title="means of three seconds", alignment="left", borderaxespad=0.9
    )


def _faults(panel: Axes, side: Axes, scene: Scene) -> None:
    kinds = lanes_of(scene.faults)
    # So short a fault as a kill would not be seen otherwise.
    least = scene.seconds / 450
    for row, (spans, colour) in enumerate(zip(kinds.values(), _cycle(_LANES, len(kinds)), strict=True)):
        bars = [(span.start, max(least, span.end - span.start)) for span in spans]
        panel.broken_barh(bars, (row - 0.36, 0.72), facecolors=colour, alpha=0.75, linewidth=0)
        side.text(
            0.02,
            row,
            f"{_times(len(spans))}, {sum(span.end - span.start for span in spans):,.0f} s",
            va="center",
            color=colour,
            size=9.5,
        )
    panel.set_yticks(range(len(kinds)), list(kinds), size=9.5)
    for label, colour in zip(panel.get_yticklabels(), _cycle(_LANES, len(kinds)), strict=True):
        label.set_color(colour)
    bottom = max(1, len(kinds)) - 0.4
    panel.set_ylim(bottom, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")
    if not kinds:
        _say(panel, "no faults")
    _bare(side)
    side.set_ylim(bottom, -0.6)


def _backlog(panel: Axes, side: Axes, scene: Scene) -> None:
    panel.fill_between(*_columns(scene.backlog), color=INK, alpha=0.08, linewidth=0)
    panel.plot(*_columns(scene.backlog), color=INK, linewidth=1.4, label="backlog (left)")
    # A scale of its own: running tasks are few beside a backlog that a break has left.
    twin = panel.twinx()
    twin.grid(visible=False)
    twin.plot(*_columns(scene.running), color=_RUNNING, linewidth=1.1, label="running (right)")
    twin.tick_params(axis="y", colors=_RUNNING, length=2, pad=2, labelsize=9)
    for axes, points in ((panel, scene.backlog), (twin, scene.running)):
        axes.set_ylim(0, max([1.0, *_columns(points)[1]]) * 1.08)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    _name(panel, "tasks")
    _bare(side)
    side.legend(*_handles(panel, twin), loc="upper left", borderaxespad=0.9)


def _rescues(panel: Axes, side: Axes, scene: Scene) -> None:
    lowest, highest = 1.0, PROMISE * 1000 * 2
    for (name, rescues), colour in zip(groups_of(scene.rescues).items(), _DOTS, strict=True):
        delays = [max(0.1, rescue.delay * 1000) for rescue in rescues]
        if not delays:
            continue
        times = [rescue.claimed for rescue in rescues]
        panel.scatter(times, delays, 9, color=colour, alpha=0.5, linewidths=0, label=name)
        lowest, highest = min(lowest, *delays), max(highest, *delays)
        if name != NAMED:
            ordered = sorted(delays)
            side.step([(n + 1) / len(ordered) for n in range(len(ordered))], ordered, color=colour, linewidth=1.6)
            _quantiles(side, Distribution.of(ordered), colour, is_left=name == AWAY)
    for axes in (panel, side):
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.6, highest * 1.8)
        axes.axhline(PROMISE * 1000, color=_FAILED, linewidth=1.1, linestyle=(0, (5, 3)))
        axes.yaxis.set_major_formatter(FuncFormatter(_duration))
        axes.yaxis.set_minor_formatter(NullFormatter())
    panel.text(0, PROMISE * 1000 * 1.1, " 500 ms", color=_FAILED, size=9, va="bottom")
    _name(panel, "rescued after")
    if scene.rescues:
        panel.legend(loc="upper right", ncols=3, markerscale=2, bbox_to_anchor=(1, 1.14), borderpad=0)
    else:
        _say(panel, "no task had to be rescued")
    side.set_xlim(0, 1)
    side.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    side.set_xlabel("of the rescues, at most so long", size=9)
    side.tick_params(axis="y", labelleft=False, length=0, which="both")


def groups_of(rescues: Sequence[Rescue]) -> dict[str, list[Rescue]]:
    """Return the rescues by what they had to wait for beside mtask."""
    groups: dict[str, list[Rescue]] = {UP: [], AWAY: [], NO_WORKER: [], NAMED: []}
    for rescue in rescues:
        groups[_group_of(rescue)].append(rescue)
    return groups


def _group_of(rescue: Rescue) -> str:
    if rescue.is_for_named:
        return NAMED
    if rescue.is_database_away:
        return AWAY
    return NO_WORKER if rescue.is_fleet_away else UP


def _quantiles(side: Axes, delays: Distribution, colour: str, *, is_left: bool) -> None:
    for share, name, value in ((0.5, "p50", delays.median), (0.99, "p99", delays.p99)):
        side.plot([share], [value], "o", color=colour, markersize=4.5)
        # To the left and above of one line, to the right and below of the other: they may lie close together.
        is_end = share > 0.9 or is_left
        side.annotate(
            f"{name} {_duration(value)}",
            (share, value),
            xytext=(-6 if is_end else 6, 5 if is_end else -5),
            textcoords="offset points",
            ha="right" if is_end else "left",
            va="bottom" if is_end else "top",
            color=colour,
            size=9,
        )


def _memory(panel: Axes, side: Axes, scene: Scene) -> None:
    highest = 1.0
    for (slot, lives), colour in zip(scene.memory.items(), _cycle(_SLOTS, len(scene.memory)), strict=True):
        label: str | None = slot
        for life in lives:
            times, values = _columns(life)
            highest = max(highest, *values, 1.0)
            panel.plot(times, values, color=colour, linewidth=1.3, alpha=0.85, label=label)
            panel.plot(times[:1], values[:1], "o", color=colour, markersize=2.6)
            label = None
    panel.set_ylim(0, highest * 1.12)
    _name(panel, "resident MiB")
    _legend(panel, side, title="each dot: a process starts")
    if not scene.memory:
        _say(panel, "not measured")


_PANELS: tuple[Callable[[Axes, Axes, Scene], None], ...] = (_throughput, _faults, _backlog, _rescues, _memory)


# --- parts --------------------------------------------------------------------------------------------------------


def _time_axis(axes: Sequence[Axes], seconds: float) -> None:
    step = next((step for step in (1, 2, 5, 10, 30, 60, 120, 300, 600) if seconds / step <= 16), 1800)
    for panel in axes:
        panel.set_xlim(0, max(1.0, seconds))
        panel.xaxis.set_major_locator(MultipleLocator(step))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{int(at) // 60}:{int(at) % 60:02}"))
        panel.tick_params(axis="x", labelbottom=panel is axes[-1], length=3 if panel is axes[-1] else 0)
    axes[-1].set_xlabel("minutes:seconds since the run began")


def _name(panel: Axes, text: str) -> None:
    panel.set_ylabel(text, labelpad=8)
    panel.yaxis.set_label_coords(-0.062, 0.5)


def _bare(side: Axes) -> None:
    side.set_axis_off()
    side.set_xlim(0, 1)


def _legend(panel: Axes, side: Axes, title: str | None = None) -> None:
    _bare(side)
    handles, labels = panel.get_legend_handles_labels()
    if handles:
        columns = 2 if len(handles) > 7 else 1
        side.legend(handles, labels, loc="upper left", ncols=columns, title=title, alignment="left", borderaxespad=0.9)


def _handles(panel: Axes, side: Axes) -> tuple[list[Any], list[str]]:
    first, second = panel.get_legend_handles_labels(), side.get_legend_handles_labels()
    return [*first[0], *second[0]], [*first[1], *second[1]]


def _say(panel: Axes, text: str) -> None:
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", va="center", color=FAINT, size=12)


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [at for at, _ in points], [value for _, value in points]


def _cycle(colours: Sequence[str], count: int) -> list[str]:
    return [colours[n % len(colours)] for n in range(count)]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _duration(milliseconds: float, _: object = None) -> str:
    return f"{milliseconds / 1000:,.3g} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def smoothed(values: Sequence[float], width: int = 3) -> list[float]:
    """Return the mean of each value and its neighbours."""
    half = width // 2
    windows = [values[max(0, n - half) : n + half + 1] for n in range(len(values))]
    return [sum(window) / len(window) for window in windows]
