"""jobber's address, the metrics, and the limits of requests and of open streams."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from prometheus_client.parser import text_string_to_metric_families

from mtask.kernel.driver.stores import SyncStore
from mtask.web.settings import WebSettings
from mtask.web.tokens import Rates
from tests.clients import claim, fail
from tests.integration.web.serving import Serve, Serving
from tests.integration.web.test_events import following


async def test_a_job_is_a_task_of_a_fresh_key(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, is_open=True)) as server:
        job = {"jobType": "send_email", "payload": {"to": "a@b.c"}}
        made = await server.ask("POST", "/jobs", token=None, json=job)
        assert made.status_code == 201
        assert list(made.json()) == ["jobId"]
        found = await server.client.get("send_email", made.json()["jobId"])
        assert found.params == {"to": "a@b.c"}
        assert (await server.ask("GET", made.headers["location"], token=None)).json()["params"] == {"to": "a@b.c"}
        header = {"Idempotency-Key": "once"}
        for _ in range(2):
            again = await server.ask("POST", "/jobs", token=None, json=job, headers=header)
            assert (again.status_code, again.json()) == (201, {"jobId": "once"})
        other = await server.ask("POST", "/jobs", token=None, json={"jobType": "send_email"}, headers=header)
        assert (other.status_code, other.json()["type"]) == (422, "/v1/problems/idempotency-key-reused")
        for wrong in ({}, {"jobType": ""}, {"jobType": "a b"}, {"jobType": 1}, {"jobType": "a", "type": "b"}):
            assert (await server.ask("POST", "/jobs", token=None, json=wrong)).status_code == 422
        assert await server.client.count() == 2

        # `curl -d` sends JSON under the type of forms. A browser may not: any page could make it do so.
        text = b'{"jobType": "send_email", "payload": [1, {"a": null}]}'
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        of_curl = await server.ask("POST", "/jobs", token=None, content=text, headers=form)
        assert of_curl.status_code == 201
        assert (await server.client.get("send_email", of_curl.json()["jobId"])).params == [1, {"a": None}]
        for of_browsers in ({"Sec-Fetch-Site": "same-site"}, {"Referer": "http://localhost/"}, {"Cookie": "a=b"}):
            refused = await server.ask("POST", "/jobs", token=None, content=text, headers={**form, **of_browsers})
            assert refused.status_code == 415, of_browsers
        compressed = {**form, "Content-Encoding": "gzip"}
        assert (await server.ask("POST", "/jobs", token=None, content=text, headers=compressed)).status_code == 415
        assert (await server.ask("POST", "/v1/tasks", token=None, content=text, headers=form)).status_code == 415
        assert await server.client.count() == 3

        # The address and the names in jobber's README.
        text = b'{"type": "send_email", "payload": {"to": "c@d.e"}}'
        queued = await server.ask("POST", "/jobber/queue", token=None, content=text, headers=form)
        assert queued.status_code == 201
        assert list(queued.json()) == ["job-id"]
        assert (await server.client.get("send_email", queued.json()["job-id"])).params == {"to": "c@d.e"}


async def test_metrics_tell_of_queues_and_are_no_tenant_s(server: Serving, store: SyncStore) -> None:
    queue = 'a"b\\c'
    await server.client.publish("echo", key="1", queue=queue)
    await server.client.publish("echo", key="2", queue=queue, delay=timedelta(hours=1))
    await server.client.publish("echo", key="3", max_retries=0)
    run_id = await asyncio.to_thread(claim, store, "echo:3")
    await asyncio.to_thread(fail, store, "echo:3", run_id, "no luck")
    answer = await server.ask("GET", "/metrics", token="read")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(answer.text)
    assert found["mtask_tasks", queue, "INIT"] == 2
    assert found["mtask_tasks", "default", "FAIL"] == 1
    assert found["mtask_tasks_is_bounded", "default", "FAIL"] == 0
    for age in ("mtask_queue_oldest_due_age_seconds", "mtask_oldest_due_seconds"):
        assert found[age, "default"] == 0, "a task that has failed is not due"
        assert found[age, queue] > 0
    assert found["mtask_worker_runs",] == found["mtask_web_streams",] == 0
    assert (await server.ask("GET", "/metrics", token="acme")).status_code == 403
    assert (await server.ask("GET", "/metrics", token=None)).status_code == 401


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the samples of metrics by name and labels, as Prometheus reads them."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_caller_that_sends_too_much_is_told_when_to_come_back(serving: Serve) -> None:
    async def scenario(server: Serving) -> None:
        answers = [await server.ask("GET", "/v1/problems/busy", token="read") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 429, 429]
        assert answers[2].json()["type"] == "/v1/problems/too-many-requests"
        assert int(answers[2].headers["retry-after"]) >= 1
        # Others, and those who look whether the server lives, are not concerned.
        assert (await server.ask("GET", "/v1/problems/busy", token="publish")).status_code == 200
        assert [(await server.ask("GET", "/healthz", token=None)).status_code for _ in range(3)] == [200] * 3

    async with serving(settings=WebSettings(port=0, max_rate=0.001)) as server:
        await scenario(server)
    async with serving(settings=WebSettings(port=0, max_rate=0)) as server:
        await _unlimited(server)


async def test_strangers_are_measured_by_address_and_visitors_by_token(serving: Serve) -> None:
    settings = WebSettings(port=0, max_rate=0.001, max_stranger_rate=0.001, proxies=("127.0.0.1",))
    async with serving(settings=settings) as server:
        visitors = {}
        for number, token in enumerate(("read", "operate")):
            form = {"Origin": server.url, "X-Forwarded-For": f"192.0.2.{number}"}
            answer = await server.ask("POST", "/login", token=None, data={"token": token}, headers=form)
            assert answer.status_code == 303
            visitors[token] = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
            server.http.cookies.clear()

        async def page(path: str, headers: dict[str, str]) -> int:
            return (await server.ask("GET", path, token=None, headers=headers)).status_code

        # A stranger has what is left of its address: the forwarded one, as the settings name the proxy.
        assert [await page("/login", {"X-Forwarded-For": "9.9.9.9, 192.0.2.9"}) for _ in range(3)] == [200, 429, 429]
        assert await page("/v1/tasks", {"X-Forwarded-For": "192.0.2.9"}) == 429
        assert await page("/login", {"X-Forwarded-For": "192.0.2.8"}) == 200
        # Each session has the measure of its token, whatever others and strangers at its address do.
        read, operate = ({**visitors[token], "X-Forwarded-For": "192.0.2.9"} for token in ("read", "operate"))
        assert [await page("/tasks", read) for _ in range(3)] == [200, 429, 429]
        assert await page("/tasks", operate) == 200
        assert (await server.ask("GET", "/v1/problems/busy", token="read")).status_code == 200


async def test_wrong_tokens_are_slowed_down_and_right_ones_go_on(server: Serving) -> None:
    assert (await server.ask("GET", "/v1/problems/busy", token="read")).status_code == 200
    guesses = [await server.ask("GET", "/v1/problems/busy", token=f"guess{number}") for number in range(40)]
    statuses = [answer.status_code for answer in guesses]
    assert statuses[:20] == [401] * 20
    refused = next(answer for answer in guesses if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    login = {"Origin": server.url}
    form = [
        await server.ask("POST", "/login", token=None, data={"token": f"other{number}"}, headers=login)
        for number in range(10)
    ]
    assert 429 in [answer.status_code for answer in form], "the page has the same measure"
    assert (await server.ask("GET", "/v1/problems/busy", token="read")).status_code == 200


async def _unlimited(server: Serving) -> None:
    for _ in range(20):
        assert (await server.ask("GET", "/v1/problems/busy")).status_code == 200


def test_a_measure_fills_up_with_time() -> None:
    rates = Rates(10)
    assert [rates.delay("a", 0.0) for _ in range(20)] == [0.0] * 20
    assert rates.delay("a", 0.0) == 0.1
    assert rates.delay("a", 0.1) == 0.0
    assert rates.delay("a", 0.1) > 0
    assert rates.delay("b", 0.1) == 0.0
    assert [rates.delay("a", 100.0) for _ in range(21)].count(0.0) == 20
    assert rates.delay("a", 50.0) > 0, "a clock that goes back gives nothing"


async def test_one_caller_has_not_all_streams(serving: Serve) -> None:
    async def scenario(server: Serving) -> None:
        await server.client.init()
        async with following(server, token="acme"):
            refused = await server.ask("GET", "/v1/events", token="acme")
            assert (refused.status_code, refused.json()["type"]) == (503, "/v1/problems/busy")
            async with following(server, token="umbra"):
                pass
        async with asyncio.timeout(30):
            while True:  # the server learns that a stream has ended when it writes to it next
                try:
                    async with following(server, token="acme"):
                        return
                except AssertionError:
                    await asyncio.sleep(0.05)

    async with serving(settings=WebSettings(port=0, max_streams_each=1)) as server:
        await scenario(server)
