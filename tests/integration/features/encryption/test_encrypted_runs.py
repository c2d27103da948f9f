"""A worker decrypts the tasks that it claims, encrypts what runs write, and leaves alone what it cannot decrypt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from mtask import App, AsyncClient, Child, Context, Fail, Flow, Next, Retry, TaskFailed, TaskSpec
from mtask.app.middleware import FinishCall
from mtask.errors import DatabaseUnavailable, DataKeyNotFound, DecryptionFailed
from mtask.features.encryption import vault as vaults
from mtask.features.encryption.cipher import Cipher
from mtask.features.isolation.options import ExecutorOptions
from mtask.features.logs.options import LogOptions
from mtask.kernel.document.parts import NO_KEYS, READABLE, Sealed
from mtask.kernel.driver.codec import Owner
from mtask.search.findings import Level
from tests.integration.features.isolation import isolated
from tests.integration.worker_harness import Bench, Working, working_on
from tests.keys import MARKER, encryption_of, everything_in, make_keys
from tests.mongo import Client, until

QUEUE = "mail"


def app_of_secrets(seen: list[Any]) -> App:
    """Return an app with a handler for each way in which a value goes into the database."""
    app = App()

    @app.task(queue=QUEUE)
    async def echo(context: Context, text: str) -> dict[str, str]:
        context.progress(0.5, f"{MARKER} half")
        logging.getLogger("shop").warning(f"{MARKER} line")
        seen.append(text)
        return {"text": f"{MARKER} {text}"}

    @app.task(queue=QUEUE)
    def echo_in_thread(text: str) -> str:
        return f"{MARKER} {text}"

    @app.task(queue=QUEUE)
    async def boom(text: str) -> None:
        raise ValueError(f"{MARKER} {text}")

    @app.task(queue=QUEUE)
    async def give_up(text: str) -> None:
        raise Fail(f"{MARKER} {text}")

    @app.task(queue=QUEUE)
    async def later(context: Context, text: str) -> str:
        if context.attempt == 1:
            raise Retry(0, f"{MARKER} again")
        return text

    @app.task(queue=QUEUE)
    async def exactly_once(context: Context, text: str) -> None:
        async with context.transaction():
            context.set_result(f"{MARKER} {text}")

    @app.task(queue=QUEUE)
    async def goes_on(text: str) -> Next:
        return Next("echo", {"text": f"{MARKER} {text}"}, returns=f"{MARKER} before", lookup={"who": f"{MARKER}-who"})

    @app.task(queue=QUEUE)
    async def parent(context: Context, text: str) -> str:
        await context.add_children([Child("child", "echo", {"text": f"{MARKER} child"}, queue=QUEUE)])
        return f"{MARKER} {text}"

    @app.task(queue=QUEUE)
    async def gather_results(context: Context) -> dict[str, Any]:
        found = await context.results()
        seen.append(found)
        return found

    @app.task(queue=QUEUE)
    async def collected(calls: list[dict[str, Any]]) -> None:
        seen.append(calls)

    return app


@asynccontextmanager
async def secret_bench(
    uri: str, database: str, mongo: Client, app: App, **options: Any
) -> AsyncIterator[tuple[Bench, AsyncClient]]:
    """Run a worker with keys, and open a client with keys."""
    keys = options.pop("encryption", encryption_of(database))
    async with (
        working_on(uri, database, mongo, app, encryption=keys, **options) as bench,
        AsyncClient(uri, database=database, encryption=encryption_of(database)) as client,
    ):
        yield bench, client


async def test_nothing_of_a_task_is_readable_in_the_database(mongo_uri: str, database_name: str, mongo: Client) -> None:
    make_keys(mongo_uri, database_name, f"queue:{QUEUE}")
    seen: list[Any] = []
    told: list[str] = []
    app = app_of_secrets(seen)

    @app.middleware("finish")
    def around_finish(call: FinishCall) -> Any:
        told.append(repr(call.returns))
        yield

    kept = LogOptions(keep=5)
    async with secret_bench(mongo_uri, database_name, mongo, app, logs=kept) as (bench, client):
        events = client.events()
        await events.open()
        for name in ("echo", "echo_in_thread", "boom", "give_up", "later", "exactly_once", "goes_on"):
            params, lookup = {"text": f"{MARKER} {name}"}, {"what": f"{MARKER}-l"}
            await client.publish(name, params, key="k", queue=QUEUE, lookup=lookup, max_retries=0)
        flow = Flow("f", queue=QUEUE)
        first = flow.add("parent", "parent", {"text": MARKER})
        flow.add("last", "gather_results", after=[first])
        await client.publish_flow(flow)
        for number, wait in enumerate((3600, 0.01)):  # the newest call says when the task starts
            await client.publish(
                "collected", {"n": f"{MARKER} {number}"}, key="c", queue=QUEUE, collect=True, debounce=wait
            )
        schedule = await client.add_schedule("s", "echo", timedelta(days=1), {"text": MARKER}, queue=QUEUE)
        assert schedule.params == {"text": MARKER}
        for name in ("echo", "echo_in_thread", "later", "exactly_once", "goes_on", "collected"):
            await client.wait(name, "c" if name == "collected" else "k", timeout=20)
        await client.wait("echo", "@goes_on:k/next-1", timeout=20)
        with pytest.raises(TaskFailed, match=f"ValueError: {MARKER} {MARKER} boom"):
            await client.result("boom", "k", timeout=20)
        with pytest.raises(TaskFailed, match=f"{MARKER} {MARKER} give_up"):
            await client.result("give_up", "k", timeout=20)
        await client.wait_flow("f", timeout=20)
        await client.retry("boom", "k", params={"text": f"{MARKER} other"})
        failed = await client.wait("boom", "k", timeout=20)
        assert [former.params for former in failed.former_params] == [{"text": f"{MARKER} boom"}]
        assert await client.result("echo", "k") == {"text": f"{MARKER} {MARKER} echo"}
        assert await client.result("exactly_once", "k") == f"{MARKER} {MARKER} exactly_once"
        assert (await client.get("echo", "k")).runs[0].progress.message == f"{MARKER} half"  # type: ignore[union-attr]
        assert {task.key for task in await client.find(lookup={"who": f"{MARKER}-who"})} == {"@goes_on:k/next-1"}
        assert len(await client.find(lookup={"what": f"{MARKER}-l"}, limit=0)) == 8, "the next task has it, too"
        assert (await client.plan_bulk("cancel", lookup={"what": f"{MARKER}-l"})).count.count == 0
        assert {"parent": f"{MARKER} {MARKER}", "child": {"text": f"{MARKER} {MARKER} child"}} in seen
        assert [{"n": f"{MARKER} 0"}, {"n": f"{MARKER} 1"}] in seen
        assert any(MARKER in each for each in told), "middleware sees what a handler returned"
        reasons = []
        while (event := await events.poll(0.5)) is not None:
            reasons.append(f"{event.reason} {event.message}")
        await events.close()
        assert f"{MARKER} {MARKER} give_up None" in reasons
        assert f"None {MARKER} half" in reasons

        async def logged() -> bool:
            return any(log.is_over for log in await client.logs("echo", "k"))

        await until(logged)
        assert [line.message for line in (await client.logs("echo", "k"))[0].lines] == [f"{MARKER} line"]
        (log,) = await bench.client.logs("echo", "k")
        assert [line.message for line in log.lines] == [f"(encrypted: {NO_KEYS})"]
        assert (log.line_cnt, log.first) == (1, 0)
    assert MARKER.encode() not in everything_in(mongo, database_name)


async def test_worker_without_keys_claims_nothing_encrypted(
    working: Working, mongo_uri: str, database_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(mongo_uri, database_name, f"queue:{QUEUE}")
    app = app_of_secrets([])
    async with (
        working(app) as bench,
        AsyncClient(mongo_uri, database=database_name, encryption=encryption_of(database_name)) as client,
    ):
        with caplog.at_level(logging.ERROR):
            for number in range(20):
                await client.publish("echo", {"text": str(number)}, key=str(number), queue=QUEUE)
            plain = AsyncClient(mongo_uri, database=database_name)
            await plain.publish("echo_in_thread", {"text": "readable"}, key="p", queue=QUEUE)
            assert await plain.result("echo_in_thread", "p", timeout=20) == f"{MARKER} readable"
            bench.worker.parts.scans.ask_full()
            scans = bench.worker.parts.scans.scan_cnt
            await until(lambda: bench.worker.parts.scans.scan_cnt > scans, message="a scan")
            await bench.at_rest()
            assert bench.tasks.count_documents({"task_state.worker_states": []}) == 20, "untouched"
            seen = await plain.get("echo", "3")
            assert (str(seen.params), seen.sealed) == ("(encrypted)", f"queue:{QUEUE}")
            assert isinstance(seen.params, Sealed)
            bench.worker.parts.pinger.beat_now()
            await until(lambda: bench.registry.find_one({"unusable_keys": ["*"]}) is not None, message="a heartbeat")
            (reason,) = (await plain.inspect("echo:3")).reasons
            assert (reason.code, "queue:mail" in reason.message) == ("keys_needed", True)
            causes = [finding.message for finding in await plain.diagnose() if finding.level is not Level.OK]
            assert any("encrypted with the data key 'queue:mail', which w1 cannot use" in cause for cause in causes)
            with pytest.raises(DecryptionFailed, match="no keys are given"):
                seen.params["text"]
            await plain.close()
        said = [
            record for record in caplog.records if record.getMessage() == "encrypted tasks are left to other workers"
        ]
        assert len(said) == 1, "once"
        async with working(app, "w2", encryption=encryption_of(database_name)):
            for number in range(20):
                await client.wait("echo", str(number), timeout=20)


async def test_worker_with_the_wrong_master_key_hands_back_and_the_task_is_not_lost(
    working: Working, mongo_uri: str, database_name: str, mongo: Client
) -> None:
    make_keys(mongo_uri, database_name, f"queue:{QUEUE}")
    app = app_of_secrets([])
    wrong = encryption_of(database_name, key=b"w" * 96)
    async with secret_bench(mongo_uri, database_name, mongo, app, encryption=wrong) as (bench, client):
        await client.publish("echo", {"text": "x"}, key="k", queue=QUEUE)
        await until(lambda: any("fail_reason" in run for run in bench.state("echo:k")["worker_states"]))
        state = bench.state("echo:k")
        assert [run["fail_reason"] for run in state["worker_states"]] == ["handed back: this worker cannot decrypt it"]
        assert (state["status"], state["failed_cnt"]) == ("INIT", 0)
        async with working(app, "w2", encryption=encryption_of(database_name)):
            assert await client.result("echo", "k", timeout=20) == {"text": f"{MARKER} x"}


async def test_value_of_another_task_is_refused(
    working: Working, mongo_uri: str, database_name: str, mongo: Client
) -> None:
    make_keys(mongo_uri, database_name, f"queue:{QUEUE}")
    app = app_of_secrets([])
    async with AsyncClient(mongo_uri, database=database_name, encryption=encryption_of(database_name)) as client:
        await client.publish("echo", {"text": "mine"}, key="a", queue=QUEUE)
        await client.publish("echo", {"text": "other"}, key="b", queue=QUEUE)
        tasks = mongo[database_name]["tasks"]
        stolen = tasks.find_one({"_id": "echo:b"})
        assert stolen is not None
        tasks.update_one({"_id": "echo:a"}, {"$set": {"params": stolen["params"]}})
        async with working(app, encryption=encryption_of(database_name)):
            with pytest.raises(TaskFailed, match="encrypted for another task or field"):
                await client.result("echo", "a", timeout=20)
            assert await client.result("echo", "b", timeout=20) == {"text": f"{MARKER} other"}


async def test_worker_ends_a_task_into_which_somebody_put_a_readable_or_copied_value(
    working: Working, mongo_uri: str, database_name: str, mongo: Client
) -> None:
    make_keys(mongo_uri, database_name, f"queue:{QUEUE}")
    seen: list[Any] = []
    app = app_of_secrets(seen)
    strict = encryption_of(database_name, queues=[QUEUE])
    tasks, schedules = mongo[database_name]["tasks"], mongo[database_name]["schedules"]
    async with (
        AsyncClient(mongo_uri, database=database_name, encryption=encryption_of(database_name)) as client,
        AsyncClient(mongo_uri, database=database_name) as plain,
    ):
        await client.add_schedule("s", "echo", timedelta(days=1), {"text": "of s"}, queue=QUEUE)
        keys = ["good", "plain", "unsealed", "none", "s/1", "field", "lookup", "added", "taken"]
        await client.publish_many(
            [TaskSpec("echo", {"text": key}, key=key, queue=QUEUE, lookup={"who": key}) for key in keys]
        )
        await client.publish("collected", {"n": 1}, key="c", queue=QUEUE, collect=True)
        await plain.publish("echo", {"text": "forged"}, key="new", queue=QUEUE)
        stored = {task["_id"]: task for task in tasks.find()}
        cipher = client._codec
        assert isinstance(cipher, Cipher)
        of_schedule = schedules.find_one({"_id": "s"})
        assert of_schedule is not None
        other = stored["echo:good"]["lookup"][0]
        forged: dict[str, tuple[dict[str, Any], str]] = {
            "echo:plain": ({"$set": {"params": {"text": "forged"}}}, "stored readable"),
            "echo:unsealed": ({"$set": {"params": {"text": "forged"}}, "$unset": {"sealed": ""}}, "stored readable"),
            "echo:none": ({"$set": {"params": None}}, "stored readable"),
            "echo:s/1": ({"$set": {"params": of_schedule["params"]}}, "another task or field"),
            "echo:field": (
                {
                    "$set": {
                        "params": cipher.encrypt(
                            f"queue:{QUEUE}", Owner("echo", "field", [QUEUE]), "returns", {"text": "forged"}
                        )
                    }
                },
                "another task or field",
            ),
            "echo:lookup": ({"$set": {"lookup.0.k": "what"}}, "another lookup"),
            "echo:added": ({"$push": {"lookup": other}}, "copied here"),
            "echo:taken": ({"$set": {"lookup": [other]}}, "copied here"),
            "collected:c": ({"$push": {"params.calls": {"n": "forged"}}}, "stored readable"),
            "echo:new": ({"$set": {"task_option.priority": 1}}, "stored readable"),
        }
        for task_id, (change, _) in forged.items():
            tasks.update_one({"_id": task_id}, change)
        async with working(app, encryption=strict):
            for task_id, (_, said) in forged.items():
                with pytest.raises(TaskFailed, match=f"it cannot be run here: DecryptionFailed: .*{said}"):
                    await client.result(*task_id.split(":"), timeout=20)
            assert await client.result("echo", "good", timeout=20) == {"text": f"{MARKER} good"}
            await client.add_schedule("now", "echo", await client.server_time(), {"text": "fired"}, queue=QUEUE)
            await until(lambda: "fired" in seen, message="what the schedule has published")
    assert seen == ["good", "fired"]


async def test_what_is_put_readable_beside_a_run_is_refused(mongo_uri: str, database_name: str, mongo: Client) -> None:
    make_keys(mongo_uri, database_name, f"queue:{QUEUE}")
    app = app_of_secrets([])
    begun, go = asyncio.Event(), asyncio.Event()

    @app.task(queue=QUEUE)
    async def last(context: Context) -> dict[str, Any]:
        begun.set()
        await go.wait()
        return await context.results()

    async with secret_bench(mongo_uri, database_name, mongo, app, logs=LogOptions(keep=5)) as (bench, client):
        flow = Flow("f", queue=QUEUE)
        first = flow.add("echo", "echo", {"text": "x"})
        flow.add("last", "last", after=[first], max_retries=0)
        await client.publish_flow(flow)
        await begun.wait()
        forged = {"task_state.worker_states.0.returns": "forged"}
        assert bench.tasks.update_one({"_id": "echo:f/echo"}, {"$set": forged}).matched_count == 1
        async with client.events() as events:
            said = {"message": "forged", "time": await client.server_time()}
            changed = {"$set": {"task_state.worker_states.0.progress": said}}
            bench.tasks.update_one({"_id": "last:f/last"}, changed)
            while (event := await events.poll(10)) is not None and event.message is None:
                pass
            assert event is not None
            assert isinstance(event.message, Sealed)
        go.set()
        with pytest.raises(TaskFailed, match=r"returns of task 'echo:f/echo'.*stored readable"):
            await client.result("last", "f/last", timeout=20)

        async def logged() -> bool:
            return any(log.is_over for log in await client.logs("echo", "f/echo"))

        await until(logged)
        line = {"time": await client.server_time(), "level": "INFO", "logger": "shop", "message": "forged"}
        mongo[database_name]["logs"].update_many({}, {"$set": {"lines": [line]}, "$unset": {"sealed_lines": ""}})
        (log,) = await client.logs("echo", "f/echo")
        assert [each.message for each in log.lines] == [f"(refused: {READABLE})"]


async def test_worker_that_need_not_encrypt_a_queue_still_encrypts_what_an_encrypted_task_returns(
    mongo_uri: str, database_name: str, mongo: Client
) -> None:
    make_keys(mongo_uri, database_name, f"queue:{QUEUE}")
    keys = encryption_of(database_name, queues=[])
    given: dict[str, Any] = {"encryption": keys, "logs": LogOptions(keep=5)}
    async with secret_bench(mongo_uri, database_name, mongo, app_of_secrets([]), **given) as (_, client):
        await client.publish("echo", {"text": "x"}, key="k", queue=QUEUE)
        assert await client.result("echo", "k", timeout=20) == {"text": f"{MARKER} x"}

        async def logged() -> bool:
            return any(log.is_over for log in await client.logs("echo", "k"))

        await until(logged)
        assert [line.message for line in (await client.logs("echo", "k"))[0].lines] == [f"{MARKER} line"]
    assert MARKER.encode() not in everything_in(mongo, database_name)


async def test_key_that_is_removed_while_a_run_is_under_way_leaves_nothing_readable(
    mongo_uri: str, database_name: str, mongo: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(mongo_uri, database_name, f"queue:{QUEUE}")
    app = App()
    begun, go = asyncio.Event(), asyncio.Event()

    @app.task(queue=QUEUE)
    async def wait() -> str:
        begun.set()
        await go.wait()
        return MARKER

    async with secret_bench(mongo_uri, database_name, mongo, app) as (_, client):
        await client.publish("wait", key="k", queue=QUEUE)
        await begun.wait()
        await client.remove_data_key(queue=QUEUE)
        forget(monkeypatch)
        go.set()
        task = await client.wait("wait", "k", timeout=20)
        assert task.status.value == "FAIL"
        assert "cannot be encrypted, and is not stored: the data key 'queue:mail' was removed" in (
            task.fail_reason or ""
        )
        with pytest.raises(DataKeyNotFound, match="was removed"):
            await client.publish("wait", key="later", queue=QUEUE)
    assert MARKER.encode() not in everything_in(mongo, database_name)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vaults look at the database at the next use, as after an hour."""
    monkeypatch.setattr(vaults, "monotonic", lambda: monotonic() + 3_600)


async def test_key_vault_that_is_away_at_the_end_of_a_run_delays_the_outcome(
    mongo_uri: str, database_name: str, mongo: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(mongo_uri, database_name, f"queue:{QUEUE}")
    app, failures = App(), list[str]()

    @app.task(queue=QUEUE)
    async def late() -> str:
        forget(monkeypatch)
        monkeypatch.setattr(vault, "find", failing)  # what comes next is the encryption of the value
        return f"{MARKER} late"

    def failing(names: Any, key_ids: Any) -> Any:
        if len(failures) < 2:
            failures.append("the key vault is away")
            raise DatabaseUnavailable(failures[-1])
        return find(names, key_ids)

    async with secret_bench(mongo_uri, database_name, mongo, app) as (bench, client):
        cipher = bench.worker.parts.scope.store.codec
        assert isinstance(cipher, Cipher)
        vault, find = cipher.vault, cipher.vault.find
        await client.publish("late", key="k", queue=QUEUE)
        assert await client.result("late", "k", timeout=20) == f"{MARKER} late"
        assert len(failures) == 2


async def test_task_published_before_the_key_was_known_is_readable_and_its_result_is_not(
    working: Working, mongo_uri: str, database_name: str
) -> None:
    app = app_of_secrets([])
    async with AsyncClient(mongo_uri, database=database_name, encryption=encryption_of(database_name)) as client:
        await client.publish("echo", {"text": "early"}, key="k", queue=QUEUE)
        make_keys(mongo_uri, database_name, f"queue:{QUEUE}", "tenant:acme")
        async with working(app, encryption=encryption_of(database_name)) as bench:
            assert await client.result("echo", "k", timeout=20) == {"text": f"{MARKER} early"}
            document = bench.document("echo:k")
            assert (document["params"], "sealed" in document) == ({"text": "early"}, False)
            assert document["task_state"]["worker_states"][0]["returns"].subtype == 6
            async with AsyncClient(
                mongo_uri, database=database_name, encryption=encryption_of(database_name)
            ) as informed:
                await informed.publish("echo", {"text": "t"}, key="acme:1", queue=QUEUE)
                assert await informed.result("echo", "acme:1", timeout=20) == {"text": f"{MARKER} t"}
            assert bench.document("echo:acme:1")["sealed"] == "tenant:acme", "before that of the queue"


async def test_executors_get_decrypted_params_and_encrypt_in_transactions(
    mongo_uri: str, database_name: str, mongo: Client, tmp_path: Path
) -> None:
    make_keys(mongo_uri, database_name, "queue:default")
    options = ExecutorOptions("tests.integration.features.isolation.isolated:app", count=1)
    async with secret_bench(mongo_uri, database_name, mongo, isolated.app, executors=options) as (bench, client):
        await client.publish("echo", {"value": MARKER}, key="k")
        assert (await client.result("echo", "k", timeout=40))["value"] == MARKER
        await client.publish("commit", {"folder": str(tmp_path), "effects": database_name}, key="k")
        await client.wait("commit", "k", timeout=40)
        # The transaction has written a SUCCESS without a value. The value follows.
        await until(lambda: bench.state("commit:k")["worker_states"][0].get("returns"), message="what came after it")
        assert await client.result("commit", "k") == "committed"
        assert bench.state("commit:k")["worker_states"][0]["returns"].subtype == 6
    assert MARKER.encode() not in everything_in(mongo, database_name)
