"""Rendering: the templates, what they show of values, and the headers that every page has."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote_plus, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import Response

from mtask.kernel.driver.extended_json import extended_exactly

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
NOTHING = "\u2013"
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
    made.globals |= {"badge": badge, "icon": icon, "static": static_url, "task_link": task_link, "url": url}
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


def shown(value: Any) -> str:
    """Return a value as HTML: it may stand between tags, and within the quotes of an attribute.

    Whatever is written into HTML in Python goes through this function, as templates do the same by themselves.
    """
    text = str(value)
    return text if _PLAIN(text) else str(escape(visible(text)))


#: Whether a text holds only characters that no HTML needs to escape. Most names, keys and ids are such texts, and a
#: list has hundreds of them.
_PLAIN = re.compile(r"[A-Za-z0-9 _./:,@+-]*").fullmatch


#: What the icon of a status shows, and what that of any other status shows.
_DASH = '<path d="M3 6h6"/>'
_ICONS: Mapping[str, str] = {
    "SUCCESS": '<path d="M2 6.5 4.8 9.3 10 3.2"/>',
    "RUNNING": '<path class="full" d="M3 1.8 10 6 3 10.2z"/>',
    "FAIL": '<path d="M2.6 2.6 9.4 9.4M9.4 2.6 2.6 9.4"/>',
    "INIT": '<circle cx="6" cy="6" r="4"/>',
    "WAITING": '<path d="M2 6h.1M6 6h.1M10 6h.1"/>',
    "CANCELED": '<circle cx="6" cy="6" r="4.2"/><path d="M3.2 8.8 8.8 3.2"/>',
    "TIMEOUT": '<circle cx="6" cy="6" r="4.4"/><path d="M6 3.4V6l1.8 1.4"/>',
}


def icon(status: Any) -> Markup:
    """Return the icon of a status."""
    drawn = _ICONS.get(status, _DASH) if isinstance(status, str) else _DASH
    return Markup(
        '<svg class="icon" viewBox="0 0 12 12" width="12" height="12" aria-hidden="true" focusable="false">'
        f"{drawn}</svg>"
    )


def badge(status: Any) -> Markup:
    """Return a status with its icon. None: the task is malformed. Malformed tasks may have any other value."""
    known = _BADGES.get(status) if isinstance(status, str) else None
    return _badge(status) if known is None else known


def _badge(status: Any) -> Markup:
    kind = status if isinstance(status, str) and status in _ICONS else "GONE"
    words = "malformed" if status is None else "gone" if status == "GONE" else shown(status)
    return Markup(f'<span class="badge st-{kind}">{icon(status)}{words}</span>')


#: The badges of the usual statuses, drawn once: a list has one in each row.
_BADGES: Mapping[str, Markup] = {status: _badge(status) for status in (*_ICONS, "GONE")}


def task_link(name: str, key: str, most: int = 64) -> Markup:
    """Return a link to a task."""
    # What `quote_plus` returns needs no escape. The id of a malformed document may hold no key.
    address = f"/task?name={_quoted(name)}" + (f"&amp;key={quote_plus(key)}" if key else "")
    shown_name, shown_key = shown(name), shown(key)
    brief_name = shown_name if len(name) <= 48 else shown(brief(name, 48))
    brief_key = shown_key if len(key) <= most else shown(brief(key, most))
    return Markup(
        f'<a href="{address}" title="{shown_name}:{shown_key}"><span class="tname">{brief_name}</span>'
        f'<span class="tkey"><bdi>{brief_key}</bdi></span></a>'
    )


@lru_cache(1_024)
def _quoted(name: str) -> str:
    """Return a name of tasks or of a queue as a part of an address. There are few of them, and each is in many rows."""
    return quote_plus(name)


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
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}".removesuffix(".0")


def length(seconds: float | None) -> str:
    """Return a length of time in the two greatest units."""
    if seconds is None:
        return NOTHING
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
        return NOTHING
    text = moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f" if day else "%H:%M:%S.%f")
    return text[:-3] if fine else text[:-7]


def ago(moment: datetime | None, now: datetime, missing: str = NOTHING) -> Markup:
    """Return an instant as its distance from now. A script keeps the distance up to date."""
    return Markup(age(moment, now) if moment is not None else escape(missing))


def age(moment: datetime | None, now: datetime) -> str:
    """Return the same as HTML; a dash for None. A list has two of these in each row."""
    if moment is None:
        return NOTHING
    seconds = (now - moment).total_seconds()
    text = f"in {length(-seconds)}" if seconds < -0.5 else f"{length(max(0.0, seconds))} ago"
    exact = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    return f'<time datetime="{exact}" title="{exact[:10]} {exact[11:19]} UTC" data-ago>{text}</time>'
