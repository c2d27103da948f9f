"""A server with its page and a worker, on an event loop of their own thread, and what they are filled with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from mtask import App, Client, Context, Fail, Flow
from mtask.parts.assembly import Worker
from mtask.parts.worker import WorkerOptions
from mtask.web.settings import WebSettings
from tests.integration.web.serving import Serving, serving_on
from tests.mongo import PATIENCE

#: What hostile users write into keys, params and reasons.
MARKUP = "<script>alert('x')</script><img src=x onerror=alert(1)>&amp;\"'`${7*7}{{7*7}}"
LONG = "long-" + "x" * 400
TURNED = "pay-\u202etxt.exe"
UNICODE = "größe/日本語/🚀:%2F..?a=b&c=d#e"


@dataclass(slots=True)
class Gates:
    """The gates that the handlers of slow tasks wait at."""

    loop: asyncio.AbstractEventLoop
    gates: dict[str, asyncio.Event] = field(default_factory=dict)

    def gate(self, key: str) -> asyncio.Event:
        """Return the gate of this key."""
        return self.gates.setdefault(key, asyncio.Event())

    def open(self, key: str) -> None:
        """Let the handler of this key end."""
        self.loop.call_soon_threadsafe(lambda: self.gate(key).set())

    def open_all(self) -> None:
        """Let all handlers end."""
        for key in list(self.gates):
            self.open(key)


def app_with(gates: Gates) -> App:
    """Return an app whose handlers do what their params say."""
    app = App()

    @app.task
    async def send_email(context: Context, to: str = "a@b.c", subject: str = "") -> dict[str, Any]:
        return {"to": to, "subject": subject, "message_id": context.run_id}

    @app.task
    async def charge_card(context: Context, order: int = 0, fail: bool = False, reason: str = "") -> str:
        if fail:
            raise Fail(reason or f"order {order}: the card was declined by its bank (code 51, insufficient funds)")
        return f"charged {order}"

    @app.task
    async def sync_stock(context: Context, warehouse: str = "") -> None:
        raise TimeoutError(f"warehouse {warehouse} did not answer within 30 s")

    @app.task
    async def transcode(context: Context, file: str = "", size: int = 0) -> str:
        await gates.gate(context.task.key).wait()
        return f"{file}.webm"

    return app


@dataclass(slots=True)
class Stage:
    """What tests act on."""

    server: Serving
    client: Client
    gates: Gates
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """The server's address."""
        return self.server.url

    def wait(self, name: str, key: str) -> Any:
        """Wait until a task has ended."""
        return self.client.wait(name, key, timeout=PATIENCE)


@contextmanager
def staged(uri: str, database: str, settings: WebSettings | None = None) -> Iterator[Stage]:
    """Serve the page in another thread during the block, with one worker of the queues default, mail and video."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    gates, made = Gates(loop), list[Serving]()
    ending = asyncio.Event()
    failure: list[BaseException] = []

    async def live() -> None:
        options = WorkerOptions(
            uri,
            database,
            worker_id="web-1",
            concurrency=8,
            queues=["default", "mail", "video"],
            shutdown_timeout=timedelta(seconds=1),
        )
        async with serving_on(uri, database, settings) as server:
            worker = Worker(app_with(gates), options)
            running = asyncio.create_task(worker.run())
            made.append(server)
            ready.set()
            await ending.wait()
            worker.stop()
            worker.stop()
            await running

    def run() -> None:
        try:
            loop.run_until_complete(live())
        except BaseException as error:  # the test's thread raises it
            failure.append(error)
        finally:
            ready.set()
            loop.close()

    with Client(uri, database=database) as client:
        client.init()
        thread = threading.Thread(target=run, name="stage")
        thread.start()
        try:
            ready.wait(PATIENCE)
            if failure:
                raise failure[0]
            yield Stage(made[0], client, gates, loop)
        finally:
            loop.call_soon_threadsafe(ending.set)
            thread.join(PATIENCE)
            assert not failure, failure


def fill(stage: Stage) -> None:
    """Publish tasks of all kinds, and wait until those that can end have ended."""
    client = stage.client
    for index in range(30):
        params = {"to": f"user{index}@example.org", "subject": "Welcome"}
        client.publish("send_email", params, key=f"welcome/{index}", queue="mail", lookup={"user_id": index})
    client.publish("charge_card", {"order": 7, "fail": True}, key="order-7")
    client.publish("charge_card", {"order": 8, "fail": True, "reason": MARKUP * 3}, key=MARKUP)
    client.publish("charge_card", {"text": TURNED, "nested": {"a": [1, 2, {"b": None}]}}, key=TURNED)
    client.publish("send_email", {"to": UNICODE}, key=UNICODE, queue="mail")
    client.publish("send_email", {"subject": LONG * 5}, key=LONG, queue="mail")
    client.publish("sync_stock", {"warehouse": "Hamburg-3"}, key="stock/hamburg", retry_delay=3600)
    client.publish("transcode", {"file": "holiday.mov", "size": 48_113_223}, key="holiday")
    client.publish("report", {"month": "2026-10"}, key="report/2026-10", queue="reports")
    client.publish("send_email", {"to": "later@example.org"}, key="later", queue="mail", delay=timedelta(hours=3))
    client.publish("nightly", None, key="nobody/serves/this", queue="q" * 120)
    flow = Flow("order-4711")
    flow.add("charge", "charge_card", {"order": 4711})
    for part in range(1, 5):
        flow.add(f"pick-{part}", "send_email", {"subject": f"pick {part}"}, after=["charge"])
    flow.add("video", "transcode", {"file": "unboxing.mov"}, after=["charge"], queue="video")
    flow.add("check", "charge_card", {"order": 4711, "fail": True}, after=["pick-1", "pick-2"])
    flow.add("ship", "send_email", {"subject": "ship"}, after=["check", "pick-3", "pick-4", "video"])
    flow.add("clean-up", "send_email", {"subject": "clean"}, after=["ship"], on_failed="run")
    client.publish_flow(flow)
    done = Flow("import/2026-11-23")
    done.add("read", "send_email", {"subject": "read"})
    done.add("write", "send_email", {"subject": "write"}, after=["read"])
    client.publish_flow(done)
    client.add_schedule("nightly-report", "send_email", "30 2 * * *", {"subject": "nightly"}, timezone="Europe/Berlin")
    client.add_schedule("poll", "send_email", timedelta(minutes=5), {"subject": "poll"}, queue="mail")
    client.add_schedule("paused-one", "send_email", "0 0 1 1 *", paused=True)
    client.wait_all([("charge_card", "order-7"), ("charge_card", MARKUP), ("send_email", LONG)], timeout=PATIENCE)
    client.wait_flow("import/2026-11-23", timeout=PATIENCE)
    client.wait("charge_card", "order-4711/check", timeout=PATIENCE)
