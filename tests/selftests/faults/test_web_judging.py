"""The judge of pages sees markup that was not escaped, and nothing wrong in what the templates make."""

from __future__ import annotations

import pytest

from mtask.web.page import rendering
from tests.faults.web.hostile import Request
from tests.faults.web.judging import Judge, page_faults, vocabulary
from tests.faults.web.sending import Answer
from tests.faults.web.texts import CANARY, TEXTS

_PAGE = (
    '<!doctype html>\n<html lang="en"><body class="bare"><main id="main"><p class="note">{}</p></main></body></html>'
)


@pytest.mark.parametrize(
    "text",
    [
        f"<script>{CANARY}()</script>",
        "<script>x</script>",
        "<img src=x>",
        "<p onclick=x>",
        '<a href="https://evil.example">x</a>',
        '<a href="//evil.example">x</a>',
        '<a href="javascript:x()">x</a>',
        "<svg onload=x>",
        "<!-- x -->",
        "<b style='x'>",
        f"<{CANARY}>",
        "a < b",
        "<?x?>",
        '<form action="https://evil.example">',
    ],
)
def test_markup_that_was_not_escaped_is_found(text: str) -> None:
    assert list(page_faults(_PAGE.format(text))), text


def test_escaped_texts_are_fine() -> None:
    for text in TEXTS:
        made = rendering.html("login.html", {"target": text, "wrong": text}, 401)
        assert list(page_faults(bytes(made.body).decode("utf-8", "surrogatepass"))) == [], text
    assert {("a", "href"), ("time", "datetime"), ("body", "hx-headers")} <= vocabulary()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, '{"type": "/v1/problems/x", "title": "t", "status": 500, "detail": "d"}'),
        (404, '{"type": "/v1/problems/x", "title": "t", "status": 400, "detail": "d"}'),
        (404, '{"type": "/v1/problems/x", "title": "t", "status": 404, "detail": ""}'),
        (404, '{"type": "/v1/problems/x", "title": "t", "status": 404, "detail": "Traceback (most recent call last)"}'),
        (404, '{"type": "/v1/problems/x", "title": "t", "status": 404, "detail": "a-token"}'),
        (404, "oops"),
    ],
)
def test_refusals_that_are_not_clear_are_found(status: int, body: str) -> None:
    judge = Judge(["a-token"], [])
    headers = [("content-type", "application/problem+json")]
    judge.look(Request("view", "GET", b"/"), Answer(status, headers, body.encode(), True))
    assert judge.verdict.findings
    fine = '{"type": "/v1/problems/x", "title": "t", "status": 404, "detail": "d"}'
    judge = Judge(["a-token"], [])
    judge.look(Request("view", "GET", b"/"), Answer(404, headers, fine.encode(), True))
    assert judge.verdict.findings == []
