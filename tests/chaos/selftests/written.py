"""Writes the history of a story down, as a run under faults leaves one behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bson

from tests.chaos.history import Call, Fault, History, Ledger, Note, Version

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """What is written down."""

    facts: Document
    calls: Sequence[Call]
    notes: Sequence[Note]
    faults: Sequence[Fault]
    versions: Sequence[Version]
    documents: Sequence[Document]
    effects: Sequence[Document]
    places: Sequence[Document]

    def to(self, history: History) -> History:
        """Write it all into the history's folder."""
        history.facts_path.write_text(json.dumps(self.facts))
        _append(history.calls_path("p1"), self.calls)
        _append(history.notes_path(100), self.notes)
        _append(history.faults_path, self.faults)
        for path, entries in {
            history.versions_path: [_entry(version) for version in self.versions],
            history.documents_path: self.documents,
            history.effects_path: self.effects,
            history.places_path: self.places,
        }.items():
            path.write_bytes(b"".join(bson.encode(entry) for entry in entries))
        return history


def _append(path: Path, records: Sequence[Call | Note | Fault]) -> None:
    ledger = Ledger(path)
    for record in records:
        ledger.write(record)
    ledger.close()


def _entry(version: Version) -> Document:
    entry: Document = {"_id": version.task_id, "at": version.at}
    if version.document is not None:
        entry["document"] = version.document
    return entry
