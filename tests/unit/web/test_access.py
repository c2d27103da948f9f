"""The stored keys of tenants."""

from __future__ import annotations

import pytest

from mtask.errors import InvalidKey
from mtask.web.access import Caller, Role

ACME = Caller("acme", Role.OPERATE, "acme")


def test_a_tenant_sees_its_keys_without_its_name() -> None:
    assert ACME.stored_key("a:b/c") == "acme:a:b/c"
    assert ACME.shown_key("acme:a:b/c") == "a:b/c"
    assert ACME.shown_id("echo:acme:a:b/c") == "echo:a:b/c"
    assert ACME.shown_text("there is no task echo:acme:a.") == "there is no task echo:a."


@pytest.mark.parametrize("key", ["a", "acm:a", "acmes:a", "other:acme:a", "acme", ""])
def test_a_tenant_owns_only_keys_that_begin_with_its_name_and_a_colon(key: str) -> None:
    assert not ACME.owns_key(key)
    assert ACME.owns_key(f"acme:{key}")


def test_a_tenant_has_no_empty_key() -> None:
    with pytest.raises(InvalidKey):
        ACME.stored_key("")


def test_a_caller_without_a_tenant_sees_stored_keys() -> None:
    caller = Caller("ops", Role.READ)
    assert caller.stored_key("acme:a") == caller.shown_key("acme:a") == "acme:a"
    assert caller.owns_key("acme:a")
