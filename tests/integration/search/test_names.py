"""The names of all tasks: a store remembers them, and yet finds each new one."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument

from mtask.kernel.driver.stores import SyncStore
from mtask.search import walks
from mtask.search.walks import names_of_tasks
from tests.explaining import examined_by

#: Names that are beginnings of each other, or sort around the colon.
NAMES = ["a", "a-b", "a.b", "a/b", "a0", "ab", "b", "n1", "n10", "n2"]


def insert(store: SyncStore, *ids: Any) -> None:
    made = [one if isinstance(one, RawBSONDocument) else {"_id": one} for one in ids]
    store.tasks.insert_many(made, bypass_document_validation=True)


@pytest.fixture(autouse=True)
def empty(store: SyncStore) -> None:
    store.tasks.delete_many({})
    store.names.clear()


def test_each_name_is_found_once(store: SyncStore) -> None:
    assert store.run(names_of_tasks()) == []
    insert(store, *(f"{name}:{key}" for name in NAMES for key in ("", "1", "a:b", "\U0010ffff")))
    for _ in range(2):
        assert store.run(names_of_tasks()) == sorted(NAMES)


def test_names_that_are_known_take_one_call(store: SyncStore) -> None:
    insert(store, *(f"{name}:{key}" for name in NAMES for key in range(30)))
    _, examined = examined_by(store, names_of_tasks())
    assert len(examined) == len(NAMES) + 1
    _, examined = examined_by(store, names_of_tasks())
    assert [each.documents for each in examined] == [0]
    assert examined[0].keys <= 2 * len(NAMES) + 2


@pytest.mark.parametrize("name", ["A", "a+", "a-", "aa", "c", "n11", "z"])
def test_a_new_name_is_found_beside_those_that_are_known(store: SyncStore, name: str) -> None:
    insert(store, *(f"{one}:1" for one in NAMES))
    store.run(names_of_tasks())
    insert(store, f"{name}:1")
    assert store.run(names_of_tasks()) == sorted([*NAMES, name])


def test_a_name_whose_tasks_are_gone_does_no_harm(store: SyncStore) -> None:
    insert(store, "a:1", "b:1")
    store.run(names_of_tasks())
    store.tasks.delete_one({"_id": "a:1"})
    insert(store, "c:1")
    assert set(store.run(names_of_tasks()) or ()) >= {"b", "c"}


def test_ids_that_are_malformed_hide_no_name(store: SyncStore) -> None:
    insert(store, "", "a", "a:1", "b", "b0", "c:1", "c", 7, None)
    for _ in range(2):
        assert store.run(names_of_tasks()) == ["a", "c"]


@pytest.mark.parametrize("malformed", ["XY:k", "XY"])
def test_an_id_that_is_no_utf_8_ends_the_search(store: SyncStore, malformed: str) -> None:
    # It is read as other text than the server compares, so no filter excludes it.
    insert(store, "a:1", RawBSONDocument(bson.encode({"_id": malformed}).replace(b"XY", b"\xff\xfe")))
    assert store.run(names_of_tasks()) is None
    assert store.names == set()
    store.tasks.delete_many({})


def test_too_many_names_are_not_remembered(store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "MOST", 4)
    insert(store, *(f"{one}:1" for one in NAMES))
    assert store.run(names_of_tasks()) is None
    store.tasks.delete_many({"_id": {"$nin": ["b:1", "n1:1"]}})
    assert store.run(names_of_tasks()) == ["b", "n1"]
