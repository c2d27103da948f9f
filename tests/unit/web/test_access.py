"""The stored keys of tenants."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from mtask.errors import InvalidKey
from mtask.features.events.task_events import EventKind, TaskEvent
from mtask.web.access import Caller, Role

ACME = Caller("acme", Role.OPERATE, "acme")


def test_a_tenant_sees_its_keys_without_its_name() -> None:
    assert ACME.stored_key("a:b/c") == "acme:a:b/c"
    assert ACME.shown_key("acme:a:b/c") == "a:b/c"
    assert ACME.shown_id("echo:acme:a:b/c") == "echo:a:b/c"
    assert ACME.shown_text("there is no task echo:acme:a.") == "there is no task echo:a."


@pytest.mark.parametrize(
    ("key", "tenant", "queue", "kind", "is_own"),
    [
        ("acme:a", "acme", "q", "published", True),
        ("acme:a", None, "q", "published", False),
        ("acme:a", "beta", "q", "published", False),
        ("acme:a", None, None, "removed", True),
        ("acme:a", None, None, "canceled", True),  # its document was gone
        *((key, None, None, "removed", False) for key in ("a", "acm:a", "acmes:a", "other:acme:a", "acme", "acme:")),
    ],
)
def test_a_tenant_sees_the_events_of_its_tasks(
    key: str, tenant: str | None, queue: str | None, kind: str, is_own: bool
) -> None:
    event = TaskEvent(EventKind(kind), f"echo:{key}", datetime(2030, 1, 1, tzinfo=UTC), queue, tenant=tenant)
    assert ACME.owns(event) == is_own
    assert Caller("ops", Role.READ).owns(event)


def test_a_tenant_has_no_empty_key() -> None:
    with pytest.raises(InvalidKey):
        ACME.stored_key("")


def test_a_caller_without_a_tenant_sees_stored_keys() -> None:
    caller = Caller("ops", Role.READ)
    assert caller.stored_key("acme:a") == caller.shown_key("acme:a") == "acme:a"
