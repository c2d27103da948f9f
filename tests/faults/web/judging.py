"""Judges the answers to hostile requests: each is a success, or says clearly what was wrong, and leaks nothing."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html.parser import HTMLParser
from importlib.resources import files

from mtask.web.page.reads import PATIENCE
from mtask.web.page.rendering import SECURITY
from tests.faults.web.hostile import Request
from tests.faults.web.sending import Answer
from tests.faults.web.texts import CANARY, without_own_error

#: What only a traceback, the driver or MongoDB writes.
_INNER = (
    "Traceback (most recent",
    'File "/',
    "site-packages",
    "pymongo",
    "bson.",
    "errmsg",
    "codeName",
    "ServerError",
    "OperationFailure",
    "$clusterTime",
    "mongodb://",
)
_HEADERS = frozenset(
    {
        "allow", "cache-control", "connection", "content-length", "content-type", "date", "etag", "location",
        "preference-applied", "retry-after", "set-cookie", "transfer-encoding", "vary", "www-authenticate",
        "x-accel-buffering", *(name.lower() for name in SECURITY),
    }
)  # fmt: skip
#: The attributes that make a browser load or open an address.
_ADDRESSES = frozenset({"href", "src", "action", "formaction", "hx-get", "hx-post", "data", "poster", "xlink:href"})
#: What a page says that has waited for the database in vain.
_UNAVAILABLE = "The database cannot be reached, or did not answer in time."
_UVICORN = "Invalid HTTP request received."
#: The longest refusal, in bytes.
_LONGEST_REFUSAL = 20_000


@dataclass(slots=True)
class Verdict:
    """What became of all requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    by_label: Counter[str] = field(default_factory=Counter)
    pages_with_canary: int = 0  #: pages that showed hostile markup, as text
    unanswered: int = 0  #: requests that were no HTTP, and got no answer
    slow: int = 0  #: pages that said, after their patience, that the database does not answer: the machine is busy
    findings: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, told: str) -> None:
        """Keep a finding. Of each kind, some examples are enough."""
        self.kinds[kind] += 1
        if self.kinds[kind] <= 5:
            self.findings.append(f"{kind}: {told}")


class Judge:
    """Judges answers, one by one."""

    def __init__(self, secrets: Sequence[str], csrf: Sequence[tuple[str, str]]) -> None:
        self._secrets = secrets
        self._csrf = csrf
        self.verdict = Verdict()

    def look(self, request: Request, answer: Answer | None) -> None:
        """Judge one answer."""
        verdict = self.verdict
        verdict.by_label[request.label] += 1
        if answer is None:
            if request.is_broken or request.label == "large":
                verdict.unanswered += 1
            else:
                verdict.note("no answer", request.shown)
            return
        verdict.statuses[f"{answer.status // 100}xx" if answer.status < 400 else str(answer.status)] += 1
        if answer.status == 503 and answer.seconds > PATIENCE and _UNAVAILABLE in answer.text:
            verdict.slow += 1
            return
        for found in self._faults(request, answer):
            verdict.note(found, f"{request.shown} -> {answer.status} {answer.text[:600]!r}")

    def _faults(self, request: Request, answer: Answer) -> Iterator[str]:
        text = answer.text
        kind = answer.header("content-type").partition(";")[0]
        if answer.status >= 500 and not _is_busy(answer):
            yield f"status {answer.status}"
        if not answer.is_whole and not request.is_stream and not request.is_broken:
            yield "an answer that does not end"
        if answer.status == 405 and not answer.header("allow"):
            yield "405 without the methods that are allowed"
        yield from _in_headers(answer)
        said = without_own_error(text)
        for words in _INNER:
            if words in said and words.encode() not in request.body:
                yield f"inner text {words!r}"
        if any(secret in text for secret in self._secrets):
            yield "a secret in an answer"
        if any(token in text for name, token in self._csrf if name != request.session):
            yield "the CSRF token of another session"
        if request.method == "HEAD" or answer.status in (204, 304):
            return
        if kind == "text/html":
            if "content-security-policy" not in {name for name, _ in answer.headers}:
                yield "a page without a Content-Security-Policy"
            self.verdict.pages_with_canary += CANARY in text
            yield from page_faults(text)
        elif kind in ("application/json", "application/problem+json"):
            yield from _in_json(answer)
        elif answer.status >= 400 and not (request.is_broken and text == _UVICORN):
            yield f"a refusal as {kind or 'nothing'}"
        elif kind == "text/event-stream" and answer.status == 200:
            yield from _in_stream(text)
        if answer.status >= 400 and kind != "text/html" and len(answer.body) > _LONGEST_REFUSAL:
            yield "a refusal that is very long"


def _is_busy(answer: Answer) -> bool:
    """Whether too many streams read old events at once: at most four may."""
    return answer.status == 503 and '"/v1/problems/busy"' in answer.text


def _in_headers(answer: Answer) -> Iterator[str]:
    for name, value in answer.headers:
        if name not in _HEADERS:
            yield f"header {name}"
        if name == "set-cookie" and not re.match(r"(__Host-)?mtask-\d+=[\w-]*; ", value):
            yield "a cookie of another"
        if name == "location" and (not value.startswith("/") or value.startswith("//") or not value.isprintable()):
            yield "a redirect to elsewhere"


def _in_json(answer: Answer) -> Iterator[str]:
    if not answer.body.isascii():
        yield "JSON that is not ASCII"
    try:
        document = json.loads(answer.body)
    except ValueError:
        yield "JSON that cannot be read"
        return
    is_problem = answer.header("content-type") == "application/problem+json"
    # 202 is a bulk change that has begun, or a control that a worker has not confirmed yet, which is a problem.
    if is_problem is not (answer.status >= 400) and answer.status != 202:
        yield "an error that is no problem document, or a problem that is no error"
    if not is_problem:
        return
    texts = [document.get(name) for name in ("type", "title", "detail")]
    if not all(isinstance(text, str) and text for text in texts) or document.get("status") != answer.status:
        yield "a problem document that lacks a member"
    elif not str(document["type"]).startswith("/v1/problems/"):
        yield "a problem of an unknown type"


def _in_stream(text: str) -> Iterator[str]:
    for block in text.split("\n\n")[:-1]:
        for line in block.split("\n"):
            if not re.match(r"(id|event|data|retry)?: ", line):
                yield "a line of a stream that is none of its fields"
            elif line.startswith("data: ") and line[6:7] == "{":
                try:
                    json.loads(line[6:])
                except ValueError:
                    yield "an event that is no JSON"


# --- pages ------------------------------------------------------------------------------------------------


class _Markup(HTMLParser):
    """The elements of a page with their attributes, its comments and the content of its scripts."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.odd: list[str] = []
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an element."""
        self.elements.append((tag, attrs))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        """Note that an element has ended."""
        self._open = ""

    def handle_data(self, data: str) -> None:
        """Look at a text."""
        if self._open in ("script", "style") and data.strip():
            self.odd.append(f"a {self._open} in the page")

    def handle_comment(self, data: str) -> None:
        """Note a comment: the templates have none."""
        self.odd.append("a comment")

    def handle_pi(self, data: str) -> None:
        """Note an instruction: the templates have none."""
        self.odd.append("a processing instruction")

    def unknown_decl(self, data: str) -> None:
        """Note a declaration: the templates have none."""
        self.odd.append("a declaration")


def _parsed(text: str) -> _Markup:
    parser = _Markup()
    parser.feed(text)
    parser.close()
    return parser


@lru_cache
def vocabulary() -> frozenset[tuple[str, str]]:
    """Return each element with each of its attributes, as the templates and the code have them."""
    page = files("mtask.web.page")
    known: set[tuple[str, str]] = set()
    for template in (page / "templates").iterdir():
        source = re.sub(r"\{#.*?#\}|\{%.*?%\}", "", template.read_text(), flags=re.DOTALL)
        known |= _pairs(re.sub(r"\{\{.*?\}\}", "x", source, flags=re.DOTALL))
    of_features = [folder / "page.py" for folder in files("mtask.features").iterdir() if folder.is_dir()]
    for drawn in (page / "rendering.py", page / "rows.py", *(path for path in of_features if path.is_file())):
        for node in ast.walk(ast.parse(drawn.read_text())):
            if isinstance(node, ast.JoinedStr):
                known |= _pairs("".join(_literal(part) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                known |= _pairs(node.value)
    return frozenset(known)


def _pairs(source: str) -> set[tuple[str, str]]:
    found = _parsed(source).elements
    return {(tag, name) for tag, attributes in found for name in ("", *(name for name, _ in attributes))}


def _literal(part: ast.expr) -> str:
    """Return a part of a formatted text; `x` stands for what is put in."""
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "x"


def page_faults(text: str) -> Iterable[str]:
    """Return what a page holds that neither its templates nor the code that draws rows makes."""
    known = vocabulary()
    tags = "|".join(sorted({tag for tag, _ in known}))
    if not re.match(r"<!doctype html>\n", text) and "<html" in text:
        yield "a page without a doctype"
    body = text.removeprefix("<!doctype html>")
    # Whatever a browser takes for the beginning of an element is one that the templates have.
    if re.search(rf"<(?!/?(?:{tags})[\s>/])", body, re.IGNORECASE):
        yield "a '<' that begins no element of the templates"
    found = _parsed(body)
    yield from found.odd
    for tag, attributes in found.elements:
        for name, value in [("", ""), *attributes]:
            if (tag, name) not in known:
                yield f"<{tag} {name}> that the templates do not have"
            if name.startswith("on") or CANARY in name or name == "style":
                yield f"attribute {name}"
            if name in _ADDRESSES and not re.match(r"/(?![/\\])|#|\Z", value or ""):
                yield f"an address elsewhere in {tag} {name}"
            if name == "http-equiv" and value != "refresh":
                yield "another meta element"
