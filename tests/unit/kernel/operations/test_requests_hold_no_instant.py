"""What is sent to the server holds no instant of this process's clock: every decision is the server's, by `$$NOW`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

import bson
import pytest

from mtask.features.controls.rules import Limit
from mtask.features.limits import operations as permits
from mtask.features.limits.operations import HeldPermit, PermitPool, PermitRequest, Wanted
from mtask.features.schedules import operations as schedules
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import RunStatus, WorkerStatus
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations import publish as publishing
from mtask.kernel.operations import stream_filter as concerns
from mtask.kernel.operations import workers
from mtask.kernel.operations.publish import NewTask, Policy
from mtask.kernel.statements.filters import LAST_TIME
from mtask.kernel.statements.finish import Outcome

_ME = workers.Registration(
    worker_id="w",
    incarnation="i",
    host="host",
    pid=1,
    pid_scope=None,
    queues=["default"],
    names=["task"],
    concurrency=1,
    version="1",
    heartbeat_timeout=timedelta(seconds=30),
)
_TASK = NewTask("task:k", "task", "k", "default", {}, TaskOption().stored(), timedelta(minutes=1))
_LIMIT = Limit(concurrency=1, starts=1, window_ms=1_000)
_REQUESTS: dict[str, Operation[Any]] = {
    "scan": finding.scan(["default"], ["task"], "w", 10_000, 100),
    "claim": claims.claim(["task:k"], "w", "token"),
    "claim of a group": claims.claim(["task:k", "task:l"], "w", "token"),
    "claim of a simple task": claims.claim(["task:k"], "w", "token", are_simple=True),
    "claim of simple tasks": claims.claim(["task:k", "task:l"], "w", "token", are_simple=True),
    "ping": claims.ping({"run": "task:k"}, 60_000),
    "finish": claims.finish([Outcome("task:k", "run", RunStatus.SUCCESS)]),
    "finish with progress": claims.finish(
        [Outcome("task:k", "run", RunStatus.SUCCESS, progress={"fraction": 1.0})], is_simple=True
    ),
    "finish of a simple task": claims.finish([Outcome("task:k", "run", RunStatus.SUCCESS)], is_simple=True),
    "failure": claims.finish([Outcome("task:k", "run", RunStatus.FAIL, reason="no luck")]),
    "lapsed": finding.lapsed(2_000, 10),
    "settle": claims.settle(["task:k"]),
    "quarantine": claims.quarantine("task:k", "w", "malformed"),
    "publish": publishing.publish(_TASK, Policy()),
    "cancel": queries.cancel("task:k"),
    "run again": queries.run_again("task:k", everything=True),
    "register": workers.register(_ME),
    "heartbeat": workers.heartbeat(_ME, workers.Heartbeat(WorkerStatus.RUNNING, 0, 1, [])),
    "live workers": workers.live(),
    "peers": workers.peers("me", ["default"]),
    "take of a permit": permits.take([PermitRequest(PermitPool("default"), _LIMIT, [Wanted("task:k")])], "w", "token"),
    "take of permits": permits.take(
        [PermitRequest(PermitPool("default", key), _LIMIT, [Wanted("task:k")]) for key in "ab"], "w", "token"
    ),
    "permits given back": permits.give_back([HeldPermit(PermitPool("default"), "task:k", "token")], "w"),
    "coming schedules": schedules.coming(60_000, 10),
    "purge": queries.remove_batch(queries.purgeable({"status": "SUCCESS"}, 60_000), 10),
}


def instants_in(value: Any) -> Iterator[datetime]:
    """Return every date within."""
    if isinstance(value, datetime):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from instants_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from instants_in(part)


@pytest.mark.parametrize("name", list(_REQUESTS))
def test_request_of_the_engine_holds_no_instant_of_this_process(name: str) -> None:
    operation = _REQUESTS[name]
    call = next(operation)
    operation.close()
    assert list(instants_in([call.args, call.kwargs])) == []
    assert "$$NOW" in repr(call)


def test_requests_for_one_simple_task_are_short() -> None:
    claim = claims.claim(["task:k"], "w", "token", are_simple=True)
    finish = claims.finish([Outcome("task:k", "run", RunStatus.SUCCESS)], is_simple=True)
    for guard, pipeline in (next(claim).args, next(finish).args):
        assert len(bson.encode({"guard": guard, "pipeline": pipeline})) < 2_000


def test_change_streams_filter_holds_no_instant_that_would_age() -> None:
    assert set(instants_in(concerns.pipeline("w", ["default"], 10_000))) <= {LAST_TIME}


@pytest.mark.parametrize("policy", [Policy(), Policy("reject"), Policy(clean_failed=True)], ids=repr)
def test_task_without_lookups_is_published_as_before_there_were_any(policy: Policy) -> None:
    call = next(publishing.publish(_TASK, policy))
    assert "lookup" not in repr(call)
    assert "lookup" not in _TASK.fixed()
