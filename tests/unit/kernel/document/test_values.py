from __future__ import annotations

import dataclasses
import enum
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

from mtask.kernel.document.values import storable


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


class Word(enum.StrEnum):
    YES = "yes"


class Address(BaseModel):
    town: str
    colour: Colour = Colour.RED


@dataclasses.dataclass
class Order:
    number: int
    address: Address
    tags: tuple[str, ...] = ()


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "text", b"bytes", datetime(2026, 1, 1, tzinfo=UTC), {}, []])
def test_what_bson_holds_is_left_as_it_is(value: Any) -> None:
    made = storable(value)
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize(("member", "stored"), [(Colour.RED, "red"), (Size.BIG, 3), (Word.YES, "yes")])
def test_an_enum_is_stored_as_its_plain_value(member: Any, stored: Any) -> None:
    made = storable(member)
    assert made == stored
    assert not isinstance(made, enum.Enum)


def test_models_dataclasses_tuples_and_sets_are_stored_as_mappings_and_lists() -> None:
    order = Order(1, Address(town="Bern"), ("a", "b"))
    assert storable({"order": order, "seen": {1}, "frozen": frozenset({2})}) == {
        "order": {"number": 1, "address": {"town": "Bern", "colour": "red"}, "tags": ["a", "b"]},
        "seen": [1],
        "frozen": [2],
    }


def test_a_class_is_no_value_and_comes_back_as_it_is() -> None:
    assert storable(Order) is Order
