"""Pausing a queue or a task name: the control, and who does not go by it yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pydantic import ValidationError

from mtask.client import requests
from mtask.errors import PauseUnconfirmed, SchemaMismatch, shown
from mtask.model.controls import Control, Kind, check_target
from mtask.model.documents import describe_validation
from mtask.store import controls, workers
from mtask.store.operation import Operation

#: Longer than a worker that died is taken for live.
PATIENCE = timedelta(seconds=60)


def control_of(document: Mapping[str, Any]) -> Control:
    """Return the document as a Control; raise SchemaMismatch."""
    try:
        return Control.model_validate(document)
    except ValidationError as error:
        reason = f"control {shown(document.get('_id'))} is malformed: {describe_validation(error)}"
        raise SchemaMismatch("controls", reason, "Remove it, then pause anew.") from None


@dataclass(frozen=True, slots=True)
class Pausing:
    """What to pause or resume, and how long to wait until every worker goes by it."""

    kind: Kind
    target: str
    paused: bool
    waiting: requests.Waiting

    def write(self) -> Operation[Control]:
        """Write it down; from then on it stands, and workers hear of it."""
        return control_of((yield from controls.set_paused(self.kind, self.target, paused=self.paused)))

    def unconfirmed(self, control: Control) -> Operation[list[str]]:
        """Return the live workers that it concerns and that do not go by it yet."""
        found = []
        for worker in (yield from workers.live()):
            served = worker.get("queues" if self.kind == "queue" else "names")
            if isinstance(served, list) and self.target in served and not _goes_by(worker, control):
                found.append(str(worker["_id"]))
        return found

    def give_up(self, control: Control, unconfirmed: list[str]) -> PauseUnconfirmed:
        """Return the error for a wait that took too long."""
        return PauseUnconfirmed(control.kind, control.target, self.paused, unconfirmed)


def _goes_by(worker: Mapping[str, Any], control: Control) -> bool:
    seen = worker.get("controls_seen")
    return isinstance(seen, list) and any(
        isinstance(entry, Mapping)
        and entry.get("_id") == control.id
        and isinstance(entry.get("revision"), int)
        and entry["revision"] >= control.revision
        for entry in seen
    )


def prepare(queue: str | None, name: str | None, *, paused: bool, timeout: timedelta | float | None) -> Pausing:
    """Return the checked request; raise InvalidInput."""
    kind, target = check_target(queue, name)
    return Pausing(kind, target, paused, requests.waiting(f"{kind}:{target}", timeout))


def every() -> Operation[list[Control]]:
    """Return all controls, by id; raise SchemaMismatch where one is malformed."""
    return [control_of(document) for document in (yield from controls.every())]
