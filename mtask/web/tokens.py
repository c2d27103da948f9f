"""Tokens: the file that lists them, and the search for the token of a request.

The file is JSON: `[{"name": "billing", "role": "publish", "sha256": "9f86…", "tenant": "acme"}]`. It holds the SHA-256
of each token, and no token itself.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtask.errors import InvalidInput, shown
from mtask.kernel.document.identity import check_text, is_tenant
from mtask.web.access import Caller, Role

_FIELDS = frozenset({"name", "role", "tenant", "sha256"})
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
#: The longest token that is looked at, in bytes.
_LONGEST = 512


def fresh_token() -> str:
    """Return a new token of 256 random bits."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """Return the SHA-256 of a token, as the token file holds it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Token:
    """A token without its text."""

    caller: Caller
    digest: str = field(repr=False)


class Tokens:
    """The tokens that a server accepts."""

    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        self._tokens = tuple(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def caller_of(self, token: str) -> Caller | None:
        """Return the caller with this token, or None. The time that this takes tells nothing about the tokens."""
        given = digest_of(token if len(token) <= _LONGEST else "")
        found: Caller | None = None
        for known in self._tokens:  # all of them, although the first may be the right one
            if hmac.compare_digest(known.digest, given):
                found = known.caller
        return found


def read_tokens(path: Path) -> Tokens:
    """Return the tokens in a file. Raises InvalidInput if the file cannot be used, or if others can write it."""
    try:
        with path.open("rb") as file:
            found, content = os.fstat(file.fileno()), file.read()
    except OSError as error:
        raise _refused_file(path, f"it cannot be read: {error.strerror or error}") from None
    _check_owner(path, found)
    return _tokens_in(content, f"token file {shown(str(path))}")


def tokens_of(text: str) -> Tokens:
    """Return the tokens in the environment, in the form of the file; raise InvalidInput."""
    return _tokens_in(text.encode("utf-8", "surrogatepass"), "MTASK_WEB_TOKENS")


def _tokens_in(content: bytes, source: str) -> Tokens:
    try:
        listed = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        raise _refused(source, "it is no JSON") from None
    if not isinstance(listed, list) or not listed:
        raise _refused(source, "it is no list of tokens with at least one entry")
    tokens = [_token(source, index, entry) for index, entry in enumerate(listed)]
    for what, values in (("names", [t.caller.name for t in tokens]), ("digests", [t.digest for t in tokens])):
        if len(set(values)) < len(values):
            raise _refused(source, f"two of its tokens have equal {what}")
    return Tokens(tokens)


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refused_file(path, f"others can write it; make it yours alone: chmod 600 {path}")
    if found.st_uid not in (os.geteuid(), 0):
        raise _refused_file(path, "it belongs to another user, who can write it")


def _token(source: str, index: int, entry: Any) -> Token:
    if not isinstance(entry, dict) or not {"name", "role", "sha256"} <= entry.keys() <= _FIELDS:
        raise _refused(source, f"entry {index} is no object with name, role, sha256 and, if wanted, tenant")
    digest, tenant = entry["sha256"], entry.get("tenant")
    if not isinstance(digest, str) or not _DIGEST.match(digest):
        raise _refused(source, f"the sha256 of entry {index} is not 64 lower-case hex digits")
    if entry["role"] not in list(Role):
        raise _refused(source, f"the role of entry {index} is not one of {', '.join(Role)}")
    if tenant is not None and not is_tenant(tenant):
        raise _refused(source, f"the tenant of entry {index} is not 1 to 64 letters, digits, '_', '.' or '-'")
    return Token(Caller(check_text("name of a token", entry["name"]), Role(entry["role"]), tenant), digest)


def _refused_file(path: Path, reason: str) -> InvalidInput:
    return _refused(f"token file {shown(str(path))}", reason)


def _refused(source: str, reason: str) -> InvalidInput:
    return InvalidInput(f"{source}: {reason}.", field="token_file")
