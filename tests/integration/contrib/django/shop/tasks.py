"""Tasks of each kind."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured, PermissionDenied

from mtask import Fail, Retry
from mtask.contrib.django import options, schedule
from tests.integration.contrib.django.shop.models import Order
from tests.integration.contrib.django.shop.tasking import task

#: What tasks of this process have seen.
seen: list[Any] = []
gate = threading.Event()


@task
def echo(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


@task
async def echo_async(*args: Any, **kwargs: Any) -> Any:
    await asyncio.sleep(0)
    return [list(args), kwargs]


@task
def add(a: int, b: int = 1) -> int:
    return a + b


@task
def give(what: str) -> Any:
    return {"bytes": b"text", "tuple": (1, (2,)), "none": None, "nested": {"a": [1.5, True]}}[what]


@task
def give_unserialisable() -> Any:
    return object()


@task
async def give_unserialisable_async() -> Any:
    return {1, 2}


@task
def fail() -> None:
    raise ValueError("this task failed")


@task
async def fail_async() -> None:
    raise PermissionDenied("not here")


@task
def fail_by_local_class() -> None:
    class Local(Exception):
        pass

    raise Local("nobody can import it")


@task
def fail_from() -> None:
    try:
        fail.func()
    except ValueError as error:
        raise ImproperlyConfigured("the outer one") from error


@task
def leave() -> None:
    sys.exit("bye")


@task
def interrupt() -> None:
    raise KeyboardInterrupt


@task
def give_up() -> None:
    raise Fail("enough")


@task(takes_context=True)
def tell(context: Any, extra: int = 0) -> Any:
    result = context.task_result
    return {
        "attempt": context.attempt,
        "id": result.id,
        "status": str(result.status),
        "args": result.args,
        "kwargs": result.kwargs,
        "workers": result.worker_ids,
        "extra": extra,
        "run": context.mtask.attempt,
    }


@task(takes_context=True)
async def tell_async(context: Any) -> Any:
    return [context.attempt, context.task_result.task.module_path]


@task
@options(max_retries=2, retry_delay=0)
def stumble(name: str, times: int) -> str:
    seen.append(name)
    if seen.count(name) <= times:
        raise ConnectionError(f"{name} {seen.count(name)}")
    return "well"


@task
@options(max_retries=2, retry_delay=0)
def give_unserialisable_though_retried() -> Any:
    seen.append("unserialisable")
    return object()


@task
def again_later(name: str) -> str:
    seen.append(name)
    if seen.count(name) == 1:
        raise Retry(0, "later")
    return "well"


@task(queue_name="mail", priority=10)
def mail(to: str) -> str:
    return f"to {to}"


@task
def count_orders(number: int) -> int:
    return Order.objects.filter(number=number).count()


@task
async def count_orders_async(number: int) -> list[Any]:
    first = await Order.objects.filter(number=number).acount()
    names = [await sync_to_async(lambda: threading.current_thread().name)() for _ in range(2)]
    return [first, names[0] == names[1], threading.current_thread().name != names[0]]


@task
async def name_thread() -> str:
    return await sync_to_async(lambda: threading.current_thread().name)()


@task
def wait_for_gate() -> str:
    gate.wait(30)
    return "through"


@task
@schedule("0 7 * * *", timezone="Europe/Berlin", kwargs={"to": "all"})
def digest(to: str) -> str:
    return f"digest to {to}"


@task(backend="lite")
def on_uri(number: int) -> int:
    return number + 1
