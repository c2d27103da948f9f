"""The table of mutations cannot rot: each still applies, its tests exist, and a run tells caught from survived."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults import mutations
from tests.faults.mutant import Edit, Mutation
from tests.faults.mutations import MUTATIONS, ROOT

_CHEAP = "tests/unit/worker/state/test_queue.py::test_priority_goes_before_any_preference"
_HARMLESS = Mutation(
    "harmless", "Nothing.", (Edit("mtask/worker/state/queue.py", "STAGGER = 0.02", "STAGGER = 0.021"),), (_CHEAP,)
)
_FATAL = Mutation(
    "fatal", "Everything.", (Edit("mtask/worker/state/queue.py", "import heapq", "import heapqueue"),), (_CHEAP,)
)


@cache
def code_of(path: str) -> str:
    return ast.dump(ast.parse((ROOT / path).read_text()))


@cache
def functions_in(path: str) -> frozenset[str]:
    body = ast.parse((ROOT / path).read_text()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


def test_each_mutation_applies_to_the_source_as_it_is_and_makes_a_program(tmp_path: Path) -> None:
    for mutation in MUTATIONS:
        for edit in mutation.edits:
            copied = tmp_path / edit.path
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_text((ROOT / edit.path).read_text())
        mutation.apply(tmp_path)
        for edit in mutation.edits:
            changed = ast.dump(ast.parse((tmp_path / edit.path).read_text()))
            assert changed != code_of(edit.path), f"{mutation.name} changes nothing"


def test_tests_that_a_mutation_names_exist() -> None:
    for mutation in MUTATIONS:
        assert mutation.tests, mutation.name
        for test in mutation.tests:
            path, _, name = test.partition("::")
            assert name in functions_in(path), (mutation.name, test)


def test_names_of_mutations_tell_them_apart_and_there_are_enough() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 20
    assert all(mutation.breaks.endswith(".") for mutation in MUTATIONS)


def test_edit_that_matches_nowhere_or_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    for old, count in (("z", 0), ("1", 2)):
        with pytest.raises(ValueError, match=f"found {count} times, not once"):
            Edit("a.py", old, "2").applied(tmp_path)


def test_run_tells_a_mutation_that_is_caught_from_one_that_survives_and_one_that_tells_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (caught,) = [mutation for mutation in MUTATIONS if mutation.name == "priority-ignored"]
    assert mutations.main(["priority-ignored", "harmless"], [caught, _HARMLESS]) == 1
    printed = capsys.readouterr().out
    assert "caught   priority-ignored" in printed
    assert f"\n         by {_CHEAP}" in printed
    assert "\nSURVIVED harmless" in printed
    assert printed.endswith("1 of 2 caught\nsurvived: harmless\n")
    with pytest.raises(RuntimeError, match="which tells nothing"):
        mutations.main(["fatal"], [_FATAL])


def test_unknown_mutation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mutations.main(["no-such-thing"])
    assert "no such mutation: no-such-thing" in capsys.readouterr().err
