"""Tokens: the file that lists them, who sends a request, and how many requests that caller may send.

The file is JSON: `[{"name": "billing", "role": "publish", "sha256": "9f86…", "tenant": "acme"}]`. It holds the SHA-256
of each token, and no token itself.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from mtask.errors import InvalidInput, shown
from mtask.kernel.document.identity import check_text, is_tenant
from mtask.web.access import Caller, Role
from mtask.web.problems import TooManyRequests
from mtask.web.settings import WebSettings

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


# --- logins ----------------------------------------------------------------------------------------------

# Finds out who sends a request: by its token and, before there is one, by the address that it comes from.

#: How many wrong tokens one address may try in a second, and at once.
_GUESSES, _AT_ONCE = 1.0, 20.0
#: The most wrong tokens that are remembered. To send one again is no guess.
_MOST = 10_000
#: IPv6 gives each customer at least this network, so all of it counts as one address.
_IPV6_NETWORK = 64


class Logins:
    """The tokens of a server, and the addresses that have shown wrong ones."""

    def __init__(self, settings: WebSettings, tokens: Tokens) -> None:
        self._proxies, self._tokens = settings.trusted, tokens
        self._guesses = Rates(_GUESSES, _AT_ONCE)
        self._right: set[str] = set()
        self._wrong: OrderedDict[str, None] = OrderedDict()

    def caller_of(self, token: str, address: str) -> Caller | None:
        """Return the caller with this token, or None. Raises TooManyRequests for an address that guesses.

        Then no new token of this address is looked at. A token that was right before goes on: so nobody behind the same
        proxy is cut off who was there before.
        """
        digest, now = digest_of(token), time.monotonic()
        if digest in self._wrong:
            return None
        delay = 0.0 if digest in self._right else self._guesses.delay(address, now, take=False)
        if delay:
            raise TooManyRequests("Too many wrong tokens came from your address.", delay)
        found = self._tokens.caller_of(token)
        if found is not None:
            self._right.add(digest)
            return found
        self._guesses.delay(address, now)
        self._wrong[digest] = None
        if len(self._wrong) > _MOST:
            self._wrong.popitem(last=False)
        return None

    def address_of(self, scope: Scope) -> str:
        """Return the address that a request comes from. Only a proxy of the settings is believed what it tells."""
        address = str((scope.get("client") or ("",))[0])
        told = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
        # Each proxy adds the address that it has seen to the end.
        while told and self._is_proxy(address):
            address = told.pop().strip() or address
        return _network_of(address)

    def _is_proxy(self, address: str) -> bool:
        try:
            return any(ipaddress.ip_address(address) in network for network in self._proxies)
        except ValueError:
            return False


def _network_of(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, _IPV6_NETWORK), strict=False))
    return address


# --- rates -----------------------------------------------------------------------------------------------

# The limit of requests: each caller may send so many in a second, and some more at once.

#: The number of requests that a caller may send at once, in seconds of the usual rate.
_BURST = 2.0


class Rates:
    """A measure for each caller. It fills up with time, and each request takes one part of it."""

    def __init__(self, per_second: float, burst: float = _BURST) -> None:
        self._per_second = per_second
        self._most = max(1.0, per_second * burst)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def delay(self, caller: str, now: float, *, take: bool = True) -> float:
        """Take one request of a caller; return 0, or the seconds after which to send it again. `now`: in seconds.

        Without `take`, the caller keeps what it has.
        """
        if not self._per_second:
            return 0.0
        left, at = self._left.pop(caller, (self._most, now))
        left = min(self._most, left + max(0.0, now - at) * self._per_second)
        delay = 0.0 if left >= 1 else (1 - left) / self._per_second
        self._left[caller] = (left - 1 if take and not delay else left, now)
        if len(self._left) > _MOST:
            self._left.popitem(last=False)
        return delay
