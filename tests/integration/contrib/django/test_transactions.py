"""A task exists exactly if the transaction is committed in which it was enqueued."""

from __future__ import annotations

import asyncio
import threading
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django_mongodb_backend.transaction import atomic

from mtask import Client
from mtask.contrib.django import connections
from mtask.contrib.django.api import TaskResultDoesNotExist, TaskResultStatus
from mtask.contrib.django.targets import Target
from tests.integration.contrib.django.conftest import Running
from tests.integration.contrib.django.shop import tasks
from tests.integration.contrib.django.shop.models import Order
from tests.integration.contrib.django.waiting import finished
from tests.mongo import Client as Mongo


@pytest.fixture
def own(project: str, mongo_uri: str) -> Iterator[Client]:
    """Return a client of the project's database, with a connection of its own."""
    with Client(mongo_uri, database=project) as made:
        yield made


class Undone(Exception):
    """Undoes a transaction."""


def test_rollback_leaves_neither_order_nor_task(own: Client) -> None:
    before = own.count()
    with suppress(Undone), atomic():
        Order.objects.create(number=1)
        result = tasks.count_orders.enqueue(1)
        raise Undone
    assert (own.count(), Order.objects.filter(number=1).count()) == (before, 0)
    with pytest.raises(TaskResultDoesNotExist):
        tasks.count_orders.get_result(result.id)


def test_commit_makes_exactly_one_task_that_sees_the_order(worker: Running, own: Client) -> None:
    keyed = tasks.count_orders.using(key=f"order/{uuid.uuid4().hex}")
    with atomic():
        first = keyed.enqueue(2)
        with atomic():  # an inner block is part of the outer one
            second = keyed.enqueue(2)
        free = tasks.count_orders.enqueue(2)
        # The transaction sees its own tasks, and nobody else does.
        assert (first.id, first.args) == (second.id, [2])
        free.refresh()
        assert (free.status, second.status) == (TaskResultStatus.READY, TaskResultStatus.READY)
        assert own.get_many([first.id, free.id]).missing == [first.id, free.id]
        Order.objects.create(number=2)
    # No worker has begun them before the commit: each sees the order.
    assert [finished(result).return_value for result in (first, free)] == [1, 1]
    assert [finished(result).attempts for result in (first, free)] == [1, 1]


def test_connections_of_async_tasks_are_closed(worker: Running) -> None:
    # Each async task has its own thread for the ORM, and the thread ends with the task.
    found = [finished(result).return_value for result in [tasks.name_thread.enqueue() for _ in range(2)]]
    assert found[0] != found[1]
    assert not {thread.name for thread in threading.enumerate()} & set(found)


async def test_async_task_has_a_thread_of_its_own_for_the_orm(worker: Running) -> None:
    await Order.objects.acreate(number=3)
    result = await tasks.count_orders_async.aenqueue(3)
    assert (await asyncio.to_thread(finished, result)).return_value == [1, True, True]


def test_transactions_of_two_threads_do_not_meet(own: Client) -> None:
    inside, outside = threading.Event(), threading.Event()
    found: list[Any] = []

    def other() -> None:
        inside.wait(30)
        found.append(tasks.echo.using(key="other thread").enqueue().id)  # at once, as no transaction is open here
        outside.set()

    thread = threading.Thread(target=other)
    thread.start()
    with suppress(Undone), atomic():
        tasks.echo.using(key="this thread").enqueue()
        inside.set()
        outside.wait(30)
        raise Undone
    thread.join()
    assert own.get("tests.integration.contrib.django.shop.tasks.echo", "other thread").id == found[0]
    with pytest.raises(TaskResultDoesNotExist):
        tasks.echo.get_result(f"{tasks.echo.module_path}:this thread")


@contextmanager
def moved(name: str) -> Iterator[None]:
    """Let Django's connection mean another database, as its test runner does."""
    usual = connection.settings_dict["NAME"]
    connection.settings_dict["NAME"] = name
    connection.connect()
    connection.__dict__.pop("database", None)
    try:
        yield
    finally:
        connection.settings_dict["NAME"] = usual
        connection.__dict__.pop("database", None)
        connection.connect()


def test_transaction_without_collections_says_what_to_do(project: str, mongo: Mongo) -> None:
    name = f"test_{uuid.uuid4().hex}"
    with moved(name):
        with pytest.raises(ImproperlyConfigured, match=r"lacks mtask's collections.*manage.py migrate"), atomic():
            tasks.echo.enqueue()
        assert mongo[name].list_collection_names() == []
    with atomic():
        tasks.echo.enqueue()


def test_atomic_of_django_itself_is_warned_of_once(project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with transaction.atomic(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tasks.echo.enqueue()
        tasks.echo.enqueue()
    found = [one for one in told if "is no transaction on MongoDB" in str(one.message)]
    assert len(found) == 1
    assert found[0].filename == __file__
    assert connections.session_of(Target("default")) is None
