"""Trace contexts: which span a task, or a run, belongs to, in the form of W3C Trace Context.

Only `mtask.otel` makes spans. The rest of mtask passes on the text that names one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict

#: The longest texts that are stored, in characters. A longer tracestate is left out, as W3C allows.
MAX_TRACEPARENT, MAX_TRACESTATE = 128, 512
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-[!-~]*)?")
_TRACESTATE = re.compile(r"[ -~\t]*")

#: A trace context as it is stored: traceparent, and perhaps tracestate.
Trace = Mapping[str, str]


class TraceContext(BaseModel):
    """The span that has published a task."""

    model_config = ConfigDict(defer_build=True, extra="ignore")

    # Who cannot read a text follows no trace. So a text of another form makes no task malformed.
    traceparent: Annotated[str, Strict(), Field(max_length=MAX_TRACEPARENT)]
    tracestate: Annotated[str, Strict(), Field(max_length=MAX_TRACESTATE)] | None = None

    def stored(self) -> dict[str, str]:
        """Return the context as it is stored."""
        return self.model_dump(exclude_none=True)


def trace_of(traceparent: str | None, tracestate: str | None = None) -> dict[str, str] | None:
    """Return the context that these two headers of W3C Trace Context give. None: they name no span."""
    if traceparent is None or len(traceparent) > MAX_TRACEPARENT or not _TRACEPARENT.fullmatch(traceparent):
        return None
    trace = {"traceparent": traceparent}
    if tracestate and len(tracestate) <= MAX_TRACESTATE and _TRACESTATE.fullmatch(tracestate):
        trace["tracestate"] = tracestate
    return trace


def is_sampled(trace: Trace) -> bool:
    """Whether somebody records the spans of this trace."""
    flags = trace["traceparent"][53:55]
    return len(flags) == 2 and int(flags, 16) & 1 == 1


def trace_id_in(trace: Trace | None) -> str | None:
    """Return the trace id of a context, 32 hexadecimal digits."""
    match = None if trace is None else _TRACEPARENT.fullmatch(trace["traceparent"])
    return None if match is None else match[1]
