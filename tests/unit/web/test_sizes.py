"""How many values a body has is told by its text, before anything parses it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtask.web import bodies
from mtask.web.problems import BodyTooLarge

_SCALARS = st.none() | st.booleans() | st.integers() | st.text('ab",[{\\é\n')
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text('a,["\\'), inner))


def count(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count, inner))


@given(_VALUES, st.integers(1, 7), st.booleans())
def test_the_count_is_at_least_the_number_of_values_and_texts_add_nothing(value: Any, step: int, escaped: bool) -> None:
    body = json.dumps(value, ensure_ascii=escaped).encode()
    emptied = json.dumps(_without_texts(value)).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "STEP", step)
        patch.setattr(bodies, "ESCAPES", 10**9)
        found = bodies.values_in(body, count(value))
    assert found >= count(value)
    assert found <= bodies.values_in(emptied, 10**9)


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(index): _without_texts(item) for index, item in enumerate(value.values())}
    if isinstance(value, list):
        return [_without_texts(item) for item in value]
    return "" if isinstance(value, str) else value


def test_a_text_full_of_commas_is_one_value() -> None:
    assert bodies.values_in(b'"' + b",[{" * 300_000 + b'"', 10) == 1
    assert bodies.values_in(b'["\\",,,\\\\", "\\\\\\",,"]', 2) == 3


def test_too_many_values_are_told_without_a_look_at_all() -> None:
    with pytest.raises(BodyTooLarge, match="at most 100000 values"):
        bodies.check_values(b"[" + b"[]," * 5_000_000 + b"[]]", 100_000)
    assert bodies.values_in(b'["' + b'","' * 1_000_000 + b'"]', 1_000) < 2_000


def test_a_long_text_and_many_escapes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LONGEST", 100)
    for short in (b"x" * 90, b'\\"' * 40, b"\\\\" * 40):
        body = b'["' + b'","'.join([short] * 9) + b'"]'
        assert bodies.check_values(body, 200) >= 9
    for long in (b"x" * 120, b'\\"' * 60, b'x\\"' * 50):
        for body in (b'["' + long + b'"]', b'["' + b'","'.join([b"x"] * 30 + [long] + [b"x"] * 30) + b'"]'):
            with pytest.raises(BodyTooLarge, match="A text in the body"):
                bodies.check_values(body, 1_000)
    escaped = b'["' + b'","'.join([b"\\n" * 40] * 50) + b'"]'
    with pytest.raises(BodyTooLarge, match="8 escapes"):
        bodies.check_values(escaped, 200)
    assert bodies.check_values(escaped, 301) == 301
