"""The index of a task's `_id` among those of its group, as the server finds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from bson.code import Code
from bson.raw_bson import RawBSONDocument
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo.collection import Collection

from mtask.kernel.statements import expressions as x
from tests.mongo import Client

GROUPS: dict[str, list[Any]] = {
    "one": ["task:1"],
    "each the beginning of another": ["task:1", "task:10", "task:1 0", "task:100", "task:", "task"],
    "each the end of another": ["xtask:1", "task:1", "1", ":1"],
    "of many sizes and alphabets": ["task:é", "task:" + "ü" * 200, "task:日本", "task:😀", "task:a"],
    "with the characters between two ids": [
        "task:a",
        "task:a\nb",
        "a\tb",
        "b",
        "\n",
        "\t",
        "task:a\t0\ntask:b",
        "task:b",
    ],
    "malformed": ["task:1", 7, None, "7", "", b"task:1", {"a": 1}, Code("task:1")],
    "with spaces": [" ", "  ", "task: ", "task:", " task:"],
    "four hundred": [f"task:{number}" for number in range(400)],
    "too long for one text": [f"task:{number}" + "k" * 900 for number in range(60)],
}


def found(mongo: Client, database_name: str, task_ids: Sequence[Any]) -> dict[str, tuple[float, str]]:
    """Return what the server finds for each of these ids, by its `repr`: its index, and the same as a text."""
    collection = mongo[database_name]["ids"]
    collection.delete_many({})
    collection.insert_many({"_id": task_id} for task_id in task_ids)
    return found_in(collection, task_ids)


def found_in(collection: Collection[dict[str, Any]], task_ids: Sequence[Any]) -> dict[str, tuple[float, str]]:
    index = {"index": {"$add": [x.index_of_id(task_ids), 0]}, "number": {"$toString": x.index_of_id(task_ids)}}
    return {repr(row["_id"]): (row["index"], row["number"]) for row in collection.aggregate([{"$project": index}])}


def expected(task_ids: Sequence[Any]) -> dict[str, tuple[float, str]]:
    return {repr(task_id): (index, str(index)) for index, task_id in enumerate(task_ids)}


@pytest.mark.parametrize("name", GROUPS)
def test_server_finds_each_id_in_its_own_place(mongo: Client, database_name: str, name: str) -> None:
    assert found(mongo, database_name, GROUPS[name]) == expected(GROUPS[name])


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.sampled_from("\n\t\0 :a1é😀"), max_size=6), min_size=1, max_size=30, unique=True))
def test_server_finds_any_id_in_its_own_place(mongo: Client, database_name: str, task_ids: list[str]) -> None:
    assert found(mongo, database_name, task_ids) == expected(task_ids)


def test_server_finds_an_id_that_is_a_symbol(mongo: Client, database_name: str) -> None:
    collection = mongo[database_name]["ids"]
    # This driver writes no symbol, and reads one as a text.
    element = b"\x0e_id\0" + (7).to_bytes(4, "little") + b"task:2\0"
    symbol = RawBSONDocument((len(element) + 5).to_bytes(4, "little") + element + b"\0")
    mongo[database_name].command("insert", "ids", documents=[{"_id": "task:1"}, symbol, {"_id": "task:3"}])
    task_ids = [row["_id"] for row in collection.find({}, sort=[("_id", 1)])]
    assert task_ids == ["task:1", "task:2", "task:3"]
    assert collection.find_one({"_id": {"$type": "symbol"}}) == {"_id": "task:2"}
    assert found_in(collection, task_ids) == expected(task_ids)
