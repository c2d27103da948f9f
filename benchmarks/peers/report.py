"""The comparison as tables for people, as Markdown for the docs, and as JSON. Pure but for `write`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.cases.peers import Comparison, Measured
from benchmarks.peers.catalogue import MTASK, REDIS
from benchmarks.peers.lines import Survival
from benchmarks.peers.servers import Mongo, Postgres, Redis
from benchmarks.peers.trials import KEPT_LEASE, KILL_TASKS, RATE, Drain
from benchmarks.report.figures import Spread, ratio_by_run
from benchmarks.report.table import shown

NAME = "peers"
_ABSENT = "-"
_TITLES = {server: kind.title for server, kind in (("mongo", Mongo), ("redis", Redis), ("postgres", Postgres))}
_DURABLE = ", fsync always"
_FAINT = "bright_black"
_PACES = ("tasks/s", "mtask's pace to it", "worker CPU, µs", "server CPU, µs")
_LONGEST_REASON = 240


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table: its title, its columns, and rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return it as a table of Markdown."""
        ruler = ["---", *("---:" for _ in self.columns[1:])]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.columns, ruler, *self.rows))


def sheets(comparison: Comparison) -> list[Sheet]:
    """Return the tables: pace, publishing, waiting, and what survives."""
    there = [one for one in comparison.measured if one.is_there]
    found = [_pace(there), *([_keeping(there)] if any(one.kept_drains for one in there) else [])]
    found += [_publishing(there), _waiting(there)]
    if any(one.worker_killed_lasting or one.server_killed for one in there):
        found += [_worker_killed(there, comparison), _server_killed(there)]
    return found


def tables(comparison: Comparison) -> RenderableType:
    """Return the tables for a terminal, with what was not measured below them."""
    made: list[RenderableType] = []
    for sheet in sheets(comparison):
        table = Table(title=Text(sheet.title), title_justify="left", title_style="bold", box=None)
        for index, column in enumerate(sheet.columns):
            table.add_column(Text(column), justify="right" if index else "left", overflow="fold")
        for row in sheet.rows:
            table.add_row(*(Text(cell) for cell in row))
        made += [table, Text()]
    made += [Text(line, style=_FAINT) for line in notes(comparison)]
    made += [Text(line) for line in failures(comparison)]
    return Group(*made)


def markdown(comparison: Comparison) -> str:
    """Return all tables, the settings and the notes as Markdown."""
    parts = [f"**{sheet.title}**\n\n{sheet.markdown()}" for sheet in (*sheets(comparison), settings(comparison))]
    lines = [f"- {line}" for line in (*notes(comparison), *failures(comparison))]
    return "\n\n".join([*parts, "\n".join(lines)]) + "\n"


def settings(comparison: Comparison) -> Sheet:
    """Return what was measured of each peer, in words."""
    rows = [
        [
            _named(one),
            one.peer.version,
            one.peer.setting,
            one.peer.lasting.replace("LEASE", str(one.peer.lease(comparison.sizes.lease))),
            one.peer.usual,
        ]
        for one in comparison.measured
    ]
    columns = ["queue", "version", "setting", "lasting setting", "a dead worker's tasks are due again, by default"]
    return Sheet("Versions and settings", columns, rows)


def notes(comparison: Comparison) -> list[str]:
    """Return what the figures mean."""
    servers = ", ".join(f"{title} {version}" for title, version in sorted(comparison.servers.items()))
    before, after = comparison.load
    sizes = comparison.sizes
    return [
        f"{comparison.runs} runs, medians; {sizes.tasks:,} tasks a drain. "
        f"Publishing and draining are each cut off after {sizes.longest:g} s.",
        f"Servers: {servers}.",
        f"Processes that wanted a core, before the run and at its end: {before:.1f} and {after:.1f}.",
        "Each handler appends one line to a file. The first tenth of a drain warms the worker up and is not counted.",
        f"The tasks of a killed worker are waited for during {sizes.patience:g} s, and the lease where one is set. "
        "A default that returns them later counts as not done.",
    ]


def failures(comparison: Comparison) -> list[str]:
    """Return what was not measured, and why."""
    return [f"{_named(one)}: {_short(reason)}" for one in comparison.measured for reason in one.failures]


def document(comparison: Comparison, around: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything for JSON."""
    return {
        "benchmark": NAME,
        "environment": {**around, "servers": dict(comparison.servers), "load": list(comparison.load)},
        "setting": {"runs": comparison.runs, **dataclasses.asdict(comparison.sizes)},
        "peers": [
            {
                "name": one.peer.name,
                "title": one.peer.title,
                "server": one.peer.server,
                "language": one.peer.language,
                "version": one.peer.version,
                **{
                    field.name: _plain(getattr(one, field.name))
                    for field in dataclasses.fields(one)
                    if field.name != "peer"
                },
            }
            for one in comparison.measured
        ],
    }


def write(comparison: Comparison, around: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write JSON, Markdown and the picture; return the files."""
    from benchmarks.peers import picture  # here, because importing matplotlib is slow

    written = {
        folder / f"{NAME}.json": json.dumps(document(comparison, around), indent=2, allow_nan=False) + "\n",
        folder / f"{NAME}.md": markdown(comparison),
    }
    for path, text in written.items():
        path.write_text(text)
    return [*written, picture.draw(comparison, folder / f"{NAME}.svg")]


# --- the tables ---------------------------------------------------------------------------------------------------


def _pace(there: Sequence[Measured]) -> Sheet:
    ours = next((one.drains for one in there if one.peer.name == MTASK), [])
    rows = []
    for one in there:
        for drains, suffix in ((one.drains, ""), (one.durable_drains, _DURABLE)):
            if drains or not suffix:
                rows.append([_named(one) + suffix, *_paces(drains, ours)])
    columns = ["drain, one worker process", *_PACES]
    return Sheet("Drain: no-op tasks of one worker process; CPU for each task", columns, rows)


def _keeping(there: Sequence[Measured]) -> Sheet:
    ours = next((one.kept_drains for one in there if one.peer.name == MTASK), [])
    rows = []
    for one in there:
        suffix = _DURABLE if one.peer.server == REDIS else ""
        rows.append([_named(one) + suffix, *_paces(one.kept_drains, ours)])
    title = f"The same with settings that keep the tasks of a killed worker and server, and a lease of {KEPT_LEASE} s"
    return Sheet(title, ["drain, lasting setting", *_PACES], rows)


def _paces(drains: Sequence[Drain], ours: Sequence[Drain]) -> list[str]:
    """Return the cells of a drain: its pace, mtask's pace to it in the same run, and its CPU."""
    rates = [drain.rate for drain in drains]
    is_paired = len(drains) == len(ours)
    ratio = Spread.of(ratio_by_run([drain.rate for drain in ours], rates) if is_paired else []).median
    cpu = (_median(drain.worker_us for drain in drains), _median(drain.server_us for drain in drains))
    return [_median(rates), shown(ratio), *cpu]


def _publishing(there: Sequence[Measured]) -> Sheet:
    rows = []
    for one in there:
        for drains, suffix in ((one.drains, ""), (one.durable_drains, _DURABLE)):
            if drains or not suffix:
                rows.append(
                    [
                        _named(one) + suffix,
                        _median(drain.bulk_rate for drain in drains),
                        _median(drain.single_rate for drain in drains),
                    ]
                )
    return Sheet("Publish: tasks a second", ["publish", "in bulk, /s", "one after another, /s"], rows)


def _waiting(there: Sequence[Measured]) -> Sheet:
    parts = ("median", "p99", "idle_worker", "idle_server", "commands")
    rows = [[_named(one), *(_median(getattr(quiet, part) for quiet in one.quiets) for part in parts)] for one in there]
    columns = ["idle worker", "p50, ms", "p99, ms", "worker, %", "server, %", "commands/s"]
    title = f"Latency from the publish call to the handler, at {RATE:g}/s; then the CPU of a core while nothing happens"
    return Sheet(title, columns, rows)


def _worker_killed(there: Sequence[Measured], comparison: Comparison) -> Sheet:
    rows = [
        [
            _named(one),
            *_died(one.worker_killed),
            *_died(one.worker_killed_lasting),
        ]
        for one in there
    ]
    wait = comparison.sizes.patience
    columns = ["worker killed", "default: not done", "again after, s", "lasting: not done", "again after, s"]
    title = f"kill -9 of the worker amid {KILL_TASKS} tasks, another one at once: not done {wait:g} s later"
    return Sheet(title, columns, rows)


def _server_killed(there: Sequence[Measured]) -> Sheet:
    rows = []
    for one in there:
        durable = one.server_killed_durable if one.peer.server == REDIS else one.server_killed
        rows.append([_named(one), _lost(one.server_killed), _lost(durable)])
    title = "kill -9 of the server after the last publish call had returned, then a restart: tasks lost"
    return Sheet(title, ["server killed", "default persistence", "durable (Redis: appendfsync always)"], rows)


def _died(found: Survival | None) -> tuple[str, str]:
    if found is None:
        return _ABSENT, _ABSENT
    twice = f", {found.twice} done twice" if found.twice else ""
    if not found.interrupted:
        return f"{found.lost} of {found.tasks}{twice}", "none was running"
    again = shown(found.seconds) if found.resumed else "not yet"
    if 0 < found.resumed < found.interrupted:
        again += f" ({found.resumed} of {found.interrupted})"
    return f"{found.lost} of {found.tasks}{twice}", again


def _lost(found: Survival | None) -> str:
    return _ABSENT if found is None else f"{found.lost:,} of {found.tasks:,}"


def _named(one: Measured) -> str:
    return f"{one.peer.title} ({_TITLES[one.peer.server]})"


def _median(values: Iterable[float]) -> str:
    return shown(Spread.of(values).median)


def _short(reason: str) -> str:
    """Return a reason on one line; the JSON has all of it."""
    line = " ".join(reason.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"


def _plain(value: Any) -> Any:
    """Return a value for JSON, which knows no NaN."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
