"""No module of mtask imports itself through others: imports within functions and under TYPE_CHECKING count, too.

An import of a module counts for that module alone, and not for the packages around it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

Graph = Mapping[str, set[str]]


def test_no_module_of_mtask_imports_itself_through_others() -> None:
    graph = imports_of(ROOT, "mtask")
    assert len(graph) > 100, f"found only {len(graph)} modules: {sorted(graph)}"
    assert circles_in(graph) == []


def imports_of(root: Path, package: str) -> dict[str, set[str]]:
    """Return for each module of a package the modules of it that it imports, wherever the import stands."""
    files = {module_name(file.relative_to(root)): file for file in (root / package).rglob("*.py")}
    return {
        module: {found for found in imported(module, file, files) if found != module} for module, file in files.items()
    }


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(module: str, file: Path, known: Iterable[str]) -> set[str]:
    """Return the known modules that a file imports: `from package import module` counts as the module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(module, file, node)
            below = {f"{source}.{alias.name}" for alias in node.names}
            found.update(below & set(known))
            if not below <= set(known):
                found.add(source)
    return found & set(known)


def absolute(module: str, file: Path, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = module.split(".")
    upwards = node.level - (file.name == "__init__.py")
    return ".".join([*package[: len(package) - upwards], *filter(None, [node.module])])


def circles_in(graph: Graph) -> list[str]:
    """Return each circle in words; one circle is told for each group of modules that import one another."""
    left = {module: set(found) for module, found in graph.items()}
    told = []
    while circle := first_circle(left):
        told.append(" imports ".join(circle))
        # Without one of its imports the rest of the graph can be looked at.
        left[circle[0]].discard(circle[1])
    return told


def first_circle(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # graphlib lists the one imported before the one that imports it.
        return list(reversed(error.args[1]))
    return []


# --- the check itself -----------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("__init__", "a", "b", "c", "wing/__init__", "wing/d"):
        file = tmp_path / "house" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.touch()
    return tmp_path / "house"


def test_imports_one_way_are_no_circle(package: Path) -> None:
    (package / "a.py").write_text("from house import b, c\nimport os, json\n")
    (package / "b.py").write_text("from house.c import something\nfrom house.wing import d\n")
    assert imports_of(package.parent, "house")["house.a"] == {"house.b", "house.c"}
    assert imports_of(package.parent, "house")["house.b"] == {"house.c", "house.wing.d"}
    assert circles_in(imports_of(package.parent, "house")) == []


@pytest.mark.parametrize(
    "import_of_a",
    [
        "import house.a",
        "from house.a import name",
        "from . import a",
        "from .a import name",
        "def late():\n    from house.a import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.a import Name",
    ],
)
def test_circle_is_told_of_wherever_its_imports_stand(package: Path, import_of_a: str) -> None:
    (package / "a.py").write_text("from house.b import name")
    (package / "b.py").write_text("from house import c")
    (package / "c.py").write_text(import_of_a)
    [told] = circles_in(imports_of(package.parent, "house"))
    modules = told.split(" imports ")
    assert set(pairwise(modules)) == {("house.a", "house.b"), ("house.b", "house.c"), ("house.c", "house.a")}
    assert len(modules) == 4


def test_circles_through_a_wings_init_and_several_circles_are_all_told(package: Path) -> None:
    (package / "wing" / "__init__.py").write_text("from .d import Thing")
    (package / "wing" / "d.py").write_text("from house.wing import Other\nfrom .. import c")
    (package / "a.py").write_text("from house import b")
    (package / "b.py").write_text("from house import a")
    told = circles_in(imports_of(package.parent, "house"))
    assert len(told) == 2
    assert {frozenset(words.split(" imports ")) for words in told} == {
        frozenset({"house.wing", "house.wing.d"}),
        frozenset({"house.a", "house.b"}),
    }
