"""`mtask keys` makes, lists and removes data keys, and commands without keys show that values are encrypted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.keys import MARKER, MASTER_KEY


@pytest.fixture
def flags(tmp_path: Path, database_name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    path = tmp_path / "master.key"
    path.write_bytes(MASTER_KEY)
    monkeypatch.setenv("MTASK_ENCRYPTION_KEY_VAULT", f"{database_name}.vault")
    return "--encryption-key-file", str(path)


def test_keys_are_made_listed_and_removed(mtask: Any, flags: tuple[str, ...]) -> None:
    assert "there are no data keys" in mtask("keys", "list", *flags).err
    assert mtask("keys", "create", "--queue", "mail", *flags).out.startswith("made  queue:mail  ")
    assert mtask("keys", "create", "--tenant", "acme", *flags).code == 0
    again = mtask("keys", "create", "--queue", "mail", *flags)
    assert (again.code, "exists" in again.err) == (1, True)
    rows = json.loads(mtask("keys", "list", "--json", *flags).out)
    assert [(row["name"], row["provider"], row["remove_time"]) for row in rows] == [
        ("queue:mail", "local", None),
        ("tenant:acme", "local", None),
    ]
    mtask("publish", "echo", json.dumps({"text": MARKER}), "--key", "k", "--queue", "mail", *flags)
    assert MARKER in mtask("show", "echo", "k", *flags).out
    assert "(encrypted)" in (hidden := mtask("show", "echo", "k")).out, hidden.err
    asked = mtask("keys", "remove", "--queue", "mail", *flags)
    assert (asked.code, "confirm with --yes" in asked.err) == (2, True)
    assert mtask("keys", "remove", "--queue", "mail", "--yes", *flags).out.startswith("removed  queue:mail")
    assert "removed" in mtask("keys", "list", *flags).out
    assert "(encrypted)" in mtask("show", "echo", "k", *flags).out
    refused = mtask("publish", "echo", "{}", "--key", "j", "--queue", "mail", *flags)
    assert (refused.code, "mtask keys create --queue mail" in refused.err) == (1, True)
    assert json.loads(mtask("log", "--json", *flags).out)[0]["intent"] == "remove data key"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create"], "name the queue or the tenant"),
        (["create", "--queue", "a", "--tenant", "b"], "name the queue or the tenant"),
        (["create", "--tenant", "a:b"], "tenant 'a:b'"),
        (["create", "--queue", ""], "queue"),
        (["remove", "--queue", "never", "--yes"], "there is no data key 'queue:never'"),
    ],
)
def test_nonsense_is_refused(mtask: Any, flags: tuple[str, ...], arguments: list[str], said: str) -> None:
    answer = mtask("keys", *arguments, *flags)
    assert answer.code in (1, 2)
    assert said in " ".join(answer.err.split())


def test_without_the_master_key_the_command_says_what_to_give(mtask: Any, flags: tuple[str, ...]) -> None:
    answer = mtask("keys", "list")
    assert (answer.code, "--encryption-key-file" in answer.err) == (2, True)
    wrong = Path(flags[1]).with_name("wrong.key")
    wrong.write_bytes(b"w" * 96)
    mtask("keys", "create", "--queue", "mail", *flags)
    refused = mtask("publish", "echo", "{}", "--key", "j", "--queue", "mail", "--encryption-key-file", str(wrong))
    assert (refused.code, "another master key" in refused.err) == (2, True)
