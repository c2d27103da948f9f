"""The doctor's check of breakers: which of them hold back tasks."""

from __future__ import annotations

from mtask.features.controls import client as controls
from mtask.kernel.driver.operation import Operation
from mtask.search.findings import Check, Finding, ok, warn

_CHECK = "breakers"


def _breakers() -> Operation[list[Finding]]:
    found: list[Finding] = []
    for control in (yield from controls.known()):
        if control.opened is not None:
            reason = control.opened.reason or "no reason given"
            message = f"the {control.kind} {control.target!r} is held back by its breaker: {reason}"
            resume = f"`mtask resume --{control.kind} {control.target}`"
            remedy = f"Mend what its tasks need: then it closes by itself, or by {resume}."
            found.append(warn(_CHECK, message, remedy, control=control.id))
    return found or [ok(_CHECK, "none has opened")]


CHECKS = [Check(_CHECK, _breakers, "controls")]
