"""Problem documents: one type for each kind of error, and no text of MongoDB."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from mtask import errors
from mtask.web import problems
from mtask.web.access import Caller, Role

ACME = Caller("acme", Role.OPERATE, "acme")
QUOTED = "not authorized on shop to execute command { find: 'tasks', secret: 'hunter2' }"


def test_each_kind_of_error_has_a_type_of_its_own_and_a_status() -> None:
    found = list(problems.kinds())
    slugs = [problems.slug_of(kind) for kind in found]
    assert len(set(slugs)) == len(slugs) > 40
    assert "task-not-found" in slugs
    assert "invalid-uri" in slugs
    for kind in found:
        assert problems.status_of(kind) in {
            202,
            400,
            401,
            403,
            404,
            405,
            408,
            409,
            410,
            412,
            413,
            415,
            421,
            422,
            429,
            500,
            503,
        }
        assert "\n" not in problems.title_of(kind)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidName("a b", "it is odd"), 422),
        (errors.UnknownOption("prio", "priority", ()), 422),
        (errors.TaskNotFound("a:b"), 404),
        (errors.TaskExists("a:b"), 409),
        (errors.TaskNotFinished("a:b", "INIT"), 409),
        (errors.ControlUnconfirmed("queue", "mail", "paused", ["w"]), 202),
        (errors.EventsLost("gone"), 410),
        (errors.DatabaseUnavailable("down"), 503),
        (errors.AccessDenied("no"), 503),
        (errors.NotStorable("no"), 422),
        (problems.Forbidden("no"), 403),
        (problems.Unauthenticated("no"), 401),
    ],
)
def test_statuses(error: problems.Problem, status: int) -> None:
    answer = problems.response_of(error)
    assert answer.status_code == status
    assert answer.media_type == "application/problem+json"
    assert json.loads(bytes(answer.body))["status"] == status


@pytest.mark.parametrize(
    "error",
    [
        errors.AccessDenied(QUOTED, is_unauthorized=True),
        errors.OperationFailed(QUOTED, 8000),
        errors.DatabaseUnavailable(QUOTED, address="db.internal:27017"),
        errors.DatabaseTimeout(QUOTED),
        errors.SchemaMismatch("tasks", QUOTED, QUOTED),
        errors.DuplicateKey(QUOTED),
        errors.EventsLost(QUOTED),
        errors.NotInStableApi(QUOTED),
        errors.NotReplicaSet("db.internal:27017"),
        errors.DocumentTooLarge(QUOTED),
        errors.MongodFailed("mongod", QUOTED, QUOTED, log_tail=QUOTED),
    ],
)
def test_an_error_of_the_database_quotes_nothing(error: errors.MtaskError) -> None:
    text = bytes(problems.response_of(error).body).decode()
    assert "hunter2" not in text
    assert "db.internal" not in text


def test_every_error_of_the_database_is_told_in_words_of_its_own() -> None:
    for kind in problems.kinds():
        if issubclass(kind, errors.DatabaseError):
            error = kind.__new__(kind)
            Exception.__init__(error, QUOTED)
            assert "hunter2" not in problems.detail_of(error), kind


def test_details_and_notes_are_kept() -> None:
    error = errors.UnknownOption("prio", "priority", ("priority",))
    error.add_note("in task 3")
    made = problems.document_of(error)
    assert made["type"] == "/v1/problems/unknown-option"
    assert made["field"] == made["option"] == "prio"
    assert made["nearest"] == "priority"
    assert made["detail"].endswith("\nin task 3")


def test_a_tenant_sees_ids_without_its_name() -> None:
    made = problems.document_of(errors.TaskNotFound("echo:acme:a"), ACME)
    assert made["task_id"] == "echo:a"
    assert "acme" not in made["detail"]


def test_the_status_of_a_task_does_not_hide_that_of_the_answer() -> None:
    made = problems.document_of(errors.WaitTimeout("a:b", "INIT", timedelta(seconds=1)))
    assert (made["status"], made["task_status"]) == (409, "INIT")


def test_a_missing_token_is_asked_for_and_a_busy_server_says_when_to_come_again() -> None:
    assert problems.response_of(problems.Unauthenticated("x")).headers["www-authenticate"] == "Bearer"
    assert problems.response_of(problems.Busy("x")).headers["retry-after"] == "1"
