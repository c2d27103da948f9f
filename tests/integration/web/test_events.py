"""Events over the wire: one stream of the process, resumed streams, gaps, and the end of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from pymongo.asynchronous.collection import AsyncCollection

from mtask.features.events.hub import BEHIND, CLOSING, LOST, Viewer, place_of
from mtask.web.settings import WebSettings
from tests.integration.web.serving import Serve, Serving
from tests.mongo import Client as Mongo
from tests.mongo import fail_command, until


@dataclass(frozen=True, slots=True)
class Sent:
    """One server-sent event."""

    kind: str
    data: dict[str, Any]
    id: str | None


async def _sent(answer: httpx.Response) -> AsyncIterator[Sent]:
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield Sent(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}


@asynccontextmanager
async def following(
    server: Serving, query: str = "", *, token: str = "read", after: str | None = None
) -> AsyncIterator[AsyncIterator[Sent]]:
    """Give the block the events of one stream, whose first event `ready` is read already."""
    headers = {"Authorization": f"Bearer {token}"} | ({} if after is None else {"Last-Event-ID": after})
    async with server.http.stream("GET", f"/v1/events{query}", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        sent = _sent(answer)
        first = await asyncio.wait_for(anext(sent), 20)
        assert (first.kind, bool(first.id)) == ("ready", True)
        yield sent


async def take(sent: AsyncIterator[Sent], number: int) -> list[Sent]:
    """Return the next events of a stream."""
    return [await asyncio.wait_for(anext(sent), 20) for _ in range(number)]


async def publish(server: Serving, *keys: str, name: str = "echo", **given: Any) -> None:
    for key in keys:
        await server.client.publish(name, {"n": 1}, key=key, **given)


async def test_all_viewers_share_one_stream_which_ends_with_the_last(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtask.features.events.hub.LINGER", 0.5)
    opened = []
    watch = AsyncCollection.watch

    async def counted(self: Any, *args: Any, **given: Any) -> Any:
        opened.append(self.name)
        return await watch(self, *args, **given)

    monkeypatch.setattr(AsyncCollection, "watch", counted)
    await server.client.init()
    assert not server.hub.is_open
    async with following(server) as one, following(server) as two, following(server, "?name=other") as three:
        await publish(server, "a", "b")
        await publish(server, "c", name="other", queue="q")
        for sent in (one, two):
            assert [event.data["task_id"] for event in await take(sent, 3)] == ["echo:a", "echo:b", "other:c"]
        (other,) = await take(three, 1)
        assert (other.kind, other.data["key"], other.data["queue"]) == ("published", "c", "q")
        assert len(opened) == 1
    await until(lambda: server.hub.viewer_cnt == 0, 20, "the viewers are gone")
    await until(lambda: not server.hub.is_open, 20, "the stream is closed")
    async with following(server) as again:
        await publish(server, "d")
        assert (await take(again, 1))[0].data["key"] == "d"


async def test_a_stream_goes_on_after_the_last_event_without_gap_or_repeat(server: Serving) -> None:
    keys = [f"{number:03d}" for number in range(60)]
    await server.client.init()
    async with following(server) as sent:
        await publish(server, *keys[:20])
        seen = await take(sent, 10)
    publishing = asyncio.create_task(publish(server, *keys[20:]))
    async with following(server, after=seen[-1].id) as sent:
        rest = await take(sent, 50)
    await publishing
    assert [event.data["key"] for event in seen + rest] == keys
    assert all(event.id for event in rest)
    async with following(server, f"?after={rest[29].id}&kind=published&key=055") as sent:
        assert (await take(sent, 1))[0].data["key"] == "055"


async def test_a_quiet_viewer_goes_on_from_its_first_id(server: Serving) -> None:
    await server.client.init()
    headers = {"Authorization": "Bearer read"}
    async with server.http.stream("GET", "/v1/events", headers=headers) as answer:
        ready = await asyncio.wait_for(anext(_sent(answer)), 20)
    await publish(server, "a")
    async with following(server, after=ready.id) as sent:
        assert (await take(sent, 1))[0].data["key"] == "a"


async def test_lost_history_is_told_and_the_stream_goes_on(serving: Serve, mongo: Mongo, database_name: str) -> None:
    async with serving(appname=database_name) as server:
        await server.client.init()
        async with following(server) as sent:
            await publish(server, "a", "b")
            first, _ = await take(sent, 2)
            with fail_command(mongo, "aggregate", error_code=286, app_name=database_name):
                async with following(server, after=first.id) as resumed:
                    (gap,) = await take(resumed, 1)
                    assert (gap.kind, bool(gap.id)) == ("lost", True)
                    await publish(server, "c")
                    assert (await take(resumed, 1))[0].data["key"] == "c"


async def test_only_so_many_streams_read_old_events_at_once(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, max_catch_ups=0)) as server:
        await server.client.init()
        async with following(server) as sent:
            await publish(server, "a", "b")
            first, _ = await take(sent, 2)
        refused = await server.ask("GET", "/v1/events", headers={"Last-Event-ID": str(first.id)})
        assert (refused.status_code, refused.json()["type"]) == (503, "/v1/problems/busy")
        assert refused.headers["retry-after"]
        assert server.hub.viewer_cnt == 0


async def test_a_stream_that_has_caught_up_leaves_its_place_to_another(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, max_catch_ups=1)) as server:
        await server.client.init()
        async with following(server) as sent:
            await publish(server, "a", "b")
            first, _ = await take(sent, 2)
        async with following(server, after=first.id) as resumed:
            assert (await take(resumed, 1))[0].data["key"] == "b"
            await publish(server, "c")
            assert (await take(resumed, 1))[0].data["key"] == "c"
            async with following(server, after=first.id) as another:
                assert [event.data["key"] for event in await take(another, 2)] == ["b", "c"]


async def test_there_is_a_limit_of_streams(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, max_streams=1)) as server:
        async with following(server):
            assert (await server.ask("GET", "/v1/events")).status_code == 503
        await until(lambda: server.hub.viewer_cnt == 0, 20, "the viewer is gone")
        async with following(server):
            pass


async def test_a_viewer_too_far_behind_gets_what_was_kept_and_is_then_disconnected() -> None:
    viewer = Viewer(lambda _: True, 3)
    for event in "abcde":
        viewer.offer(event)  # type: ignore[arg-type] # what it keeps is nothing to it, but gaps are not selected
    assert viewer.is_over
    assert [await viewer.next(1) for _ in range(4)] == ["a", "b", "c", BEHIND]
    assert await viewer.next(0.01) is None
    full = Viewer(lambda _: True, 2)
    for event in "ab":
        full.offer(event)  # type: ignore[arg-type]
    full.offer(CLOSING)
    assert [await full.next(1) for _ in range(3)] == ["a", "b", CLOSING]
    full.offer(LOST)
    assert await full.next(0.01) is None


async def test_a_viewer_that_does_not_read_is_disconnected_and_others_go_on(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, max_behind=5)) as server:
        await server.client.init()
        async with server.hub.view(lambda _: True) as slow, following(server) as sent:
            for start in range(0, 20, 4):
                await publish(server, *(str(number) for number in range(start, start + 4)))
                assert len(await take(sent, 4)) == 4
            found = [await slow.next(1) for _ in range(6)]
            assert found[-1] is BEHIND
            assert [event.key for event in found[:-1]] == list("01234")  # type: ignore[union-attr]


async def test_viewers_are_disconnected_where_the_stream_ends_by_a_mistake_and_can_go_on(server: Serving) -> None:
    await server.client.init()
    async with following(server) as sent:
        await publish(server, "a")
        (first,) = await take(sent, 1)
        assert server.hub._reading is not None
        server.hub._reading.cancel()
        assert [event.kind async for event in sent] == ["behind"]
    await publish(server, "b")
    async with following(server, after=first.id) as sent:
        assert (await take(sent, 1))[0].data["key"] == "b"


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("82AA.1.5-1", "82AA.2.5-1"),
        ("82AA.9.5-1", "82AA.10.5-1"),
        ("82AA.2.5-1", "82AA"),
        ("82AA", "82AB.1.5-1"),
        ("82AA", "82AB"),
    ],
)
def test_tokens_have_an_order(earlier: str, later: str) -> None:
    assert place_of(earlier) < place_of(later)


async def test_the_end_of_the_server_ends_streams_and_waits_at_once(server: Serving) -> None:
    await publish(server, "a")
    waiting = asyncio.create_task(server.ask("GET", "/v1/tasks/echo/a", headers={"Prefer": "wait=30"}))
    async with following(server) as sent:
        await until(lambda: server.hub.viewer_cnt == 2, 20, "a stream and a request wait")
        begun = asyncio.get_running_loop().time()
        server.hub.close()
        assert [event.kind async for event in sent] == ["closing"]
        assert (await waiting).json()["task_state"]["status"] == "INIT"
        assert asyncio.get_running_loop().time() - begun < 2
