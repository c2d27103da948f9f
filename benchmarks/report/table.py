"""A result as a table for people."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.report.figures import Figure, Result, Spread

_ABSENT = "-"
_FAINT = "bright_black"
#: Columns of text. A narrower table leaves out the spread of the values (the JSON has it), not that of the ratios.
_WIDE = 150


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    is_for_wide: bool = False
    style: str | None = None


_COLUMNS = (
    _Column("figure"),
    _Column("mtask"),
    _Column("min to max", True, _FAINT),
    _Column("quartiles", True, _FAINT),
    _Column("against"),
    _Column("ratio"),
    _Column("min to max", False, _FAINT),
    _Column("quartiles", True, _FAINT),
    _Column("target", False, "cyan"),
)


def table(result: Result, width: int) -> RenderableType:
    """Return a table of the result's figures with their comparisons and targets; `width` is in columns of text."""
    is_wide = width >= _WIDE
    made = Table(title=Text(f"{result.benchmark}: {result.about}"), title_justify="left", title_style="bold", box=None)
    for index, column in enumerate(_COLUMNS):
        if is_wide or not column.is_for_wide:
            made.add_column(column.title, justify="right" if index else "left", style=column.style, no_wrap=index > 0)
    for figure in result.figures:
        shown_cells = [
            Text(cell)
            for cell, column in zip(cells(figure), _COLUMNS, strict=True)
            if is_wide or not column.is_for_wide
        ]
        made.add_row(*shown_cells, style="bold" if figure.target else None)
    return Group(made, *_lines(result))


def cells(figure: Figure) -> list[str]:
    """Return the figure's cells, one for each column."""
    against, ratio = figure.against, figure.ratio
    return [
        figure.name,
        f"{shown(figure.measured.median)} {figure.unit}".rstrip(),
        _range(figure.measured),
        _quartiles(figure.measured),
        "" if against is None else f"{figure.against_name} {shown(against.median)}",
        "" if ratio is None else shown(ratio.median),
        "" if ratio is None else _range(ratio),
        "" if ratio is None else _quartiles(ratio),
        "" if figure.target is None else str(figure.target),
    ]


def _lines(result: Result) -> Iterator[Text]:
    setting = ", ".join(f"{name} {_plain(value)}" for name, value in result.setting.items())
    yield Text(f"Medians of the runs; each ratio is of one run. {setting}.", style=_FAINT)
    for note in result.notes:
        yield Text(note, style=_FAINT)


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _range(spread: Spread) -> str:
    return f"{shown(spread.low)} to {shown(spread.high)}" if spread.is_known else _ABSENT


def _quartiles(spread: Spread) -> str:
    return f"{shown(spread.first_quartile)} to {shown(spread.third_quartile)}" if spread.is_known else _ABSENT


def shown(value: float) -> str:
    """Return a number with three significant digits; a large number keeps all digits before the point."""
    if math.isnan(value):
        return _ABSENT
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(digits, 0), 4)}f}"
