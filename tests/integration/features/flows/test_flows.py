"""Flows under a worker: steps run in order, failures do what the flow says, and what a dead worker left is done."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from mtask import App, Context, Flow
from mtask.errors import Fail
from mtask.testing import bench
from tests.integration.worker_harness import Bench, Working
from tests.mongo import until

Document = dict[str, Any]


def make_app() -> App:
    app = App()

    @app.task(name="work")
    async def work(n: int = 0) -> int:
        return n

    @app.task(name="fail")
    async def fail() -> None:
        raise Fail("no luck")

    @app.task(name="transact")
    async def transact(context: Context) -> None:
        async with context.transaction():
            pass

    return app


def steps(bench: Bench) -> dict[str, Document]:
    return {document["flow"]["step"]: document for document in bench.tasks.find({"flow": {"$exists": True}})}


def statuses(bench: Bench) -> dict[str, str]:
    return {step: document["task_state"]["status"] for step, document in steps(bench).items()}


async def ended(bench: Bench) -> None:
    """Wait until all tasks have ended, and nobody is owed anything."""
    is_open = {
        "$or": [{"task_state.status": {"$in": ["WAITING", "INIT", "RUNNING"]}}, {"owed_since": {"$exists": True}}]
    }
    await until(lambda: bench.tasks.find_one(is_open) is None, message="the flow has ended")


def assert_in_order(bench: Bench) -> None:
    """Check that no step began before its dependencies had ended, by the server's clock."""
    by_id = {document["_id"]: document for document in steps(bench).values()}
    for document in by_id.values():
        runs = document["task_state"]["worker_states"]
        first: datetime | None = min((run["claim_time"] for run in runs), default=None)
        for other in document["flow"]["after"]:
            if first is not None:
                assert by_id[other]["task_state"]["finish_time"] <= document["flow"]["release_time"] <= first


async def test_steps_run_in_order_once_each(working: Working) -> None:
    async with working(make_app()) as bench:
        flow = Flow("f")
        last = flow.add("0", "work")
        for number in range(1, 20):
            last = flow.add(str(number), "work", {"n": number}, after=[last])
        sides = [flow.add(f"side-{n}", "transact", after=[last]) for n in range(30)]
        flow.add("end", "work", after=sides)
        assert (await bench.client.publish_flow(flow)).created
        await ended(bench)
        assert set(statuses(bench).values()) == {"SUCCESS"}
        runs = {key: document["task_state"]["worker_states"] for key, document in steps(bench).items()}
        # A transaction that meets a write of the settling conflicts and goes back: nothing of it was kept. And what
        # had no slot in time was handed back: its handler was not called.
        kept = {
            key: [run for run in found if not run.get("conflict") and "no slot free" not in run.get("fail_reason", "")]
            for key, found in runs.items()
        }
        assert {key: found for key, found in kept.items() if len(found) != 1} == {}
        assert_in_order(bench)


async def test_a_failure_cancels_what_depends_on_it_and_runs_the_clean_up(working: Working) -> None:
    async with working(make_app()) as bench:
        flow = Flow("f")
        bad, good = flow.add("bad", "fail"), flow.add("good", "work")
        total = flow.add("total", "work", after=[bad, good])
        flow.add("report", "work", after=[total], on_failed="fail")
        flow.add("clean", "work", after=[total], on_failed="run")
        await bench.client.publish_flow(flow)
        await ended(bench)
        expected = {"bad": "FAIL", "good": "SUCCESS", "total": "CANCELED", "report": "FAIL", "clean": "SUCCESS"}
        assert statuses(bench) == expected
        assert_in_order(bench)


async def test_what_a_worker_that_died_after_its_finish_owes_is_done_by_another(working: Working) -> None:
    async with working(make_app()) as bench:
        bench.worker.parts.settlers[0].submit = lambda task_id: None  # type: ignore[method-assign]
        flow = Flow("f")
        flow.add("b", "work", after=[flow.add("a", "work")])
        await bench.client.publish_flow(flow)
        await bench.status("work:f/a", "SUCCESS")
        await ended(bench)
        assert statuses(bench) == {"a": "SUCCESS", "b": "SUCCESS"}


async def test_a_worker_hears_of_the_first_step_of_a_flow_that_is_not_for_it(working: Working) -> None:
    """It may be the only one that lives when somebody must look after the flow."""
    async with working(make_app()) as bench:
        parts = bench.worker.parts
        assert not parts.scope.ledger.owing
        heard = parts.stream.event_cnt
        flow = Flow("f", queue="elsewhere")
        flow.add("b", "work", after=[flow.add("a", "work")])
        await bench.client.publish_flow(flow)
        await bench.heard(heard)
        await until(lambda: "flow" in parts.scope.ledger.owing, message="the worker knows")
        later = Flow("g")
        later.add("a", "work", delay=3600)
        await bench.client.publish_flow(later)
        await bench.heard(heard + 1)
        await bench.at_rest()
        assert statuses(bench) == {"a": "INIT", "b": "WAITING"}
        assert not parts.queue.ready_count(time.monotonic() + 7200)


async def test_a_worker_looks_for_flows_when_its_stream_was_broken(working: Working) -> None:
    async with working(make_app()) as bench:
        ledger, scans = bench.worker.parts.scope.ledger, bench.worker.parts.scans
        flow = Flow("f", queue="elsewhere")
        flow.add("a", "work")
        await bench.client.publish_flow(flow)
        await until(lambda: "flow" in ledger.owing, message="the event")
        ledger.owing.clear()
        scans.ask_full()
        await until(lambda: "flow" in ledger.owing, message="a full scan looks for flows")


async def test_the_end_of_a_step_that_waits_for_a_failed_one_is_told_without_a_scan(working: Working) -> None:
    async with working(make_app()) as bench:
        bench.stop_scans()
        flow = Flow("f")
        flow.add("b", "work", after=[flow.add("a", "fail")], callback={"url": "https://hooks.example.com/"})
        await bench.client.publish_flow(flow)
        await bench.status("work:f/b", "CANCELED")
        deliveries = {"name": "mtask/callback"}
        await until(lambda: bench.tasks.count_documents(deliveries) == 1, 30.0, "its delivery is published")


async def test_a_release_is_an_event_of_its_own(working: Working) -> None:
    async with working(make_app()) as bench:
        flow = Flow("f")
        bad, good = flow.add("bad", "fail"), flow.add("good", "work")
        flow.add("after-good", "work", after=[good])
        flow.add("after-bad", "work", after=[bad])
        async with bench.client.events(key=["f/after-good", "f/after-bad"]) as happening:
            await bench.client.publish_flow(flow)
            seen: dict[str, list[tuple[str, str | None, str | None]]] = {}
            while sum(map(len, seen.values())) < 6:
                event = await anext(happening)
                told = (event.kind.value, event.task_status, event.queue)
                seen.setdefault(event.key, []).append(told)
                if event.key == "f/after-bad" and event.is_end:
                    assert "work" not in (event.reason or "")
                    assert "fail:f/bad failed" in (event.reason or "")
        assert seen == {
            "f/after-good": [
                ("published", "WAITING", "default"),
                ("released", "INIT", "default"),
                ("claimed", "RUNNING", "default"),
                ("succeeded", "SUCCESS", "default"),
            ],
            "f/after-bad": [("published", "WAITING", "default"), ("canceled", "CANCELED", "default")],
        }


async def test_a_worker_leaves_waiting_tasks_alone(working: Working) -> None:
    async with working(make_app()) as bench:
        flow = Flow("f")
        flow.add("b", "work", after=[flow.add("a", "work", delay=3600)])
        await bench.client.publish_flow(flow)
        scans = bench.worker.parts.scans
        seen = scans.scan_cnt
        scans.ask_full()
        await bench.worker.parts.scans._janitor.look_for_malformed()
        await until(lambda: scans.scan_cnt > seen, message="a scan")
        await bench.at_rest()
        assert statuses(bench) == {"a": "INIT", "b": "WAITING"}


def test_the_bench_of_users_runs_a_flow_to_its_end(mongo_uri: str) -> None:
    with bench(make_app(), uri=mongo_uri) as made:
        flow = Flow("f")
        flow.add("c", "work", after=[flow.add("b", "work", after=[flow.add("a", "work")])])
        made.client.publish_flow(flow)
        made.run()
        assert {task.status for task in made.client.find()} == {"SUCCESS"}
