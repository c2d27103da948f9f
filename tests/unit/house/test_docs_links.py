"""The pages hold together: links and anchors lead somewhere, and the files, modules and rules that they name exist."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import mtask
from mtask import errors
from mtask.features.callbacks.rules import DELIVERY, DELIVERY_QUEUE
from mtask.features.metrics import operations as counts
from mtask.kernel.document import rules
from mtask.kernel.statements import rules as twins
from tools.site_fences import faults_of

ROOT = Path(__file__).parents[3]
PAGES_OF_THE_CODE = ("docs", "CONTRIBUTING.md")
_NOT_OURS = {"build", "dist", "node_modules"}
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_FILE = re.compile(r"`((?:mtask|tests|tools|docs|examples|benchmarks)/[\w./*-]*)(?:::\w+)?`")
_MODULE = re.compile(r"`(mtask(?:\.\w+)+)`")


def markdown_files() -> Iterator[str]:
    """The pages of the repository, by their paths in it."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_OURS]
        for name in files:
            if name.endswith(".md"):
                yield (Path(folder) / name).relative_to(ROOT).as_posix()


PAGES = sorted(markdown_files())
PAGES_THAT_NAME_CODE = [page for page in PAGES if page.startswith(PAGES_OF_THE_CODE)]


@cache
def prose_of(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """The anchors that a page's headings make, on GitHub and on the site alike."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+)$", prose_of(page), re.MULTILINE):
        text = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        anchor = re.sub(r"\s", "-", text)
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return frozenset(found)


def links_of(page: Path) -> list[str]:
    """The targets of a page's links, without those to other hosts."""
    prose = re.sub(r"`[^`\n]*`", "code", prose_of(page))
    targets = [inline or referred for inline, referred in _LINK.findall(prose)]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and (there.suffix != ".md" or anchor not in anchors_of(there))):
            found.append(target)
    return found


def test_the_pages_are_found_and_their_links_are_seen() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/design.md", "docs/design/rules.md"} <= set(PAGES)
    assert "docs/design.md" in links_of(ROOT / "README.md")
    assert "reliability.md" not in " ".join(broken(ROOT / "docs/design/claiming.md"))


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `head`-line: two\n# Twice\n# Twice\n[a](page.md) [b](#a-head-line-two) [c](page.md#twice-1) [`d`](no.md)\n"
        "`[e](code.md)`\n```\n[f](fence.md)\n# No heading\n```\n[g](#no-heading) [h](https://host/x) [i](#twice-2)\n"
        "![j](no.png)\n[k]: none/at/all\n"
    )
    assert broken(page) == ["no.md", "#no-heading", "#twice-2", "no.png", "none/at/all"]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_anchor_leads_somewhere(page: str) -> None:
    assert broken(ROOT / page) == []


@pytest.mark.parametrize("page", PAGES_THAT_NAME_CODE)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    # One task name looks like a path.
    named = [path for path in _FILE.findall(prose_of(ROOT / page)) if path not in (DELIVERY, DELIVERY_QUEUE)]
    assert [path for path in named if not any(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("page", PAGES_THAT_NAME_CODE)
def test_every_module_that_a_page_names_exists(page: str) -> None:
    # Attributes of spans look like modules.
    attributes = set(re.findall(r'"(mtask\.[a-z_.]+)"', (ROOT / "mtask" / "otel.py").read_text()))
    named = [name for name in _MODULE.findall(prose_of(ROOT / page)) if name not in attributes]
    assert [name for name in named if not exists(name)] == []


def exists(name: str) -> bool:
    """Whether this is a module, or an attribute of one."""
    module, attributes = name, list[str]()
    while module:
        try:
            found: object = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, attribute = module.rpartition(".")
            attributes.insert(0, attribute)
    else:
        return False
    for attribute in attributes:
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


def test_rules_and_guards_on_their_page_are_functions_of_that_name() -> None:
    page = (ROOT / "docs/design/rules.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert {"status", "may_take", "next_preempt_time", "preemptable_at"} <= set(named)
    assert [name for name in named if not callable(getattr(rules, name, getattr(twins, name, None)))] == []
    guards = {name for row in re.findall(r"^\| [\w, ()]+ \| (.*?) \|", page, re.MULTILINE) for name in backticked(row)}
    assert {"due_tasks", "held_runs"} <= guards
    assert sorted(name for name in guards - {"_id"} | {"derive", "unbegun", "held_alone"} if not is_defined(name)) == []


def backticked(row: str) -> list[str]:
    """The names in backticks."""
    return re.findall(r"`(\w+)`", row)


def is_defined(name: str) -> bool:
    """Whether a module of the statements defines this function."""
    modules = [*(ROOT / "mtask/kernel/statements").glob("*.py"), *(ROOT / "mtask/features").glob("*/*.py")]
    return any(re.search(rf"^def {name}\(", module.read_text(encoding="utf-8"), re.MULTILINE) for module in modules)


def named_in(row: str) -> list[tuple[str, str]]:
    """The folders that a row of the map names: those behind the first one lie beside it."""
    first, *others = re.findall(r"`([\w/]+)/`", row)
    folder, _, name = first.rpartition("/")
    return [(f"{folder}/", one) for one in (name, *others)]


def test_the_map_names_every_folder_of_the_package() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`mtask/[\w/]+/`(?:, `\w+/`)*) \|", page, re.MULTILINE)
    told = {f"{folder}{name}/" for row in rows for folder, name in named_in(row)}
    packages = {f"{init.parent.relative_to(ROOT).as_posix()}/" for init in (ROOT / "mtask").rglob("__init__.py")}
    assert told == packages - {"mtask/"}


def test_the_reference_has_all_that_the_package_exports() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference").glob("*.md"))
    shown = set(re.findall(r"^::: mtask\.(\w+)$", pages, re.MULTILINE))
    exported = {name for name in mtask.__all__ if not hasattr(errors, name) and not name.startswith("__")}
    assert exported <= shown
    assert {"errors", "testing"} <= shown


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = re.findall(r"^ +- (?:.+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    wanted = {page for page in PAGES if page.startswith("docs/")} | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert wanted <= set(navigation)


@pytest.mark.parametrize("path", ["docs/metrics.md", "mtask/client/aio.py", "mtask/client/sync.py"])
def test_the_pause_between_two_counts_is_told_as_it_is(path: str) -> None:
    told = re.findall(
        r"(\d+) times the time that (?:it|the counting) took, (\d+) s at least", (ROOT / path).read_text()
    )
    assert told == [(str(counts._TIMES), str(int(counts._FRESH.total_seconds())))]


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_names_its_language_and_nothing_else(page: str) -> None:
    # GitHub reads more; the site would show the fence and its code as text.
    fences = re.findall(r"^ *```(.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert [fence for fence in fences if not re.fullmatch(r"\w*", fence)] == []
    assert len(fences) % 2 == 0


def test_the_site_is_built_so_that_a_warning_ends_it() -> None:
    built = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert built == ["mkdocs build --strict"], "--quiet hides warnings from --strict"
    assert "hooks:\n  - tools/site_fences.py\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


_FENCE = "```python\nx = 1\n```\n"
_SHOWN, _AS_TEXT = "<pre><code>x = 1</code></pre>", "<p>```python file=shop.py x = 1 ```</p>"


@pytest.mark.parametrize(
    ("html", "faults"),
    [
        (_SHOWN + "<p>write <code>```</code></p>" + _SHOWN, 0),
        (_SHOWN, 1),
        (_SHOWN + _SHOWN + _AS_TEXT, 1),
        (_SHOWN + _AS_TEXT, 2),
    ],
)
def test_the_site_is_not_built_with_a_fence_that_became_text(html: str, faults: int) -> None:
    assert len(faults_of(_FENCE + "text\n\n" + _FENCE, html)) == faults


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/design")])
def test_design_is_wrapped_at_100_columns(page: str) -> None:
    lines = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 100] == []
