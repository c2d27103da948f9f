"""Right lines with `call`, sync and async: mypy --strict and pyright accept each of them.

It is never run: tests/integration/house/test_packaging.py has both checkers read it beside the installed wheel.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

from mtask import (
    App,
    AsyncClient,
    AsyncFlowHandle,
    AsyncTaskHandle,
    Call,
    Child,
    Client,
    Context,
    Flow,
    FlowHandle,
    Next,
    Published,
    PublishedFlow,
    Task,
    TaskHandle,
    TaskSpec,
    call,
)
from mtask.features.flows.client import Step
from mtask.features.flows.views import FlowState

app = App()


@dataclass
class Order:
    number: int
    lines: list[str]


# --- handlers: with a context and without, async and sync ---------------------------------------------------------


@app.task
async def send_email(context: Context, to: str, subject: str = "hi") -> str:
    return f"{to}{subject}"


@app.task(queue="files")
def import_file(path: str, *, limit: int = 100) -> int:
    return limit


@app.task
async def place(order: Order) -> Order:
    return order


@app.task
def charge(context: Context, order: Order, cents: int = 0) -> None: ...


@app.task
async def tidy() -> None: ...


@app.task
async def totals(context: Context, *, days: int) -> dict[str, float]:
    return {}


@app.task
def with_more(name: str, **more: int) -> list[int]:
    return list(more.values())


@app.task
async def split(context: Context, n: int) -> Next:
    await context.add_child("a", call(import_file)("a.csv"), priority=1)
    await context.add_children([Child("b", call(send_email)(to="b"), delay=1.0), Child("c", "send_email", {"to": "c"})])
    return Next(call(import_file)(path="a.csv", limit=n), returns=1, priority_diff=-1, queue="slow")


@app.task
def split_alone(n: int) -> Next:
    return Next(call(tidy)())


# Where a signature holds Any, mypy may take any arguments and know no result. It takes the right ones all the same.


@app.task
async def store(context: Context, document: dict[str, Any]) -> str:
    return str(document)


@app.task
def store_sync(context: Context, document: Any) -> Any:
    return document


@app.task
async def store_alone(documents: list[Any]) -> int:
    return len(documents)


# --- calls --------------------------------------------------------------------------------------------------------


def calls() -> list[Call[Any]]:
    assert_type(call(send_email)("a@b.c", "hi"), Call[str])
    assert_type(call(send_email)("a@b.c", subject="hi"), Call[str])
    assert_type(call(send_email)(subject="hi", to="a@b.c"), Call[str])
    assert_type(call(import_file)("a.csv", limit=3), Call[int])
    assert_type(call(place)(Order(1, ["pen"])), Call[Order])
    assert_type(call(charge)(order=Order(1, []), cents=7), Call[None])
    assert_type(call(tidy)(), Call[None])
    assert_type(call(totals)(days=7), Call[dict[str, float]])
    assert_type(call(with_more)("a", b=1, c=2), Call[list[int]])
    assert_type(call(split)(3), Call[Any])
    assert_type(call(split_alone)(n=3), Call[Any])
    assert_type(call(store_alone)([1, "a"]), Call[int])
    assert_type(call(store_sync)(document=1), Call[Any])
    prepared: list[Call[Any]] = [call(send_email)("a"), call(import_file)(path="b"), call(store)({"a": 1})]
    wider: Call[object] = call(send_email)("a")
    return [*prepared, wider]


# --- sync ---------------------------------------------------------------------------------------------------------


def publish(client: Client) -> str:
    handle = client.publish(call(send_email)(to="a", subject="b"), key="welcome/42", delay=60, max_retries=2)
    assert_type(handle, TaskHandle[str])
    assert_type((handle.task_id, handle.created, handle.updated), tuple[str, bool, bool])
    assert_type((handle.name, handle.key), tuple[str, str])
    assert_type(handle.result(), str)
    assert_type(handle.wait(timeout=timedelta(seconds=30)), Task)
    assert_type(handle.task(), Task)
    assert_type(handle.cancel(), Task)
    assert_type(client.publish(call(place)(Order(1, []))).result(timeout=30).lines, list[str])
    assert_type(client.publish(call(split)(1)).result(), Any)
    assert_type(client.publish(send_email, {"to": "a"}, key="b"), TaskHandle[Any])
    assert_type(client.publish("send_email", {"to": "a"}).result(), Any)
    assert_type(client.wait_all([handle, client.publish("tidy")]), list[Task])
    plain: Published = handle
    wider: TaskHandle[object] = handle
    client.publish_many([TaskSpec(call(import_file)("a.csv"), key="a", priority=5), TaskSpec("tidy", key="b")])
    client.add_schedule("tidy", call(tidy)(), timedelta(hours=6), catch_up="all", priority=3)
    client.add_schedule("import", call(import_file)("a.csv"), "30 2 * * *", if_exists="keep", queue="slow")
    return handle.result(timeout=30) + plain.task_id + wider.key


def publish_flow(client: Client) -> int:
    flow = Flow("import/42", priority=5)
    sent = flow.add("send", call(send_email)(to="a"), queue="mail")
    assert_type(sent, Step[str])
    read = flow.add("read", call(import_file)("a.csv"), after=[sent, "send"], on_failed="run", priority=1)
    assert_type(flow.add("tidy", "tidy", after=[read]), Step[Any])
    published = client.publish_flow(flow)
    assert_type(published, FlowHandle)
    assert_type(published.step(sent), TaskHandle[str])
    assert_type(published.step("send"), TaskHandle[Any])
    assert_type(published.wait(timeout=30), FlowState)
    assert_type(published.state(), FlowState)
    plain: PublishedFlow = published
    return published.step(read).result(timeout=30) + len(plain.task_ids)


# --- async --------------------------------------------------------------------------------------------------------


async def publish_async(client: AsyncClient) -> str:
    handle = await client.publish(call(send_email)("a", subject="b"), key="welcome/42", if_exists="update")
    assert_type(handle, AsyncTaskHandle[str])
    assert_type((handle.task_id, handle.created, handle.updated), tuple[str, bool, bool])
    assert_type(await handle.result(), str)
    assert_type(await handle.wait(timeout=30), Task)
    assert_type(await handle.task(), Task)
    assert_type(await handle.cancel(), Task)
    assert_type((await (await client.publish(call(place)(Order(1, [])))).result()).number, int)
    assert_type(await (await client.publish(call(split_alone)(1))).result(), Any)
    assert_type(await client.publish(send_email, {"to": "a"}), AsyncTaskHandle[Any])
    assert_type(await client.wait_all([handle]), list[Task])
    await client.publish_many([TaskSpec(call(tidy)()), TaskSpec(tidy)])
    await client.add_schedule("tidy", call(tidy)(), timedelta(hours=6))
    return await handle.result(timeout=30)


async def publish_flow_async(client: AsyncClient) -> dict[str, float]:
    flow = Flow("totals/42")
    total = flow.add("totals", call(totals)(days=7))
    published = await client.publish_flow(flow)
    assert_type(published, AsyncFlowHandle)
    assert_type(published.step(total), AsyncTaskHandle[dict[str, float]])
    assert_type(await published.wait(), FlowState)
    return await published.step(total).result()


def of_any_handler(handler: Callable[[str], Coroutine[Any, Any, int]]) -> Call[int]:
    return call(handler)("a")
