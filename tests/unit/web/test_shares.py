"""Shares, sessions and wrong tokens: whoever has much leaves something for the others."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from mtask.web.access import Caller, Role
from mtask.web.page import sessions
from mtask.web.page.sessions import Sessions
from mtask.web.problems import Busy, TooManyRequests
from mtask.web.rooms import Shares
from mtask.web.settings import WebSettings
from mtask.web.tokens import Logins, Token, Tokens, digest_of


def caller(name: str, tenant: str | None = None) -> Caller:
    return Caller(name, Role.READ, tenant)


def most_of(shares: Shares, stack: ExitStack, who: Caller) -> int:
    """Take as many as the caller may have; return how many."""
    count = 0
    while shares.admits(who):
        stack.enter_context(shares.taken(who))
        count += 1
    with pytest.raises(Busy), shares.taken(who):
        pass
    return count


def test_each_caller_may_have_what_is_left_for_the_others() -> None:
    shares = Shares(1000, "streams")
    with ExitStack() as stack:
        assert [most_of(shares, stack, caller(name)) for name in "abcdefgh"] == [500, 250, 125, 63, 31, 16, 8, 4]
        assert shares.admits(caller("somebody else"))
    assert shares.used == 0
    with ExitStack() as stack:
        assert most_of(shares, stack, caller("a")) == 500


def test_the_tokens_of_one_tenant_share_what_it_may_have() -> None:
    shares = Shares(1000, "streams")
    with ExitStack() as stack:
        taken = [most_of(shares, stack, caller(f"acme {number}", "acme")) for number in range(5)]
        assert sum(taken) <= 500
        assert all(taken)
        assert most_of(shares, stack, caller("umbra", "umbra")) > 100


def test_a_small_number_can_be_had_by_one() -> None:
    shares = Shares(1, "streams")
    with ExitStack() as stack:
        assert most_of(shares, stack, caller("a", "acme")) == 1
    with ExitStack() as stack:
        assert most_of(Shares(10, "streams", each=2), stack, caller("a")) == 2


async def test_what_is_given_back_goes_to_those_who_wait_and_patience_ends() -> None:
    shares, order = Shares(100, "room"), []

    async def hold(who: str, amount: int) -> None:
        async with shares.awaited(caller(who), amount, 60.0):
            order.append(who)

    async with shares.awaited(caller("a"), 60, 0.0):
        with pytest.raises(Busy):
            async with shares.awaited(caller("a"), 10, 0.0):
                pass
        async with shares.awaited(caller("b"), 40, 0.0):
            waiting = [asyncio.create_task(hold(who, 50)) for who in "cd"]
            await asyncio.sleep(0)
            assert order == []
        await asyncio.sleep(0)
        assert order == [], "there is still too little"
    await asyncio.gather(*waiting)
    assert (order, shares.used) == (["c", "d"], 0)


def test_many_logins_of_one_token_end_no_session_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST", 10)
    kept = Sessions()
    other, _ = kept.begin(caller("other"))
    of_tenant, _ = kept.begin(caller("one", "acme"))
    values = [kept.begin(caller("flood"))[0] for _ in range(30)]
    for _ in range(3):
        kept.begin(caller("two", "acme"))
    assert kept.session_of(other) is not None
    assert kept.session_of(of_tenant) is not None, "its tenant has fewer than the flood"
    live = [value for value in values if kept.session_of(value) is not None]
    assert live == values[-5:], "the newest ones"
    for _ in range(20):
        kept.begin(caller("two", "acme"))
    assert kept.session_of(of_tenant) is not None, "another token of its tenant has more"


def test_who_guesses_tokens_is_slowed_down_and_nobody_else() -> None:
    tokens = Tokens(Token(caller(name), digest_of(name)) for name in ("right", "new"))
    logins = Logins(WebSettings(), tokens)
    assert logins.caller_of("right", "10.0.0.1") == caller("right")
    for number in range(20):
        assert logins.caller_of(f"wrong {number}", "10.0.0.1") is None
    for _ in range(100):
        assert logins.caller_of("wrong 7", "10.0.0.1") is None, "an old token that is sent again is no guess"
    for guess in ("wrong 20", "new"):
        with pytest.raises(TooManyRequests):
            logins.caller_of(guess, "10.0.0.1")
    assert logins.caller_of("right", "10.0.0.1") == caller("right"), "it was right before"
    assert logins.caller_of("new", "10.0.0.2") == caller("new")
    assert logins.caller_of("new", "10.0.0.1") == caller("new")


@pytest.mark.parametrize(
    ("peer", "told", "expected"),
    [
        ("203.0.113.7", [], "203.0.113.7"),
        ("203.0.113.7", ["198.51.100.1"], "203.0.113.7"),
        ("10.0.0.5", ["198.51.100.1"], "198.51.100.1"),
        ("10.0.0.5", ["1.2.3.4, 198.51.100.1"], "198.51.100.1"),
        ("10.0.0.5", ["1.2.3.4", "198.51.100.1, 10.0.0.6"], "198.51.100.1"),
        ("10.0.0.5", [], "10.0.0.5"),
        ("2001:db8:1:2:3:4:5:6", [], "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.7", [], "203.0.113.7"),
        ("10.0.0.5", ["nonsense"], "nonsense"),
    ],
)
def test_the_address_is_that_which_the_last_known_proxy_has_seen(peer: str, told: list[str], expected: str) -> None:
    logins = Logins(WebSettings(proxies=("10.0.0.0/24",)), Tokens())
    headers = [(b"x-forwarded-for", each.encode()) for each in told]
    assert logins.address_of({"type": "http", "client": (peer, 1), "headers": headers}) == expected
