"""Every statement that mtask sends, byte for byte: a restructuring changes none, and a change of one is seen.

`statements.txt` has a line for each: its name, its length in bytes, and the beginning of its hash. No name tells in
which module a statement is made. The cases are in `tests/unit/house/sent/`.

`make statements` writes them as text, one file for each, into a folder. With a second folder, such as that of another
commit, it shows what differs. Without any folder, `python -m tests.unit.house.test_statements` records them anew.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import pytest

from tests.unit.house.sent import flows, lists, others, publishing, tasks
from tests.unit.house.sent.conversation import texts

SNAPSHOT = Path(__file__).with_name("statements.txt")
REMEDY = (
    "make the texts of both commits with `make statements FOLDER=...` and look at what differs; if it is meant, run "
    "`python -m tests.unit.house.test_statements`"
)
_CASES = (tasks, publishing, flows, lists, others)
#: Operations without a case: each only sends what another one makes.
_WITHOUT = frozenset(
    {
        "mtask.kernel.operations.change.by_index",
        "mtask.doctor.position.find",
        "mtask.features.gathering.doctor.gathered",
        "mtask.features.metrics.client.read",
    }
)


def described(indent: int | None = None) -> dict[str, str]:
    """Return the text of each statement, by name."""
    found: dict[str, str] = {}
    for module in _CASES:
        for name, case in module.cases().items():
            made = texts(name, case, indent)
            assert not found.keys() & made.keys(), f"two cases have the name {name}"
            found |= made
    return found


def _recorded(found: dict[str, str]) -> list[str]:
    return sorted(f"{name}: {len(text.encode())} {_hash(text)}" for name, text in found.items())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@pytest.fixture(scope="module")
def told() -> tuple[dict[str, str], set[CodeType]]:
    """Return the text of each statement, and all functions that were called to make it."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    former = sys.getprofile()
    sys.setprofile(note)
    try:
        return described(), called
    finally:
        sys.setprofile(former)


def test_statements_are_as_recorded(told: tuple[dict[str, str], set[CodeType]]) -> None:
    recorded, found = SNAPSHOT.read_text().splitlines(), _recorded(told[0])
    changes = difflib.unified_diff(recorded, found, "recorded", "found", lineterm="", n=0)
    assert recorded == found, f"{REMEDY}:\n" + "\n".join(changes)


def test_each_operation_has_a_case(told: tuple[dict[str, str], set[CodeType]]) -> None:
    lacking = [f"{made.__module__}.{made.__name__}" for made in _operations() if made.__code__ not in told[1]]
    assert lacking == [], "a case in tests/unit/house/sent/ sends what each operation sends"


def _operations() -> Iterator[Callable[..., object]]:
    """Return the operations of the modules that the cases import."""
    modules = {one for module in _CASES for one in vars(module).values() if isinstance(one, ModuleType)}
    for module in sorted(modules, key=lambda one: one.__name__):
        for name, made in vars(module).items():
            is_own = inspect.isgeneratorfunction(made) and made.__module__ == module.__name__
            is_left_out = name.startswith("_") or f"{module.__name__}.{name}" in _WITHOUT
            if is_own and _is_operation(made) and not is_left_out:
                yield made


def _is_operation(made: Callable[..., object]) -> bool:
    return str(inspect.signature(made).return_annotation).startswith("Operation[")


def write(folder: Path) -> None:
    """Write the text of each statement into a file of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.txt"):
        old.unlink()
    for name, text in described(indent=1).items():
        (folder / f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{_hash(name)[:4]}.txt").write_text(f"{name}\n{text}\n")


def differences(before: Path, after: Path) -> list[str]:
    """Return what differs between two folders, in lines."""
    lines: list[str] = []
    for name in sorted({file.name for folder in (before, after) for file in folder.glob("*.txt")}):
        former, later = (
            file.read_text().splitlines() if (file := folder / name).exists() else [] for folder in (before, after)
        )
        lines += difflib.unified_diff(former, later, f"{before / name}", f"{after / name}", lineterm="")
    return lines


def test_what_differs_between_two_folders_is_shown(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder, text in ((before, "a\nb\n"), (after, "a\nc\n")):
        folder.mkdir()
        (folder / "same.txt").write_text("a\n")
        (folder / "one.txt").write_text(text)
    (after / "new.txt").write_text("n\n")
    shown = [line for line in differences(before, after) if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert shown == ["+n", "-b", "+c"]


def _main(folders: list[str]) -> int:
    logging.disable()  # what some of the operations tell the user
    if not folders:
        SNAPSHOT.write_text("\n".join(_recorded(described())) + "\n")
        return 0
    after, *others = map(Path, folders)
    write(after)
    lines = [line for before in others for line in differences(before, after)]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
