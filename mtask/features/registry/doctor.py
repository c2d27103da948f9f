"""The doctor's check of the registry: each document can be read, and live workers have the current versions."""

from __future__ import annotations

from pydantic import ValidationError

from mtask.features.registry import operations
from mtask.features.registry.rules import HandlerDocument, declaration_of, label
from mtask.kernel.document.task import describe_validation
from mtask.kernel.driver.operation import Operation
from mtask.search.findings import Check, Finding, fail, listed, ok, warn

_NAME = "handlers"


def _examine() -> Operation[list[Finding]]:
    documents = yield from operations.every()
    workers = yield from operations.live_workers()
    labels = operations.labels_of(workers)
    found: list[Finding] = []
    several: list[str] = []
    for document in documents:
        name = str(document.get("_id"))
        try:
            declaration_of(document)
            versions = HandlerDocument.model_validate(document).versions
        except ValueError as error:
            reason = describe_validation(error) if isinstance(error, ValidationError) else str(error)
            remedy = "Remove the document: the next worker that starts stores it again."
            found.append(fail(_NAME, f"handler {name!r} is malformed: {reason}", remedy, handler=name))
            continue
        if sum(label(name, version.hash) in labels for version in versions) > 1:
            several.append(name)
    if several:
        message = f"live workers have several versions of {listed(several)}"
        remedy = "A deploy is under way, or some workers were left out: `mtask handlers` says which."
        found.append(warn(_NAME, message, remedy, handlers=several))
    silent = [str(worker["_id"]) for worker in workers if documents and not isinstance(worker.get("handlers"), list)]
    if silent:
        message = f"workers that register no handlers: {listed(silent)}"
        remedy = (
            "Upgrade them, or grant their user `mtask roles`: else their options are unknown to publishers by name."
        )
        found.append(warn(_NAME, message, remedy, workers=silent))
    return found or [ok(_NAME, f"{len(documents)} registered")]


CHECKS = [Check(_NAME, _examine, "handlers")]
