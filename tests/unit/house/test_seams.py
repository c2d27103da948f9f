"""A test reaches a part by its public names: it replaces no private one, and sets none.

What tests tune, such as a pause of a loop, has a public name where it is used, and a comment there says so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
#: What replaces an attribute: `monkeypatch.setattr`, `setattr`, and those of `unittest.mock`.
REPLACING = {"setattr", "delattr", "patch", "object"}


def private_patches(source: str) -> Iterator[int]:
    """Yield the lines that replace or set a private name of something else than `self` and `cls`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _name(node.func) in REPLACING:
            texts = [each for each in node.args[1:2] if isinstance(each, ast.Constant)]
            names = [name for each in (*node.args[:1], *texts) for name in _names(each)]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            names = [] if _name(node.value) in {"self", "cls"} else [node.attr]
        else:
            continue
        if any(map(_is_private, names)):
            yield node.lineno


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(argument: ast.expr) -> list[str]:
    """Return the names in an argument: those of a text, such as "mtask.says._word", or of `worker._parts`."""
    if isinstance(argument, ast.Constant):
        return str(argument.value).split(".")
    return [each.attr for each in ast.walk(argument) if isinstance(each, ast.Attribute)]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_test_replaces_or_sets_a_private_name() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in private_patches(path.read_text())
    ]
    assert not found, f"give these a public name, or reach them by the part's own operations: {', '.join(found)}"


@pytest.mark.parametrize(
    "line",
    [
        'monkeypatch.setattr(stream, "_GIVE_WAY", 0.1)',
        'monkeypatch.setattr("mtask.cli.commands._outline", None)',
        'monkeypatch.setattr(scans._janitor, "look", None)',
        'setattr(stream, "_take", None)',
        'with patch.object(stream, "_take"): pass',
        "worker.scans._wake = None",
        "worker.scans._count += 1",
        "scans._scan = scans._upkeep = None",
        "del stream._take",
    ],
)
def test_a_private_patch_is_found(line: str) -> None:
    assert list(private_patches(line))


@pytest.mark.parametrize(
    "line", ['monkeypatch.setattr(stream, "GIVE_WAY", 1)', 'setattr(Call, "__init__", 1)', "self._scan = scans._scan"]
)
def test_what_is_public_or_ones_own_is_no_private_patch(line: str) -> None:
    assert not list(private_patches(line))
