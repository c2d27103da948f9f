"""Wrong lines with `call`, sync and async, each of them marked: mypy --strict and pyright refuse these and no others.

It is never run: see tests/integration/house/test_packaging.py.
"""

from __future__ import annotations

from datetime import timedelta

from mtask import App, AsyncClient, Call, Child, Client, Context, Flow, Next, TaskHandle, TaskSpec, call

app = App()


@app.task
async def send_email(context: Context, to: str, subject: str = "hi") -> str:
    return f"{to}{subject}"


@app.task(queue="files")
def import_file(path: str, *, limit: int = 100) -> int:
    return limit


@app.task
async def tidy() -> None: ...


@app.task
def context_comes_last(to: str, context: Context) -> None: ...


def of_calls(context: Context) -> None:
    call(send_email)(to=1)  # wrong
    call(send_email)()  # wrong
    call(send_email)("a", "b", "c")  # wrong
    call(send_email)("a", to="b")  # wrong
    call(send_email)(to="a", sbuject="b")  # wrong
    call(send_email)(context, to="a")  # wrong
    call(send_email)(context=context, to="a")  # wrong
    call(send_email, to="a")  # wrong
    call(import_file)("a", 3)  # wrong
    call(import_file)("a", limit="3")  # wrong
    call(import_file)(path=None)  # wrong
    call(tidy)(1)  # wrong
    call(context_comes_last)("a")  # wrong
    call("send_email")(to="a")  # wrong
    call(call(send_email)("a"))  # wrong
    call(send_email)("a").upper()  # wrong
    number: Call[int] = call(send_email)("a")  # wrong
    text: Call[str] = call(tidy)()  # wrong


def of_client(client: Client) -> None:
    client.publish(call(send_email)(to=1))  # wrong
    client.publish(call(send_email)("a"), {"to": "a"})  # wrong
    client.publish(call(send_email)("a"), params={"to": "a"})  # wrong
    client.publish(call(send_email)("a"), prioritty=5)  # wrong
    client.publish(call(send_email)("a"), delay="soon")  # wrong
    client.publish(call(send_email)("a"), if_exists="replace")  # wrong
    client.publish(call(send_email)("a")).result().real  # wrong
    client.publish(call(import_file)("a")).result().upper()  # wrong
    client.publish(call(tidy)()).result().upper()  # wrong
    client.publish(call(send_email)("a")).result(30)  # wrong
    client.publish(call(send_email)("a")).wait(timeout="soon")  # wrong
    client.publish(call(send_email)("a")).resultt()  # wrong
    handle: TaskHandle[int] = client.publish(call(send_email)("a"))  # wrong
    client.publish_many([call(send_email)("a")])  # wrong
    client.add_schedule("a", call(send_email)(to=1), timedelta(hours=1))  # wrong
    client.add_schedule("a", call(send_email)("a"), timedelta(hours=1), {"to": "a"})  # wrong
    TaskSpec(call(send_email)("a"), {"to": "a"})  # wrong
    TaskSpec(call(send_email)("a"), params=None)  # wrong
    TaskSpec(call(send_email)("a"), priority="high")  # wrong


async def of_handlers(context: Context) -> None:
    await context.add_child("a", call(send_email)("a"), {"to": "a"})  # wrong
    await context.add_child("a", call(send_email)(1))  # wrong
    Child("a", call(send_email)("a"), {"to": "a"})  # wrong
    Child("a", call(send_email)("a"), priority="high")  # wrong
    Next(call(send_email)("a"), {"to": "a"})  # wrong
    Next(call(import_file)("a", limit=None))  # wrong


def of_flows(client: Client, flow: Flow) -> None:
    flow.add("a", call(send_email)("a"), {"to": "a"})  # wrong
    flow.add("a", call(send_email)(to=1))  # wrong
    step = flow.add("a", call(send_email)("a"))
    published = client.publish_flow(flow)
    published.step(step).result().real  # wrong
    published.step(step).result(timeout="soon")  # wrong
    published.step(1)  # wrong
    published.result()  # wrong


async def of_async_client(client: AsyncClient, flow: Flow) -> None:
    (await client.publish(call(send_email)(to=1)))  # wrong
    await client.publish(call(send_email)("a"), {"to": "a"})  # wrong
    await client.publish(call(send_email)("a"), prioritty=5)  # wrong
    client.publish(call(send_email)("a")).result()  # wrong
    handle = await client.publish(call(send_email)("a"))
    handle.result().upper()  # wrong
    (await handle.result()).real  # wrong
    (await handle.wait()).statuss  # wrong
    number: int = await handle.result()  # wrong
    sync: TaskHandle[str] = handle  # wrong
    await client.publish_many([call(send_email)("a")])  # wrong
    await client.add_schedule("a", call(send_email)("a"), timedelta(hours=1), {"to": "a"})  # wrong
    published = await client.publish_flow(flow)
    (await published.step(flow.add("a", call(import_file)("a"))).result()).upper()  # wrong
