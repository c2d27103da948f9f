"""Hostile texts: markup, characters that nobody sees, what is no text at all, and JSON that parsers disagree about."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: A word that no template and no message of mtask holds: as a tag or an attribute, it is an injection.
CANARY = "zqcanary"
_MARKUP = (
    f"<script>{CANARY}()</script>",
    f'"><img src=x onerror={CANARY}()>',
    f"'><svg/onload={CANARY}()>",
    f"</textarea><{CANARY}>",
    f"</title></script></style></pre><{CANARY} {CANARY}=1>",
    f'" onmouseover="{CANARY}()" x="',
    f"' autofocus onfocus='{CANARY}()",
    f"<!--<{CANARY}>-->",
    f"]]><![CDATA[<{CANARY}>]]>",
    f"&lt;{CANARY}&gt; &#60;{CANARY}&#62; &amp;",
    f"javascript:{CANARY}()",
    f"{{{{7*7}}}}{{% raw %}}<{CANARY}>${{7*7}}",
    f"<a href=javascript:{CANARY}()>x</a>",
    f"\u0000<{CANARY}>\u0000",
    f"+ADw-{CANARY}+AD4-",
    f"\uff1c{CANARY}\uff1e",
)
_UNICODE = (
    "pay-\u202etxt.exe\u2066\u2069",
    "zero\u200bwidth\u200d\ufeff",
    "größe/日本語/🚀",
    "\U000f0000\ue000\uffff",
    "e\u0301\u0301\u0301" * 40,
    "\u2028line\u2029paragraph\x85",
    "ﷺ" * 120,
)
_CONTROL = ("a\x00b", "a\r\nSet-Cookie: zqcanary=1\r\n\r\nx", "\x1b[31mred\x07", "\t\v\f", "a\x7fb\x80\x9f", "\x00")
_PATHS = (
    "..",
    ".",
    "../../../../etc/passwd",
    "%2F",
    "%252F",
    "%00",
    "a/b:cancel",
    ":",
    "::",
    "a:b:c",
    "\\..\\",
    "//",
    "~",
)
_QUERIES = (
    "$where",
    "$ne",
    "a.$b",
    "a..b",
    ".",
    "__proto__",
    "' or 1=1 --",
    "{$gt:''}",
    '{"$ne": null}',
    "*",
    "#",
    "?",
    ",",
)
_LONG = ("x" * 513, "é" * 300, "x" * 5000, "a" * 257, "日" * 171)
_ODD = (
    "",
    " ",
    "  a  ",
    "null",
    "true",
    "NaN",
    "-1",
    "1e999",
    "9" * 400,
    "0x10",
    "١٢٣",
    "\uff11\uff12",
    "None",
    "undefined",
    "[]",
    "{}",
)
TEXTS: Sequence[str] = (*_MARKUP, *_UNICODE, *_CONTROL, *_PATHS, *_QUERIES, *_LONG, *_ODD)
#: Percent-encoded octets that are no text: lone surrogates, overlong forms, single bytes, broken escapes.
NO_TEXT = ("%ED%A0%80", "%ED%BF%BF", "%C0%AF", "%FF", "%80", "%", "%zz", "%u0041", "%F4%90%80%80", "%e9")
JSON_ODD = (
    '"\\ud800"',
    '"\\udfff\\ud800"',
    '"\\u0000"',
    "NaN",
    "-Infinity",
    "1e999",
    "-0.0",
    "9" * 30,
    "-" + "9" * 5000,
    "0." + "1" * 400,
    '{"a": 1, "a": 2}',
    '{"$date": "zq"}',
    '{"$date": {"$numberLong": "9999999999999999"}}',
    '{"$date": "0000-00-00T00:00:00Z"}',
    '{"$oid": "zz"}',
    '{"$numberLong": "99999999999999999999"}',
    '{"$numberDecimal": "zq"}',
    '{"$numberDouble": "NaN"}',
    '{"$binary": {"base64": "AAAA", "subType": "06"}}',
    '{"$binary": {"base64": "=", "subType": "zz"}}',
    '{"$regularExpression": {"pattern": "(a+)+$", "options": "zq"}}',
    '{"$code": "while(1);", "$scope": {"a": {"$oid": 1}}}',
    '{"$minKey": 1}',
    '{"$timestamp": {"t": -1, "i": 1}}',
    '{"$dbPointer": {"$ref": "a", "$id": 7}}',
    '{"$uuid": "zq"}',
    '{"$where": "1"}',
    '{"a.b": 1, "$set": {"c": 1}}',
    '{"": 1, "\\u0000": 2}',
    "[" * 99 + "]" * 99,
    "[" * 101 + "]" * 101,
    '{"a":' * 5000 + "1" + "}" * 5000,
    "[" * 200_000,
    '"' + "x" * 300,
    "",
    "\ufeff{}",
    "{} {}",
    "[1,2,]",
    "{'a': 1}",
    "null",
    "7",
    '"text"',
    "[]",
)


#: What a run keeps of the handler's own failure: from the head of its traceback to the line that raises.
_OWN_ERROR = re.compile(r"Traceback \(most recent call last\):.{1,9000}?\bin refuse\b.{1,400}?Fail\b", re.DOTALL)


def without_own_error(text: str) -> str:
    """Return an answer without what `refuse` has raised: readers of a task see it, and nothing else of the kind."""
    return _OWN_ERROR.sub("", text)
