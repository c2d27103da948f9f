"""Flows: the list, and the graph of one flow with the statuses of its steps."""

from __future__ import annotations

from collections import Counter

from starlette.responses import Response

from mtask.errors import InvalidInput
from mtask.features.flows.surface.graph import BOX_HEIGHT, BOX_WIDTH, MOST_STEPS, graph
from mtask.features.flows.views import StepState
from mtask.web.access import Role
from mtask.web.page.drawing.rows import bar, flow_rows
from mtask.web.page.rendering import url
from mtask.web.page.views import Addresses, Visit

addresses = Addresses()
#: The flows of one list, and the steps of one table.
_MOST_FLOWS, _MOST_ROWS = 100, 500
_WEIGHT = {"FAIL": 0, "CANCELED": 1, "RUNNING": 2, "INIT": 3, "WAITING": 4, "SUCCESS": 5}


@addresses.get_at("/flows")
async def flows(visit: Visit) -> Response:
    """List the newest flows."""
    given = visit.query.exact("prefix") or ""
    prefix = visit.caller.stored_key(given) if given else None
    if visit.caller.tenant is not None and not given:
        prefix = f"{visit.caller.tenant}:"
    reads = visit.parts.reads
    found = await reads.within(visit.client.flows(prefix=prefix, limit=_MOST_FLOWS))
    rows = [(visit.caller.shown_key(row.key), row) for row in found]
    now = await reads.now()
    table = flow_rows(rows, now)
    return visit.html("flows.html", flows=rows, table=table, prefix=given, now=now, is_cut=len(found) == _MOST_FLOWS)


@addresses.get_at("/flow")
async def flow(visit: Visit) -> Response:
    """Show a flow."""
    key = _named(visit)
    caller, reads = visit.caller, visit.parts.reads
    found = await reads.within(visit.client.flow(caller.stored_key(key)))
    drawn = graph(found.steps)
    rows = sorted(found.steps, key=_weight) if drawn is None else list(found.steps)
    layers = [] if drawn is not None else Counter((step.step.rstrip("0123456789-_"), step.status) for step in rows)
    names = {step.task_id: step.step for step in found.steps}
    return visit.html(
        "flow.html",
        key=key,
        flow=found,
        graph=drawn,
        box=(BOX_WIDTH, BOX_HEIGHT),
        rows=[(step, *_split(visit, step.task_id), caller.shown_text(step.reason or "")) for step in rows[:_MOST_ROWS]],
        names=names,
        bar=bar(found.counts, len(found.steps)),
        left_out=max(0, len(rows) - _MOST_ROWS),
        groups=sorted(Counter(dict(layers)).items()),
        most=MOST_STEPS,
        now=found.now or await reads.now(),
        key_of=lambda step: _split(visit, step.task_id),
    )


def _weight(step: StepState) -> int:
    return _WEIGHT.get(step.status, 9)


def _split(visit: Visit, task_id: str) -> tuple[str, str]:
    name, _, key = visit.caller.shown_id(task_id).partition(":")
    return name, key


def _named(visit: Visit) -> str:
    key = visit.query.exact("key")
    if not key:
        raise InvalidInput("Name the flow: /flow?key=KEY.", field="key")
    return key


def _address(key: str) -> str:
    return url("/flow", key=key)


@addresses.post_at("/flow/cancel", Role.PUBLISH)
async def cancel(visit: Visit) -> Response:
    """Cancel the open steps of a flow."""
    key = _named(visit)
    everything = bool(visit.form.text("everything"))
    made = await visit.client.cancel_flow(visit.caller.stored_key(key), everything=everything)
    return visit.back(_address(key), f"Steps canceled or asked to stop: {len(made.task_ids)}.")


@addresses.post_at("/flow/retry", Role.PUBLISH)
async def retry(visit: Visit) -> Response:
    """Let all failed and canceled steps of a flow run again."""
    key = _named(visit)
    made = await visit.client.retry_flow(visit.caller.stored_key(key))
    return visit.back(_address(key), f"Steps opened again: {len(made.task_ids)}.")


@addresses.post_at("/flow/retry-step", Role.PUBLISH)
async def retry_step(visit: Visit) -> Response:
    """Let a step run again, with all that failed or was canceled because of it."""
    key = _named(visit)
    name, step_key = visit.query.exact("name") or "", visit.query.exact("step") or ""
    made = await visit.client.retry(name, visit.caller.stored_key(step_key))
    step = step_key if made.flow is None else made.flow.step
    return visit.back(_address(key), f"The step {step} runs again, with all that ended because of it.")
