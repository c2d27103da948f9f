"""The feature of CONTRIBUTING.md: its blocks, written into a copy of the repository, pass the linters and the tests.

The page alone holds the feature, so nothing can differ from it.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "CONTRIBUTING.md"
_COPIED = ("docs", "examples", "mtask", "tests", "tools", *(path.name for path in ROOT.glob("*.*") if path.is_file()))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?:# |<!-- )([\w/]+\.(?:py|md))(?: -->)?\n")
#: What the walkthrough says is run in the end.
_RECORDED = (
    ("tools/generate_sync.py",),
    ("-m", "tools.generate_words"),
    ("-m", "tests.unit.house.test_public_api"),
    ("-m", "tests.unit.house.test_statements"),
)
#: The tests that compare lists with what they list.
_OF_LISTS = (
    "tests/unit/house/test_layers.py",
    "tests/unit/house/test_parts.py",
    "tests/unit/house/test_public_api.py",
    "tests/unit/house/test_docs_links.py::test_the_map_names_every_folder_of_the_package",
    "tests/unit/cli/test_commands.py",
)


@dataclass(frozen=True, slots=True)
class Tree:
    """A copy of the repository with the feature."""

    folder: Path
    written: list[str]  #: the files of the feature
    changed: list[str]  #: the files that it changes

    @property
    def sources(self) -> list[str]:
        """The files of the feature that are code."""
        return [path for path in self.written if path.endswith(".py")]

    def run(self, *command: str) -> None:
        """Run a program in the copy; it must succeed."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MTASK_", "PYTEST_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
        environment = {**kept, "PYTHONPATH": str(self.folder), "PATH": path}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def walkthrough() -> str:
    """Return the part of the page that adds the feature."""
    [found] = re.findall(r"^## Walkthrough: add a feature$.*?(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def changed(text: str, change: str) -> str:
    """Return a text with a change, whose lines begin as in a diff. What it replaces must be there once."""
    lines = text.splitlines()
    for hunk in change.split("@@\n"):
        told = hunk.splitlines()
        old, new = ([line[1:] for line in told if line[:1] != other] for other in "+-")
        places = [place for place in range(len(lines)) if lines[place : place + len(old)] == old]
        assert len(places) == 1, f"found {len(places)} times:\n" + "\n".join(old)
        lines[places[0] : places[0] + len(old)] = new
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Copy the repository, and do there what the walkthrough says."""
    made = Tree(tmp_path_factory.mktemp("feature"), [], [])
    for name in _COPIED:
        # With the times of the files, what is compiled stays valid.
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, made.folder / name)
    for language, block in _BLOCK.findall(walkthrough()):
        if language == "diff":
            head, change = block.split("\n", 1)
            file = made.folder / head.removeprefix("--- ")
            file.write_text(changed(file.read_text(), change))
            made.changed.append(head.removeprefix("--- "))
        else:
            first = _FILE.match(block)
            assert first is not None, block
            file = made.folder / first[1]
            assert not file.exists(), first[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block[first.end() :])
            made.written.append(first[1])
    for command in _RECORDED:
        made.run(sys.executable, *command)
    return made


def test_change_whose_place_is_missing_or_doubled_is_refused() -> None:
    assert changed("a\nb\nc\n", " a\n-b\n+d\n@@\n c\n+e\n") == "a\nd\nc\ne\n"
    for text in ("a\nc\n", "b\na\nb\n"):
        with pytest.raises(AssertionError):
            changed(text, "-b\n+d\n")


def test_feature_is_one_folder_and_a_line_in_each_list(tree: Tree) -> None:
    of_mtask = [path for path in tree.written if not path.startswith("tests/")]
    assert {str(Path(path).parent) for path in of_mtask} == {"mtask/features/deadlines"}
    assert tree.changed == [
        "mtask/parts/worker.py",
        "mtask/client/aio.py",
        "mtask/parts/surfaces.py",
        "tests/unit/house/sent/others.py",
        "CONTRIBUTING.md",
    ]


def test_feature_passes_the_linters(tree: Tree) -> None:
    files = [*tree.sources, *(path for path in tree.changed if path.endswith(".py")), "mtask/client/sync.py"]
    tree.run("ruff", "check", *files)
    tree.run("ruff", "format", "--check", *files)
    tree.run("lint-imports")


@pytest.mark.long  # on a fresh clone, the checker reads all of mtask
def test_feature_passes_the_type_checker(tree: Tree) -> None:
    # What is known of the modules that stay the same need not be found again.
    for known in ROOT.glob(".mypy_cache/*/*.db"):
        copy = tree.folder / known.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with sqlite3.connect(known) as source, sqlite3.connect(copy) as target:
            source.backup(target)  # the checker may be writing it
    tree.run("mypy", *tree.sources, "mtask/client/sync.py", "mtask/parts/assembly.py")


def test_feature_changes_no_statement_that_others_send(tree: Tree) -> None:
    recorded = "tests/unit/house/statements.txt"
    before, after = ({*(folder / recorded).read_text().splitlines()} for folder in (ROOT, tree.folder))
    assert before < after
    assert {line.split(",")[0] for line in after - before} == {"late tasks", "late tasks canceled"}


def test_feature_passes_its_tests_and_those_of_the_lists(tree: Tree) -> None:
    own = [path for path in tree.sources if Path(path).name.startswith("test_")]
    assert len(own) == 5
    tree.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *own, *_OF_LISTS)
