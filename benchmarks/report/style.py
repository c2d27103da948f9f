"""The look of the project's pictures: those of benchmarks and those of runs under faults."""

from __future__ import annotations

from typing import Any

INK, FAINT, GRID = "#22272e", "#8b949e", "#e6e8eb"
#: For `matplotlib.rc_context`.
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": "#c9cdd2",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}
