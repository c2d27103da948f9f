"""Children under a worker: handlers add tasks to their flow while their lease lives, and read what they waited for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mtask import App, Child, Context, Fail, Flow, LeaseLost, Next
from mtask.errors import InvalidFlow, InvalidOption, MtaskError, NotInFlow, StepExists
from mtask.testing import bench
from tests.integration.features.flows.test_flows import Document, ended, statuses, steps
from tests.integration.worker_harness import Bench, Working
from tests.mongo import until


def make_app(seen: dict[str, Any]) -> App:
    app = App()

    @app.task(name="work")
    async def work(n: int = 0) -> int:
        return n

    @app.task(name="urgent", priority=9, queue="fast")
    async def urgent() -> str:
        return "urgent"

    @app.task(name="split")
    async def split(context: Context, parts: int) -> str:
        first = await context.add_child("extra", "urgent")
        seen["first"] = first
        children = [Child(f"part-{n}", work, {"n": n}) for n in range(parts)]
        seen["children"] = await context.add_children(children)
        seen["again"] = await context.add_children(children)
        return "split"

    @app.task(name="split-sync")
    def split_sync(context: Context) -> None:
        context.add_child("part-1", work, {"n": 1})
        seen["added"] = context.add_children([Child("part-1", work, {"n": 1}), Child("part-2", work)]).get()

    @app.task(name="total")
    async def total(context: Context) -> int:
        seen["results"] = await context.results()
        seen["pairs"] = [step async for step, _ in context.results()]
        return sum(value for value in seen["results"].values() if isinstance(value, int))

    @app.task(name="total-sync")
    def total_sync(context: Context) -> int:
        seen["results"] = dict(context.results())
        return sum(value for _, value in context.results() if isinstance(value, int))

    return app


async def test_dependents_wait_for_children_and_get_their_results(working: Working) -> None:
    seen: dict[str, Any] = {}
    queues = ["default", "fast"]
    async with working(make_app(seen), queues=queues) as bench:
        flow = Flow("f", priority=3)
        split = flow.add("split", "split", {"parts": 250})
        flow.add("total", "total", after=[split])
        await bench.client.publish_flow(flow)
        await ended(bench)
        assert set(statuses(bench).values()) == {"SUCCESS"}
        found = steps(bench)
        released = found["total"]["flow"]["release_time"]
        children = [document for document in found.values() if document["flow"].get("ancestors")]
        assert len(children) == 251
        assert all(document["task_state"]["finish_time"] <= released for document in children)
        assert found["part-7"]["flow"]["ancestors"] == ["split:f/split"]
        assert found["part-7"]["task_option"]["priority"] == 3
        assert (found["extra"]["task_option"]["priority"], found["extra"]["queue"]) == (9, "fast")
        assert found["total"]["task_state"]["worker_states"][0]["returns"] == sum(range(250))
    assert (seen["first"].task_id, seen["first"].created) == ("urgent:f/extra", True)
    assert {published.created for published in seen["children"]} == {True}
    assert {published.created for published in seen["again"]} == {False}
    expected = {"split": "split", "extra": "urgent", **{f"part-{n}": n for n in range(250)}}
    assert seen["results"] == expected
    assert sorted(seen["pairs"]) == sorted(expected)


async def test_a_sync_handler_adds_children_and_reads_results_without_await(working: Working) -> None:
    seen: dict[str, Any] = {}
    async with working(make_app(seen)) as bench:
        flow = Flow("f")
        flow.add("total", "total-sync", after=[flow.add("split", "split-sync")])
        await bench.client.publish_flow(flow)
        await ended(bench)
        assert set(statuses(bench).values()) == {"SUCCESS"}
        assert await bench.client.result("total-sync", "f/total") == 1
    assert [published.created for published in seen["added"]] == [False, True]
    assert seen["results"] == {"split": None, "part-1": 1, "part-2": 0}


async def test_children_of_a_failed_try_stay_and_the_next_try_finds_them(working: Working) -> None:
    created: list[bool] = []
    app = make_app({})

    @app.task(name="fragile")
    async def fragile(context: Context) -> None:
        created.append((await context.add_child("c", "work")).created)
        if len(created) == 1:
            raise RuntimeError("after the child")

    async with working(app) as bench:
        flow = Flow("f")
        flow.add("p", "work", after=[flow.add("d", "fragile", retry_delay=0)])
        await bench.client.publish_flow(flow)
        await ended(bench)
        assert statuses(bench) == {"d": "SUCCESS", "c": "SUCCESS", "p": "SUCCESS"}
        assert len(steps(bench)["c"]["task_state"]["worker_states"]) == 1
    assert created == [True, False]


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_run_that_loses_its_lease_adds_no_child(working: Working, kind: str) -> None:
    """The lease lapses and another run takes the task; the first run then adds a child: none stays."""
    errors: list[BaseException] = []
    held, free = threading.Event(), threading.Event()
    app = make_app({})

    @app.task(name="async")
    async def slow(context: Context) -> None:
        held.set()
        await asyncio.to_thread(free.wait, 30)
        try:
            await context.add_child("ghost", "work")
        except MtaskError as error:
            errors.append(error)
            raise

    @app.task(name="sync")
    def slow_sync(context: Context) -> None:
        held.set()
        free.wait(30)
        try:
            context.add_child("ghost", "work")
        except MtaskError as error:
            errors.append(error)
            raise

    async with working(app) as bench:
        # Nothing tells the worker of its loss but the child.
        bench.worker.parts.pinger.apply = lambda *_: None  # type: ignore[method-assign]
        flow = Flow("f")
        flow.add("p", "work", after=[flow.add("d", kind)])
        await bench.client.publish_flow(flow)
        await until(held.is_set, message="the handler runs")
        take_away(bench, f"{kind}:f/d")
        free.set()
        await until(lambda: bool(errors), message="the first run has ended")
        assert isinstance(errors[0], LeaseLost)
        assert bench.tasks.find_one({"flow.step": "ghost"}) is None
        assert "owed_tasks" not in bench.document(f"{kind}:f/d")
        assert bench.document(f"{kind}:f/d")["flow"].get("has_children") is None


def take_away(bench: Bench, task_id: str) -> None:
    """Close the task's run, as a worker does that preempts it."""
    run = {"task_state.worker_states.0.status": "TIMEOUT", "task_state.status": "FAIL"}
    bench.tasks.update_one({"_id": task_id}, {"$set": run, "$unset": {"task_state.next_preempt_time": 1}})


async def test_a_canceled_task_adds_no_child_and_ends_at_once(working: Working) -> None:
    app = make_app({})
    canceled = asyncio.Event()
    told: list[str] = []

    @app.task(name="stubborn")
    async def stubborn(context: Context) -> None:
        await canceled.wait()
        try:
            await context.add_child("c", "work")
        except MtaskError as error:
            told.append(type(error).__name__)
            raise

    async with working(app) as bench:
        # The worker learns of the cancel by the child alone.
        bench.worker.parts.pinger.apply = lambda *_: None  # type: ignore[method-assign]
        flow = Flow("f")
        flow.add("d", "stubborn")
        await bench.client.publish_flow(flow)
        await bench.status("stubborn:f/d", "RUNNING")
        bench.tasks.update_one({"_id": "stubborn:f/d"}, {"$set": {"task_state.cancel_requested": True}})
        canceled.set()
        state = await bench.status("stubborn:f/d", "CANCELED")
        assert told == ["RunCanceled"]
        assert state["worker_states"][0]["status"] == "CANCELED"
        assert list(steps(bench)) == ["d"]


async def test_what_cannot_be_a_child_is_refused_before_anything_is_written(working: Working) -> None:
    raised: dict[str, type[BaseException]] = {}
    app = make_app({})

    @app.task(name="wrong", lookup=["case"])
    async def wrong(context: Context, case: str) -> None:
        children: Any = {
            "slash": [Child("a", "work"), Child("a/b", "work")],
            "twice": [Child("a", "work"), Child("a", "work")],
            "option": [Child("a", "work"), Child("b", "work", priority=2**40)],
            "existing": [Child("a", "work"), Child("taken", "work")],
            "no child": [Child("a", "work"), "b"],
        }[case]
        try:
            await context.add_children(children)
        except Exception as error:
            raised[case] = type(error)

    @app.task(name="alone")
    async def alone(context: Context) -> None:
        await context.add_child("a", "work")

    @app.task(name="in-transaction")
    async def in_transaction(context: Context) -> None:
        async with context.transaction():
            await context.add_child("a", "work")

    async with working(app) as bench:
        cases = ["slash", "twice", "option", "existing", "no child"]
        flow = Flow("f")
        taken = flow.add("taken", "work")
        for case in cases:
            flow.add(case, "wrong", {"case": case}, after=[taken])
        flow.add("t", "in-transaction", max_retries=0)
        await bench.client.publish_flow(flow)
        await bench.client.publish("alone", key="k", max_retries=0)
        await ended(bench)
        assert set(steps(bench)) == {"taken", "t", *cases}
        state = await bench.status("alone:k", "FAIL")
        assert "NotInFlow: task alone:k is of no flow" in state["worker_states"][0]["fail_reason"]
        reason = bench.state("in-transaction:f/t")["worker_states"][0]["fail_reason"]
        assert "add children before context.transaction()" in reason
    assert raised == {
        "slash": InvalidFlow,
        "twice": InvalidFlow,
        "option": InvalidOption,
        "existing": StepExists,
        "no child": InvalidFlow,
    }
    assert issubclass(NotInFlow, MtaskError)


def test_children_of_children_end_at_a_depth(mongo_uri: str) -> None:
    app = App()

    @app.task(name="deeper", max_retries=0)
    async def deeper(context: Context, level: int) -> None:
        await context.add_child(f"level-{level + 1}", deeper, {"level": level + 1})

    @app.task(name="total")
    async def total() -> None: ...

    with bench(app, uri=mongo_uri) as made:
        flow = Flow("f")
        flow.add("total", total, after=[flow.add("level-0", deeper, {"level": 0})], on_failed="run")
        made.client.publish_flow(flow)
        made.run()
        found: dict[str, Document] = {document["_id"]: document for document in made.client.tasks.find()}
        assert len(found) == 18
        assert len(found["deeper:f/level-16"]["flow"]["ancestors"]) == 16
        assert "16 levels deep" in (made.client.get("deeper", "f/level-16").fail_reason or "")
        assert made.client.get("total", "f/total").status == "SUCCESS"


def test_a_flow_that_is_full_takes_no_more_children(mongo_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtask.features.flows.publish.MAX_STEPS", 4)
    app = App()

    @app.task(name="split")
    async def split(context: Context) -> None:
        await context.add_children([Child("a", work), Child("b", work)])
        for step in "cd":
            try:
                await context.add_child(step, work)
            except InvalidFlow as error:
                raise Fail(f"{step}: {error}") from None

    @app.task(name="work")
    async def work() -> Next | None:
        return None

    with bench(app, uri=mongo_uri) as made:
        flow = Flow("f")
        flow.add("split", split)
        made.client.publish_flow(flow)
        made.run()
        assert "d: flow 'f': 1 more tasks do not fit" in (made.client.get("split", "f/split").fail_reason or "")
        assert made.client.count() == 4


async def test_readers_of_events_see_a_child_as_a_task_like_any_other(working: Working) -> None:
    app = make_app({})

    @app.task(name="parent")
    async def parent(context: Context) -> Next:
        await context.add_child("c", "work")
        return Next("work")

    async with working(app) as bench:
        flow = Flow("f")
        flow.add("d", "parent")
        async with bench.client.events(key=["f/d", "f/c", "f/d/next-1"]) as happening:
            await bench.client.publish_flow(flow)
            seen: dict[str, list[tuple[str, str | None]]] = {}
            while sum(map(len, seen.values())) < 9:
                event = await anext(happening)
                seen.setdefault(event.key, []).append((event.kind.value, event.task_status))
            await ended(bench)
        of_one = [("published", "INIT"), ("claimed", "RUNNING"), ("succeeded", "SUCCESS")]
        assert seen == dict.fromkeys(["f/d", "f/c", "f/d/next-1"], of_one)
