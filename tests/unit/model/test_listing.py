"""Cursors of lists by a prefix: they name no key of another prefix, and never lead back."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from mtask.model.listing import Order, Place, end_of_prefix, hidden

NOW = datetime(2026, 1, 1, tzinfo=UTC)
texts = st.text(st.sampled_from("\0a:;b\ud7ff\ue000\U0010ffff"), max_size=4)


@given(st.sampled_from(list(Order)), texts.filter(bool), texts, st.lists(texts, max_size=8))
def test_a_hidden_place_means_the_same_and_never_leads_back(
    order: Order, prefix: str, key: str, keys: list[str]
) -> None:
    given_id = f"n:{key}"
    found = hidden(Place(NOW, given_id), prefix, order)
    assert found.time == NOW
    ids = [f"{name}:{prefix}{one}" for name in ("m", "n", "o") for one in keys]
    if order.is_descending:
        assert [one for one in ids if one < found.task_id] == [one for one in ids if one < given_id]
    else:
        assert [one for one in ids if one > found.task_id] == [one for one in ids if one > given_id]
        assert found.task_id >= given_id or not key.startswith(prefix[:-1])
    if not key.startswith(prefix):
        # Of the key it tells only on which side of the prefix it lies.
        sides = [hidden(Place(NOW, f"n:{one}"), prefix, order) for one in ("", end_of_prefix(prefix) or "")]
        assert found in sides


def test_a_place_of_the_same_prefix_stays() -> None:
    place = Place(NOW, "n:t0:1")
    assert hidden(place, "t0:", Order.DUE) == hidden(place, None, Order.DUE) == place
