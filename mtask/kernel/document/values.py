"""What documents hold: the base of their models, values that BSON can hold, and trace contexts."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict


class Stored(BaseModel):
    """A part of a document. It is built at its first use, and ignores the fields of a newer mtask."""

    model_config = ConfigDict(defer_build=True, extra="ignore", populate_by_name=True)


#: The types whose values are stored unchanged. A value of a subclass may need conversion.
_STORED_AS_IT_IS = frozenset({type(None), bool, int, float, str, bytes})


def storable(value: Any) -> Any:
    """Return the value in a form for BSON: pydantic models, dataclasses, enums, tuples and sets are converted."""
    kind = type(value)
    if kind in _STORED_AS_IT_IS:
        return value
    if kind is dict:  # the commonest, without a look at what else it could be
        return {key: item if type(item) in _STORED_AS_IT_IS else storable(item) for key, item in value.items()}
    if isinstance(value, str | bytes | int | float) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, BaseModel):
        return storable(value.model_dump())
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: storable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [storable(item) for item in value]
    return value


# --- tracing ---------------------------------------------------------------------------------------------

# Trace contexts: which span a task, or a run, belongs to, in the form of W3C Trace Context.
#
# Only `mtask.otel` makes spans. The rest of mtask passes on the text that names one.

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
