"""A client tells why a task of a limited queue waits, and how many permits of each limit are in use."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from mtask.database import setup
from mtask.errors import InvalidInput
from mtask.features.controls.rules import Limit
from mtask.features.limits import operations as permits
from mtask.features.limits.doctor import PermitHolder, PermitWaiter
from mtask.features.limits.operations import PermitPool, PermitRequest, Wanted
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from mtask.search.findings import Level
from tests.clients import AnyClient, server_now
from tests.integration.stores import register

QUEUE = PermitPool("default")
TWO = Limit(concurrency=2)


@pytest.fixture(autouse=True)
def set_up(store: SyncStore, client: AnyClient) -> None:
    store.run(setup.ensure(setup.EVERY))
    register(store, "w1", ["send"])


def limited(client: AnyClient, store: SyncStore, queue: str | None = None, **limits: Any) -> None:
    """Limit a queue. No process belongs to the workers on record, so none confirms it."""
    store.database["workers"].delete_many({})
    client.limit("default" if queue is None and "tenant" not in limits else queue, **limits, timeout=0)
    register(store, "w1", ["send"])


def run(store: SyncStore, *keys: str, pool: PermitPool = QUEUE, worker: str = "w1") -> None:
    """Take permits for tasks and claim them, as a worker does."""
    for key in keys:
        token = f"t{key.replace(':', '')}"
        store.run(permits.take([PermitRequest(pool, TWO, [Wanted(f"send:{key}")])], worker, token))
        store.run(claims.claim([f"send:{key}"], worker, token))


def wait(store: SyncStore, worker: str, *keys: str, priority: int = 0, pool: PermitPool = QUEUE) -> None:
    """Ask for permits for tasks, the first of which has this priority."""
    long_ago = server_now(store) - timedelta(hours=1)
    wanted = [Wanted(f"send:{key}", (1, n - priority, long_ago)) for n, key in enumerate(keys)]
    store.run(permits.take([PermitRequest(pool, TWO, wanted)], worker, f"ask-{worker}"))


def messages(client: AnyClient, task_id: str) -> dict[str, str]:
    return {reason.code: reason.message for reason in client.inspect(task_id).reasons}


def test_task_is_told_who_has_the_permits_and_who_goes_first(client: AnyClient, store: SyncStore) -> None:
    limited(client, store, concurrency=2)
    for key in ("a", "b", "c", "d", "e"):
        client.publish("send", key=key)
    run(store, "a", "b")
    wait(store, "w1", "c")
    wait(store, "w2", "d", "e", priority=5)
    found = messages(client, "send:c")
    assert found == {
        "limited": (
            "the limit of the queue 'default', 2 at once, is reached: "
            "send:a (running in w1), send:b (running in w1) hold its permits"
        ),
        "behind": "2 better tasks wait for a permit of the queue 'default' before it, in w2",
    }
    position = client.position("send", "c")
    assert {reason.code: reason.message for reason in position.reasons} == found
    assert (position.ahead, position.start_estimate) == (0, None), "nobody knows how long the runs last"
    assert list(messages(client, "send:d")) == ["limited"]
    store.run(permits.give_back([permits.HeldPermit(QUEUE, "send:a", "ta")], "w1"))
    kept = "a free permit of the queue 'default' is kept for a better task: send:d, and 1 more, which wait in w2"
    assert messages(client, "send:c") == {"reserved": kept}


def test_keys_of_tenants_are_told_apart(client: AnyClient, store: SyncStore) -> None:
    limited(client, store, key_concurrency=2)
    acme = client.for_tenant("acme")
    for key in ("1", "2", "3"):
        acme.publish("send", key=key, limit_key="k")
    client.publish("send", key="plain", limit_key="k")
    run(store, "acme:1", "acme:2", pool=PermitPool("default", "k", "acme"))
    (message,) = messages(client, "send:acme:3").values()
    assert message.startswith("the limit of the limit_key 'k' of the tenant 'acme' in the queue 'default', 2 at once")
    assert "limited" not in messages(client, "send:plain")


def test_tenant_is_told_of_no_task_of_others(client: AnyClient, store: SyncStore) -> None:
    limited(client, store, concurrency=2)
    for tenant in ("acme", "beta"):
        client.for_tenant(tenant).publish("send", key="1")
        client.for_tenant(tenant).publish("send", key="2")
    run(store, "acme:1", "beta:1")
    wait(store, "w1", "beta:2", priority=9)
    own = client.for_tenant("acme")
    for reasons in (own.inspect("send:acme:2").reasons, own.position("send", "2").reasons):
        text = " ".join(reason.message for reason in reasons)
        assert "send:acme:1 (running in w1) and 1 more hold its permits" in text
        assert "1 better task waits for a permit" in text
        assert "beta" not in text
    assert "send:beta:1" in client.inspect("send:acme:2").reasons[0].message


def test_permits_in_use_are_told_by_limit(client: AnyClient, store: SyncStore) -> None:
    assert client.permits("default") == []
    limited(client, store, concurrency=5, key_concurrency=2, tenant_rate=(3, 60))
    for key in ("a", "b", "c", "d"):
        client.publish("send", key=key, limit_key="k")
    pool = PermitPool("default", "k")
    run(store, "a", "b", pool=pool)
    run(store, "a")
    wait(store, "w2", "c", "d", pool=pool)
    timed = PermitRequest(PermitPool("default", tenant="acme"), Limit(starts=3, window_ms=60_000), [Wanted("send:a")])
    store.run(permits.take([timed], "w1", "t"))
    queue, of_key, of_tenant = client.permits("default")
    assert (queue.limit_key, queue.tenant, queue.limit.concurrency, queue.running_cnt) == (None, None, 5, 1)
    assert queue.waiters == ()
    assert (of_key.limit_key, of_key.tenant, of_key.limit.concurrency, of_key.running_cnt) == ("k", None, 2, 2)
    assert of_key.holders == (PermitHolder("send:a", "w1", False), PermitHolder("send:b", "w1", False))
    assert of_key.waiters == (PermitWaiter("w2", 2, "send:c"),)
    assert (of_tenant.tenant, of_tenant.running_cnt, of_tenant.start_cnt) == ("acme", 0, 1)
    limited(client, store, concurrency=5)
    assert [use.limit_key for use in client.permits("default")] == [None], "a limit that was lifted has no permits"
    with pytest.raises(InvalidInput):
        client.permits("")


def test_tenant_s_limit_over_all_queues_is_told_to_its_tasks(client: AnyClient, store: SyncStore) -> None:
    limited(client, store, tenant="acme", concurrency=2)
    for key in ("1", "2", "3"):
        client.for_tenant("acme").publish("send", key=key)
    run(store, "acme:1", "acme:2", pool=PermitPool(None, tenant="acme"))
    (message,) = messages(client, "send:acme:3").values()
    assert message.startswith("the limit of the tenant 'acme', 2 at once, is reached: send:acme:1 (running in w1)")


# --- the doctor -------------------------------------------------------------------------------------------------


def found(client: AnyClient, check: str) -> list[tuple[Level, str]]:
    """Return what the doctor finds about limited tasks that have waited for an hour."""
    return [(one.level, one.message) for one in client.diagnose() if one.check == check]


def age(store: SyncStore, *keys: str) -> None:
    long_ago = server_now(store) - timedelta(hours=1)
    fields = ("create_time", "next_preempt_time")
    changes = {f"task_state.{field}": long_ago for field in fields}
    store.tasks.update_many({"_id": {"$in": [f"send:{key}" for key in keys]}}, {"$set": changes})


def test_doctor_reports_tasks_that_wait_beside_free_permits_for_which_nobody_asks(
    client: AnyClient, store: SyncStore
) -> None:
    limited(client, store, concurrency=2)
    client.publish("send", key="a")
    age(store, "a")
    ((level, message),) = found(client, "due tasks")
    assert level is Level.FAIL
    assert message.endswith("have free slots and don't take it, and its limits have free permits")
    run(store, "other")
    wait(store, "w9", "b", "c")
    assert [level for level, _ in found(client, "due tasks")] == [Level.OK], "the pool was asked a moment ago"
    past = server_now(store) - timedelta(minutes=10)
    silent = {"$set": {"quiet_time": past, "waiting.0.until": past}, "$unset": {"call": ""}}
    store.database["places"].update_one({}, silent)
    store.database["places"].update_one({}, {"$set": {"running": []}})
    ((level, message),) = found(client, "due tasks")
    assert level is Level.FAIL
    assert message.endswith("its limits have free permits; w9 asked last, and is gone")
    store.database["workers"].delete_many({})
    ((level, message),) = found(client, "due tasks")
    assert (level, "no worker is live" in message) == (Level.FAIL, True)


def test_doctor_reports_no_limit_that_is_reached_but_for_runs_that_ended_long_ago(
    client: AnyClient, store: SyncStore
) -> None:
    limited(client, store, concurrency=2)
    for key in ("a", "b", "c"):
        client.publish("send", key=key)
    run(store, "a", "b")
    wait(store, "w2", "c")
    age(store, "c")
    assert [level for level, _ in found(client, "due tasks")] == [Level.OK]
    store.run(claims.finish([Outcome("send:a", "ta-0", RunStatus.SUCCESS)]))
    assert found(client, "permits") == [], "its worker is about to return the permit"
    past = server_now(store) - timedelta(minutes=10)
    ended = {"$set": {"task_state.worker_states.0.success_time": past}}
    store.tasks.update_one({"_id": "send:a"}, ended)
    store.database["places"].update_one({}, {"$set": {"running.$[].claim_by": past}})
    ((level, message),) = found(client, "permits")
    assert level is Level.FAIL
    assert message.startswith(
        "permits of the queue 'default', for which tasks wait, belong to runs that ended over 2 min"
    )
    assert message.endswith(": 1, such as that of send:a")
    client.remove("send", "c")
    assert found(client, "permits") == [], "nothing waits for it"
