"""Cursors of lists by a prefix: they name no key of another prefix, and never lead back."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

from hypothesis import example, given
from hypothesis import strategies as st

from mtask.search.order import LAST, Order, Place, end_of_prefix, hidden, leads_on, place_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
texts = st.text(st.sampled_from("\0a:;b\ud7ff\ue000\U0010ffff"), max_size=4)


@given(texts.filter(bool), texts, st.lists(texts, max_size=8))
@example("b", "a\U0010ffff:", [])
def test_a_hidden_place_means_the_same_and_never_leads_back(prefix: str, key: str, keys: list[str]) -> None:
    given_id = f"n:{key}"
    found = hidden(Place(NOW, given_id, NOW), prefix)
    assert (found.time, found.create_time) == (NOW, NOW)
    ids = [f"{name}:{prefix}{one}" for name in ("m", "n", "o") for one in keys]
    assert [one for one in ids if one < found.task_id] == [one for one in ids if one < given_id]
    assert found.task_id <= given_id
    if not key.startswith(prefix):
        # Of the key it tells only on which side of the prefix it lies.
        sides = [hidden(Place(NOW, f"n:{one}", NOW), prefix) for one in ("", end_of_prefix(prefix) or "")]
        assert found in sides


def test_a_place_of_the_same_prefix_stays() -> None:
    place = Place(NOW, "n:t0:1")
    assert hidden(place, "t0:") == hidden(place, None) == place


def test_an_earlier_cursor_of_due_tasks_begins_the_instant_once_more() -> None:
    earlier = base64.urlsafe_b64encode(b'["due", 5, "n:k"]').decode().rstrip("=")
    assert place_of(earlier, Order.DUE) == Place(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=5), "")


SOME = [
    Place(NOW + timedelta(milliseconds=moment), task_id, created)
    for moment in range(2)
    for task_id, created in (
        ("", None),
        ("a:2", NOW),
        ("a:1", NOW),
        ("a:", NOW),
        ("a:3", NOW - timedelta(1)),
        ("a:", None),
        ("b:1", NOW),
        (LAST, None),
    )
]


def test_due_places_lead_on_by_instant_name_newest_creation_and_last_id() -> None:
    for index, one in enumerate(SOME):
        assert [leads_on(one, other, Order.DUE) for other in SOME] == [place > index for place in range(len(SOME))]


def test_places_of_other_orders_lead_on_to_earlier_instants_and_lower_ids() -> None:
    later = NOW + timedelta(milliseconds=1)
    some = [Place(later, "a:1"), Place(NOW, "b:1"), Place(NOW, "a:2"), Place(NOW, "")]
    for index, one in enumerate(some):
        assert [leads_on(one, other, Order.CREATED) for other in some] == [place > index for place in range(4)]
