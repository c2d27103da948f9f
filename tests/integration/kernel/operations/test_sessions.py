"""The sessions of transactions that dead workers left open: which of them are ended, and which are not."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo.errors import OperationFailure

from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.driver.types import SyncSession
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import sessions, transactions
from mtask.kernel.statements import filters
from mtask.kernel.statements.finish import Outcome
from tests.clients import server_now
from tests.integration import stores

LEASE_MS = 60_000
_NO_SUCH_TRANSACTION = 251


@pytest.fixture
def session(store: SyncStore) -> Iterator[SyncSession]:
    with store.client.start_session() as opened:
        yield opened


def run_id(store: SyncStore, key: str) -> str:
    return stores.parsed(store, key).runs[-1].run_id


def begin(store: SyncStore, session: SyncSession, key: str) -> None:
    """Claim a task, name the session in it, and write to it in the session's transaction, which stays open."""
    stores.publish(store, key)
    assert stores.claim(store, "w", key) == [key]
    name(store, session, key)
    transactions.start(session)
    store.tasks.update_one({"_id": f"task:{key}"}, {"$set": {"params": "written"}}, session=session)


def name(store: SyncStore, session: SyncSession, key: str) -> None:
    named = str(transactions.id_of(session))
    (renewed,) = store.run(claims.ping({run_id(store, key): f"task:{key}"}, LEASE_MS, session_id=named))
    assert renewed["_id"] == f"task:{key}"


def is_open(store: SyncStore, session: SyncSession) -> bool:
    try:
        store.tasks.find_one({"_id": "any"}, session=session)
    except OperationFailure as error:
        if error.code != _NO_SUCH_TRANSACTION:
            raise
        return False
    return True


def test_session_that_a_lapsed_run_names_is_ended_and_its_task_can_be_claimed(
    store: SyncStore, session: SyncSession
) -> None:
    stores.publish(store, "k")
    stores.claim(store, "w", "k")
    name(store, session, "k")
    stores.lapse(store, "k")
    transactions.start(session)
    store.tasks.update_one({"_id": "task:k"}, {"$set": {"params": "written"}}, session=session)

    assert store.run(sessions.end_lapsed(["task:k"])) == ["task:k"]

    assert not is_open(store, session)
    assert stores.claim(store, "v", "k") == ["k"]
    assert stores.stored(store, "k")["params"] is None
    dead, rescue = stores.parsed(store, "k").runs
    assert (dead.status, rescue.status) == (RunStatus.TIMEOUT, RunStatus.RUNNING)
    assert rescue.session_id is None, "it has named none"


def test_session_of_a_live_run_is_left_alone(store: SyncStore, session: SyncSession) -> None:
    begin(store, session, "k")

    assert store.run(sessions.end_lapsed(["task:k"])) == []

    assert is_open(store, session)
    session.commit_transaction()
    assert stores.stored(store, "k")["params"] == "written"


def test_session_that_a_closed_run_named_is_left_alone(store: SyncStore, session: SyncSession) -> None:
    stores.publish(store, "k")
    stores.claim(store, "w", "k")
    name(store, session, "k")
    store.run(claims.finish([Outcome("task:k", run_id(store, "k"), RunStatus.SUCCESS)]))
    past = server_now(store).replace(year=2020)
    store.tasks.update_one({"_id": "task:k"}, {"$set": {"task_state.worker_states.0.ping_expire_time": past}})
    transactions.start(session)  # for another run, say: after a commit the driver uses it again
    assert is_open(store, session)

    assert store.run(sessions.end_lapsed(["task:k"])) == []

    assert is_open(store, session)


def test_settling_ends_the_session_first(store: SyncStore, session: SyncSession) -> None:
    stores.publish(store, "k", max_retries=0)
    stores.claim(store, "w", "k")
    name(store, session, "k")
    stores.lapse(store, "k")
    transactions.start(session)
    store.tasks.update_one({"_id": "task:k"}, {"$set": {"params": "written"}}, session=session)

    assert store.run(claims.settle(["task:k"])) == 1

    assert not is_open(store, session)
    assert stores.parsed(store, "k").runs[0].status is RunStatus.TIMEOUT


@pytest.mark.parametrize("named", ["no session", "", 5, None, {"id": 1}, str(uuid.UUID(int=5))])
def test_what_names_no_session_ends_none_and_keeps_no_other_from_its_end(
    store: SyncStore, session: SyncSession, named: Any
) -> None:
    for key in ("bad", "good"):
        stores.publish(store, key)
        stores.claim(store, "w", key)
    name(store, session, "good")
    for key in ("bad", "good"):
        stores.lapse(store, key)
    change = {"$set": {"task_state.worker_states.0.session_id": named, "task_state.worker_states.1": "no run"}}
    store.database.command(
        "update", "tasks", updates=[{"q": {"_id": "task:bad"}, "u": change}], bypassDocumentValidation=True
    )
    transactions.start(session)
    store.tasks.update_one({"_id": "task:good"}, {"$set": {"params": "written"}}, session=session)

    assert "task:good" in store.run(sessions.end_lapsed(["task:bad", "task:good"]))

    assert not is_open(store, session)


def test_renewal_without_a_transaction_names_none(store: SyncStore) -> None:
    stores.publish(store, "k")
    stores.claim(store, "w", "k")

    store.run(claims.ping({run_id(store, "k"): "task:k"}, LEASE_MS))

    assert "session_id" not in stores.stored(store, "k")["task_state"]["worker_states"][0]


def test_read_before_a_rescue_goes_by_the_ids(store: SyncStore) -> None:
    keys = [str(number) for number in range(20)]
    for key in keys:
        stores.publish(store, key)
    stores.claim(store, "w", *keys)
    wanted = [f"task:{key}" for key in keys[:3]]

    plan = store.tasks.find(filters.naming_sessions(wanted), hint="_id_").explain()["executionStats"]

    assert plan["totalDocsExamined"] <= 3
    assert plan["nReturned"] == 0, "nothing is sent where no run names a session"
