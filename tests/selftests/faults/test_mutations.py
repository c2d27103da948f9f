"""The table of mutations cannot rot: each still applies, its tests exist, and a run tells caught from survived."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults import mutations
from tests.faults.mutant import Edit, Mutation
from tests.faults.mutations import MUTATIONS, ROOT

_CHEAP = "tests/unit/kernel/worker/discovery/test_queue.py::test_priority_goes_before_any_preference"
_HARMLESS = Mutation(
    "harmless",
    "Nothing.",
    (Edit("mtask/kernel/worker/discovery/ready.py", "STAGGER", "0.02", "0.021"),),
    (_CHEAP,),
)
_FATAL = Mutation(
    "fatal",
    "Everything.",
    (Edit("mtask/kernel/worker/discovery/buffer.py", "", "import heapq", "import heapqueue"),),
    (_CHEAP,),
)


@cache
def code_of(path: str) -> str:
    return ast.dump(ast.parse((ROOT / path).read_text()))


@cache
def functions_in(path: str) -> frozenset[str]:
    body = ast.parse((ROOT / path).read_text()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def mistakes_of(mutation: Mutation, folder: Path) -> list[str]:
    """Apply the mutation to a copy of its sources; return what is wrong with it."""
    for edit in mutation.edits:
        copied = folder / edit.path
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text((ROOT / edit.path).read_text())
    try:
        mutation.apply(folder)
        changed = {edit.path: ast.dump(ast.parse((folder / edit.path).read_text())) for edit in mutation.edits}
    except (ValueError, SyntaxError) as error:
        return [f"{mutation.name}: {error}"]
    return [f"{mutation.name}: it changes nothing in {path}" for path in changed if changed[path] == code_of(path)]


def test_each_mutation_applies_to_the_source_as_it_is_and_makes_a_program(tmp_path: Path) -> None:
    assert [mistake for mutation in MUTATIONS for mistake in mistakes_of(mutation, tmp_path)] == []


def test_tests_that_a_mutation_names_exist() -> None:
    named = [(mutation.name, *test.partition("::")[::2]) for mutation in MUTATIONS for test in mutation.tests or ("",)]
    assert [each for each in named if not each[1] or each[2].partition("[")[0] not in functions_in(each[1])] == []


def test_names_of_mutations_tell_them_apart_and_there_are_enough() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) >= 20
    assert all(mutation.breaks.endswith(".") for mutation in MUTATIONS)


_SOURCE = """
LEAST, MOST = 1, 2

class Lease:
    @lengthened  # by 1
    def lapses(
        self, now, last,  # in seconds
    ):
        if now > last:
            return True  # it has 1

    def holds(self):
        return 1 + 1
"""


@pytest.mark.parametrize(
    ("name", "old", "new", "code"),
    [
        ("MOST", "2", "3", "LEAST, MOST = 1, 3\n"),
        ("Lease", "@lengthened", "", "    # by 1\n"),
        ("Lease.lapses", "lapses(self, now, last)", "lapses(self)", "    def lapses(self):\n"),
        (
            "Lease.lapses",
            "if now > last:\n    return True",
            "now = 1\nreturn",
            "        now = 1\n        return  # it has 1\n",
        ),
    ],
)
def test_edit_goes_by_tokens_and_keeps_to_what_it_names(
    name: str, old: str, new: str, code: str, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(_SOURCE)
    assert code in Edit("a.py", name, old, new).applied(tmp_path)


def test_edit_that_matches_nowhere_or_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(_SOURCE)
    for name, old, count in (("LEAST", "3", 0), ("Lease.lapses", "1", 0), ("holds", "1", 0), ("Lease.holds", "1", 2)):
        with pytest.raises(ValueError, match=f"found {count} times, not once"):
            Edit("a.py", name, old, "4").applied(tmp_path)


@pytest.mark.long
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
