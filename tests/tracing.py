"""Spans in tests: as a program with the SDK of OpenTelemetry exports them, in this process or into a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id

#: The environment variable that holds the path of the file into which processes write their spans.
SPANS_VARIABLE = "MTASK_TEST_SPANS"


@dataclass(frozen=True)
class Seen:
    """A span as it was exported."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str | None
    links: list[tuple[str, str, str]]  #: trace id, span id, and kind of each
    attributes: dict[str, Any]
    status: str
    events: list[dict[str, Any]] = field(default_factory=list)
    pid: int = 0

    @property
    def linked(self) -> dict[str, str]:
        """The ids of the spans to which this one links, by the kind of the link."""
        return {kind: span_id for _, span_id, kind in self.links}


def seen(span: ReadableSpan) -> Seen:
    """Return a span in the form in which tests compare it."""
    assert span.context is not None
    return Seen(
        name=span.name,
        kind=span.kind.name,
        trace_id=format_trace_id(span.context.trace_id),
        span_id=format_span_id(span.context.span_id),
        parent_id=None if span.parent is None else format_span_id(span.parent.span_id),
        links=[
            (
                format_trace_id(one.context.trace_id),
                format_span_id(one.context.span_id),
                str(dict(one.attributes or {})["mtask.link"]),
            )
            for one in span.links
        ],
        attributes=dict(span.attributes or {}),
        status=span.status.status_code.name,
        events=[dict(event.attributes or {}) for event in span.events],
        pid=os.getpid(),
    )


class Spans:
    """A provider with an exporter in memory."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**options)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def all(self) -> list[Seen]:
        """All spans that have ended, the first one first."""
        return [seen(span) for span in self._exporter.get_finished_spans()]

    def of(self, operation: str, name: str | None = None) -> list[Seen]:
        """Return the spans of this operation, of tasks of this name."""
        return chosen(self.all, operation, name)


def chosen(spans: Sequence[Seen], operation: str, name: str | None = None) -> list[Seen]:
    """Return the spans of this operation, of tasks of this name."""
    return [
        span
        for span in spans
        if span.attributes.get("messaging.operation.name") == operation
        and name in (None, span.attributes["mtask.task.name"])
    ]


class FileExporter(SpanExporter):
    """Appends each span to the file that the environment names. So the spans of a killed process are there, too."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the spans, each whole."""
        with open(os.environ[SPANS_VARIABLE], "ab", buffering=0) as file:
            for span in spans:
                file.write(json.dumps(vars(seen(span))).encode() + b"\n")
        return SpanExportResult.SUCCESS


def file_provider() -> TracerProvider:
    """Return a provider that writes into this file."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter()))
    return provider


def spans_in(path: Path) -> list[Seen]:
    """Return the spans that processes have written."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Seen(**{**json.loads(line), "links": [tuple(one) for one in json.loads(line)["links"]]}) for line in lines]
