"""Tasks that expire: no run starts after their not_after, by the server's clock, and somebody ends them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from mtask import App, Client, TaskSpec
from mtask.errors import HandlerError, InvalidInput, WorkersTooOld
from mtask.kernel.statements.derive import EXPIRED_REASON
from tests.build import worker
from tests.integration.worker_harness import Bench, Working
from tests.mongo import Client as Mongo
from tests.mongo import until

SOON = timedelta(milliseconds=300)


def _app() -> tuple[App, list[str]]:
    app, began = App(), list[str]()

    @app.task
    async def work(key: str, fails: bool = False) -> None:
        began.append(key)
        if fails:
            raise RuntimeError("boom")

    @app.task(expires=3600)
    async def hurried() -> None: ...

    return app, began


async def _passed(bench: Bench, task_id: str) -> None:
    end = bench.state(task_id)["not_after"]

    async def is_over() -> bool:
        return bool(await bench.client.server_time() > end)

    await until(is_over)


@pytest.mark.parametrize("task_cnt", [1, 3])
async def test_task_that_expires_between_its_discovery_and_its_claim_never_starts(
    working: Working, task_cnt: int
) -> None:
    app, began = _app()
    async with working(app) as bench:
        queue = bench.worker.parts.queue
        with bench.backed_up():
            specs = [TaskSpec("work", {"key": str(n)}, key=str(n), expires=SOON) for n in range(task_cnt)]
            await bench.client.publish_many(specs)
            await until(lambda: len(queue) == task_cnt)
            await _passed(bench, f"work:{task_cnt - 1}")
        await bench.client.publish("work", {"key": "wakes it"}, key="last")
        for number in range(task_cnt):
            state = await bench.status(f"work:{number}", "CANCELED")
            assert (state["reason"], state["worker_states"]) == (EXPIRED_REASON, [])
            assert state["finish_time"] >= state["not_after"]
        await bench.status("work:last", "SUCCESS")
        assert began == ["wakes it"]
        await bench.at_rest()
        # Who asks for it again gets it.
        await bench.client.retry("work", "0")
        await bench.status("work:0", "SUCCESS")


async def test_task_that_expires_in_its_retry_delay_ends_as_fail_with_its_reason(working: Working) -> None:
    app, _ = _app()
    async with working(app) as bench:
        await bench.client.publish("work", {"key": "1", "fails": True}, key="1", expires=1, retry_delay=3600)
        state = await bench.status("work:1", "FAIL")
        assert state["finish_time"] >= state["not_after"]
        assert "boom" in str((await bench.client.get("work", "1")).fail_reason)
        assert len(state["worker_states"]) == 1


async def test_expiry_is_taken_from_the_call_or_from_the_handler(
    client: Client, mongo: Mongo, database_name: str
) -> None:
    app, _ = _app()
    hurried = app.handlers["hurried"]
    moment = datetime(2999, 1, 1, tzinfo=UTC)

    def ends(key: str) -> object:
        state = client.get("hurried", key).task_state
        return state.not_after and state.not_after - state.create_time

    client.publish(hurried, key="declared")
    client.publish(hurried, key="given", expires=60)
    client.publish(hurried, key="instant", expires=moment)
    client.publish("hurried", key="never")
    assert [ends("declared"), ends("given"), ends("never")] == [timedelta(hours=1), timedelta(minutes=1), None]
    assert client.get("hurried", "instant").task_state.not_after == moment
    client.publish("hurried", key="given", if_exists="update")
    assert ends("given") is None
    client.add_schedule("s", "hurried", timedelta(hours=1), expires=90)
    assert client.get_schedule("s").expires_ms == 90_000
    for wrong in (0, -1, "soon", datetime(2999, 1, 1)):  # noqa: DTZ001 it is wrong
        with pytest.raises(InvalidInput, match="expires"):
            client.publish("hurried", expires=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="firing"):
        client.add_schedule("s", "hurried", timedelta(hours=1), expires=moment)  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match="expires"):
        client.publish("hurried", key="a", debounce=1, expires=60)
    with pytest.raises(HandlerError, match="expires"):
        app.task(name="x", expires=0)(lambda: None)
    mongo[database_name]["workers"].insert_one(worker("old", client.server_time(), schema_revision=10))
    with pytest.raises(WorkersTooOld, match="expiry"):
        client.publish("hurried", key="b", expires=60)
