"""Kept logs and the callers' traces in the REST API and on the page: tenants see only their own."""

from __future__ import annotations

import logging
from datetime import timedelta

from mtask.features.logs import operations as run_logs
from mtask.features.logs.worker import GrowingLog, line_of
from mtask.kernel.driver.stores import SyncStore
from mtask.logs import RunMarks
from tests.clients import claim
from tests.integration.web.page.test_sessions import visiting
from tests.integration.web.serving import Serving

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LOGS = "/v1/tasks/mail/a/logs"


def keep(store: SyncStore, key: str, run_id: str, message: str, tenant: str | None = None) -> None:
    marks = RunMarks("mail", key, run_id, 1)
    marks.tenant = tenant
    log = GrowingLog(marks, 5, lambda _: None)
    log.add(line_of(logging.LogRecord("shop", logging.WARNING, __file__, 1, message, (), None)))
    store.run(run_logs.make_ready())
    store.run(run_logs.write([log.taken("w1")], timedelta(days=1)))


async def test_a_tenant_reads_the_logs_of_its_own_tasks_only(server: Serving, store: SyncStore) -> None:
    assert (await server.ask("GET", LOGS, token="acme")).status_code == 404
    for tenant in ("acme", "umbra"):
        await server.ask("PUT", "/v1/tasks/mail/a", token=tenant, json={})
        keep(store, f"{tenant}:a", f"run-{tenant[0]}", f"hello from mail:{tenant}:a", tenant)
    answer = await server.ask("GET", LOGS, token="acme")
    [run] = answer.json()["runs"]
    assert (run["run_id"], run["task_id"], run["first"], run["is_over"]) == ("run-a", "mail:a", 0, False)
    [line] = run["lines"]
    assert (line["level"], line["logger"]) == ("WARNING", "shop")
    assert "umbra" not in answer.text
    # The run of another tenant, by its id, is not there.
    other = await server.ask("GET", f"{LOGS}?run_id=run-u", token="acme")
    assert (other.status_code, other.json()) == (200, {"runs": []})
    assert (await server.ask("GET", LOGS, token=None)).status_code == 401


async def test_what_a_caller_publishes_belongs_to_its_span(server: Serving, store: SyncStore) -> None:
    traced = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    await server.ask("POST", "/v1/tasks", json={"name": "mail", "key": "1"}, headers=traced)
    batch = {"tasks": [{"name": "mail", "key": "2"}]}
    await server.ask("POST", "/v1/tasks:batch", json=batch, headers={"traceparent": TRACEPARENT})
    flow = {"key": "f", "steps": [{"step": "s", "name": "mail"}]}
    made = await server.ask("POST", "/v1/flows", json=flow, headers={"traceparent": TRACEPARENT})
    assert made.status_code == 201, made.text
    await server.ask("POST", "/v1/tasks", json={"name": "mail", "key": "3"}, headers={"traceparent": "nonsense"})
    found = {task["_id"]: task.get("trace") for task in store.tasks.find()}
    own = {"traceparent": TRACEPARENT}
    assert found == {"mail:1": traced, "mail:2": own, "mail:f/s": own, "mail:3": None}


async def test_the_page_of_a_task_shows_the_lines_of_its_last_run(server: Serving, store: SyncStore) -> None:
    await server.client.publish("mail", key="a")
    run_id = claim(store, "mail:a")
    async with visiting(server, "read") as visitor:
        assert "Log of try" not in (await visitor.get("/task?name=mail&key=a")).text
        keep(store, "a", run_id, "<script>alert(1)</script> \x1b[2J")
        page = (await visitor.get("/task?name=mail&key=a")).text
        assert "Log of try 1" in page
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
        assert "<script>alert" not in page
