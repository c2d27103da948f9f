"""Claims land in the order in which they began, unless one is late."""

from __future__ import annotations

import asyncio

import pytest

from mtask.kernel.worker.running import claim as landings
from mtask.kernel.worker.running.claim import Landings


async def test_a_claim_lands_after_those_that_began_earlier() -> None:
    landed: list[str] = []

    async def claim(name: str, all_claims: Landings, reply: asyncio.Event) -> None:
        with all_claims.begin() as number:
            await reply.wait()
            await all_claims.wait_for_earlier(number, took=100.0)
            landed.append(name)

    all_claims, replies = Landings(), {name: asyncio.Event() for name in "abc"}
    claims = [asyncio.ensure_future(claim(name, all_claims, reply)) for name, reply in replies.items()]
    for name in "cba":
        await asyncio.sleep(0)
        assert not landed
        replies[name].set()
    await asyncio.gather(*claims)
    assert landed == ["a", "b", "c"]


async def test_a_claim_without_a_reply_holds_up_no_other_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landings, "LEAST_LANDING_WAIT", 0.01)
    claims = Landings()
    async with asyncio.timeout(60):
        with claims.begin(), claims.begin() as number:
            await claims.wait_for_earlier(number, took=0.001)


async def test_a_claim_waits_for_no_later_one() -> None:
    claims = Landings()
    async with asyncio.timeout(60):
        with claims.begin() as number, claims.begin():
            await claims.wait_for_earlier(number, took=1e6)
