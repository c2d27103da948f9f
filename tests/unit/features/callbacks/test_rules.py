"""What a callback may be, which ends it tells, and the message that tells one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask import TaskSpec
from mtask.errors import InvalidInput
from mtask.features.callbacks.rules import (
    TaskIdentity,
    check_callback,
    event,
    webhook_id,
)
from mtask.kernel.document.parts import MAX_URL, OwedCallback
from tests.oracles.rules import is_told

URL = "https://hooks.example.com/a?b=c"
CREATED = datetime(2030, 1, 1, 12, 0, 0, 500_000, tzinfo=UTC)
TASK = TaskIdentity("send:acme:k/1", "send", "acme:k/1", CREATED)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"url": URL}, {"url": URL, "on": ["SUCCESS", "FAIL", "CANCELED"]}),
        ({"url": URL, "on": ["FAIL", "SUCCESS"]}, {"url": URL, "on": ["SUCCESS", "FAIL"]}),
        ({"url": URL, "on": "CANCELED", "secret": "a.b"}, {"url": URL, "on": ["CANCELED"], "secret": "a.b"}),
        ({"url": "http://[::1]:8080", "on": None}, {"url": "http://[::1]:8080", "on": ["SUCCESS", "FAIL", "CANCELED"]}),
    ],
)
def test_a_callback_is_checked_and_completed(given: dict[str, Any], stored: dict[str, Any]) -> None:
    assert check_callback(given) == stored


def test_the_secrets_of_a_tenant_are_its_own() -> None:
    assert check_callback({"url": URL, "on": "FAIL"}, "acme") == {
        "url": URL,
        "on": ["FAIL"],
        "secret": "acme/default",
        "tenant": "acme",
    }
    assert check_callback({"url": URL, "secret": "x"}, "acme")["secret"] == "acme/x"
    with pytest.raises(InvalidInput, match="no slash"):
        check_callback({"url": URL, "secret": "umbra/x"}, "acme")


@pytest.mark.parametrize(
    "wrong",
    [
        "https://hooks.example.com",
        {},
        {"url": None},
        {"url": "ftp://a"},
        {"url": "https://"},
        {"url": "https:///a"},
        {"url": "https://a b"},
        {"url": "https://a\\@b"},
        {"url": "https://a\n"},
        {"url": "https://é.example"},
        {"url": "https://user:pw@a"},
        {"url": "https://a#b"},
        {"url": "https://a:0"},
        {"url": "https://a:99999"},
        {"url": "https://[::1"},
        {"url": "https://a/" + "x" * MAX_URL},
        {"url": URL, "on": []},
        {"url": URL, "on": ["RUNNING"]},
        {"url": URL, "on": 7},
        {"url": URL, "secret": ""},
        {"url": URL, "secret": "a b"},
        {"url": URL, "secret": 7},
        {"url": URL, "tenant": "acme"},
        {"url": URL, "one": 1},
    ],
)
def test_what_is_no_callback_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="callback") as refused:
        TaskSpec("send", callback=wrong).prepare()
    assert "pw" not in str(refused.value)


def test_nobody_publishes_a_delivery() -> None:
    with pytest.raises(InvalidInput, match="mtask's own"):
        TaskSpec("mtask/callback", {"url": URL}).prepare()


@pytest.mark.parametrize(
    ("on", "status", "was_final", "told"),
    [
        (["FAIL"], "FAIL", False, True),
        (["FAIL"], "FAIL", True, False),
        (["FAIL"], "SUCCESS", False, False),
        (["SUCCESS", "FAIL", "CANCELED"], "CANCELED", False, True),
        (["RUNNING"], "RUNNING", False, False),
    ],
)
def test_an_end_is_told_once_if_it_was_asked_for(on: list[str], status: str, *, was_final: bool, told: bool) -> None:
    assert is_told(on, status, was_final=was_final) is told


def test_the_id_of_an_end_is_its_own() -> None:
    later = TaskIdentity(TASK.task_id, TASK.name, TASK.key, CREATED + timedelta(milliseconds=1))
    other = TaskIdentity("send:acme:k/2", "send", "acme:k/2", CREATED)
    ids = [webhook_id(task, number) for task in (TASK, later, other) for number in (1, 2)]
    assert len(set(ids)) == 6
    assert webhook_id(TASK, 1) == ids[0] == webhook_id(TaskIdentity("send:acme:k/1", "x", "y", CREATED), 1)
    assert ids[0].startswith("msg_")


def test_the_message_holds_ids_status_and_times_and_shows_a_tenant_its_own_keys() -> None:
    owed = OwedCallback(number=2, status="FAIL", time=CREATED + timedelta(seconds=1), url=URL)
    told = event(TASK, owed)
    assert told == {
        "type": "task.fail",
        "timestamp": "2030-01-01T12:00:01.500Z",
        "data": {
            "task_id": "send:acme:k/1",
            "name": "send",
            "key": "acme:k/1",
            "status": "FAIL",
            "create_time": "2030-01-01T12:00:00.500Z",
            "finish_time": "2030-01-01T12:00:01.500Z",
            "number": 2,
        },
    }
    of_tenant = event(TASK, owed.model_copy(update={"tenant": "acme"}))["data"]
    assert (of_tenant["task_id"], of_tenant["key"]) == ("send:k/1", "k/1")
