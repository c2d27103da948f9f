"""Breakers: failures in a row hold back a queue or a name for all workers, until a probe succeeds."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from mtask import App, Breaker, Fail, RateLimited
from mtask.errors import HandlerError, InvalidInput
from tests.integration.worker_harness import Bench, Document, Working
from tests.mongo import until

WAIT = 0.3


class Service:
    """What the handlers need. It fails as long as a test says."""

    def __init__(self, breaker: Breaker | None = None) -> None:
        self.error: Exception | None = ConnectionError("down")
        self.app = App()

        @self.app.task(queue="mail", breaker=breaker, max_retries=0)
        async def send(to: str = "") -> None:
            if self.error is not None:
                raise self.error

        @self.app.task(queue="mail", max_retries=0)
        async def other() -> None: ...


def _control(bench: Bench, control_id: str) -> Document:
    return bench.mongo[bench.database]["controls"].find_one({"_id": control_id}) or {}


def _opened(bench: Bench, control_id: str) -> Any:
    return _control(bench, control_id).get("opened")


@pytest.mark.parametrize("kind", ["name", "queue"])
async def test_breaker_opens_for_all_probes_one_task_at_a_time_and_closes_with_a_success(
    working: Working, kind: str
) -> None:
    service = Service(Breaker(failures=3, wait=WAIT) if kind == "name" else None)
    control_id = "name:send" if kind == "name" else "queue:mail"
    async with working(service.app, concurrency=1) as bench, working(service.app, worker_id="w2"):
        if kind == "queue":
            await bench.client.set_breaker("mail", 3, wait=WAIT)
        for number in range(40):
            await bench.client.publish("send", key=f"{number:02}")
        again = await until(lambda: (found := _opened(bench, control_id)) and found["wait_ms"] >= 4000 * WAIT and found)
        assert "down" in again["reason"]
        # The runs of its worker after the first wait are probes: none begins before the wait of the one before.
        own = {"worker_id": again["by"], "claim_time": {"$gt": again["time"] + timedelta(seconds=WAIT)}}
        found = bench.tasks.find({"task_state.worker_states": {"$elemMatch": own}})
        probes = sorted(task["task_state"]["worker_states"][0]["claim_time"] for task in found)
        assert len(probes) >= 2
        assert all(later - earlier >= timedelta(seconds=2 * WAIT) for earlier, later in pairwise(probes))
        assert bench.count("INIT") > 20  # the other worker has left them alone
        if kind == "name":  # what the breaker does not guard goes on
            await bench.client.publish("other", key="1")
            await bench.status("other:1", "SUCCESS")
        waiting = bench.tasks.find_one({"task_state.status": "INIT"})
        assert waiting is not None
        [reason, *_] = (await bench.client.inspect(waiting["_id"])).reasons
        assert (reason.code, reason.until is not None) == ("paused", True)
        [finding] = [each for each in await bench.client.diagnose() if each.check == "breakers"]
        assert "down" in finding.message
        service.error = None
        await until(lambda: not bench.count("INIT"))
        assert _opened(bench, control_id) is None


async def test_another_worker_makes_the_probe_of_one_that_has_died(working: Working) -> None:
    service = Service()
    service.error = None
    async with working(service.app) as bench:
        await bench.client.set_breaker("mail", 3, wait=WAIT)
        now = await bench.client.server_time()
        held_until = now + timedelta(seconds=1.5)
        opened = {"by": "dead", "time": now, "wait_ms": 300, "until": now, "held_until": held_until}
        bench.mongo[bench.database]["controls"].update_one(
            {"_id": "queue:mail"}, {"$set": {"opened": opened}, "$inc": {"revision": 1}}
        )
        breakers = bench.worker.parts.features.controls
        await until(lambda: breakers.opened)
        await bench.client.publish("send", key="1")
        state = await bench.status("send:1", "SUCCESS")
        assert state["worker_states"][0]["claim_time"] >= held_until
        await until(lambda: _opened(bench, "queue:mail") is None)


async def test_what_lies_in_the_task_itself_opens_no_breaker_and_resume_closes_one(working: Working) -> None:
    service = Service(Breaker(failures=2, wait=600))
    async with working(service.app, concurrency=1) as bench:
        service.error = Fail("no such address")
        for number in range(4):
            await bench.client.publish("send", key=f"fail {number}")
            await bench.client.publish("send", {"to": 7}, key=f"params {number}")
        await until(lambda: bench.count("FAIL") == 8)
        service.error = RateLimited(3600, "task")
        for number in range(4):
            await bench.client.publish("send", key=f"limited {number}")
        await until(lambda: bench.tasks.count_documents({"task_state.worker_states.status": "CANCELED"}) == 4)
        assert _control(bench, "name:send") == {}
        service.error = ConnectionError("down")
        for number in range(4):
            await bench.client.publish("send", key=f"down {number}")
        await until(lambda: bench.worker.parts.features.controls.opened)
        service.error = None
        await bench.client.publish("send", key="good")
        assert bench.state("send:good")["status"] == "INIT"
        await bench.client.resume(name="send")
        await bench.status("send:good", "SUCCESS")
        assert _opened(bench, "name:send") is None
        with pytest.raises(InvalidInput, match="failures"):
            await bench.client.set_breaker("mail", 0)
        with pytest.raises(HandlerError, match="failures"):
            App().task(name="x", breaker=Breaker(failures=0))(lambda: None)
