"""50 concurrent publishes of one key, from processes: one document, one `created`."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable
from threading import Barrier
from typing import Any

import pytest

from mtask import Client, TaskSpec
from mtask.kernel.driver.indexes import HEAD_INDEX, task_indexes
from tests.clients import KINDS, Kind, open_client
from tests.mongo import Client as Mongo

#: What the kinds differ in does not depend on the number of processes.
PUBLISHERS: dict[Kind, int] = {"sync": 50, "asyncio": 12, "motor": 12}
KEYS = [f"welcome/{number}" for number in range(200)]


def publish_one(kind: Kind, uri: str, database: str, number: int) -> list[tuple[str, bool]]:
    with open_client(kind, uri, database) as client:
        published = client.publish("send_email", {"publisher": number}, key="welcome/42")
    return [(published.task_id, published.created)]


def publish_all(kind: Kind, uri: str, database: str, number: int) -> list[tuple[str, bool]]:
    with open_client(kind, uri, database) as client:
        results = client.publish_many([TaskSpec("send_email", {"publisher": number}, key=key) for key in KEYS])
    return [(published.task_id, published.created) for published in results]


def publisher(work: Callable[..., Any], start: Barrier, results: Any, *arguments: Any) -> None:
    try:
        start.wait(60)
        results.put(work(*arguments))
    except BaseException as error:
        results.put(repr(error))
        raise


def from_processes(count: int, work: Callable[..., Any], kind: Kind, uri: str, database: str) -> list[Any]:
    """Run `work` in that many processes at once; return what each came to."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    start = context.Barrier(count)
    results: Any = context.SimpleQueue()
    processes = [
        context.Process(target=publisher, args=(work, start, results, kind, uri, database, number))
        for number in range(count)
    ]
    for process in processes:
        process.start()
    came_to = [results.get() for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0, came_to
        process.close()
    results.close()
    return came_to


@pytest.mark.parametrize("kind", ["sync", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[1:])])
def test_many_processes_publish_one_key_and_one_document_is_created_once(
    kind: Kind, mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    came_to = from_processes(PUBLISHERS[kind], publish_one, kind, mongo_uri, database_name)

    told = [one for each in came_to for one in each]
    assert len(told) == PUBLISHERS[kind]
    assert {task_id for task_id, _ in told} == {"send_email:welcome/42"}
    assert sum(created for _, created in told) == 1
    documents = list(mongo[database_name]["tasks"].find())
    assert [document["_id"] for document in documents] == ["send_email:welcome/42"]
    assert documents[0]["task_state"]["status"] == "INIT"


def test_processes_that_publish_the_same_batch_create_each_task_once(
    mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    came_to = from_processes(8, publish_all, "sync", mongo_uri, database_name)

    created = Counter(task_id for each in came_to for task_id, is_new in each if is_new)
    assert created == Counter({f"send_email:{key}": 1 for key in KEYS})
    assert all([task_id for task_id, _ in each] == [f"send_email:{key}" for key in KEYS] for each in came_to)
    assert mongo[database_name]["tasks"].count_documents({}) == len(KEYS)


def test_processes_that_are_the_first_to_connect_set_the_database_up_once(
    mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    from_processes(8, publish_one, "sync", mongo_uri, database_name)

    with Client(mongo_uri, database=database_name) as client:
        client.init(repair=False)
    assert sorted(mongo[database_name].list_collection_names()) == ["tasks", "workers"]
    indexes = {"_id_", HEAD_INDEX, *(index.document["name"] for index in task_indexes())}
    assert mongo[database_name]["tasks"].index_information().keys() == indexes
