"""The token file, and the search for a token."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mtask.errors import InvalidInput
from mtask.web.access import Caller, Role
from mtask.web.tokens import Token, Tokens, digest_of, fresh_token, read_tokens, tokens_of

SECRET = "a-token-that-nobody-guesses"
GOOD = {"name": "ci", "role": "publish", "sha256": digest_of(SECRET)}


def written(tmp_path: Path, content: Any, mode: int = 0o600) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(mode)
    return path


def test_a_token_of_the_file_is_found_and_others_are_not(tmp_path: Path) -> None:
    other = {"name": "acme", "role": "operate", "tenant": "acme", "sha256": digest_of("another")}
    tokens = read_tokens(written(tmp_path, [GOOD, other]))
    assert tokens.caller_of(SECRET) == Caller("ci", Role.PUBLISH)
    assert tokens.caller_of("another") == Caller("acme", Role.OPERATE, "acme")
    assert len(tokens) == 2
    for wrong in ("", SECRET + "x", SECRET[:-1], SECRET.upper(), digest_of(SECRET), "x" * 10_000, "\ud800"):
        assert tokens.caller_of(wrong) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidInput, match="others can write it"):
        read_tokens(written(tmp_path, [GOOD], mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [GOOD])
    os.chown(path, 12_345, -1)
    with pytest.raises(InvalidInput, match="another user"):
        read_tokens(path)


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[" * 100_000,
        {},
        [],
        ["text"],
        [{"name": "ci", "role": "publish"}],
        [{**GOOD, "more": 1}],
        [{**GOOD, "role": "admin"}],
        [{**GOOD, "role": ["read"]}],
        [{**GOOD, "sha256": SECRET}],
        [{**GOOD, "sha256": digest_of(SECRET).upper()}],
        [{**GOOD, "tenant": "a:b"}],
        [{**GOOD, "tenant": ""}],
        [{**GOOD, "tenant": 7}],
        [{**GOOD, "name": ""}],
        [GOOD, {**GOOD, "name": "twin"}],
        [GOOD, {**GOOD, "sha256": digest_of("other")}],
    ],
)
def test_a_malformed_file_is_refused_and_the_error_quotes_no_digest(tmp_path: Path, content: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_tokens(written(tmp_path, content))
    assert digest_of(SECRET) not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_tokens(tmp_path / "none")


def test_neither_tokens_nor_digests_are_shown_by_repr() -> None:
    token = Token(Caller("ci", Role.READ), digest_of(SECRET))
    assert digest_of(SECRET) not in repr(token)
    assert digest_of(SECRET) not in repr(Tokens([token]))


def test_each_comparison_looks_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def compare(known: str, given: str) -> bool:
        looked.append(known)
        return known == given

    monkeypatch.setattr("hmac.compare_digest", compare)
    tokens = Tokens(Token(Caller(name, Role.READ), digest_of(name)) for name in "abc")
    assert tokens.caller_of("a") == Caller("a", Role.READ)
    assert looked == [digest_of(name) for name in "abc"]


def test_fresh_tokens_have_256_bits() -> None:
    assert len({fresh_token() for _ in range(100)}) == 100
    assert len(fresh_token()) >= 43


def test_each_role_may_do_what_the_roles_before_it_may_do() -> None:
    assert [[Caller("x", role).may(asked) for asked in Role] for role in Role] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_the_environment_holds_what_the_file_would() -> None:
    token = fresh_token()
    text = json.dumps([{"name": "ci", "role": "read", "sha256": digest_of(token), "tenant": "acme"}])
    assert tokens_of(text).caller_of(token) == Caller("ci", Role.READ, "acme")
    for wrong in ("", "{}", "[]", "[1]", "\ud800", '[{"name": "ci", "role": "read"}]'):
        with pytest.raises(InvalidInput, match="MTASK_WEB_TOKENS"):
            tokens_of(wrong)
