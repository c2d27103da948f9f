"""docs/operations.md tells of each finding of the doctor, of the revision, and of files that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from mtask.kernel.document.task import SCHEMA_REVISION

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
DIAGNOSIS = sorted([*(ROOT / "mtask/doctor").glob("*.py"), *(ROOT / "mtask/features").glob("*/doctor.py")])
#: The checks whose name the code makes: each function with the names that its findings have.
_MADE = {
    "_guarded": ["any check"],
    "readable": ["controls", "schedules"],
    "_collections": ["indexes of ..."],
    "_validator": ["validator of ..."],
}


def findings_of_the_code() -> Counter[str]:
    """Return how many places of the code make a WARN or a FAIL, by the name of the check."""
    found: Counter[str] = Counter()
    for path in DIAGNOSIS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                made = {node.id for node in ast.walk(call.func) if isinstance(node, ast.Name)}
                if made & {"warn", "fail", "finding"} and not isinstance(call.func, ast.Attribute):
                    found.update(_names(call.args[0], function.name, constants))
    return found


def _names(check: ast.expr, function: str, constants: Mapping[str, object]) -> list[str]:
    if isinstance(check, ast.Constant):
        return [str(check.value)]
    assert isinstance(check, ast.Name)
    return [str(constants[check.id])] if check.id in constants else _MADE[function]


def findings_of_the_page() -> list[tuple[str, str, str]]:
    """Return the check, the words and the advice of each line of the table."""
    rows = re.findall(r"^\| (any check|`[^`|]+`) \| \*([^|*]+)\*[^|]* \| ([^|]+) \|$", PAGE, re.MULTILINE)
    return [(check.strip("`"), words, advice) for check, words, advice in rows]


def test_each_finding_of_the_doctor_has_its_line() -> None:
    told = Counter(check for check, _, _ in findings_of_the_page())
    made = findings_of_the_code()
    assert made.total() > 40
    # There may be more lines than places: one place gives several causes.
    assert {check: count for check, count in made.items() if told[check] < count} == {}
    assert set(told) - set(made) - {"due tasks"} == set()


def test_the_words_of_each_line_are_those_of_the_doctor() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in DIAGNOSIS)
    texts = re.sub(r'"\s*\n\s*f?"', "", source)
    assert [words for _, words, _ in findings_of_the_page() if words not in texts] == []
    assert all(len(advice) > 5 for _, _, advice in findings_of_the_page())


def test_the_files_to_deploy_by_are_those_of_the_page() -> None:
    told = set(re.findall(r"`((?:deploy/|Dockerfile|docker-compose)[^`]*)`", PAGE))
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "deploy").rglob("*") if path.is_file()}
    assert told == {*there, "Dockerfile", "docker-compose.yml"}


def test_the_page_names_this_version_and_its_revision() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        release = ".".join(tomllib.load(file)["project"]["version"].split(".")[:2])
    assert re.search(rf"version {re.escape(release)}\.\d+ revision {SCHEMA_REVISION}\)", PAGE)
    assert f"FROM mtask:{release}." in PAGE
