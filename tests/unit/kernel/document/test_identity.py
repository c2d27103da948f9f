from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtask.errors import InvalidInput, InvalidKey, InvalidName
from mtask.kernel.document.identity import (
    MAX_KEY_BYTES,
    check_key,
    check_name,
    check_text,
    fresh_key,
    split_task_id,
    task_id_of,
)

_LETTERS = "abcXYZ019_.-/"


@pytest.mark.parametrize("name", ["a", "send_email", "Mail.v2/send-now", "0", "x" * 256])
def test_name_of_letters_digits_and_four_signs_is_taken(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "a:b", "a b", "é", "a\n", "a$b", "x" * 257, "a\x00", "a,b"])
def test_name_with_anything_else_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="Use 1 to 256 letters") as caught:
        check_name(name)
    assert caught.value.name == name


@pytest.mark.parametrize("name", [None, 1, b"a", ["a"]])
def test_name_that_is_no_text_is_refused_by_its_type(name: Any) -> None:
    with pytest.raises(InvalidName, match=f"it is {type(name).__name__}, not text"):
        check_name(name)


@pytest.mark.parametrize(
    "key", ["k", "a:b/c d", "ключ", "x" * MAX_KEY_BYTES, "é" * (MAX_KEY_BYTES // 2), "$where", " "]
)
def test_any_text_up_to_512_bytes_is_a_key(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "it is empty"),
        ("x" * 513, "it has 513 bytes"),
        ("é" * 257, "it has 514 bytes"),
        ("\ud800", "lone surrogate"),
        (None, "it is NoneType, not text"),
        (7, "it is int, not text"),
        (b"k", "it is bytes, not text"),
    ],
)
def test_other_keys_are_refused_with_the_reason(key: Any, reason: str) -> None:
    with pytest.raises(InvalidKey, match=reason):
        check_key(key)


def test_a_refused_key_is_shown_shortened() -> None:
    with pytest.raises(InvalidKey) as caught:
        check_key("x" * 10_000)
    assert len(str(caught.value)) < 250


@given(st.text(_LETTERS, min_size=1), st.text(min_size=1), st.text(_LETTERS, min_size=1), st.text(min_size=1))
def test_two_tasks_never_share_an_id(name: str, key: str, other_name: str, other_key: str) -> None:
    is_same = task_id_of(name, key) == task_id_of(other_name, other_key)
    assert is_same is ((name, key) == (other_name, other_key))


def test_a_task_id_splits_at_its_first_colon() -> None:
    assert split_task_id("mail/send:a:b") == ("mail/send", "a:b")


@pytest.mark.parametrize("task_id", [":key", "a b:key"])
def test_a_task_id_without_a_name_is_refused(task_id: str) -> None:
    with pytest.raises(InvalidName):
        split_task_id(task_id)


@pytest.mark.parametrize("task_id", ["", "mail"])
def test_a_task_id_without_a_colon_asks_for_the_key(task_id: str) -> None:
    with pytest.raises(InvalidInput, match="give the key, too"):
        split_task_id(task_id)


def test_a_task_id_without_a_key_is_refused() -> None:
    with pytest.raises(InvalidKey):
        split_task_id("mail:")


def test_fresh_keys_differ_and_sort_by_time() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    keys = [fresh_key(start + timedelta(milliseconds=step)) for step in range(50)]
    assert keys == sorted(keys)
    assert len({fresh_key(start) for _ in range(100)}) == 100
    assert all(check_key(key) == key and len(key) == 32 for key in keys)


@pytest.mark.parametrize("text", ["default", "$w", "w.1", "worker {1}", "ключ", "x" * 256])
def test_printable_text_names_a_queue_or_a_worker(text: str) -> None:
    assert check_text("queue", text) == text


@pytest.mark.parametrize("text", ["", " ", "a\nb", "a,b", "x" * 257, "é" * 129, None, 1, "\ud800"])
def test_other_text_is_refused_by_the_name_of_its_field(text: Any) -> None:
    with pytest.raises(InvalidInput, match="worker_id") as caught:
        check_text("worker_id", text)
    assert caught.value.field == "worker_id"
