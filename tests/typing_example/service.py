"""A user's program: it publishes, handles, schedules, reads and follows tasks. mypy --strict and pyright accept it.

It is never run: tests/integration/house/test_packaging.py has both checkers read it beside the installed wheel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, assert_type

from mtask import (
    App,
    AsyncClient,
    AsyncTaskHandle,
    Child,
    Client,
    Context,
    Cron,
    Fail,
    FoundTasks,
    LeaseLost,
    MtaskError,
    Next,
    Position,
    Published,
    Retry,
    RunStatus,
    Schedule,
    Task,
    TaskCanceled,
    TaskExists,
    TaskFailed,
    TaskFields,
    TaskHandle,
    TaskNotFound,
    TaskOption,
    TaskSpec,
    TaskStatus,
    WaitTimeout,
)
from mtask.errors import InvalidInput, TaskError
from mtask.testing import Bench, bench

app = App()
more = App()
app.include(more)


# --- handlers -----------------------------------------------------------------------------------------------------


@app.task(next={"import": "store"})
async def split(context: Context) -> Next:
    published = await context.add_child("part", send_email, {"to": "a@b.c"}, priority=1)
    assert_type(published, Published)
    assert_type(await context.add_children([Child("other", "store", delay=1.0)]), list[Published])
    results = await context.results()
    assert_type(results, dict[str, Any])
    async for step, _ in context.results():
        assert_type(step, str)
    async with context.transaction():
        context.set_result(1)
    return Next("store", {"n": len(results)}, returns=1, priority_diff=-1, queue="slow")


@app.task(next="store")
def split_sync(context: Context) -> None:
    assert_type(context.add_children([Child("other", "store")]).get(), list[Published])
    dict(context.results())


@app.task(queue="mail", max_retries=5, run_timeout=timedelta(minutes=1), retry_scope="worker")
async def send_email(context: Context, to: str, subject: str = "hi") -> str:
    if context.is_cancelled or not context.is_lease_valid:
        raise Retry(delay=5)
    context.progress(0.5, "half way")
    return f"{subject} to {to}: {context.task.name}, {context.attempt}, {context.run_id}, {context.worker_id}"


@app.schedule("30 2 * * *", timezone="Europe/Berlin", params={"path": "a.csv"}, overlap="skip", catch_up="all")
@app.schedule(timedelta(hours=6), id="often", jitter=30)
@app.schedule(Cron(day_of_week="mon-fri", hour="9", timezone="Europe/Berlin"), id="workdays", priority=2)
@app.task
def import_file(path: str, limit: int = 100) -> int:
    if not path.endswith(".csv"):
        raise Fail("only CSV")
    return limit


@app.task(name="shop.charge", on_exception="fail")
async def charge(context: Context, order: int) -> None:
    async with context.transaction() as session:
        charges = session.client["shop"]["charges"]
        await charges.insert_one({"order": order}, session=session)


@app.task
def charge_in_a_thread(context: Context, order: int) -> None:
    try:
        with context.transaction() as session:
            session.client["shop"]["charges"].insert_one({"order": order}, session=session)
    except LeaseLost as error:
        print(error.task_id, error.run_id)


async def handlers_stay_what_they_are(context: Context) -> None:
    assert_type(await send_email(context, "a@b.c", subject="news"), str)
    assert_type(import_file("a.csv", limit=3), int)
    assert_type(app.queues, list[str])


# --- publish ------------------------------------------------------------------------------------------------------


def publish(client: Client, message: dict[str, Any], due: datetime) -> Task | None:
    published = client.publish(send_email, message, key="welcome/42", priority=5, delay=timedelta(minutes=1))
    assert_type(published, TaskHandle[Any])
    assert_type((published.task_id, published.created, published.updated), tuple[str, bool, bool])
    client.publish("send_email", message, if_exists="update", clean_failed=True, start_time=due)
    specs = [TaskSpec(import_file, {"path": f"{n}.csv"}, key=f"bulk/{n}", retain_success=1) for n in range(9)]
    for outcome in client.publish_many(specs, if_exists="reject"):
        if isinstance(outcome, Published):
            print(outcome.created)
        else:
            assert_type(outcome, TaskError)
            print(outcome.task_id)
    with client.tasks.database.client.start_session() as session, session.start_transaction():
        client.publish(charge, {"order": 7}, key="order/7", session=session)
    try:
        return client.wait(send_email, "welcome/42", timeout=30)
    except WaitTimeout as error:
        print(error.task_id)
    except (TaskExists, TaskNotFound) as error:
        print(error.task_id)
    except InvalidInput as error:
        assert_type(error.field, str | None)
    except MtaskError as error:
        assert_type(error.exit_code, int)
    return None


async def publish_async(client: AsyncClient) -> None:
    assert_type(await client.publish("send_email", {"to": "a@b.c"}, key="a"), AsyncTaskHandle[Any])
    assert_type(await client.publish_many([TaskSpec("send_email", {"to": "a@b.c"})]), list[Published | TaskError])
    task = await client.get(send_email, "a")
    assert_type(task, Task)
    async with client.events(name=["send_email"], since=task.task_state.create_time) as events:
        async for event in events:
            assert_type(event.task_status, TaskStatus | None)
            if event.is_end:
                break
    await client.close()


# --- read and operate ---------------------------------------------------------------------------------------------


def read(client: Client) -> Sequence[str]:
    task = client.get("send_email", "welcome/42")
    assert_type(task.task_option, TaskOption)
    assert_type(task.task_option.retry_scope, Literal["task", "worker"])
    assert_type(task.task_state.finish_time, datetime | None)
    assert_type(task.returns, Any)
    for run in task.runs:
        assert_type(run.status, RunStatus)
        assert_type(run.ping_expire_time, datetime)
        assert_type(run.fail_reason, str | None)
        if run.progress is not None:
            assert_type(run.progress.fraction, float | None)
    if task.status is TaskStatus.FAIL:
        assert_type(client.retry("send_email", task.key), Task)
    assert_type(client.remove("send_email", "gone"), bool)
    assert_type(client.count(status=["FAIL", "SUCCESS"]), int)
    assert_type(client.server_time(), datetime)
    assert_type([worker.running_cnt for worker in client.workers()], list[int])
    assert_type(client.tasks.find_one({"task_state.status": "FAIL"}), dict[str, Any] | None)
    assert_type(client.find(lookup={"user_id": 7, "tags": ["a", "b"]}, after=task), list[Task])
    rows = client.find(lookup={"user_id": 7}, fields=["returns", "params.user_id"], after="send_email:welcome/42")
    assert_type(rows, list[TaskFields])
    assert_type([row["returns"] for row in rows], list[Any])
    found = client.get_many([task, ("send_email", "a"), (send_email, "b"), "send_email:c"])
    assert_type(found, FoundTasks[Task])
    assert_type(found.missing, list[str])
    assert_type(client.get_many(rows, fields=["status"]).tasks, dict[str, TaskFields])
    page = client.find_page(key_prefix="welcome/", params={"user.id": 7}, queue=["mail"], worker_id="a", until=None)
    assert_type(page.tasks, list[Task])
    assert_type(client.find_page(status="FAIL", fields=["status"], cursor=page.next_cursor).tasks, list[TaskFields])
    assert_type(client.count_up_to(most=100, key=["a", "b"]).count, int)
    assert_type(client.plan_bulk("cancel", name="send_email", within="shop/").plan, str)
    position = client.position(send_email, "welcome/42")
    assert_type(position, Position)
    assert_type((position.ahead, position.start_estimate), tuple[int | None, datetime | None])
    client.limit("mail", concurrency=20, rate=(100, timedelta(seconds=1)))
    return [found.id for found in client.find(status="FAIL", name="send_email", limit=10)]


def results(client: Client) -> Any:
    published = client.publish_many([TaskSpec(send_email, {"to": "a@b.c"}, lookup={"user_id": 7})])
    assert_type(client.wait_all(published, timeout=30), list[Task])
    assert_type(client.wait_any(published), Task)
    with client.as_completed(published, timeout=timedelta(seconds=30)) as completed:
        for task in completed:
            assert_type(task, Task)
    try:
        return client.result(send_email, "welcome/42", timeout=30)
    except TaskCanceled as error:
        print(error.task_id)
    except TaskFailed as error:
        assert_type(error.reason, str | None)
    return None


async def results_async(client: AsyncClient) -> None:
    assert_type(await client.find(fields=["status"]), list[TaskFields])
    assert_type(await client.get_many(["send_email:a"]), FoundTasks[Task])
    async with client.as_completed(["send_email:a"]) as completed:
        async for task in completed:
            assert_type(task, Task)
    assert_type(await client.wait_all([("send_email", "a")]), list[Task])


def schedule(client: Client) -> datetime | None:
    added = client.add_schedule("digest", "report", timedelta(hours=6), {"kind": "costs"}, catch_up="all", priority=3)
    assert_type(added, Schedule)
    assert_type(client.next_firings("digest"), list[datetime])
    return added.schedule_state.next_fire_time


def follow(client: Client) -> str | None:
    with client.events(name="import_file") as events:
        for event in events:
            print(event.kind, event.key, event.progress, event.reason)
            if event.is_end:
                return event.token
        return events.token


# --- test ---------------------------------------------------------------------------------------------------------


def test_mail(mtask_bench: Callable[[App], Bench]) -> None:
    made = mtask_bench(app)
    made.client.publish(send_email, {"to": "a@b.c"}, key="now")
    assert_type(made.run(), list[Task])
    assert [task.key for task in made.advance(timedelta(hours=1))] == []


def try_without_pytest() -> list[Task]:
    with bench(app) as made:
        return made.fire("often")
