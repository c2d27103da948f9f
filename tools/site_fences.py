"""A hook of mkdocs: it warns of a block of code that the built page does not show as one. `--strict` makes it an error.

Markdown does not complain about a fence that it cannot read: it prints the text of the block.
"""

from __future__ import annotations

import logging
import re
from typing import Any

log = logging.getLogger("mkdocs.hooks.site_fences")

_FENCED = re.compile(r"^( *)(```+)[^`\n]*\n.*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.DOTALL)


def on_page_content(html: str, /, *, page: Any, **_: Any) -> None:
    """Check one page, as mkdocs has built it."""
    for fault in faults_of(page.markdown, html):
        log.warning("%s: %s", page.file.src_uri, fault)


def faults_of(markdown: str, html: str) -> list[str]:
    """Tell which fences of a page are not blocks of code in its HTML."""
    faults = [f"a fence became text: {left.strip()!r}" for left in re.findall(r"```[^<\n]*", _CODE.sub("", html))]
    fences, blocks = len(_FENCED.findall(markdown)), len(re.findall(r"<pre\b", html))
    if blocks < fences:
        faults.append(f"{fences} fences became {blocks} blocks of code; write only the language behind the first ```")
    return faults
