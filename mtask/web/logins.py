"""Finds out who sends a request: by its token and, before there is one, by the address that it comes from."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict

from starlette.datastructures import Headers
from starlette.types import Scope

from mtask.web.access import Caller
from mtask.web.problems import TooManyRequests
from mtask.web.rates import Rates
from mtask.web.settings import WebSettings
from mtask.web.tokens import Tokens, digest_of

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
