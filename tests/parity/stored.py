"""What the server makes of documents, which are there for that long only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.statements.derive import Pipeline
from tests.parity.cases import Document


@contextmanager
def inserted(store: SyncStore, documents: list[Document], *, checks: bool = False) -> Iterator[list[str]]:
    """Have these stored inside, past the validator unless it `checks`; tell their ids."""
    ids = [document["_id"] for document in documents]
    store.tasks.insert_many(documents, bypass_document_validation=not checks)
    try:
        yield ids
    finally:
        store.tasks.delete_many({"_id": {"$in": ids}})


def stored_after(
    store: SyncStore, documents: list[Document], pipeline: Pipeline, guard: dict[str, Any] | None = None
) -> list[Document]:
    """Return what the server makes of the documents that the guard matches by the pipeline; without a guard, of all.

    Without one the validator sees what is drawn, too: what it refuses, no change has to take.
    """
    with inserted(store, documents, checks=guard is None) as ids:
        store.tasks.update_many(guard or {"_id": {"$in": ids}}, pipeline)
        found = {document["_id"]: document for document in store.tasks.find({"_id": {"$in": ids}})}
    return [found[task_id] for task_id in ids]
