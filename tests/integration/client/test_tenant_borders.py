"""Whose a task is, its field tells: random names, keys and tenants, through every read and write of a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtask import Client, TaskSpec
from mtask.errors import MtaskError, TaskExists, TaskNotFound
from tests.mongo import Client as Mongo

_TENANTS = ("acme", "beta")
_NAMES = st.sampled_from(["acme", "beta", "a", "a/acme"])
#: Keys of pieces that look like names, tenants and borders of them.
_KEYS = st.lists(st.sampled_from(["acme", "beta", ":", "::", "@", "/", "k"]), min_size=1, max_size=4).map("".join)
_PUBLISHED = st.lists(st.tuples(_NAMES, _KEYS, st.sampled_from([None, *_TENANTS])), min_size=1, max_size=10)
_QUERIES: tuple[dict[str, Any], ...] = (
    {},
    {"name": "acme"},
    {"status": "INIT"},
    {"status": ["INIT", "CANCELED"], "name": ["a", "beta"]},
    {"queue": "default"},
    {"status": ["CANCELED", "FAIL"]},
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_PUBLISHED, st.sampled_from(_TENANTS))
def test_tenant_reads_and_changes_its_own_tasks_alone(
    mongo_uri: str, mongo: Mongo, database_name: str, published: list[tuple[str, str, str | None]], tenant: str
) -> None:
    stored = mongo[database_name]["tasks"]
    stored.delete_many({})
    with Client(mongo_uri, database=database_name) as everybody:
        owner: dict[str, str | None] = {}
        for name, key, of in published:
            task_id = f"{name}:{key}" if of is None else f"{name}:{of}:{key}"
            try:
                made = everybody.publish(name, key=key, tenant=of)
            except TaskExists:  # it is of another tenant, or of none
                assert of is not None
                assert owner[task_id] != of
                continue
            assert made.task_id == task_id
            assert made.created == (task_id not in owner)
            owner.setdefault(task_id, of)
        own = {task_id for task_id, of in owner.items() if of == tenant}
        alike = {task_id for task_id in owner if task_id.partition(":")[2].startswith(f"{tenant}:")}
        assert own <= alike

        for client in (everybody.for_tenant(tenant), everybody.bound_to(tenant)):
            _reads(client, owner, own)
        before = _documents(stored)
        _changes(everybody.for_tenant(tenant), tenant, {*owner, *alike})
        after = _documents(stored)
        others = set(owner) - own
        assert {task_id: after[task_id] for task_id in others} == {task_id: before[task_id] for task_id in others}
        assert not own & set(after)


def _documents(stored: Any) -> Mapping[str, Any]:
    return {document["_id"]: document for document in stored.find()}


def _reads(client: Client, owner: Mapping[str, str | None], own: set[str]) -> None:
    assert {task.id for task in client.find()} == own
    assert set(client.get_many(list(owner)).tasks) == own
    assert sum(row.count for row in client.stats()) == len(own)
    for query in _QUERIES:
        names = query.get("name", [])
        listed = [names] if isinstance(names, str) else names
        statuses = query.get("status", "INIT")
        wanted = {one for one in own if "INIT" in statuses and (not listed or one.partition(":")[0] in listed)}
        assert {task.id for task in client.find_page(**query).tasks} == wanted, query
        assert client.count_up_to(**query).count == client.count(**query) == len(wanted), query


def _changes(client: Client, tenant: str, task_ids: set[str]) -> None:
    """Try to change and to remove each task under each key by which its id could be meant."""
    for task_id in task_ids:
        name, _, key = task_id.partition(":")
        for meant in {key, key.removeprefix(f"{tenant}:")} - {""}:
            for act in (
                lambda name=name, meant=meant: client.cancel(name, meant),
                lambda name=name, meant=meant: client.update_option(name, meant, priority=3),
                lambda name=name, meant=meant: client.retry(name, meant),
                lambda name=name, meant=meant: client.publish_many([TaskSpec(name, key=meant)], if_exists="reject"),
            ):
                with suppress(TaskNotFound, TaskExists):
                    act()
    planned = client.plan_bulk("cancel", status=["INIT", "RUNNING"])
    client.run_bulk(planned.plan)
    client.purge(status=["CANCELED", "INIT"])
    for task in client.find():
        try:
            client.remove(task.name, str(task.own_key))
        except MtaskError as error:
            raise AssertionError(task.id) from error
