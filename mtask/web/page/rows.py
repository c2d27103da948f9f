"""The rows of long tables, as HTML. A template takes four times as long for them.

All that comes from the database goes through `shown`, which escapes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from markupsafe import Markup

from mtask.web.page.reads import Queue, State
from mtask.web.page.rendering import NOTHING, age, badge, brief, number, shown, task_link, url


def task_rows(rows: Iterable[Mapping[str, Any]], now: datetime) -> Markup:
    """Return the rows of a list of tasks."""
    return Markup("".join([_task_row(row, now) for row in rows]))


def _task_row(row: Mapping[str, Any], now: datetime) -> str:
    name, key, status, flow = row["name"], row["key"], row["status"], row["flow"]
    tag = f' <a class="tag" href="{shown(url("/flow", key=flow))}" title="Flow {shown(flow)}">flow</a>' if flow else ""
    ends = NOTHING if status == "GONE" else age(row["finish_time"] or row["due_time"], now)
    return (
        f'<tr data-id="{shown(name)}:{shown(key)}"><td>{badge(status)}</td>\n'
        f'<td class="grow">{task_link(name, key)}{tag}</td>\n'
        f'<td class="wide">{shown(brief(str(row["queue"] or NOTHING), 32))}</td>\n'
        f'<td class="wide dim note-cell">{_note(row, status)}</td>\n'
        f'<td class="n">{age(row["create_time"], now)}</td>\n'
        f'<td class="n wide">{ends}</td></tr>\n'
    )


def _note(row: Mapping[str, Any], status: Any) -> str:
    if row["cancel_requested"] and status == "RUNNING":
        return "cancel requested"
    reason = row["reason"]
    if reason and status != "SUCCESS":
        return f'<span title="{shown(brief(reason, 1000))}">{shown(brief(reason, 72))}</span>'
    return f"{shown(row['failed_cnt'])} failed before" if row["failed_cnt"] else ""


def queue_rows(state: State, rates: Mapping[str, float] | None) -> Markup:
    """Return the rows of the table of queues. `rates`: the ends a second, by queue; None: they are not known yet."""
    parts = []
    for name, before, behind in _queue_rows(state):
        parts.append(before)
        parts.append(NOTHING if rates is None else number(round(rates.get(name, 0.0), 1)))
        parts.append(behind)
    return Markup("".join(parts))


# Many views show one state, until the next one is read. Only the rates differ.
@lru_cache(2)
def _queue_rows(state: State) -> Sequence[tuple[str, str, str]]:
    """Return the name of each queue, and what its row has before and behind its rate."""
    return [(queue.name, *_queue_row(queue, state.now)) for queue in state.queues.values()]


def _queue_row(queue: Queue, now: datetime) -> tuple[str, str]:
    name = queue.name
    tag = state = ""
    if queue.is_paused or queue.stuck:
        kind, word = ("odd", "paused") if queue.is_paused else ("bad", "stuck")
        tag = f' <span class="tag narrow {kind}">{word}</span>'
        state = f'<span class="tag {kind}">{word}</span>'
    elif queue.limits:
        state = f'<span class="tag" title="{shown("; ".join(queue.limits))}">limited</span>'
    else:
        state = '<span class="dim">open</span>'

    def cell(classes: str, *statuses: str) -> str:
        address = shown(url("/tasks", queue=name, status=statuses))
        return f'<td class="{classes}"><a href="{address}">{queue.shown(*statuses)}</a></td>\n'

    before = (
        f'<tr><td class="grow"><a href="{shown(url("/queue", queue=name))}" title="{shown(name)}">'
        f"{shown(brief(name, 48))}</a>{tag}</td>\n"
        f"{cell('n', 'INIT', 'WAITING')}{cell('n', 'RUNNING')}"
        f"{cell('n c-FAIL' if queue.counts.get('FAIL') else 'n', 'FAIL')}{cell('n wide', 'SUCCESS')}"
        f'<td class="n">{age(queue.oldest_due(now), now)}</td>\n<td class="n wide dim">'
    )
    return before, f'</td>\n<td class="wide">{state}</td></tr>\n'
