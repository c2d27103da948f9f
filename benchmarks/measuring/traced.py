"""The handlers of the benchmarks' workers, traced: by an SDK that samples nothing, and by one that samples all."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

import mtask.otel
from benchmarks.measuring.app import app as plain
from mtask import App


def _traced(sampler: Sampler) -> App:
    app = App()
    app.include(plain)
    mtask.otel.instrument(app, tracer_provider=TracerProvider(sampler=sampler))
    return app


#: No exporter takes the spans of the second one: an exporter has costs of its own.
off, on = _traced(ALWAYS_OFF), _traced(ALWAYS_ON)
