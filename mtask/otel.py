"""Traces by OpenTelemetry: spans around publishing, running and finishing tasks, with links from one to the other.

It needs the extra `otel`, which brings the API of OpenTelemetry only. Your program configures the SDK. Without an SDK,
no span is made and nothing is stored.

    import mtask.otel

    app = App()
    mtask.otel.instrument(app)
    client = Client(uri, middleware=app.around.publish)

A service without an app traces what it publishes by `Client(uri, middleware=[mtask.otel.publishing()])`.

The spans follow the semantic conventions for messaging: `publish QUEUE` (PRODUCER), `process QUEUE` (CONSUMER) and
`settle QUEUE` (CLIENT).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mtask.app.app import App
from mtask.app.middleware import FinishCall, FiredTask, RunCall
from mtask.arguments.publish import TaskSpec, current_trace
from mtask.errors import InvalidInput, LeaseLost, RateLimited, Retry, RunCanceled
from mtask.kernel.document.handlers import Around, handler_of
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import DEFAULT_QUEUE, Task
from mtask.kernel.document.values import MAX_TRACESTATE, Trace, is_sampled, trace_of
from mtask.kernel.operations.publish import Published
from mtask.logs import first_of, last_of, traceback_of
from mtask.version import __version__

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace as api
    from opentelemetry.context import Context as SpanScope
    from opentelemetry.trace import Link, Span, SpanKind, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError(
        f"mtask.otel needs the extra `otel` ({error}): pip install 'mtask[otel]'", name=error.name
    ) from None

__all__ = ["instrument", "publishing"]

Step = Generator[None, Any, None]
_W3C = TraceContextTextMapPropagator()
#: The exceptions by which a handler asks for another try: an executor tells their names.
_RETRIES = (Retry.__name__, RateLimited.__name__)
#: The most characters of an exception's text in a span.
_MAX_TEXT = 2000
_MAX_TRACE = 64 * 1024


def instrument(app: App, *, linked: bool = True, tracer_provider: TracerProvider | None = None) -> None:
    """Trace the tasks of an app: in workers, and in clients that get `middleware=app.around.publish`.

    Each run has a trace of its own, which links to the publisher's. With `linked=False`, the first try of a task is a
    child of its publisher instead; a later try has a trace of its own in any case. Without `tracer_provider`, the
    global one is used, also if it is set later. Call this before you register middleware whose work is to be inside of
    the spans. Raises InvalidInput if the app is traced already.
    """
    if app.tracer is not None:
        raise InvalidInput("the app is traced already: call mtask.otel.instrument once.", field="app")
    tracing = _Tracing(linked, tracer_provider)
    app.tracer = tracing
    app.around.add(tracing.publish, "publish")
    app.around.add(tracing.run, "run")
    app.around.add(tracing.finish, "finish")


def publishing(*, linked: bool = True, tracer_provider: TracerProvider | None = None) -> Around[TaskSpec]:
    """Return the middleware that traces what a client publishes: `Client(uri, middleware=[mtask.otel.publishing()])`.

    The arguments mean the same as in `instrument`.
    """
    return _Tracing(linked, tracer_provider).publish


class _Tracing:
    """Makes the spans."""

    def __init__(self, linked: bool, provider: TracerProvider | None) -> None:
        self._is_linked = linked
        self._tracer = api.get_tracer("mtask", __version__, provider)

    # --- publish --------------------------------------------------------------------------------------------

    def publish(self, spec: TaskSpec) -> Step:
        """Observe the publishing of a task."""
        handler = handler_of(spec.task)
        name = handler.name if handler is not None else str(spec.task)
        queue = spec.queue or (handler.queue if handler is not None else DEFAULT_QUEUE)
        scope = None if api.get_current_span().get_span_context().is_valid else _scope_of(current_trace())
        # Its span is not made the current one: the steps of a batch overlap.
        span = self._tracer.start_span(
            f"publish {queue}", scope, SpanKind.PRODUCER, _attributes("publish", "send", queue, name)
        )
        spec.trace = self._stored(span) or spec.trace
        try:
            published = yield
        except BaseException as error:
            _fail(span, error)
            raise
        else:
            if isinstance(published, Published) and span.is_recording():
                span.set_attribute("messaging.message.id", published.task_id)
                span.set_attribute("mtask.created", published.created)
        finally:
            span.end()

    def fired(self, task: FiredTask) -> Step:
        """Observe the publishing of a task by a schedule."""
        attributes = _attributes("publish", "send", task.queue, task.name)
        attributes |= {"messaging.message.id": task.task_id, "mtask.schedule_id": task.schedule_id}
        span = self._tracer.start_span(f"publish {task.queue}", SpanScope(), SpanKind.PRODUCER, attributes)
        task.trace = self._stored(span)
        try:
            yield
        except BaseException as error:
            _fail(span, error)
            raise
        finally:
            span.end()

    # --- run ------------------------------------------------------------------------------------------------

    def run(self, call: RunCall) -> Step:
        """Observe the call of a handler, in its own process."""
        if call.trace is not None:  # the worker of this executor has begun the span
            token = contexts.attach(_scope_of(call.trace) or SpanScope())
            try:
                yield
            finally:
                contexts.detach(token)
            return
        yield from self.isolated(call)

    def isolated(self, call: RunCall) -> Step:
        """Observe the call of a handler that runs here, or in an executor of this worker."""
        task = call.stored_task
        span = self._begin_run(call, task)
        followed = _text_of(span)
        if followed is not None:
            call.follow(followed, is_stored=self._stored(span) is not None)
        token = contexts.attach(api.set_span_in_context(span))
        try:
            yield
        except BaseException as error:
            _end_run(span, call, error)
            raise
        else:
            span.set_attribute("mtask.outcome", RunStatus.SUCCESS.value)
        finally:
            contexts.detach(token)
            span.end()

    def _begin_run(self, call: RunCall, task: Task) -> Span:
        # Another worker may hold the task at the same time, or have succeeded with it: that is no try before this one.
        others = (run for run in reversed(task.runs) if run.run_id != call.run_id)
        before = next((run for run in others if run.status not in (RunStatus.RUNNING, RunStatus.SUCCESS)), None)
        published = None if task.trace is None else task.trace.stored()
        is_child = not self._is_linked and before is None and published is not None
        earlier = None if before is None else trace_of(before.traceparent)
        links = [] if is_child else _links(published=published, earlier=earlier)
        attributes = _attributes("process", "process", task.queue, task.name)
        attributes |= {
            "messaging.message.id": task.id,
            "messaging.client.id": call.context.worker_id,
            "mtask.run_id": call.run_id,
            "mtask.attempt": call.attempt,
        }
        if task.flow is not None:
            attributes |= {"mtask.flow.key": task.flow.key, "mtask.flow.step": task.flow.step}
        scope = (_scope_of(published) if is_child else None) or SpanScope()
        return self._tracer.start_span(f"process {task.queue}", scope, SpanKind.CONSUMER, attributes, links)

    # --- finish ---------------------------------------------------------------------------------------------

    def finish(self, call: FinishCall) -> Step:
        """Observe the writing of an outcome."""
        if call.trace is not None and not is_sampled(call.trace):
            return  # nobody records its parent
        task = call.stored_task
        attributes = _attributes("settle", "settle", task.queue, task.name)
        attributes |= {
            "messaging.message.id": task.id,
            "messaging.client.id": call.worker_id,
            "mtask.run_id": call.run_id,
            "mtask.attempt": call.attempt,
            "mtask.outcome": call.status.value,
        }
        scope = _scope_of(call.trace) or SpanScope()
        span = self._tracer.start_span(f"settle {task.queue}", scope, SpanKind.CLIENT, attributes)
        try:
            is_written = yield
            if not is_written:
                span.set_attribute("error.type", LeaseLost.__name__)
                span.set_status(StatusCode.ERROR, "the lease was lost: the outcome is not written")
        finally:
            span.end()

    def _stored(self, span: Span) -> Trace | None:
        """Return the span as it is stored with a task. None: nobody records it, so a link to it would lead nowhere.

        Where runs are children of their publishers, they also take over the decision to record nothing.
        """
        is_wanted = span.get_span_context().trace_flags.sampled or not self._is_linked
        return _text_of(span) if is_wanted else None


def _attributes(name: str, kind: str, queue: str, task: str) -> dict[str, Any]:
    return {
        "messaging.system": "mtask",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": queue,
        "mtask.task.name": task,
    }


def _text_of(span: Span) -> Trace | None:
    """Return the span as W3C Trace Context. None: there is no SDK, so it is no real span."""
    found = span.get_span_context()
    if not found.is_valid:
        return None
    trace = {"traceparent": f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"}
    if found.trace_state:
        state = found.trace_state.to_header()
        if len(state) <= MAX_TRACESTATE:
            trace["tracestate"] = state
    return trace


def _scope_of(trace: Mapping[str, str] | None) -> SpanScope | None:
    return None if trace is None else _W3C.extract(trace, SpanScope())


def _links(**traces: Mapping[str, str] | None) -> Sequence[Link]:
    links = []
    for kind, trace in traces.items():
        found = api.get_current_span(_scope_of(trace)).get_span_context() if trace is not None else None
        if found is not None and found.is_valid:
            links.append(Link(found, {"mtask.link": kind}))
    return links


def _end_run(span: Span, call: RunCall, error: BaseException) -> None:
    """Say in the span how a run ended that did not return."""
    if not span.is_recording():
        return
    ended = call.ended_because
    if ended is not None or isinstance(error, RunCanceled):
        span.set_attribute("mtask.ended_because", ended or "cancel requested")
    is_retry = isinstance(error, Retry) or getattr(error, "error_type", None) in _RETRIES
    if is_retry or isinstance(error, RunCanceled):
        span.set_attribute("mtask.outcome", _outcome_of(error))
        span.set_attribute("mtask.retry", is_retry)
        return
    if isinstance(error, LeaseLost):
        span.set_attribute("mtask.outcome", "LOST")
    else:
        span.set_attribute("mtask.outcome", call.ended_as or _outcome_of(error))
    _fail(span, error)


def _outcome_of(error: BaseException) -> str:
    judged = getattr(error, "outcome", None)  # an executor has made the outcome
    if judged is not None:
        return str(judged.status.value)
    is_canceled = isinstance(error, RunCanceled) or (isinstance(error, Retry) and not error.counted)
    return RunStatus.CANCELED.value if is_canceled else RunStatus.FAIL.value


def _fail(span: Span, error: BaseException) -> None:
    """Record an exception in the span."""
    if not span.is_recording():
        return
    kind = getattr(error, "error_type", None) or type(error).__qualname__
    try:
        text = first_of(str(error), _MAX_TEXT)
    except Exception:
        text = "(its text cannot be read)"
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR, text)
    span.record_exception(
        error, {"exception.type": kind, "exception.message": text, "exception.stacktrace": _trace_text(error)}
    )


def _trace_text(error: BaseException) -> str:
    return last_of(traceback_of(error), _MAX_TRACE)
