"""Next under a worker: a task goes on as another one in the write of its success, once, whatever happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mtask import App, Client, Context, Flow, Next
from mtask.errors import DatabaseUnavailable
from mtask.features.flows import publish
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from mtask.testing import bench
from tests.clients import claim
from tests.integration.features.flows.test_flows import Document, ended, statuses, steps
from tests.integration.worker_harness import Bench, Working, between
from tests.mongo import Client as Mongo
from tests.mongo import until

QUEUES = ["default", "a", "b", "c"]


def make_app(seen: dict[str, Any] | None = None) -> App:
    """Return an app with a chain "first", "second", "third" through three queues."""
    seen = {} if seen is None else seen
    app = App()

    @app.task(name="first", queue="a", lookup=["user"])
    async def first(user: int) -> Next:
        return Next("second", {"n": user + 1}, returns={"from": "first"}, priority_diff=2, lookup={"stage": "second"})

    @app.task(name="second", queue="b", max_retries=7)
    async def second(context: Context, n: int) -> Next:
        seen["second"] = await context.results()
        return Next(third, n + 1, returns="of second", priority_diff=-1)

    @app.task(name="third", queue="c")
    def third(context: Context, n: int) -> int:
        seen["third"] = dict(context.results())
        return n + 1

    @app.task(name="work")
    async def work() -> int:
        return 1

    @app.task(name="twofold", concurrent_worker_cnt=2)
    async def twofold(context: Context) -> Next:
        return Next("work", returns=context.worker_id)

    @app.task(name="always", next="after")
    async def always(user: int) -> str:
        return f"always {user}"

    @app.task(name="after")
    async def after(context: Context, user: int) -> str:
        return f"after {await context.results()}"

    @app.task(name="by-flow", next={"import": "work", "fast": "after-fast"})
    async def by_flow() -> None: ...

    @app.task(name="after-fast")
    async def after_fast() -> None: ...

    @app.task(name="wrong")
    async def wrong(how: str) -> Next:
        return {
            "params": lambda: Next(third, {"m": 1}),
            "name": lambda: Next("no name"),
            "value": lambda: Next("work", returns=object()),
            "priority": lambda: Next("work", priority=3),
            "diff": lambda: Next("work", priority_diff=2**40),
        }[how]()

    return app


def the(bench: Bench, task_id: str) -> Document:
    return bench.document(task_id)


async def succeeded(bench: Bench, task_id: str) -> None:
    """Wait until there is such a task, and it has succeeded."""
    await until(lambda: bench.tasks.find_one({"_id": task_id}), message=f"{task_id} is published")
    await bench.status(task_id, "SUCCESS")


async def test_a_chain_runs_through_three_queues(working: Working) -> None:
    seen: dict[str, Any] = {}
    async with working(make_app(seen), queues=QUEUES) as bench:
        await bench.client.publish("first", {"user": 7}, key="k", priority=1, queue="a", lookup={"user": 7})
        await succeeded(bench, "third:@first:k/next-2")
        await ended(bench)
        chain_ids = ("first:k", "second:@first:k/next-1", "third:@first:k/next-2")
        first, second, third = (the(bench, task_id) for task_id in chain_ids)
        assert bench.tasks.count_documents({}) == 3
        assert [each["queue"] for each in (first, second, third)] == ["a", "b", "c"]
        assert [each["task_option"]["priority"] for each in (first, second, third)] == [1, 3, 2]
        assert second["task_option"]["max_unexpected_retries"] == 7, "its handler's defaults hold"
        run_ids = [each["task_state"]["worker_states"][0]["run_id"] for each in (first, second)]
        chain = {"before": "first:k", "first": "first:k", "number": 1, "run_id": run_ids[0]}
        assert second["chain"] == chain
        assert third["chain"] == chain | {"before": "second:@first:k/next-1", "number": 2, "run_id": run_ids[1]}
        assert first["task_state"]["next_id"] == "second:@first:k/next-1"
        assert not {"owed_since", "owed_tasks", "expire_time", "flow"} & {*first, *second, *third}
        assert await bench.client.result("first", "k") == {"from": "first"}
        assert await bench.client.result("third", "@first:k/next-2") == 10
        found = await bench.client.find(lookup={"user": 7})
        assert {task.name for task in found} == {"first", "second", "third"}
        assert {task.name for task in await bench.client.find(lookup={"stage": "second"})} == {"second", "third"}
    assert seen == {"second": {"first": {"from": "first"}}, "third": {"second": "of second"}}


async def test_the_reply_to_the_finish_is_lost_and_there_is_one_next_task(working: Working) -> None:
    async with working(make_app(), queues=QUEUES) as bench:
        lost: list[bool] = []

        async def lose() -> None:
            if len(lost) < 2:
                lost.append(True)
                raise DatabaseUnavailable("the reply is lost")

        finishing = between(bench.store, "finish", after=lose)
        await bench.client.publish("first", {"user": 1}, key="k", queue="a")
        await succeeded(bench, "third:@first:k/next-2")
        await ended(bench)
        assert finishing.seen_cnt > 3
        assert bench.tasks.count_documents({}) == 3
        assert all(len(each["task_state"]["worker_states"]) == 1 for each in bench.tasks.find())


async def test_what_a_worker_that_died_after_its_finish_owes_is_published_by_another(working: Working) -> None:
    """Meanwhile neither retention, nor purge, nor a removal takes the task away that owes the next one."""
    async with working(make_app(), queues=["default", "a"]) as bench:
        parts = bench.worker.parts
        parts.settlers[0].submit = lambda task_id: None  # type: ignore[method-assign]
        upkeeps, parts.scans.upkeeps = parts.scans.upkeeps, ()
        await bench.client.keep("a", success=0)
        await bench.client.publish("first", {"user": 1}, key="k", queue="a", retain_success=0)
        await bench.status("first:k", "SUCCESS")
        assert "expire_time" not in the(bench, "first:k")
        assert await bench.client.purge(name="first") == 0
        await bench.client.keep("a")
        parts.scans.upkeeps = upkeeps
        await until(lambda: bench.tasks.find_one({"_id": "second:@first:k/next-1"}), message="published by a scan")
        await until(lambda: not bench.tasks.find_one({"owed_since": {"$exists": True}}), message="crossed off")
        gone = bench.tasks.find_one({"_id": "first:k"})
        assert gone is None or "expire_time" in gone


async def test_the_outbox_gap_of_a_flow(working: Working) -> None:
    """D1 goes on, and its worker dies right after the finish; D2 ends: P starts only after the chain."""
    app = make_app()
    opened = asyncio.Event()

    @app.task(name="d2")
    async def d2() -> None:
        await opened.wait()

    async with working(app, queues=QUEUES) as bench:
        submit = bench.worker.parts.settlers[0].submit

        def die_once(task_id: str) -> None:
            if task_id != "first:f/d1":
                submit(task_id)

        bench.worker.parts.settlers[0].submit = die_once  # type: ignore[method-assign]
        flow = Flow("f", retain_success=0)
        after = [flow.add("d1", "first", {"user": 1}, queue="a"), flow.add("d2", "d2")]
        flow.add("p", "work", after=after)
        await bench.client.publish_flow(flow)
        for queue in QUEUES:
            await bench.client.keep(queue, success=0)
        await bench.status("first:f/d1", "SUCCESS")
        opened.set()
        await bench.status("d2:f/d2", "SUCCESS")
        await ended(bench)
        found = steps(bench)
        assert statuses(bench) == dict.fromkeys(["d1", "d1/next-1", "d1/next-2", "d2", "p"], "SUCCESS")
        assert found["d1/next-2"]["flow"]["ancestors"] == ["first:f/d1"]
        released = found["p"]["flow"]["release_time"]
        assert all(found[step]["task_state"]["finish_time"] <= released for step in found if step != "p")
        assert len(found["p"]["task_state"]["worker_states"]) == 1


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_rerun_does_not_go_on_again(working: Working, is_removed: bool) -> None:
    async with working(make_app(), queues=QUEUES) as bench:
        await bench.client.publish("second", {"n": 1}, key="k", queue="b")
        await succeeded(bench, "third:@second:k/next-1")
        if is_removed:
            assert await bench.client.remove("third", "@second:k/next-1")
        await bench.client.rerun("second", "k")
        await bench.status("second:k", "SUCCESS")
        await until(lambda: not bench.tasks.find_one({"owed_since": {"$exists": True}}), message="nothing is owed")
        await ended(bench)
        left = {"second:k"} if is_removed else {"second:k", "third:@second:k/next-1"}
        assert {each["_id"] for each in bench.tasks.find()} == left
        assert all(len(each["task_state"]["worker_states"]) <= 2 for each in bench.tasks.find())


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_in_a_transaction_the_result_and_the_next_task_are_in_the_commit(
    working: Working, database_name: str, mongo: Mongo, kind: str
) -> None:
    app = make_app()
    tries: list[bool] = []
    committed: list[Document] = []

    @app.task(name="async")
    async def pay(context: Context) -> str:
        async with context.transaction() as session:
            await session.client[database_name]["effects"].insert_one({"n": 1}, session=session)
            context.set_result(Next("work", returns="paid"))
            tries.append(True)
            if len(tries) == 1:
                raise RuntimeError("the first one is rolled back")
        look()
        return "ignored"

    @app.task(name="sync")
    def pay_sync(context: Context) -> str:
        with context.transaction() as session:
            session.client[database_name]["effects"].insert_one({"n": 1}, session=session)
            context.set_result(Next("work", returns="paid"))
            tries.append(True)
            if len(tries) == 1:
                raise RuntimeError("the first one is rolled back")
        look()
        return "ignored"

    def look() -> None:
        committed.append(mongo[database_name]["tasks"].find_one({"name": kind}) or {})

    async with working(app) as bench:
        await bench.client.publish(kind, key="k", retry_delay=0)
        await succeeded(bench, f"work:@{kind}:k/next-1")
        await ended(bench)
        assert await bench.client.result(kind, "k") == "paid"
        assert mongo[database_name]["effects"].count_documents({}) == 1
        assert bench.tasks.count_documents({}) == 2
    assert len(tries) == 2
    [document] = committed
    assert document["task_state"]["next_id"] == f"work:@{kind}:k/next-1"
    assert document["task_state"]["worker_states"][-1]["returns"] == "paid"
    assert [owed["_id"] for owed in document["owed_tasks"]] == [f"work:@{kind}:k/next-1"]


@pytest.mark.parametrize("kind", ["returned", "committed"])
async def test_next_task_beyond_the_size_of_a_flow_fails_the_run(
    working: Working, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(publish, "MAX_STEPS", 4)
    app = App()

    @app.task(name="returned")
    async def returned() -> Next:
        return Next("returned")

    @app.task(name="committed")
    async def committed(context: Context) -> None:
        async with context.transaction():
            context.set_result(Next("committed"))

    async with working(app) as bench:
        flow = Flow("f")
        flow.add("s", kind)
        await bench.client.publish_flow(flow)
        found = await bench.client.wait_flow("f", timeout=20)
        assert found.counts == {"SUCCESS": 3, "FAIL": 1}
        failed = await bench.client.get(kind, "f/s/next-3")
        assert "cannot go on" in (failed.fail_reason or "")
        assert "it has 4, and 4 are the most" in (failed.fail_reason or "")


async def test_next_tasks_of_one_flow_are_counted_together_and_those_that_fit_go_on(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "MAX_STEPS", 10)
    counts: list[int] = []
    take = publish.take

    def counting(key: str, count: int) -> Operation[None]:
        counts.append(count)
        yield from take(key, count)

    monkeypatch.setattr(publish, "take", counting)
    app, begun, goes_on = App(), list[bool](), asyncio.Event()

    @app.task(name="work")
    async def work() -> Next:
        begun.append(True)
        await goes_on.wait()
        return Next("last")

    @app.task(name="last")
    async def last() -> None: ...

    async with working(app) as bench:
        flow = Flow("f")
        for number in range(6):
            flow.add(f"s{number}", "work")
        await bench.client.publish_flow(flow)
        await until(lambda: len(begun) == 6)
        goes_on.set()
        found = await bench.client.wait_flow("f", timeout=20)
        assert found.counts == {"SUCCESS": 8, "FAIL": 2}
        ended = [run for document in bench.tasks.find() for run in document["task_state"]["worker_states"]]
        assert all(("success_time" in run) is (run["status"] == "SUCCESS") for run in ended)
        assert all(("fail_time" in run) is (run["status"] == "FAIL") for run in ended)
    assert counts == [6, 1, 1, 1, 1, 1, 1]


def test_a_result_that_cannot_be_stored_rolls_the_transaction_back(mongo_uri: str, database_name: str) -> None:
    app = make_app()

    @app.task(name="pay")
    async def pay(context: Context) -> None:
        async with context.transaction():
            context.set_result(Next("no name"))

    @app.task(name="late")
    async def late(context: Context) -> Next:
        async with context.transaction():
            pass
        return Next("work")

    with bench(app, uri=mongo_uri) as made:
        made.client.publish(pay, key="k")
        made.client.publish(late, key="k")
        made.run()
        assert made.client.get(pay, "k").status == "FAIL"
        assert "'no name' is not a task name" in (made.client.get(pay, "k").fail_reason or "")
        assert made.client.get(late, "k").status == "SUCCESS"
        assert made.client.count() == 2


def test_decorated_handlers_always_go_on(mongo_uri: str) -> None:
    with bench(make_app(), uri=mongo_uri) as made:
        made.client.publish("always", {"user": 3}, key="k", priority=4)
        made.client.publish("by-flow", key="alone")
        for key in ("import/1", "fast", "other/import"):
            flow = Flow(key)
            flow.add("s", "by-flow")
            made.client.publish_flow(flow)
        made.run()
        next_one = made.client.get("after", "@always:k/next-1")
        assert (next_one.params, next_one.task_option.priority) == ({"user": 3}, 4)
        assert next_one.returns == "after {'always': 'always 3'}"
        assert {task.id for task in made.client.find(limit=0)} == {
            "always:k", "after:@always:k/next-1", "by-flow:alone",
            "by-flow:import/1/s", "work:import/1/s/next-1",
            "by-flow:fast/s", "after-fast:fast/s/next-1",
            "by-flow:other/import/s",
        }  # fmt: skip
        assert {task.status for task in made.client.find(limit=0)} == {"SUCCESS"}


def test_a_next_task_that_cannot_be_published_fails_its_task(mongo_uri: str) -> None:
    expected = {
        "params": "params of 'third'",
        "name": "'no name' is not a task name",
        "value": "cannot be stored as BSON",
        "priority": "takes priority_diff instead",
        "diff": "option priority",
    }
    with bench(make_app(), uri=mongo_uri) as made:
        for how in expected:
            made.client.publish("wrong", {"how": how}, key=how)
        made.client.publish("always", {"user": 3}, key="x" * 510)
        made.run()
        for how, reason in expected.items():
            assert reason in (made.client.get("wrong", how).fail_reason or "")
        assert "is not a key" in (made.client.get("always", "x" * 510).fail_reason or "")
        assert made.client.count(status="FAIL") == made.client.count() == 6


async def test_of_several_workers_the_one_that_makes_the_task_final_goes_on(working: Working) -> None:
    async with working(make_app(), worker_id="w1") as bench:
        await bench.client.publish("twofold", key="k", concurrent_worker_cnt=2)
        await until(lambda: len(bench.state("twofold:k")["worker_states"]) == 1, message="one run")
        runs: Any = None
        while runs != ["SUCCESS"]:
            runs = [run["status"] for run in bench.state("twofold:k")["worker_states"]]
            await asyncio.sleep(0.01)
        assert not {"owed_tasks", "owed_since"} & {*the(bench, "twofold:k")}
        assert "next_id" not in bench.state("twofold:k"), "no next task was published meanwhile"
        async with working(make_app(), worker_id="w2"):
            await bench.status("twofold:k", "SUCCESS")
            await succeeded(bench, "work:@twofold:k/next-1")
        assert bench.tasks.count_documents({}) == 2


def test_a_short_statement_serves_no_task_that_goes_on(store: SyncStore, client: Client) -> None:
    client.publish("first", key="k")
    run_id = claim(store, "first:k")
    fixed = {"_id": "next:k/next-1", "name": "next", "key": "k/next-1", "queue": "default", "params": None}
    outcome = Outcome("first:k", run_id, RunStatus.SUCCESS, next=OwedTask(fixed))
    assert store.run(claims.finish([outcome], is_simple=True)) == {run_id}
    document = store.tasks.find_one({"_id": "first:k"}) or {}
    assert [owed["_id"] for owed in document["owed_tasks"]] == ["next:k/next-1"]


async def test_a_task_that_owes_its_next_one_is_removed_after_it_is_published(working: Working) -> None:
    async with working(make_app(), queues=["a"]) as bench:
        bench.worker.parts.settlers[0].submit = lambda task_id: None  # type: ignore[method-assign]
        await bench.client.publish("first", {"user": 1}, key="k", queue="a")
        await bench.status("first:k", "SUCCESS")
        assert await bench.client.remove("first", "k")
        assert {each["_id"] for each in bench.tasks.find()} == {"second:@first:k/next-1"}
