"""How much a body of JSON will become when it is parsed. A byte of `[[],[],[]]` takes seventy bytes as lists.

The values are counted in the text, before anything parses it.
"""

from __future__ import annotations

import re

from mtask.web.problems import BodyTooLarge

#: What follows in a text of JSON, up to the quote that ends it.
_IN_TEXT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_QUOTE, _BACKSLASH = b'"', ord("\\")
#: The part of a body that one step looks at, in bytes: no other thread runs meanwhile.
_STEP = 256 * 1024


def values_in(body: bytes, most: int) -> int:
    """Return at least the number of values in a body, and the number itself if it may exceed `most`.

    This calls for no parser. Each value but the first follows a comma, or the beginning of a list or of an object.
    """
    rough = 1 + sum(_separators(body, start, start + _STEP) for start in range(0, len(body), _STEP))
    if rough <= most:
        return rough
    # Commas and brackets of texts are not those of lists. This takes longer, so it ends as soon as there are too many.
    found, at, is_in_text = 1, 0, False
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
    """Return at least the number of values in a body; raise BodyTooLarge if there are more than `most`."""
    found = values_in(body, most)
    if found > most:
        raise BodyTooLarge(
            f"The body may have at most {most} values, with those in lists and objects. Send fewer tasks at once, or "
            "store large values elsewhere and pass a reference."
        )
    return found


def _separators(body: bytes, start: int, end: int) -> int:
    return body.count(b",", start, end) + body.count(b"[", start, end) + body.count(b"{", start, end)
