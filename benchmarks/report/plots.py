"""Pictures of results: every run as a dot, the target beside it, distributions where there are many observations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.report.figures import Figure, Result, Spread, Target, quantile
from benchmarks.report.style import FAINT, STYLE
from benchmarks.report.table import shown

_RUN, _GOAL = "#2f6fde", "#d1242f"
_SIDES = ("#8b949e", "#2f6fde", "#2da44e", "#bc6c00", "#8250df", "#1b7c83", "#bf3989", "#57606a")
_SERVER, _CLIENT = "#2f6fde", "#f2c572"
_WIDTH = 14.0
_ROW = 0.34


def draw(result: Result, path: Path) -> Path:
    """Draw one benchmark: ratios to the ceiling above; below, latencies and CPU as far as it has them."""
    rows = [figure for figure in result.figures if figure.ratio is not None and figure.ratio.is_known]
    values = [figure for figure in result.figures if figure.ratio is None or _is_of_value(figure.target)]
    cpu = {side: parts for side, parts in result.cpu.items() if _is_drawable(parts)}
    heights = [_height(len(rows))] if rows else []
    heights += [_height(len(values))] if values else []
    heights += [3.4] if result.samples else []
    heights += [_height(len(cpu))] if cpu else []
    with matplotlib.rc_context(STYLE):
        canvas, panels = _canvas(f"{result.benchmark}: {result.about}", heights)
        if rows:
            _ratios(panels.pop(0), rows)
        if values:
            _values(panels.pop(0), values)
        if result.samples:
            _distributions(panels.pop(0), result.samples)
        if cpu:
            _cpu(panels.pop(0), cpu)
        canvas.savefig(path)
    return path


def draw_overview(results: Sequence[Result], path: Path) -> Path:
    """Draw every figure that has a target, of all benchmarks."""
    rows = [(result, figure) for result in results for figure in result.figures if figure.target is not None]
    ratios = [(f"{r.benchmark}: {f.name}", f) for r, f in rows if not _is_of_value(f.target) and f.ratio is not None]
    values = [(f"{r.benchmark}: {f.name}", f) for r, f in rows if _is_of_value(f.target)]
    heights = [_height(len(part)) for part in (ratios, values) if part]
    with matplotlib.rc_context(STYLE):
        canvas, panels = _canvas("mtask against the raw ceiling, with the targets", heights)
        if ratios:
            _ratios(panels.pop(0), [figure for _, figure in ratios], [name for name, _ in ratios])
        if values:
            _values(panels.pop(0), [figure for _, figure in values], [name for name, _ in values])
        canvas.savefig(path)
    return path


# --- panels -------------------------------------------------------------------------------------------------------


def _ratios(panel: Axes, figures: Sequence[Figure], names: Sequence[str] | None = None) -> None:
    """Draw each run's ratio as a dot, the quartiles as a bar, the median in words, and the target as a red tick."""
    panel.axvline(1.0, color=FAINT, linewidth=1.0)
    for row, figure in enumerate(figures):
        assert figure.ratio is not None
        _row(panel, row, figure.ratio, None if _is_of_value(figure.target) else figure.target, f"{figure.against_name}")
    _axis(panel, names or [figure.name for figure in figures])
    _log(panel, [v for f in figures if f.ratio for v in f.ratio.values] + _bounds(figures, "ratio"))
    panel.set_xlabel("times what it is compared with, each run a dot")


def _values(panel: Axes, figures: Sequence[Figure], names: Sequence[str] | None = None) -> None:
    """Draw each run's own value as a share of its target, because the values have different units."""
    for row, figure in enumerate(figures):
        bound = figure.target.bound if _is_of_value(figure.target) and figure.target is not None else 0.0
        scale = bound or max([abs(value) for value in figure.measured.values] or [1.0]) or 1.0
        scaled = Spread.of(value / scale for value in figure.measured.values)
        target = Target.at_most(1.0) if _is_of_value(figure.target) and bound else None
        text = f"{shown(figure.measured.median)} {figure.unit}".rstrip()
        goal = f", target {figure.target}" if figure.target is not None else ""
        _row(panel, row, scaled, target, "", f"{text}{goal}")
    _axis(panel, names or [figure.name for figure in figures])
    panel.set_xlim(left=0)
    panel.set_xlabel("of the target, or of the largest value where there is none")


def _row(panel: Axes, row: int, spread: Spread, target: Target | None, against: str, text: str | None = None) -> None:
    if not spread.is_known:
        return
    panel.plot([spread.low, spread.high], [row, row], color=_RUN, linewidth=1.0, alpha=0.5)
    quartiles = [spread.first_quartile, spread.third_quartile]
    panel.plot(quartiles, [row, row], color=_RUN, linewidth=6.0, alpha=0.3, solid_capstyle="butt")
    panel.plot(spread.values, [row] * len(spread.values), "o", color=_RUN, markersize=4.0, alpha=0.8, linewidth=0)
    if target is not None:
        panel.plot([target.bound, target.bound], [row - 0.38, row + 0.38], color=_GOAL, linewidth=2.0)
    words = text or f"{shown(spread.median)} x {against}{f', target {target}' if target else ''}"
    panel.text(1.01, row, words, transform=panel.get_yaxis_transform(), va="center", size=9)


def _distributions(panel: Axes, samples: Mapping[str, Sequence[float]]) -> None:
    """Draw for each duration the share of the tasks that took no longer."""
    for (name, values), colour in zip(samples.items(), _SIDES, strict=False):
        ordered = sorted(value for value in values if value > 0)
        if not ordered:
            continue
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        median, p99 = quantile(ordered, 0.5), quantile(ordered, 0.99)
        label = f"{name}: median {shown(median)} ms, p99 {shown(p99)} ms"
        panel.step(ordered, shares, where="post", color=colour, linewidth=1.6, label=label)
        panel.plot([median, p99], [0.5, 0.99], "o", color=colour, markersize=4.5)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.set_ylim(0, 1.02)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    panel.set_xlabel("ms from the call to the start, all runs")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(loc="lower right")


def _cpu(panel: Axes, cpu: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the CPU a task of the server and of the client in one bar."""
    rows = list(range(len(cpu)))
    server = [_drawn(parts.get("server")) for parts in cpu.values()]
    client = [_drawn(parts.get("client")) for parts in cpu.values()]
    panel.barh(rows, server, height=0.6, color=_SERVER, label="server", alpha=0.85)
    panel.barh(rows, client, height=0.6, left=server, color=_CLIENT, label="client", alpha=0.95)
    for row, (mine, other) in enumerate(zip(server, client, strict=True)):
        words = f"{shown(mine)} + {shown(other)} µs"
        panel.text(1.01, row, words, transform=panel.get_yaxis_transform(), va="center", size=9)
    _axis(panel, list(cpu))
    panel.set_xlabel("µs of CPU a task, all runs")
    panel.legend(loc="upper right", ncols=2, bbox_to_anchor=(1.0, 1.0 + 0.28 / max(0.6, len(cpu) * _ROW)), borderpad=0)


# --- parts --------------------------------------------------------------------------------------------------------


def _canvas(title: str, heights: Sequence[float]) -> tuple[Canvas, list[Axes]]:
    gaps = 0.8 * len(heights) + 0.9
    total = sum(heights) + gaps
    canvas = Canvas(figsize=(_WIDTH, total), dpi=100, facecolor="white")
    canvas.text(0.012, 1 - 0.34 / total, title, size=13, weight="bold", va="center")
    panels, top = [], total - 0.9
    for height in heights:
        panels.append(canvas.add_axes((0.32, (top - height) / total, 0.45, height / total)))
        top -= height + 0.8
    return canvas, panels


def _axis(panel: Axes, names: Sequence[str]) -> None:
    panel.set_yticks(range(len(names)), list(names), size=9.5)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")


def _log(panel: Axes, values: Sequence[float]) -> None:
    """Use a scale on which a half and a double lie equally far from 1."""
    positive = [value for value in values if value > 0]
    low, high = min([0.5, *positive]), max([2.0, *positive])
    panel.set_xscale("log", base=2)
    panel.set_xlim(low / 1.15, high * 1.15)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


def _bounds(figures: Sequence[Figure], measure: str) -> list[float]:
    return [figure.target.bound for figure in figures if figure.target and figure.target.measure == measure]


def _is_of_value(target: Target | None) -> bool:
    return target is not None and target.measure == "value"


def _is_drawable(parts: Mapping[str, float]) -> bool:
    return any(not math.isnan(value) for value in parts.values())


def _drawn(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def _height(rows: int) -> float:
    return max(1, rows) * _ROW + 0.2
