from __future__ import annotations

import inspect
import re
from datetime import timedelta
from typing import Any

import pytest

import mtask
from mtask import errors
from mtask.errors import MtaskError

_LINE = re.compile(r"^(?P<indent>[│ ]*)(?:[├└]── )?(?P<name>\w+)(?: {2,}(?P<what>\S.*))?$")


def drawn_tree() -> dict[str, str | None]:
    """Return each class of the drawing with the one above it."""
    drawing = (errors.__doc__ or "").split("```")[1].strip("\n")
    parents: dict[str, str | None] = {}
    branch: list[str] = []
    for line in drawing.splitlines():
        found = _LINE.match(line)
        assert found, f"not a line of the tree: {line!r}"
        depth = (len(line) - len(line.lstrip("│ ├└─"))) // 4
        branch = [*branch[:depth], found["name"]]
        assert len(branch) == depth + 1, f"a level is left out: {line!r}"
        parents[found["name"]] = branch[-2] if depth else None
    return parents


def actual_tree() -> dict[str, str | None]:
    found = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, MtaskError)]
    return {c.__name__: None if c is MtaskError else c.__bases__[0].__name__ for c in found}


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    assert drawn_tree() == actual_tree()


def test_what_the_drawing_says_of_builtin_bases_holds() -> None:
    drawing = (errors.__doc__ or "").splitlines()
    said = {line.strip("│ ├└─").split()[0]: line for line in drawing if "(also a " in line}
    assert said.keys() == {"InvalidInput", "WaitTimeout"}
    assert issubclass(errors.InvalidInput, ValueError)
    assert issubclass(errors.WaitTimeout, TimeoutError)


def test_every_error_has_a_docstring() -> None:
    for name in actual_tree():
        assert inspect.getdoc(getattr(errors, name)), name


def test_every_error_that_a_user_may_catch_is_exported_at_the_top() -> None:
    for name in ("MtaskError", "Fail", "Retry"):
        assert getattr(mtask, name) is getattr(errors, name)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidInput("bad"), 2),
        (errors.UnknownOption("x", None, ()), 2),
        (errors.InvalidURI("bad"), 2),
        (errors.HandlerError("f", "bad"), 2),
        (errors.AppNotFound("a:b", "bad"), 2),
        (errors.DatabaseUnavailable("away"), 3),
        (errors.NotReplicaSet("here"), 3),
        (errors.SchemaMismatch("tasks", "bad", "Go."), 3),
        (errors.MongodNotFound(()), 3),
        (errors.TaskNotFound("a:b"), 4),
        (errors.WorkerNotFound("w"), 4),
        (errors.TaskExists("a:b"), 5),
        (errors.TaskRunning("a:b"), 5),
        (errors.TaskNotFinished("a:b", "INIT"), 5),
        (errors.MalformedTask("a:b", "bad"), 5),
        (errors.WorkerIdInUse("w", "host", 1, timedelta(0)), 5),
        (errors.InvalidLookup("a b", "bad"), 2),
        (errors.TaskFailed("a:b", "no luck"), 8),
        (errors.TaskCanceled("a:b"), 9),
        (errors.WaitTimeout("a:b", "INIT", timedelta(seconds=1)), 6),
        (errors.LeaseLost("a:b", "r"), 1),
        (errors.Fail("no"), 1),
    ],
)
def test_an_error_ends_the_command_line_with_the_code_of_its_kind(error: MtaskError, code: int) -> None:
    assert error.exit_code == code


def test_a_standalone_server_is_told_the_two_commands_that_make_it_a_replica_set() -> None:
    message = str(errors.NotReplicaSet("db:27017"))
    assert "db:27017" in message
    assert "mongod --replSet rs0" in message
    assert "mongosh --eval 'rs.initiate()'" in message


def test_a_worker_id_in_use_never_frees_itself_in_the_past() -> None:
    assert "in 0 s" in str(errors.WorkerIdInUse("w", "host", 1, timedelta(seconds=-5)))


def test_a_wait_for_several_tasks_tells_how_many_have_not_ended() -> None:
    assert "still INIT after 5 s. `" in str(errors.WaitTimeout("a:1", "INIT", timedelta(seconds=5)))
    message = str(errors.WaitTimeout("a:1", "INIT", timedelta(seconds=5), ["a:2", "a:3"]))
    assert "still INIT after 5 s, and 2 other tasks with it. `" in message


@pytest.mark.parametrize("delay", [0, 1.5, timedelta(seconds=2)])
def test_a_retry_takes_seconds_or_a_timedelta(delay: float | timedelta) -> None:
    expected = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
    assert errors.Retry(delay).delay == expected


def test_a_retry_in_the_past_is_refused() -> None:
    with pytest.raises(errors.InvalidOption, match="delay"):
        errors.Retry(-1)


@pytest.mark.parametrize(
    "delay",
    [errors.MAX_DELAY + timedelta(milliseconds=1), timedelta(days=3_000_000), timedelta.max, 1e300, float("nan"), "1"],
)
def test_a_retry_later_than_ten_years_is_refused(delay: Any) -> None:
    with pytest.raises(errors.InvalidOption, match="use 0 to 10 years"):
        errors.Retry(delay)
    assert errors.Retry(errors.MAX_DELAY).delay == errors.MAX_DELAY
