"""Pages of lists, bounded counts and queues, for each kind of client."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask import Client, Count, TaskFields, TaskSpec, TaskStatus
from mtask.errors import InvalidInput
from mtask.kernel.driver.stores import SyncStore
from mtask.search.order import Order, Place, cursor_of, end_of_prefix, place_of
from tests.clients import AnyClient, claim, fail, succeed

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def ids(page: Any) -> list[str]:
    return [task.id for task in page.tasks]


def test_pages_go_on_with_cursors_through_tasks_of_one_instant(client: AnyClient) -> None:
    client.publish_many([TaskSpec("a", {"n": n}, key=f"{n:02}") for n in range(25)])
    seen: list[str] = []
    cursor = None
    for size in (10, 10, 5):
        page = client.find_page(limit=10, cursor=cursor)
        assert (len(page.tasks), page.looked_to) == (size, None)
        seen += ids(page)
        cursor = page.next_cursor
    assert cursor is None
    assert seen == [f"a:{n:02}" for n in reversed(range(25))]
    part = client.find_page(params={"n": 7}, fields=["params.n"])
    assert isinstance(part.tasks[0], TaskFields)
    assert [dict(row) for row in part.tasks] == [{"params.n": 7}]


def test_the_order_depends_on_the_statuses(client: AnyClient, store: SyncStore) -> None:
    for key in ("first", "second", "third"):
        client.publish("a", key=key, max_retries=0)
    for key in ("third", "first"):
        run = claim(store, f"a:{key}")
        (fail if key == "first" else succeed)(store, f"a:{key}", run)
    assert ids(client.find_page()) == ["a:third", "a:second", "a:first"]
    assert ids(client.find_page(status=["SUCCESS", "FAIL"])) == ["a:first", "a:third"]
    client.publish("a", key="soon", delay=1)
    client.publish("a", key="late", delay=3600)
    assert ids(client.find_page(status="INIT")) == ["a:second", "a:soon", "a:late"]
    finished = client.get("a", "first").task_state.finish_time
    assert ids(client.find_page(status=["SUCCESS", "FAIL"], until=finished)) == ["a:third"]
    assert ids(client.find_page(status=["SUCCESS", "FAIL"], since=finished)) == ["a:first"]


def test_counts_and_queues(client: AnyClient) -> None:
    client.publish_many([TaskSpec("a", key=f"t:{n}", queue=f"q{n % 2}") for n in range(10)])
    client.cancel("a", "t:0")
    assert client.count_up_to() == client.count_up_to(name="a") == client.count_up_to(key_prefix="t:") == Count(10)
    assert str(client.count_up_to(most=3, queue="q1")) == "3+"
    assert client.count_up_to(status="INIT", queue="q0") == Count(4)
    found = {row.queue: row for row in client.queues()}
    assert found["q0"].counts[TaskStatus.CANCELED] == Count(1)
    assert found["q0"].counts[TaskStatus.INIT] == Count(4)
    assert found["q0"].oldest_preempt_time == client.get("a", "t:2").task_state.next_preempt_time
    assert all(row.is_more for row in client.stats(most=2) if row.status == "INIT")


@pytest.mark.parametrize(
    "given",
    [
        {"cursor": "x"},
        {"cursor": ""},
        {"cursor": "AAAA"},
        {"cursor": 7},
        {"cursor": "é"},
        {"cursor": "W" * 10_000},
        {"cursor": cursor_of(Order.FINISHED, Place(NOW, "a:1"))},
        {"cursor": cursor_of(Order.CREATED, Place(NOW, "a:1")), "status": "FAIL"},
        {"limit": 0},
        {"limit": 10_001},
        {"limit": True},
        {"since": "2030-01-01"},
        {"until": NOW.replace(tzinfo=None)},
        {"key_prefix": ""},
        {"key_prefix": "\ud800"},
        {"params": {"$where": 1}},
        {"params": {"a..b": 1}},
        {"params": {"": 1}},
        {"params": {"a\0": 1}},
        {"params": [1]},
        {"fields": []},
        {"status": "LOST"},
    ],
)
def test_what_no_list_can_be_is_refused_before_anything_is_sent(given: dict[str, Any]) -> None:
    with Client("mongodb://127.0.0.1:1", timeout=timedelta(seconds=1)) as client, pytest.raises(InvalidInput):
        client.find_page(**given)


def test_cursors_say_what_they_were_made_of() -> None:
    for place in (Place(NOW, "a:é\0😀"), Place(NOW - timedelta(days=200_000), ""), Place(NOW, "n:" + "x" * 512)):
        for order in Order:
            assert place_of(cursor_of(order, place), order) == place
        created = replace(place, create_time=NOW - timedelta(days=1))
        assert place_of(cursor_of(Order.DUE, created), Order.DUE) == created


@pytest.mark.parametrize(
    ("prefix", "end"),
    [("a", "b"), ("ab:", "ab;"), ("a\U0010ffff", "b"), ("\U0010ffff", None), ("\ud7ff", "\ue000"), ("\0", "\1")],
)
def test_end_of_a_prefix(prefix: str, end: str | None) -> None:
    assert end_of_prefix(prefix) == end


def test_prefixes_with_any_characters(client: AnyClient) -> None:
    prefixes = ["a.", "a*", "a\0", "é:", "😀", "a\n", "a\\", "^a", "a$"]
    client.publish_many([TaskSpec("n", key=f"{prefix}{n}") for prefix in prefixes for n in range(2)])
    for prefix in prefixes:
        assert sorted(ids(client.find_page(key_prefix=prefix))) == [f"n:{prefix}0", f"n:{prefix}1"]
        assert sorted(ids(client.find_page(key_prefix=prefix, lookup=None, status="INIT"))) == [
            f"n:{prefix}0",
            f"n:{prefix}1",
        ]
        assert client.count_up_to(key_prefix=prefix) == Count(2)
