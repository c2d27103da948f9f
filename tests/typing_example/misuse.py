"""A program with one mistake for each important type, each on a line that is marked.

It is never run: tests/integration/house/test_packaging.py sees that mypy --strict and pyright refuse the marked lines
and no others. A checker accepts a mistake about a type that has become `Any`, so this shows that the types are precise.
"""

from __future__ import annotations

from datetime import timedelta

from mtask import (
    App,
    AsyncClient,
    Client,
    Context,
    Cron,
    Fail,
    Published,
    Retry,
    Task,
    TaskOption,
    TaskSpec,
    TaskStatus,
)
from mtask.errors import InvalidInput, TaskError
from mtask.testing import Bench

app = App()


@app.task
async def send_email(context: Context, to: str) -> str:
    return to


@app.task(queue="files")
def import_file(path: str) -> int:
    return len(path)


async def of_handlers(context: Context) -> None:
    await send_email(context, 1)  # wrong
    import_file("a.csv").upper()  # wrong
    import_file(path="a.csv", limit=1)  # wrong


@app.task(priority="high")  # wrong
@app.task(max_retries=3)  # wrong
@app.task(on_exception="stop")  # wrong
@app.schedule(42)  # wrong
@app.schedule("* * * * *", overlap="sometimes")  # wrong
async def of_app() -> None:
    raise Fail(reason=1)  # wrong


async def of_context(context: Context) -> None:
    context.attempt.upper()  # wrong
    context.is_canceled  # wrong
    context.task.runs.status  # wrong
    context.progress("half")  # wrong
    with context.transaction() as session:
        await session.end_session()  # wrong
    async with context.transaction() as session_of_loop:
        await session_of_loop.end()  # wrong
    raise Retry(delay="soon")  # wrong


def of_client(client: Client, spec: TaskSpec, task: Task) -> None:
    client.publish("send_email", {}, if_exists="replace")  # wrong
    client.publish("send_email", {}, delay="soon")  # wrong
    client.publish("send_email", {}, prioritty=1)  # wrong
    client.publish_many([{"to": "a@b.c"}])  # wrong
    client.publish_many([spec])[0].created  # wrong
    client.get("send_email").status  # wrong
    client.get("send_email", "a").statuss  # wrong
    client.publish("send_email", {}, if_running="later")  # wrong
    client.publish("send_email", {}, call_id=7)  # wrong
    client.publish_many([spec], call_id="a")  # wrong
    client.find(limit="all")  # wrong
    client.find(state="FAIL")  # wrong
    client.find(status=["FAIL"], lookup=["user_id"])  # wrong
    client.find(fields=["status"], worker=["a"])  # wrong
    client.find(status="FAIL")[0]["status"]  # wrong
    client.find_page(params=["user_id"])  # wrong
    client.find_page(fields=["status"]).tasks[0].status  # wrong
    client.count(key="welcome/42")  # wrong
    client.count_up_to(key_prefix=7)  # wrong
    client.plan_bulk("cancel", since=None)  # wrong
    client.purge(worker_id="a")  # wrong
    client.wait("send_email", "a", timeout="1s").upper()  # wrong
    client.add_schedule("digest", "report", timedelta(hours=6), catch_up="some")  # wrong
    client.limit("mail", rate=100)  # wrong
    client.workers()[0].running_cnt.upper()  # wrong
    client.tasks.find_one({})["_id"]  # wrong
    for event in client.events():
        event.kind.real  # wrong
        event.progress + 1  # wrong


async def of_async_client(client: AsyncClient, published: Published) -> None:
    client.publish("send_email", {}).created  # wrong
    (await client.publish("send_email", {})).status  # wrong
    published.created = True  # wrong
    async for event in client.events():
        event.token.real  # wrong


def of_values(task: Task, option: TaskOption, error: TaskError, invalid: InvalidInput, bench: Bench) -> None:
    task.status = "DONE"  # wrong
    task.task_state.finish_time.isoformat()  # wrong
    task.runs[0].status is TaskStatus.INIT  # wrong
    option.priority.upper()  # wrong
    option.retry_scope == "all"  # wrong
    error.task_id.real  # wrong
    invalid.field.upper()  # wrong
    bench.run()[0].upper()  # wrong
    TaskSpec("send_email", priority="high")  # wrong
    Cron(hour=3)  # wrong
    Cron("0 9 * * *")  # wrong
