"""Rendering: the templates, what they show of values, and the headers that every page has."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import Response

from mtask.store.driver.extended_json import extended_exactly

#: The longest JSON that a page shows, in characters.
LONGEST = 20_000
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
#: `same-origin`, and not `no-referrer`: with that, browsers would send forms with the Origin "null".
SECURITY: Mapping[str, str] = {
    "Content-Security-Policy": _CSP,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=()",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
#: An en dash: what is shown where there is nothing.
_NOTHING = "\u2013"
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@lru_cache
def static_files() -> Mapping[str, tuple[bytes, str, str]]:
    """Return the static files by address: content, media type, and the beginning of their SHA-256."""
    folder = files("mtask.web.page") / "static"
    found: dict[str, tuple[bytes, str, str]] = {}
    for path in ("app.css", "app.js", "charts.js", "icon.svg", *_VENDORED):
        content = folder.joinpath(*path.split("/")).read_bytes()
        found[f"/static/{path}"] = content, _TYPES[path.rpartition(".")[2]], hashlib.sha256(content).hexdigest()[:12]
    return found


_VENDORED = ("vendor/htmx/htmx.min.js", "vendor/uplot/uPlot.iife.min.js", "vendor/uplot/uPlot.min.css")


def static_url(path: str) -> str:
    """Return the address of a static file. It changes with the content, so browsers may keep it for ever."""
    return f"/static/{path}?v={static_files()[f'/static/{path}'][2]}"


def static(path: str) -> Response | None:
    """Return a static file, or None."""
    found = static_files().get(path)
    if found is None:
        return None
    headers = {**SECURITY, "Cache-Control": "public, max-age=31536000, immutable"}
    return Response(found[0], headers=headers, media_type=found[1])


def html(template: str, context: Mapping[str, Any], status: int = 200) -> Response:
    """Return a page."""
    text = templates().get_template(template).render(context)
    headers = {**SECURITY, "Cache-Control": "no-store", "Vary": "HX-Request"}
    return Response(text, status, headers=headers, media_type="text/html")


@lru_cache
def templates() -> Environment:
    """Return the templates."""
    made = Environment(
        loader=PackageLoader("mtask.web.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "ago": ago,
        "brief": brief,
        "clock": clock,
        "exact": lambda text: Markup(escape(text)),
        "length": length,
        "number": number,
        "pretty": pretty,
        "size": len,
    }
    made.globals |= {"url": url, "static": static_url}
    return made


def url(path: str, **query: Any) -> str:
    """Return an address with a query. What is None or empty is left out."""
    pairs = [
        (name, one)
        for name, value in query.items()
        if value not in (None, "", [])
        for one in (value if isinstance(value, list | tuple) else [value])
    ]
    return f"{path}?{urlencode(pairs)}" if pairs else path


def _finalized(value: Any) -> Any:
    """Show what a text holds that cannot be seen, or that turns the order of what follows it."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def visible(text: str) -> str:
    """Return a text whose control and formatting characters are escapes: a key cannot look like another one."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" or _joins(one) else _escaped(one) for one in text)


def _joins(character: str) -> bool:
    return unicodedata.category(character) == "Zs" or character in "\u200c\u200d"  # used within words and emoji


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]


def brief(text: str, most: int = 80) -> str:
    """Return a text that is not longer than this; the middle is left out, as both ends tell most."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def pretty(value: Any) -> str:
    """Return a value as extended JSON for readers."""
    text = whole(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n… {len(text) - LONGEST:,} more characters"


def whole(value: Any) -> str:
    """Return a value as extended JSON, as long as it is. What cannot be seen is an escape of JSON."""
    text = json.dumps(extended_exactly(value), ensure_ascii=False, indent=2)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text)


def number(value: float | None) -> str:
    """Return a number for readers; a dash for None."""
    if value is None:
        return _NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}".removesuffix(".0")


def length(seconds: float | None) -> str:
    """Return a length of time in the two greatest units."""
    if seconds is None:
        return _NOTHING
    if seconds < 0:
        return f"-{length(-seconds)}"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for unit, size, next_unit, next_size in (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86_400, "h", 3600)):
        if seconds < size * {"min": 60, "h": 24, "d": 10**9}[unit]:
            whole, rest = divmod(int(seconds), size)
            return f"{whole} {unit} {rest // next_size} {next_unit}" if rest // next_size else f"{whole} {unit}"
    return f"{seconds:.0f} s"


def clock(moment: datetime | None, *, day: bool = True, fine: bool = False) -> str:
    """Return an instant as text, in UTC; with `fine`, to the millisecond."""
    if moment is None:
        return _NOTHING
    text = moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f" if day else "%H:%M:%S.%f")
    return text[:-3] if fine else text[:-7]


def ago(moment: datetime | None, now: datetime, missing: str = _NOTHING) -> Markup:
    """Return an instant as its distance from now. A script keeps the distance up to date."""
    if moment is None:
        return Markup(escape(missing))
    seconds = (now - moment).total_seconds()
    text = f"in {length(-seconds)}" if seconds < -0.5 else f"{length(max(0.0, seconds))} ago"
    exact = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    # Digits and units need no escape, and a list has two of these in each row.
    return Markup(f'<time datetime="{exact}" title="{clock(moment)} UTC" data-ago>{text}</time>')
