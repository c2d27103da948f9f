"""One step of the machine: run an operation, and find the server's now at which the model says the same.

No test knows the server's `$$NOW`, but it lies between two readings of its clock around the operation. The
model is asked for each millisecond between them; one must give the stored documents and the error, to the letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mtask.errors import MtaskError
from tests.parity.cases import Document
from tests.parity.machine_model import Prediction, unchanged

Documents = Mapping[str, Document]
#: What was told of each task: the kind of error, or None.
Told = Mapping[str, type[MtaskError] | None]
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Observed:
    """What an operation did, between two readings of the server's clock."""

    earliest: datetime
    latest: datetime
    before: Documents
    stored: Documents
    told: Told


def differences(expected: Any, stored: Any, path: str = "") -> list[str]:
    """Return where two values differ; a number of another type, or a missing field, is a difference."""
    if isinstance(expected, dict) and isinstance(stored, dict):
        names = [*expected, *(name for name in stored if name not in expected)]
        missing = object()
        return [
            found
            for name in names
            for found in (
                [f"{path}.{name}: only {'the model' if name in expected else 'the server'} has it"]
                if missing in (expected.get(name, missing), stored.get(name, missing))
                else differences(expected[name], stored[name], f"{path}.{name}")
            )
        ]
    if isinstance(expected, list) and isinstance(stored, list) and len(expected) == len(stored):
        pairs = enumerate(zip(expected, stored, strict=True))
        return [found for place, (a, b) in pairs for found in differences(a, b, f"{path}[{place}]")]
    if _kind(expected) is _kind(stored) and expected == stored:
        return []
    return [f"{path}: the model says {expected!r}, the server {stored!r}"]


def _kind(value: Any) -> type:
    # A long is read as a subclass of int, and so is a boolean.
    return next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), type(value))


def moments(observed: Observed) -> Iterator[datetime]:
    """Return each millisecond of the bracket, the likely ones first."""
    likely = {observed.earliest, observed.latest}
    for document in observed.stored.values():
        likely |= {found for found in instants_in(document) if observed.earliest <= found <= observed.latest}
    yield from sorted(likely)
    moment = observed.earliest
    while moment <= observed.latest:
        if moment not in likely:
            yield moment
        moment += _MILLISECOND


def instants_in(value: Any) -> Iterator[datetime]:
    if isinstance(value, datetime):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from instants_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from instants_in(item)


def shifted(value: Any, by: timedelta) -> Any:
    """Return the value with every instant in it moved."""
    if isinstance(value, datetime):
        return value + by
    if isinstance(value, dict):
        return {name: shifted(item, by) for name, item in value.items()}
    return [shifted(item, by) for item in value] if isinstance(value, list) else value


def mismatch(observed: Observed, task_id: str, prediction: Prediction, now: datetime) -> tuple[list[str], Any]:
    """Return in what the server and the model differ for one task at this now, and what the model says."""
    before = observed.before.get(task_id)
    try:
        expected, error = prediction(before, now), None
    except MtaskError as refusal:
        expected, error = before, type(refusal)
    told = observed.told.get(task_id)
    found = [] if told is error else [f"error: the model says {error}, the server {told}"]
    return [*found, *differences(expected, observed.stored.get(task_id), task_id)], expected


def fitted(
    observed: Observed, predictions: Mapping[str, Prediction], *, is_one_update: bool
) -> tuple[dict[str, Document], dict[str, datetime]]:
    """Return what the model says, and for each task the now at which it is what the server did.

    What one update changes is changed at one now. Tasks without a prediction must be as they were.
    """
    everything = {task_id: predictions.get(task_id, unchanged) for task_id in {*observed.before, *observed.stored}}
    everything |= predictions
    groups = [sorted(everything)] if is_one_update else [[task_id] for task_id in sorted(everything)]
    model: dict[str, Document] = {}
    nows: dict[str, datetime] = {}
    for group in groups:
        nearest: list[str] | None = None
        for now in moments(observed):
            cases = {task_id: mismatch(observed, task_id, everything[task_id], now) for task_id in group}
            found = [text for texts, _ in cases.values() for text in texts]
            if not found:
                model |= {task_id: expected for task_id, (_, expected) in cases.items() if expected is not None}
                nows |= dict.fromkeys(group, now)
                break
            if nearest is None or len(found) < len(nearest):
                nearest = found
        else:
            raise AssertionError(
                f"no instant from {observed.earliest} to {observed.latest} gives what the server made of it:\n  "
                + "\n  ".join(nearest or [])
                + "".join(f"\nbefore: {observed.before.get(task_id)}" for task_id in group)
            )
    return model, nows
