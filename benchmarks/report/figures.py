"""Figures: the values of several runs, their spread, and their ratio to the value they are compared with. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

T = TypeVar("T")

RAW = "raw"
MTASK = "mtask"
Measure = Literal["ratio", "value"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of several runs, their median, and how far they lie apart."""

    median: float
    low: float
    high: float
    first_quartile: float
    third_quartile: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return the spread of these values; those that were not measured (NaN) are left out."""
        there = tuple(value for value in values if not math.isnan(value))
        if not there:
            return cls(math.nan, math.nan, math.nan, math.nan, math.nan, ())
        return cls(
            statistics.median(there), min(there), max(there), quantile(there, 0.25), quantile(there, 0.75), there
        )

    @property
    def is_known(self) -> bool:
        """Whether it was measured at all."""
        return bool(self.values)

    def document(self) -> dict[str, Any]:
        """Return it for JSON, which knows no NaN."""
        return {
            "median": known(self.median),
            "min": known(self.low),
            "max": known(self.high),
            "first_quartile": known(self.first_quartile),
            "third_quartile": known(self.third_quartile),
            "values": list(self.values),
        }


@dataclass(frozen=True, slots=True)
class Target:
    """The goal of a figure: a bound on its ratio, or on the value itself."""

    bound: float
    is_floor: bool
    measure: Measure = "ratio"
    unit: str = ""

    @classmethod
    def at_least(cls, bound: float, measure: Measure = "ratio", unit: str = "") -> Self:
        """Return a target for which higher is better."""
        return cls(bound, True, measure, unit)

    @classmethod
    def at_most(cls, bound: float, measure: Measure = "ratio", unit: str = "") -> Self:
        """Return a target for which lower is better."""
        return cls(bound, False, measure, unit)

    def __str__(self) -> str:
        unit = " x" if self.measure == "ratio" else f" {self.unit}" if self.unit else ""
        return f"{'≥' if self.is_floor else '≤'} {self.bound:g}{unit}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity that every run measured, and the quantity it is compared with, run by run."""

    name: str
    unit: str
    measured: Spread
    against: Spread | None = None
    against_name: str = RAW
    ratio: Spread | None = None
    target: Target | None = None

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            "measured": self.measured.document(),
            "against": None if self.against is None else {"name": self.against_name, **self.against.document()},
            "ratio": None if self.ratio is None else self.ratio.document(),
            "target": None if self.target is None else str(self.target),
        }


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one benchmark."""

    benchmark: str
    about: str
    figures: Sequence[Figure]
    #: Sizes, rates and the number of runs.
    setting: Mapping[str, Any]
    #: All observations of all runs in ms, by side: for the picture of their distribution.
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    #: CPU by side and by part (server, client), µs a task.
    cpu: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "benchmark": self.benchmark,
            "about": self.about,
            "setting": dict(self.setting),
            "figures": [figure.document() for figure in self.figures],
            "cpu_us_per_task": {side: {k: known(v) for k, v in parts.items()} for side, parts in self.cpu.items()},
            "samples_ms": {
                name: [round(value, 3) for value in values if not math.isnan(value)]
                for name, values in self.samples.items()
            },
            "notes": list(self.notes),
        }


def figure(name: str, unit: str, values: Sequence[float], target: Target | None = None) -> Figure:
    """Return a figure that is compared with nothing."""
    return Figure(name, unit, Spread.of(values), target=target)


def compared(
    name: str,
    unit: str,
    values: Sequence[float],
    against: Sequence[float],
    target: Target | None = None,
    *,
    against_name: str = RAW,
) -> Figure:
    """Return a figure with its ratio to another value, computed run by run."""
    ratios = ratio_by_run(values, against)
    return Figure(name, unit, Spread.of(values), Spread.of(against), against_name, Spread.of(ratios), target)


def ratio_by_run(values: Sequence[float], against: Sequence[float]) -> list[float]:
    """Return the ratio of each pair of values, NaN where the divisor is 0 or NaN. Both have one value for each run."""
    pairs = zip(values, against, strict=True)
    return [value / other if other and not math.isnan(other) else math.nan for value, other in pairs]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies; between two values it is interpolated."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def turns(sides: Sequence[T], run: int) -> list[T]:
    """Return the sides in the order of this run: each comes first, second, ... equally often."""
    first = run % len(sides)
    return [*sides[first:], *sides[:first]]


def known(value: float) -> float | None:
    """Return the value, or None where it was not measured."""
    return None if math.isnan(value) else value
