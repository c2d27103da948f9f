"""What the page makes of values: escapes, lengths of time, addresses."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from markupsafe import Markup

from mtask.web.page import rendering

NOW = datetime(2030, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)


def rendered(template: str, **context: object) -> str:
    return rendering.templates().from_string(template).render(context)


@pytest.mark.parametrize("name", ["a.html", "a.svg", "a.j2", "a.txt"])
def test_all_templates_escape(name: str) -> None:
    environment = rendering.templates()
    assert environment.autoescape is True, "and no choice by the name of the file"
    template = environment.from_string("{{ value }}|<a title='{{ value }}'>")
    assert template.render(value="<b>&\"'") == "&lt;b&gt;&amp;&#34;&#39;|<a title='&lt;b&gt;&amp;&#34;&#39;'>", name


def test_every_template_can_be_compiled() -> None:
    environment = rendering.templates()
    names = environment.list_templates()
    assert len(names) > 15
    for name in names:
        source = environment.get_template(name)
        assert source.name == name
        text = (environment.loader.get_source(environment, name)[0]) if environment.loader else ""
        assert "|safe" not in text.replace(" ", ""), name
        assert "<script>" not in text, name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größe 日本語 🚀", "größe 日本語 🚀"),
        ("a\u00a0b", "a\u00a0b"),
        ("pay-\u202etxt", "pay-\\u202etxt"),
        ("a\u200bb", "a\\u200bb"),
        ("nul\0", "nul\\x00"),
        ("line\nend\t.", "line\nend\t."),
        ("esc\x1b[31m", "esc\\x1b[31m"),
    ],
)
def test_text_that_cannot_be_seen_is_shown(text: str, shown: str) -> None:
    assert rendered("{{ text }}", text=text) == shown
    assert rendered("{{ text|exact }}", text=text) == text, "but a field keeps it"


def test_json_stays_json_whatever_it_holds() -> None:
    value = {"a": "\u202e\0\x85\U000e0001<b>", "n": [1, 2.5, None], "d": NOW}
    text = rendering.whole(value)
    assert text.replace("\n", "").isprintable()
    assert json.loads(text)["a"] == value["a"]
    long = rendering.pretty("x" * 30_000)
    assert len(long) < 20_100
    assert long.endswith("more characters")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "\u2013"), (0.0421, "42 ms"), (1.26, "1.3 s"), (42.4, "42 s"), (60, "1 min"), (61, "1 min 1 s"),
        (3_599, "59 min 59 s"), (3_600, "1 h"), (5_400, "1 h 30 min"), (90_000, "1 d 1 h"), (86_400 * 400, "400 d"),
        (-5, "-5.0 s"),
    ],
)  # fmt: skip
def test_length_of_time(seconds: float | None, text: str) -> None:
    assert rendering.length(seconds) == text


def test_ages() -> None:
    made = rendering.ago(NOW - timedelta(seconds=90), NOW)
    assert isinstance(made, Markup)
    assert "1 min 30 s ago" in made
    assert 'datetime="2030-01-02T03:02:35.678+00:00"' in made
    assert "in 2 h" in rendering.ago(NOW + timedelta(hours=2), NOW)
    assert rendering.ago(None, NOW, "<none>") == "&lt;none&gt;"


def test_addresses() -> None:
    assert rendering.url("/task", name="a", key="b/c:&d é") == "/task?name=a&key=b%2Fc%3A%26d+%C3%A9"
    assert rendering.url("/tasks", status=["INIT", "FAIL"], key="") == "/tasks?status=INIT&status=FAIL"
    assert rendering.url("/tasks") == "/tasks"


def test_brief_text_keeps_both_ends() -> None:
    assert rendering.brief("short", 10) == "short"
    assert rendering.brief("0123456789abc", 10) == "012345…abc"
    assert len(rendering.brief("x" * 500, 80)) == 80
