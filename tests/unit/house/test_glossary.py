"""The glossary: each word once, and no word of it with a second meaning on the pages."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
GLOSSARY = (DOCS / "glossary.md").read_text()
#: Words that once had a second meaning, as the pages wrote them, and the page on which they did.
FORMER = [
    ("design/flows.md", r"\bholders?\b|\bculprit\b|\bfirst steps?\b|tasks that X holds"),
    ("design/discovery.md", r"\blookups?\b(?!`)"),
    ("design/document.md", r"went on in several rounds|this round went on"),
    ("flows.md", r"Once a round"),
]


def test_each_word_is_explained_once() -> None:
    words = [word for cell in re.findall(r"^\| \*\*(.+?)\*\*", GLOSSARY, re.MULTILINE) for word in cell.split(", ")]
    assert len(words) > 80
    assert [word for word, count in Counter(words).items() if count > 1] == []


@pytest.mark.parametrize(("page", "second_meaning"), FORMER)
def test_words_keep_to_their_meaning(page: str, second_meaning: str) -> None:
    assert re.findall(second_meaning, (DOCS / page).read_text()) == []
