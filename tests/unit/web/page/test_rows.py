"""The rows that are drawn in Python: nothing that comes from the database becomes markup."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from markupsafe import Markup

from mtask.features.audit_log.client import Action
from mtask.features.audit_log.page import action_rows
from mtask.features.flows.page import bar, flow_rows
from mtask.features.flows.views import FlowRow
from mtask.web.page import rendering
from mtask.web.page.reads import Queue, State
from mtask.web.page.rows import queue_rows, task_rows

NOW = datetime(2030, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
MARKUP = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>&amp;{{7*7}}\u202e\0"
NAMES = ["plain", "größe/日本語 🚀", "a&b=c#d e+f", "\u202etxt", MARKUP, "x" * 500]
_KNOWN_TAGS = {"tr", "td", "a", "b", "bdi", "span", "svg", "path", "circle", "rect", "time"}


class _Reader(HTMLParser):
    """Reads rows: their tags, the values of their attributes, and their text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def read(rows: Markup) -> _Reader:
    """Return rows that hold no other tag or attribute than those of the page."""
    assert isinstance(rows, Markup)
    found = _Reader(rows)
    assert set(found.tags) <= _KNOWN_TAGS, found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("style", "src")]
    assert all(
        value.startswith(("/task", "/flow", "/queue", "/workers")) for name, value in found.attributes if name == "href"
    )
    assert "\u202e" not in rows
    assert "\0" not in rows
    return found


def row(**given: Any) -> dict[str, Any]:
    usual = {
        "name": "send", "key": "a/1", "status": "FAIL", "queue": "mail", "create_time": NOW, "due_time": None,
        "finish_time": NOW, "failed_cnt": 0, "cancel_requested": False, "reason": "", "flow": "",
    }  # fmt: skip
    return usual | given


@pytest.mark.parametrize("text", NAMES)
@pytest.mark.parametrize("field", ["name", "key", "status", "queue", "reason", "flow", "failed_cnt"])
def test_tasks_are_escaped(field: str, text: str) -> None:
    found = read(task_rows([row(**{field: text})], NOW))
    if field != "status":  # a malformed status is shown, and nothing more
        addresses = [parse_qs(urlsplit(value).query) for name, value in found.attributes if name == "href"]
        if field in ("name", "key"):
            assert addresses[0][field] == [text], "the link leads to this very task"
        if field == "flow":
            assert addresses[1]["key"] == [text]
    assert found.tags.count("tr") == 1


@pytest.mark.parametrize("value", [None, 7, 1.5, ["<b>"], {"<b>": MARKUP}, True])
@pytest.mark.parametrize("field", ["status", "queue", "failed_cnt"])
def test_malformed_tasks_are_shown(field: str, value: Any) -> None:
    found = read(task_rows([row(**{field: value})], NOW))
    assert found.tags.count("td") == 6


def test_what_a_row_says() -> None:
    kinds = {
        "gone": row(status="GONE"),
        "cancel requested": row(status="RUNNING", cancel_requested=True, reason="before"),
        "3 failed before": row(status="INIT", failed_cnt=3),
        "ValueError: no": row(reason="ValueError: no"),
    }
    for words, one in kinds.items():
        assert words in read(task_rows([one], NOW)).text
    assert "before" not in read(task_rows([row(status="SUCCESS", reason="before")], NOW)).text
    assert "in 1 h" in read(task_rows([row(finish_time=None, due_time=NOW + timedelta(hours=1))], NOW)).text


def test_id_without_a_key_has_a_link_without_one() -> None:
    assert 'href="/task?name=broken"' in rendering.task_link("broken", "")
    assert rendering.task_link("a b", "c/d&e").startswith(
        '<a href="/task?name=a+b&amp;key=c%2Fd%26e" title="a b:c/d&amp;e">'
    )


@pytest.mark.parametrize("text", NAMES)
def test_queues_are_escaped(text: str) -> None:
    queues = {text: Queue(text, counts={"FAIL": 2}, limits=[text]), "b": Queue("b", stuck={"n": text})}
    state = State(NOW, queues, (), (), NOW)
    found = read(queue_rows(state, {text: 1.25}))
    assert found.tags.count("tr") == 2
    addresses = [parse_qs(urlsplit(value).query)["queue"][0] for name, value in found.attributes if name == "href"]
    assert addresses[:5] == [text] * 5
    assert "1.2" in found.text
    assert "–" in read(queue_rows(state, None)).text  # noqa: RUF001 the dash of the page


def test_rows_of_queues_belong_to_one_state() -> None:
    first = State(NOW, {"a": Queue("a", counts={"FAIL": 1})}, (), (), NOW)
    second = replace(first, queues={"a": Queue("a", counts={"FAIL": 2})})
    texts = [read(queue_rows(state, {"a": rate})).text for state in (first, second, first) for rate in (1.0, 2.0)]
    assert len(set(texts)) == 4
    assert texts[:2] == texts[4:]


@pytest.mark.parametrize("text", NAMES)
def test_flows_are_escaped(text: str) -> None:
    flow = FlowRow(text, f"n:{text}", NOW, {"SUCCESS": 1, "FAIL": 1, text: 2})
    found = read(flow_rows([(text, flow)], NOW))
    assert [parse_qs(urlsplit(value).query)["key"] for name, value in found.attributes if name == "href"] == [[text]]
    assert ("class", "f-SUCCESS") in found.attributes
    assert "2/4" in found.text
    assert bar({}, 0) == ""


@pytest.mark.parametrize("text", NAMES)
def test_actions_are_escaped(text: str) -> None:
    action = Action("1", NOW, actor=text, via=text, intent=text, target=text, detail=text, result=text)
    for address in (None, rendering.url("/task", name=text, key=text)):
        read(action_rows([(action, address)], NOW))
    open_one = replace(action, result=None)
    assert "open" in read(action_rows([(open_one, None)], NOW)).text


@pytest.mark.parametrize("status", ["SUCCESS", "GONE", None, MARKUP, ["FAIL"], 3])
def test_badges(status: Any) -> None:
    found = read(rendering.badge(status))
    assert found.tags[:3] == ["span", "svg", "path"]
    words = "malformed" if status is None else "gone" if status == "GONE" else rendering.visible(str(status))
    assert found.text == words
