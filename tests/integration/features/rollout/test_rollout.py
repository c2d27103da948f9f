"""Workers of two versions of the code: which task runs where, what is handed on, and why the others wait."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, Client, Flow, TaskSpec
from mtask.errors import InvalidParams
from mtask.features.isolation.options import ExecutorOptions
from mtask.features.registry.rules import hash_of
from mtask.features.rollout import worker as rollout
from mtask.features.rollout.rules import is_known_version, of_known_versions
from mtask.kernel.document.handlers import Handler
from mtask.kernel.driver.stores import SyncStore
from tests import build
from tests.integration.cli.commands import Commands
from tests.integration.features.registry.apps import registered
from tests.integration.features.rollout import apps
from tests.integration.worker_harness import Bench, Working
from tests.mongo import Client as Mongo
from tests.mongo import until

NEW = {"to": "ann", "subject": "news"}


def handler(app: App) -> Handler:
    return app.handlers["send"]


def runs(bench: Bench, task_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = bench.state(task_id)["worker_states"]
    return found


def stored(tasks: Any, task_id: str) -> dict[str, Any]:
    found: dict[str, Any] | None = tasks.find_one({"_id": task_id})
    assert found is not None
    return found


async def handed_on(bench: Bench, task_id: str, count: int = 1) -> list[dict[str, Any]]:
    """Wait until a task was handed on so often; return its runs."""
    await until(
        lambda: sum("misfit_since" in run for run in runs(bench, task_id)) >= count, message=f"{task_id} was handed on"
    )
    return runs(bench, task_id)


# --- misfits ---------------------------------------------------------------------------------------------


async def test_misfit_of_a_later_version_waits_uncounted_for_its_worker(
    working: Working, client: Client, mtask: Commands
) -> None:
    async with working(apps.former(), "old") as bench:
        made = client.publish(handler(apps.later()), NEW, key="k")
        (run,) = await handed_on(bench, made.task_id)
        assert (run["status"], run["worker_id"]) == ("CANCELED", "old")
        assert run["fail_reason"].startswith("handed on: the params do not fit this version: params of 'send'")
        assert run["misfit_since"] == run["claim_time"]
        assert timedelta(0) < run["retry_time"] - run["fail_time"] <= timedelta(milliseconds=rollout.MAX_DELAY_MS)
        state = bench.state(made.task_id)
        assert (state["status"], state["failed_cnt"]) == ("INIT", 0)
        # It is told why.
        (reason,) = [each for each in client.inspect(made.task_id).reasons if each.code != "retry_delay"]
        assert reason.code == "handed_on"
        assert reason.message.startswith("handed on by old, whose version its params do not fit: it fails at ")
        found = client.position("send", "k")
        assert (found.declared, found.version, found.start_estimate) == (hash_of(handler(apps.later())), 1, None)
        (finding,) = [each for each in client.diagnose() if each.check == "rollout"]
        assert finding.message == "handed on, as the params fit no worker: 1 task, such as send:k"
        shown = mtask.ok("show", made.task_id).out
        assert f"declared   {found.declared}" in shown
        placed = mtask.ok("position", made.task_id).out
        assert f"made for version 1 of its handler (declared: {found.declared})" in placed
        async with working(apps.later(), "new"):
            await bench.status(made.task_id, "SUCCESS")
        assert [run["worker_id"] for run in runs(bench, made.task_id)] == ["old", "new"]


async def test_misfit_of_this_version_or_a_former_one_fails_at_once(
    working: Working, client: Client, store: SyncStore
) -> None:
    registered(store, apps.former())
    async with working(apps.later()) as bench:
        await until(lambda: bench.worker.parts.features.handlers.look_cnt > 0, message="registered")
        former, own = hash_of(handler(apps.former())), hash_of(handler(apps.later()))
        for key, declared in (("former", former), ("own", own), ("unknown", None)):
            fields: dict[str, Any] = {} if declared is None else {"declared": declared}
            task_id = f"send:{key}"
            bench.tasks.insert_one(build.task(task_id, **fields) | {"params": {"nobody": 1}})
            await bench.status(task_id, "FAIL")
            (run,) = runs(bench, task_id)
            assert run["final"], key
            assert "misfit_since" not in run, key


async def test_where_no_worker_of_another_version_comes_a_misfit_fails_at_once(
    working: Working, client: Client
) -> None:
    async with working(apps.former(), hands_on=False) as bench:
        made = client.publish(handler(apps.later()), NEW, key="k")
        await bench.status(made.task_id, "FAIL")
        assert len(runs(bench, made.task_id)) == 1


async def test_misfit_fails_an_hour_after_the_first_one(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "LEFT_ALONE", 0.0)
    async with working(apps.former()) as bench:
        made = client.publish(handler(apps.later()), NEW, key="k")
        first, second, *_ = await handed_on(bench, made.task_id, 2)
        assert second["misfit_since"] == first["claim_time"]
        # The server's clock goes on: what the runs say is an hour older.
        old = first["misfit_since"] - timedelta(hours=1)
        await until(
            lambda: (
                bench.tasks.update_many(
                    {"_id": made.task_id, "task_state.status": "INIT"},
                    {"$set": {"task_state.worker_states.$[run].misfit_since": old}},
                    array_filters=[{"run.misfit_since": {"$exists": True}}],
                ).modified_count
            ),
            message="an hour passes",
        )
        await bench.status(made.task_id, "FAIL")
        assert runs(bench, made.task_id)[-1]["fail_reason"].endswith("(no worker fitted them within 1 h)")
        # A retry begins anew.
        client.retry("send", "k")
        await until(lambda: "misfit_since" in runs(bench, made.task_id)[-1], message="handed on anew")
        assert runs(bench, made.task_id)[-1]["misfit_since"] > old + timedelta(hours=1)


async def test_worker_leaves_a_misfit_alone_for_a_while(working: Working, client: Client) -> None:
    async with working(apps.former()) as bench:
        made = [client.publish(handler(apps.later()), NEW, key=f"{number}", priority=1) for number in range(5)]
        for one in made:
            await handed_on(bench, one.task_id)
        # When this one is due, all misfits have been due for long, and would go first.
        client.publish(handler(apps.former()), {"to": "ann"}, key="fits", delay=5 * rollout.MAX_DELAY_MS / 1000)
        await bench.status("send:fits", "SUCCESS")
        assert [len(runs(bench, one.task_id)) for one in made] == [1] * 5


async def test_worker_leaves_a_version_alone_after_many_misfits(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "MANY", 10)
    async with working(apps.former(), concurrency=1) as bench:
        specs = [TaskSpec(handler(apps.later()), NEW, key=f"{number:03}") for number in range(100)]
        client.publish_many(specs)
        part = bench.worker.parts.features.rollout
        await until(lambda: len(part.guard()) == 1, message="the version is left alone")
        client.publish(handler(apps.former()), {"to": "ann"}, key="fits")
        await bench.status("send:fits", "SUCCESS")
        await bench.at_rest()
        tried = bench.tasks.count_documents({"task_state.worker_states": {"$ne": []}, "_id": {"$ne": "send:fits"}})
        assert 10 <= tried <= 20, "the claims that were under way come on top"
        assert all(len(task["task_state"]["worker_states"]) <= 1 for task in bench.tasks.find())
        assert bench.count("FAIL") == 0


async def test_handler_that_raises_invalid_params_itself_is_no_misfit(working: Working, client: Client) -> None:
    app = App()

    @app.task
    async def send(to: str) -> None:
        raise InvalidParams("other", "what it publishes does not fit")

    async with working(app) as bench:
        made = client.publish(handler(apps.later()), {"to": "ann"}, key="k")
        await bench.status(made.task_id, "FAIL")
        assert len(runs(bench, made.task_id)) == 1


# --- versions --------------------------------------------------------------------------------------------


async def test_tasks_store_the_version_and_lower_workers_never_claim_them(
    working: Working, client: Client, store: SyncStore, mtask: Commands
) -> None:
    async with working(apps.versioned(2), "second") as bench:
        await until(lambda: bench.worker.parts.features.handlers.look_cnt > 0, message="registered")
        registered(store, apps.versioned())
        by_handler = client.publish(handler(apps.versioned()), {"to": "ann", "cc": "bo"}, key="handler")
        by_name = client.publish("send", {"to": "ann", "cc": "bo"}, key="name")
        flow = Flow("f")
        flow.add("a", handler(apps.versioned()), {"to": "ann", "cc": "bo"})
        client.publish_flow(flow)
        ids = [by_handler.task_id, by_name.task_id, "send:f/a"]
        assert [bench.document(task_id)["version"] for task_id in ids] == [3, 3, 3]
        bench.tasks.insert_one(build.task("send:own", version=2) | {"params": {"to": "ann", "cc": "bo"}})
        await bench.status("send:own", "SUCCESS")
        for task_id in ids:
            assert runs(bench, task_id) == []
            (reason,) = client.inspect(task_id).reasons
            assert reason.code == "version_needed"
            assert reason.message == "its params are of version 3 of 'send', and second have version 2 at most"
        assert any("version 3 of 'send'" in each.message for each in client.diagnose() if each.check == "due tasks")
        assert "version    3 of the handler" in mtask.ok("show", by_name.task_id).out
        async with working(apps.versioned(), "third"):
            for task_id in ids:
                await bench.status(task_id, "SUCCESS")
        assert {run["worker_id"] for task_id in ids for run in runs(bench, task_id)} == {"third"}


async def test_params_of_former_versions_are_upcast(working: Working, client: Client) -> None:
    async with working(apps.versioned()) as bench:
        first = client.publish(handler(apps.former()), {"to": "ann"}, key="first")
        await bench.status(first.task_id, "SUCCESS")
        task = client.get("send", "first")
        assert (task.returns, task.params, task.version) == ("ann ANN", {"to": "ann"}, None)
        broken = client.publish(handler(apps.former()), {"to": "ann"}, key="broken", delay=3600)
        bench.tasks.update_one({"_id": broken.task_id}, {"$set": {"params": {}}})
        bench.tasks.update_one(
            {"_id": broken.task_id},
            [{"$set": {"task_state.start_time": "$$NOW", "task_state.next_preempt_time": "$$NOW"}}],
        )
        await bench.status(broken.task_id, "FAIL")
        (run,) = runs(bench, broken.task_id)
        assert run["final"]
        assert run["fail_reason"].startswith("the params of 'send' could not be upcast from version 1 to 2: KeyError")


async def test_executors_upcast_and_tell_misfits(working: Working, client: Client) -> None:
    executors = ExecutorOptions(app="tests.integration.features.rollout.apps:isolated", count=1)
    async with working(apps.isolated, executors=executors) as bench:
        first = client.publish(handler(apps.former()), {"to": "ann"}, key="first")
        misfit = client.publish(handler(apps.later()), NEW, key="misfit", delay=3600)
        change = {"params": {"other": 1}, "version": 3, "task_state.start_time": "$$NOW"}
        bench.tasks.update_one({"_id": misfit.task_id}, [{"$set": {**change, "task_state.next_preempt_time": "$$NOW"}}])
        await bench.status(first.task_id, "SUCCESS")
        assert client.get("send", "first").returns == "ann ANN"
        (run,) = await handed_on(bench, misfit.task_id)
        assert run["status"] == "CANCELED"


async def test_retry_stores_for_which_version_its_params_are(client: Client, store: SyncStore, mongo: Mongo) -> None:
    registered(store, apps.versioned())
    tasks = mongo[client.database_name]["tasks"]

    def failed(key: str) -> None:
        client.publish(handler(apps.former()), {"to": "ann"}, key=key)
        client.cancel("send", key)

    failed("plain")
    client.retry("send", "plain")
    assert "version" not in stored(tasks, "send:plain"), "its params are as they were"
    for key, task in (("name", "send"), ("handler", handler(apps.versioned()))):
        failed(key)
        client.retry(task, key, params={"to": "ann", "cc": "bo"})
        found = stored(tasks, f"send:{key}")
        assert (found["version"], found["declared"]) == (3, hash_of(handler(apps.versioned())))
    client.cancel("send", "name")
    with pytest.raises(InvalidParams, match="cc: Field required"):
        client.retry("send", "name", params={"to": "ann"})
    client.rerun("send", "name")
    assert stored(tasks, "send:name")["version"] == 3
    client.cancel("send", "name")
    client.retry(handler(apps.former()), "name", params={"to": "bo"})
    assert "version" not in stored(tasks, "send:name")


async def test_what_gathers_and_schedules_has_the_version_of_its_params(client: Client, mongo: Mongo) -> None:
    tasks = mongo[client.database_name]["tasks"]
    new, old = handler(apps.versioned()), handler(apps.former())
    client.publish(old, {"to": "ann"}, key="k", debounce=3600)
    assert "version" not in stored(tasks, "send:k")
    client.publish(new, {"to": "ann", "cc": "bo"}, key="k", debounce=3600)
    assert stored(tasks, "send:k")["version"] == 3
    client.publish(old, {"to": "ann"}, key="k", if_exists="update")
    assert "version" not in stored(tasks, "send:k")
    made = client.add_schedule("daily", new, timedelta(days=1), {"to": "ann", "cc": "bo"})
    assert made.version == 3


def test_the_server_and_python_know_the_same_versions(mongo: Mongo, database_name: str) -> None:
    tasks = mongo[database_name]["documents"]
    values = [None, 0, 1, 2, 3, 4, 2.5, 3.0, 10**7, "9", "", True, False, {"a": 9}]
    documents = [{"name": name, "version": value} for name in ("a", "b", "c") for value in values]
    documents += [{"name": name} for name in ("a", "b", "c")]
    tasks.insert_many([dict(document) for document in documents])
    for versions in ({}, {"a": 2}, {"a": 2, "b": 3}):
        found = [{key: row[key] for key in row if key != "_id"} for row in tasks.find(of_known_versions(versions))]
        assert found == [document for document in documents if is_known_version(document, versions)], versions


# --- unknown params --------------------------------------------------------------------------------------


async def test_dropped_params_stay_stored_and_by_name_nothing_is_refused(
    working: Working, client: Client, store: SyncStore
) -> None:
    app = App()

    @app.task(unknown="drop")
    async def greet(to: str) -> str:
        return to

    registered(store, app)
    async with working(app) as bench:
        for key, task in (("handler", app.handlers["greet"]), ("name", "greet")):
            made = await asyncio.to_thread(client.publish, task, {"to": "ann", "style": 1}, key=key)
            await bench.status(made.task_id, "SUCCESS")
            assert bench.document(made.task_id)["params"] == {"to": "ann", "style": 1}
