"""Live pages: a burst of events costs few messages, and tenants get only their own news."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from mtask import TaskSpec
from mtask.local import ReplicaSet
from tests.integration.web.page.test_sessions import Visitor, visiting
from tests.integration.web.serving import Serving
from tests.integration.web.test_command import command
from tests.mongo import PATIENCE, eventually, until


class Heard:
    """The messages of one live page."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []
        self.is_over = False

    def ticks(self) -> list[Any]:
        return [document for kind, document in self.messages if kind == "tick"]

    def names(self) -> set[str]:
        return {task_id for tick in self.ticks() for task_id in tick["ids"]}

    async def read(self, answer: httpx.Response) -> None:
        kind = ""
        async for line in answer.aiter_lines():
            name, _, rest = line.partition(": ")
            if name == "event":
                kind = rest
            elif name == "data":
                self.messages.append((kind, json.loads(rest)))
        self.is_over = True


@asynccontextmanager
async def listening(visitor: Visitor) -> AsyncIterator[Heard]:
    """Give the block a live page that has begun."""
    heard = Heard()
    async with visitor.http.stream("GET", "/live") as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["x-accel-buffering"] == "no"
        reading = asyncio.create_task(heard.read(answer))
        try:
            # A page that joins a pulse which beats already gets no first message.
            await until(lambda: bool(heard.messages) or visitor.server.hub.is_open)
            yield heard
        finally:
            reading.cancel()
            await asyncio.wait((reading,))


async def test_burst_costs_a_page_two_messages_a_second(server: Serving) -> None:
    async with visiting(server, "read") as visitor, listening(visitor) as heard:
        begun = time.monotonic()
        specs = [TaskSpec("echo", key=f"k/{index}", delay=3600) for index in range(3_000)]
        await server.client.publish_many(specs)
        await until(lambda: sum(tick["kinds"].get("published", 0) for tick in heard.ticks()) == 3_000)
        took = time.monotonic() - begun
        assert len(heard.ticks()) <= 2 * took + 3
        assert any(tick["many"] and not tick["ids"] for tick in heard.ticks()), "a large tick names no tasks"
        assert max(len(json.dumps(tick)) for tick in heard.ticks()) < 10_000


async def test_all_pages_share_one_stream_and_its_end_follows_theirs(server: Serving) -> None:
    async with visiting(server, "read") as visitor:
        async with listening(visitor) as one, listening(visitor) as two, listening(visitor) as three:
            assert server.hub.viewer_cnt == 1, "the pulse is the hub's only viewer"
            await server.client.publish("echo", key="a", delay=3600)
            await until(lambda: all("echo:a" in heard.names() for heard in (one, two, three)))
        charts = (await visitor.get("/charts")).json()
        assert charts["rows"] == [[charts["rows"][0][0], 0, 0, 0, None, None]], "a publish is no start"


async def test_tenant_hears_only_of_its_own_tasks(server: Serving) -> None:
    async with visiting(server, "acme") as acme, visiting(server, "umbra") as umbra, visiting(server, "read") as all_of:
        async with listening(acme) as of_acme, listening(umbra) as of_umbra, listening(all_of) as of_all:
            for tenant, key in (("acme", "one"), ("umbra", "two"), (None, "three")):
                await server.client.publish("echo", key=key, tenant=tenant, delay=3600)
            await until(lambda: of_all.names() == {"echo:acme:one", "echo:umbra:two", "echo:three"})
            await until(lambda: of_acme.names() == {"echo:one"} and of_umbra.names() == {"echo:two"})
            for heard in (of_acme, of_umbra):
                assert sum(tick["kinds"].get("published", 0) for tick in heard.ticks()) == 1
        for visitor in (acme, umbra):
            assert len((await visitor.get("/charts")).json()["rows"]) == 1


def signed_in(http: httpx.Client, printed: dict[str, str]) -> httpx.Response:
    """Press the button to which the printed link leads."""
    token = printed["page"].partition("/login?token=")[2]
    return http.post("/login", data={"token": token}, headers={"Origin": printed["url"]})


def test_sigterm_ends_it_at_once_though_50_pages_are_live(mongo_uri: str, database_name: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        process, printed = stack.enter_context(command(mongo_uri, database_name, tmp_path))
        limits = httpx.Limits(max_connections=100)
        http = stack.enter_context(httpx.Client(base_url=printed["url"], timeout=60, trust_env=False, limits=limits))
        answer = signed_in(http, printed)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        for _ in range(50):
            live = stack.enter_context(http.stream("GET", "/live"))
            assert live.status_code == 200
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - begun < 10, "2 s on a machine of its own"
    assert (tmp_path / "err").read_text() == ""


def test_page_says_that_the_database_is_away_and_goes_on(single_set: ReplicaSet, tmp_path: Path) -> None:
    uri = f"{single_set.uri}&serverSelectionTimeoutMS=500&heartbeatFrequencyMS=500"
    with (
        command(uri, "away", tmp_path) as (_, printed),
        httpx.Client(base_url=printed["url"], timeout=60, trust_env=False, follow_redirects=True) as http,
    ):
        assert "Open the page" in http.get(printed["page"]).text
        assert signed_in(http, printed).status_code == 200
        node = single_set.primary()
        single_set.kill(node)
        eventually(lambda: http.get("/").status_code == 503, PATIENCE, "what was read a moment ago is no longer shown")
        paths = ("/", "/tasks", "/flows", "/task?name=a&key=b")
        with ThreadPoolExecutor(2 * len(paths)) as pool:  # each answer takes as long as a page waits for the database
            parts = pool.map(lambda path: http.get(path, headers={"HX-Request": "true"}), paths)
            answers = dict(zip(paths, pool.map(http.get, paths), strict=True))
            assert [part.status_code for part in parts] == [503] * len(paths)
        for path, answer in answers.items():
            assert answer.status_code == 503, path
            assert "The database cannot be reached" in answer.text
            assert '<meta http-equiv="refresh"' in answer.text
        single_set.restart(node)
        eventually(lambda: http.get("/").status_code == 200, PATIENCE, "it goes on by itself")
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_a_publish_is_answered_with_its_key_while_the_database_is_frozen(
    single_set: ReplicaSet, tmp_path: Path
) -> None:
    body = {"name": "a", "params": {}}
    with (
        command(single_set.uri, "frozen", tmp_path) as (_, printed),
        httpx.Client(base_url=printed["url"], timeout=40, trust_env=False) as http,
    ):
        http.headers["Authorization"] = f"Bearer {printed['token']}"
        assert http.post("/v1/tasks", json=body).status_code == 201
        node = single_set.primary()
        single_set.pause(node)
        try:
            answer = http.post("/v1/tasks", json=body)  # takes 10 s: the limit of one call of the client
        finally:
            single_set.resume(node)
        assert answer.status_code == 503
        key = answer.json()["key"]
        again = http.put(f"/v1/tasks/a/{key}", json={"params": {}})
        assert again.status_code in (200, 201)
