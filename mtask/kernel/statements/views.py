"""Projections: the parts of a task's document that a read sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtask.kernel.document.status import RunStatus
from mtask.kernel.statements import expressions as x

#: The fields in the reply of a partial read, beside `_id`.
CREATED, ASKED = "t", "f"


def only(fields: Sequence[str]) -> dict[str, Any]:
    """Return the projection for a partial read: `_id`, create_time, and the values of these fields as an array.

    Each value stands at the index of its field. The value of a field that a task lacks is null. A path through an
    array gives the values of all its elements.
    """
    return {"_id": 1, CREATED: f"{x.STATE}.create_time", ASKED: [_value_of(field) for field in fields]}


def _value_of(field: str) -> x.Expression:
    first, _, rest = field.partition(".")
    made = _DERIVED.get(first)
    if made is None:
        return f"${field}"
    path = f".{rest}" if rest else ""
    return {"$let": {"vars": {"found": made}, "in": f"$$found{path}"}}


def _last(condition: x.Expression, field: str) -> x.Expression:
    """Return this field of the last run for which the condition holds. A malformed document may lack the runs."""
    runs = {"$cond": [{"$isArray": [x.RUNS]}, x.RUNS, []]}
    return {"$let": {"vars": {"run": {"$last": x.runs_where(condition, runs)}}, "in": f"$$run.{field}"}}


def returned() -> x.Expression:
    """Return the value that the last successful run of this round returned, as `documents.Task.returns` does."""
    return _last(x.current(x.has_status(RunStatus.SUCCESS)), "returns")


def returned_by(run_id: str) -> x.Expression:
    """Return the value that this run returned, of whatever round it is."""
    return _last({"$eq": ["$$run.run_id", x.literal(run_id)]}, "returns")


def lost() -> x.Expression:
    """Return why the value of the last successful run of this round is lost, as `documents.Task.returns_lost` does."""
    return _last(x.current(x.has_status(RunStatus.SUCCESS)), "returns_lost")


def lost_by(run_id: str) -> x.Expression:
    """Return why the value of this run is lost, of whatever round it is."""
    return _last({"$eq": ["$$run.run_id", x.literal(run_id)]}, "returns_lost")


#: The fields that `documents.Task` has as properties, and that no document stores under this name.
_DERIVED: Mapping[str, x.Expression] = {
    "status": x.STATUS,
    "runs": x.RUNS,
    "returns": returned(),
    "fail_reason": {
        "$ifNull": [
            f"{x.STATE}.reason",
            _last({"$ne": [{"$ifNull": ["$$run.fail_reason", None]}, None]}, "fail_reason"),
        ]
    },
}
DERIVED_FIELDS: tuple[str, ...] = tuple(_DERIVED)
