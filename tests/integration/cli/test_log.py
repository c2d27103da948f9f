"""`mtask log`, and the name under which commands act."""

from __future__ import annotations

import os
import pwd

import pytest

from mtask.features.audit_log.client import acting_as
from tests.integration.cli.commands import Commands, client_of


def test_commands_write_down_what_they_change_and_log_shows_it(mtask: Commands) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    mtask.ok("publish", "send", '{"token": "hidden"}', "--key", "k/1")
    mtask.ok("cancel", "send", "k/1", "--as", "ann")
    mtask.ok("pause", "--queue", "mail")
    assert mtask("cancel", "send", "k/2", "--as", "ann").code != 0
    found = mtask.ok("log", "--json").json
    assert [(row["actor"], row["via"], row["intent"], row["target"], row["result"]) for row in found] == [
        ("ann", "command line", "cancel", "task:send:k/2", "TaskNotFound"),
        (user, "command line", "pause", "queue:mail", "done"),
        ("ann", "command line", "cancel", "task:send:k/1", "done"),
    ]
    assert "hidden" not in repr(found)
    shown = mtask.ok("log").out.splitlines()
    assert shown[0].split() == ["TIME", "WHO", "VIA", "WHAT", "TARGET", "RESULT"]  # a column without a text is left out
    assert "task:send:k/2" in shown[1]
    assert shown[1].endswith("TaskNotFound")
    assert len(mtask.ok("log", "--who", "ann", "--what", "cancel", "--json").json) == 2
    assert [row["target"] for row in mtask.ok("log", "--target", "queue:mail", "--json").json] == ["queue:mail"]
    assert len(mtask.ok("log", "--since", "1h", "--limit", "1", "--json").json) == 1
    (last,) = mtask.ok("log", "--after", found[1]["id"], "--json").json
    assert last == found[2]
    assert "more: --after" in mtask.ok("log", "--limit", "1").err
    assert "no such action" in mtask.ok("log", "--who", "bob").err
    assert mtask("log", "--what", "publish").code == 2


def test_the_environment_names_the_actor(mtask: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTASK_ACTOR", "deployment 7")
    mtask.ok("pause", "--queue", "mail")
    mtask.ok("resume", "--queue", "mail", "--as", "ann")
    assert [row["actor"] for row in mtask.ok("log", "--json").json] == ["ann", "deployment 7"]
    assert mtask("pause", "--queue", "mail", "--as", "a,b").code == 2
    assert mtask("pause", "--queue", "mail", "--as", "").code == 2


def test_a_command_that_was_shown_before_is_not_taken_for_the_next(mtask: Commands) -> None:
    mtask.ok("pause", "--queue", "a", "--as", "ann")
    with client_of(mtask) as client, acting_as("bob", "web"):
        client.pause(queue="b")
    with client_of(mtask) as client:
        client.pause(queue="c")
        assert [action.via for action in client.actions()] == ["python", "web", "command line"]
