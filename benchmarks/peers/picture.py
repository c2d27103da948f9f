"""The picture of a comparison: the pace of every queue, and whose tasks survive the death of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from benchmarks.cases.peers import Comparison, Measured
from benchmarks.peers.catalogue import MONGO, MTASK, POSTGRES, REDIS
from benchmarks.report.figures import Spread
from benchmarks.report.style import STYLE
from benchmarks.report.table import shown

_COLOURS = {MONGO: "#2da44e", POSTGRES: "#2f6fde", REDIS: "#d1242f"}
_TITLES = {MONGO: "MongoDB", POSTGRES: "PostgreSQL", REDIS: "Redis"}
_FAINT = 0.3
_WIDTH, _ROW, _AROUND = 9.0, 0.3, 1.5


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: a queue on one server with one persistence."""

    name: str
    server: str
    rate: float
    #: Whether no task was lost when the server was killed; None if that was not tried.
    is_durable: bool | None


def bars(comparison: Comparison) -> list[Bar]:
    """Return the bars, the fastest first."""
    found = [bar for one in comparison.measured for bar in _bars_of(one)]
    return sorted(found, key=lambda bar: -bar.rate)


def _bars_of(one: Measured) -> list[Bar]:
    made = []
    for drains, killed, suffix in (
        (one.drains, one.server_killed, ""),
        (one.durable_drains, one.server_killed_durable, ", fsync always"),
    ):
        if drains:
            rate = Spread.of(drain.rate for drain in drains).median
            is_durable = None if killed is None else killed.lost == 0
            made.append(Bar(f"{one.peer.title}, {_TITLES[one.peer.server]}{suffix}", one.peer.server, rate, is_durable))
    return made


def draw(comparison: Comparison, path: Path) -> Path:
    """Draw the bars as SVG, with text that can be read and searched."""
    found = bars(comparison)
    # Without a date and with fixed ids, so that the same figures make the same file.
    rules = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": "mtask"}
    with matplotlib.rc_context(rules):
        height = len(found) * _ROW + _AROUND
        canvas = Canvas(figsize=(_WIDTH, height), facecolor="white")
        panel = canvas.add_axes((0.3, 0.75 / height, 0.6, 1 - _AROUND / height))
        widest = max((bar.rate for bar in found), default=1.0)
        for row, bar in enumerate(found):
            alpha = _FAINT if bar.is_durable is False else 0.9
            panel.barh(row, bar.rate, height=0.7, color=_COLOURS[bar.server], alpha=alpha)
            panel.text(bar.rate + widest * 0.012, row, shown(bar.rate), va="center", size=9)
        _axes(panel, found)
        servers = [server for server in _COLOURS if any(bar.server == server for bar in found)]
        marks = [Patch(color=_COLOURS[server], label=_TITLES[server]) for server in servers]
        if any(bar.is_durable is False for bar in found):
            marks.append(Patch(color="#57606a", alpha=_FAINT, label="pale: tasks were lost when the server was killed"))
        canvas.legend(handles=marks, loc="lower center", ncols=len(marks), fontsize=9)
        canvas.text(
            0.02, 1 - 0.3 / height, "No-op tasks a second of one worker process", size=12, weight="bold", va="center"
        )
        canvas.savefig(path, format="svg", metadata={"Date": None})
    return path


def _axes(panel: matplotlib.axes.Axes, found: Sequence[Bar]) -> None:
    panel.set_yticks(range(len(found)), [bar.name for bar in found], size=9.5)
    for label, bar in zip(panel.get_yticklabels(), found, strict=True):
        if bar.name.startswith(MTASK):
            label.set_fontweight("bold")
    panel.set_ylim(len(found) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
