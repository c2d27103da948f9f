"""Spans of OpenTelemetry around publishing, running and finishing, and their links, with a real SDK."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import mtask.otel
from mtask import App, AsyncClient, Client, Context, Fail, Flow, Next, Retry, TaskSpec
from mtask.errors import InvalidInput
from mtask.features.isolation.options import ExecutorOptions
from tests.integration.app import traced
from tests.integration.worker_harness import Bench, Working
from tests.mongo import Client as Mongo
from tests.mongo import eventually, until
from tests.tracing import SPANS_VARIABLE, Seen, Spans, chosen, spans_in
from tests.workers import open_stage

ONCE: dict[str, Any] = {"max_retries": 0}


def instrumented(spans: Spans, **options: Any) -> App:
    app = App()
    mtask.otel.instrument(app, tracer_provider=spans.provider, **options)
    return app


def client_of(bench: Bench, app: App) -> AsyncClient:
    return AsyncClient(bench.uri, database=bench.database, middleware=app.around.publish)


async def settled(spans: Spans, count: int, name: str | None = None) -> list[Seen]:
    """Wait until so many outcomes are written, and return the spans of these runs."""
    await until(lambda: len(spans.of("settle", name)) >= count, message=f"{count} settled")
    return spans.of("process", name)


async def test_a_task_has_a_publish_a_process_and_a_settle_span_and_the_handlers_own_are_inside(
    working: Working,
) -> None:
    spans = Spans()
    app, own = instrumented(spans), spans.provider.get_tracer("shop")

    @app.task(queue="mail")
    async def greet(who: str) -> str:
        with own.start_as_current_span("in a coroutine"):
            return who

    @app.task(queue="mail")
    def greet_in_thread(who: str) -> str:
        with own.start_as_current_span("in a thread"):
            return who

    async with working(app, queues=["mail"]) as bench, client_of(bench, app) as it:
        with own.start_as_current_span("request"):
            await it.publish(greet, {"who": "Ann"}, key="1")
        await it.publish_many([TaskSpec(greet_in_thread, {"who": "Bob"}, key="2")])
        await settled(spans, 2)
        stored = bench.document("greet:1")["trace"]
        (publish,) = spans.of("publish", "greet")
        assert stored.keys() == {"traceparent"}
        assert stored["traceparent"].startswith(f"00-{publish.trace_id}-{publish.span_id}-")
    (request,) = (span for span in spans.all if span.name == "request")
    for name, inner, task_id in (
        ("greet", "in a coroutine", "greet:1"),
        ("greet_in_thread", "in a thread", "greet_in_thread:2"),
    ):
        (publish,), (process,), (settle,) = (spans.of(step, name) for step in ("publish", "process", "settle"))
        assert [(span.name, span.kind) for span in (publish, process, settle)] == [
            ("publish mail", "PRODUCER"),
            ("process mail", "CONSUMER"),
            ("settle mail", "CLIENT"),
        ]
        assert publish.parent_id == (request.span_id if name == "greet" else None)
        assert (process.parent_id, process.linked) == (None, {"published": publish.span_id})
        assert process.trace_id != publish.trace_id
        assert (settle.trace_id, settle.parent_id) == (process.trace_id, process.span_id)
        (within,) = (span for span in spans.all if span.name == inner)
        assert (within.trace_id, within.parent_id) == (process.trace_id, process.span_id)
        for span, kind in ((publish, "send"), (process, "process"), (settle, "settle")):
            attributes = span.attributes
            assert attributes["messaging.system"] == "mtask"
            assert attributes["messaging.operation.type"] == kind
            assert attributes["messaging.destination.name"] == "mail"
            assert attributes["messaging.message.id"] == task_id
        assert process.attributes["mtask.outcome"] == settle.attributes["mtask.outcome"] == "SUCCESS"
        assert process.attributes["messaging.client.id"] == "w1"


async def test_each_try_is_a_trace_of_its_own_and_links_to_the_publish_and_to_the_try_before(working: Working) -> None:
    spans = Spans()
    app = instrumented(spans)

    @app.task
    async def flaky(context: Context) -> None:
        if context.attempt == 1:
            raise ValueError("first at mongodb://u:secret@h/")
        if context.attempt == 2:
            raise Retry(delay=0)

    @app.task
    async def hopeless() -> None:
        raise Fail("never")

    async with working(app) as bench, client_of(bench, app) as it:
        await it.publish(flaky, key="1", retry_delay=0)
        await it.publish(hopeless, key="1")
        await settled(spans, 4)
    (publish,) = spans.of("publish", "flaky")
    first, second, third = spans.of("process", "flaky")
    assert len({publish.trace_id, first.trace_id, second.trace_id, third.trace_id}) == 4
    assert first.linked == {"published": publish.span_id}
    assert second.linked == {"published": publish.span_id, "earlier": first.span_id}
    assert third.linked == {"published": publish.span_id, "earlier": second.span_id}
    assert [span.attributes["mtask.attempt"] for span in (first, second, third)] == [1, 2, 3]
    assert [span.attributes["mtask.outcome"] for span in (first, second, third)] == ["FAIL", "CANCELED", "SUCCESS"]
    assert [span.status for span in (first, second, third)] == ["ERROR", "UNSET", "UNSET"]
    assert first.attributes["error.type"] == "ValueError"
    (event,) = first.events
    assert (event["exception.type"], event["exception.message"]) == ("ValueError", "first at mongodb://***@h/")
    assert "secret" not in str(spans.all)
    (failed,) = spans.of("process", "hopeless")
    assert (failed.attributes["mtask.outcome"], failed.attributes["error.type"]) == ("FAIL", "Fail")


async def test_children_next_tasks_and_tasks_of_schedules_link_to_what_made_them(working: Working) -> None:
    spans = Spans()
    app = instrumented(spans)

    @app.task
    async def parent(context: Context) -> Next:
        await context.add_child("part", "child")
        return Next("follower")

    @app.task
    def child() -> None: ...

    @app.task
    def follower() -> None: ...

    @app.task
    def nightly() -> None: ...

    async with working(app) as bench, client_of(bench, app) as it:
        flow = Flow("order/7")
        flow.add("start", parent)
        await it.publish_flow(flow)
        await it.add_schedule("night", nightly, await it.server_time())
        await settled(spans, 4)
    (published,), (ran,) = spans.of("publish", "parent"), spans.of("process", "parent")
    assert ran.linked == {"published": published.span_id}
    assert ran.attributes["mtask.flow.key"] == "order/7"
    for name in ("child", "follower"):
        (process,) = spans.of("process", name)
        assert process.linked == {"published": ran.span_id}
        assert process.trace_id != ran.trace_id
    (fired,), (process,) = spans.of("publish", "nightly"), spans.of("process", "nightly")
    assert fired.attributes["mtask.schedule_id"] == "night"
    assert (fired.parent_id, process.linked) == (None, {"published": fired.span_id})


async def test_not_linked_the_first_try_is_a_child_of_its_publisher_and_a_later_one_is_not(working: Working) -> None:
    spans = Spans()
    app = instrumented(spans, linked=False)

    @app.task
    async def flaky(context: Context) -> None:
        if context.attempt == 1:
            raise ValueError("first")

    async with working(app) as bench, client_of(bench, app) as it:
        await it.publish(flaky, key="1", retry_delay=0)
        await settled(spans, 2)
    (publish,), (first, second) = spans.of("publish"), spans.of("process")
    assert (first.trace_id, first.parent_id, first.linked) == (publish.trace_id, publish.span_id, {})
    assert (second.parent_id, second.linked) == (None, {"published": publish.span_id, "earlier": first.span_id})


async def test_a_run_that_its_worker_ends_says_why(working: Working) -> None:
    spans = Spans()
    app = instrumented(spans)

    @app.task
    async def endless() -> None:
        await asyncio.Event().wait()

    async with working(app) as bench, client_of(bench, app) as it:
        await it.publish(endless, key="slow", run_timeout=0.05, **ONCE)
        await it.publish(endless, key="unwanted", ping_interval=0.1)
        await bench.status("endless:unwanted", "RUNNING")
        await it.cancel("endless", "unwanted")
        await settled(spans, 2)
    ended = {span.attributes["messaging.message.id"]: span.attributes for span in spans.of("process")}
    assert ended["endless:slow"]["mtask.ended_because"] == "it ran longer than run_timeout_ms"
    assert ended["endless:unwanted"]["mtask.ended_because"] == "cancel requested"
    settles = {span.attributes["messaging.message.id"]: span.attributes for span in spans.of("settle")}
    assert settles["endless:slow"]["mtask.outcome"] == ended["endless:slow"]["mtask.outcome"] == "FAIL"
    assert settles["endless:unwanted"]["mtask.outcome"] == ended["endless:unwanted"]["mtask.outcome"] == "CANCELED"


def test_spans_of_two_processes_and_of_executors_belong_together(
    mongo_uri: str, database_name: str, tmp_path: Path
) -> None:
    """The publisher is this process. The worker and its executors write their spans into a file."""
    spans, path = Spans(), tmp_path / "spans.jsonl"
    publish = mtask.otel.publishing(tracer_provider=spans.provider)
    with (
        open_stage(mongo_uri, database_name, tmp_path) as stage,
        Client(mongo_uri, database=database_name, middleware=[publish]) as client,
    ):
        worker = stage.launch(
            "A", "--executors", "1", environment={SPANS_VARIABLE: str(path)}, app="tests.integration.app.traced:app"
        )
        stage.wait_running(worker)
        client.publish("greet", {"who": "Ann"}, key="1")
        client.publish("apart", key="2")
        client.publish("apart", {"how": "raise"}, key="3", **ONCE)
        client.publish("apart", {"how": "die"}, key="4", **ONCE)
        eventually(lambda: len(chosen(spans_in(path), "settle")) == 4, message="four tasks are settled")
        pid = client.get("apart", "2").returns
        written = spans_in(path)
    published = {span.attributes["messaging.message.id"]: span for span in spans.of("publish")}
    processed = {span.attributes["messaging.message.id"]: span for span in chosen(written, "process")}
    for task_id, process in processed.items():
        assert process.linked == {"published": published[task_id].span_id}
        assert process.pid == worker.pid, "also of a handler in an executor: so a killed one has a span, too"
    inner = {span.parent_id: span for span in written if span.name == "inner"}
    assert inner[processed["greet:1"].span_id].pid == worker.pid
    assert inner[processed["apart:2"].span_id].pid == pid != worker.pid
    assert inner[processed["apart:2"].span_id].trace_id == processed["apart:2"].trace_id
    raised, died = processed["apart:3"], processed["apart:4"]
    assert (raised.attributes["error.type"], raised.attributes["mtask.outcome"]) == ("ValueError", "FAIL")
    assert (died.attributes["error.type"], died.attributes["mtask.outcome"]) == ("ExecutorDied", "FAIL")
    assert "secret" not in str(written)


async def test_an_sdk_only_in_the_executors_has_its_spans_there(
    working: Working, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, the app is traced without an SDK."""
    path = tmp_path / "spans.jsonl"
    monkeypatch.setenv(SPANS_VARIABLE, str(path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    executors = ExecutorOptions("tests.integration.app.traced:app", count=1)
    async with working(traced.app, executors=executors) as bench:
        await bench.client.publish("apart", {"how": "retry"}, key="1")
        state = await bench.status("apart:1", "SUCCESS")
        first, second = spans_of_runs(spans_in(path))
        assert first.span_id in state["worker_states"][0]["traceparent"]
        assert (first.status, first.attributes["mtask.retry"]) == ("UNSET", True)
        assert second.linked == {"earlier": first.span_id}


def spans_of_runs(spans: list[Seen]) -> list[Seen]:
    return chosen(spans, "process")


@pytest.mark.parametrize(
    "provider", [trace.NoOpTracerProvider(), Spans(sampler=ALWAYS_OFF).provider], ids=["no SDK", "samples nothing"]
)
async def test_nothing_is_stored_where_nothing_is_recorded(working: Working, provider: Any) -> None:
    app = App()
    mtask.otel.instrument(app, tracer_provider=provider)

    @app.task
    async def fails() -> None:
        raise ValueError

    async with working(app) as bench, client_of(bench, app) as it:
        await it.publish(fails, key="1", **ONCE)
        state = await bench.status("fails:1", "FAIL")
        assert "trace" not in bench.document("fails:1")
        assert "traceparent" not in state["worker_states"][0]


def test_a_second_instrument_is_refused_and_a_traced_part_traces_the_whole() -> None:
    part, whole = App(), App()
    mtask.otel.instrument(part)
    with pytest.raises(InvalidInput, match="once"):
        mtask.otel.instrument(part)
    whole.include(part)
    assert whole.tracer is part.tracer


def test_without_the_extra_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None\nimport mtask.otel"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "pip install 'mtask[otel]'" in ended.stderr


def test_an_update_brings_the_span_of_the_new_publish_and_another_language_may_write_anything(
    mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    spans = Spans()
    publish = mtask.otel.publishing(tracer_provider=spans.provider)
    tasks = mongo[database_name]["tasks"]
    with Client(mongo_uri, database=database_name, middleware=[publish]) as traced_client:
        traced_client.publish("mail", key="1")
        traced_client.publish("mail", key="1", if_exists="update")
        _, second = spans.of("publish")
        assert tasks.find_one({"_id": "mail:1"})["trace"]["traceparent"].split("-")[2] == second.span_id  # type: ignore[index]
    with Client(mongo_uri, database=database_name) as plain:
        plain.publish("mail", key="1", if_exists="update")
        assert "trace" not in (tasks.find_one({"_id": "mail:1"}) or {})
        plain.publish("mail", key="2")
        tasks.update_one({"_id": "mail:2"}, {"$set": {"trace": {"traceparent": "nonsense"}}})
        assert plain.get("mail", "2").trace is not None


@pytest.mark.parametrize("kind", ["untraced", "samples nothing", "samples all"])
async def test_a_traced_task_takes_the_same_writes(
    working: Working, database_name: str, mongo: Mongo, kind: str
) -> None:
    app = App()
    if kind != "untraced":
        spans = Spans(sampler=ALWAYS_OFF) if kind == "samples nothing" else Spans()
        mtask.otel.instrument(app, tracer_provider=spans.provider)

    @app.task
    async def noop() -> None: ...

    async with working(app) as bench, client_of(bench, app) as it:
        database = mongo[database_name]
        await it.publish(noop, key="first")
        await bench.status("noop:first", "SUCCESS")
        changes = [{"op": {"$in": ["update", "insert", "remove"]}}, {"command.findAndModify": "tasks"}]
        writes = {"ns": f"{database_name}.tasks", "$or": changes}
        profile = database["system.profile"]
        database.command("profile", 2)
        try:
            await it.publish(noop, key="1")
            await bench.status("noop:1", "SUCCESS")
            await until(lambda: profile.count_documents(writes) >= 3, message="publish, claim and finish")
            await bench.at_rest()
        finally:
            database.command("profile", 0)
        assert profile.count_documents(writes) == 3
