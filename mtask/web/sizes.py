"""How much a body of JSON will become when it is parsed. A byte of `[[],[],[]]` takes seventy bytes as lists.

The values are counted in the text, before anything parses it. The parser takes a text in one step, in which no other
thread runs: 15 MB take 50 ms, and 150 ms if all of it is escaped. So long texts are refused, and escapes count, too.
"""

from __future__ import annotations

import re

from mtask.web.problems import BodyTooLarge

#: What follows in a text of JSON, up to the quote that ends it.
_IN_TEXT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_QUOTE, _BACKSLASH = b'"', ord("\\")
#: The part of a body that one step looks at, in bytes: no other thread runs meanwhile.
_STEP = 256 * 1024
#: The longest text, in bytes, and the number of escapes in texts that counts as one value.
_LONGEST, _ESCAPES = 4 * 1024 * 1024, 8


def values_in(body: bytes, most: int) -> int:
    """Return at least the number of values in a body, and the number itself if it may exceed `most`.

    This calls for no parser. Each value but the first follows a comma, or the beginning of a list or of an object.
    """
    escapes = sum(body.count(b"\\", start, start + _STEP) for start in range(0, len(body), _STEP)) // _ESCAPES
    rough = 1 + escapes + sum(_separators(body, start, start + _STEP) for start in range(0, len(body), _STEP))
    if rough <= most:
        return rough
    # Commas and brackets of texts are not those of lists. This takes longer, so it ends as soon as there are too many.
    found, at, is_in_text = 1 + escapes, 0, False
    while at < len(body) and found <= most:
        if is_in_text:
            match = _IN_TEXT.match(body, at, at + _STEP)
            at = len(body) if match is None else match.end()
            if at < len(body) and body[at] == _BACKSLASH:  # the step has cut it off from what it belongs to
                at += 2
            elif body.startswith(_QUOTE, at):
                at, is_in_text = at + 1, False
        else:
            quote = body.find(_QUOTE, at, at + _STEP)
            end = min(at + _STEP, len(body)) if quote < 0 else quote
            found += _separators(body, at, end)
            at, is_in_text = (end, False) if quote < 0 else (quote + 1, True)
    return found


def check_values(body: bytes, most: int) -> int:
    """Return at least the number of values in a body; raise BodyTooLarge if there are more, or too long a text."""
    found = values_in(body, most)
    if found > most:
        raise BodyTooLarge(
            f"The body may have at most {most} values, with those in lists and objects; {_ESCAPES} escapes in texts "
            "count as one. Send fewer tasks at once, or store large values elsewhere and pass a reference."
        )
    if _has_long_text(body):
        raise BodyTooLarge(
            f"A text in the body may have at most {_LONGEST} bytes. Store it elsewhere, and pass a reference."
        )
    return found


def _has_long_text(body: bytes) -> bool:
    """Whether there is no quote that ends or begins a text for longer than a text may be."""
    at = 0
    while at + _LONGEST < len(body):
        end = at + _LONGEST
        while (quote := body.rfind(_QUOTE, at, end)) > at and body[quote - 1] == _BACKSLASH:
            end = quote
        if quote < 0:
            return True
        at = quote + 1
    return False


def _separators(body: bytes, start: int, end: int) -> int:
    return body.count(b",", start, end) + body.count(b"[", start, end) + body.count(b"{", start, end)
