"""What is sent about tasks: to claim, ping, finish, find, read, change and remove them."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from mtask.doctor import position as positions
from mtask.doctor.position import Standing
from mtask.errors import DocumentTooLarge
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations import sessions, transactions
from mtask.kernel.statements import claim as pipelines
from mtask.kernel.statements import derive, filters, views
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements.finish import finish
from mtask.kernel.statements.publish import NewParams
from mtask.search import walks
from mtask.testing.bench import bring_nearer, drop, due, is_idle, until_next
from tests.unit.house.sent.conversation import NOW, Written, told
from tests.unit.house.sent.parts import (
    FAILURES,
    GOING_ON,
    LATER,
    ONE,
    OPTION,
    OWING,
    RAISED,
    RUN,
    SUCCESS,
    SUCCESSES,
    TWO,
    VOID,
    Document,
    stored,
)

_SESSION = "8f3c1c1e-3f0c-4a57-9f6b-0a1b2c3d4e5f"
_MINUTE = timedelta(minutes=1)
_GUARDS = [
    filters.in_time(LATER),
    filters.of_others(["mail"], ["acme"]),
    *filters.without_tenants({None: ["b", "a"], "mail": ["c"], "none": []}),
    filters.claimable_now(["mail"], ["task"], LATER, ["acme"]),
    filters.of_queues_and_keys([("mail", "key", None), ("mail", None, "acme")]),
    *filters.none_of([{"queue": "mail"}]),
    *filters.other_than(TWO),
    filters.of_shares([(["task"], "0101")]),
    filters.of_shares([(["task"], "0101"), (["other"], "1010")]),
]


def cases() -> dict[str, object]:
    """Return the cases, by name."""
    return {**_runs(), **_finds(), **_requests(), **_others()}


def _runs() -> dict[str, object]:
    sending = {**RUN, "session_id": _SESSION}
    lapsed = stored(task_state={**stored()["task_state"], "worker_states": [sending]})
    return {
        "claim one": told(claims.claim(ONE, "w", "token")),
        "claim one, guarded": told(claims.claim(ONE, "w", "token", timedelta(seconds=2), _GUARDS)),
        "claim one as a group": told(claims.claim(ONE, "w", "token", as_group=True), Written(1)),
        "claim one simple": told(claims.claim(ONE, "w", "token", are_simple=True)),
        "claim two": told(claims.claim(TWO, "w", "token"), Written(2)),
        "claim two simple": told(claims.claim(TWO, "w", "token", also=_GUARDS[:1], are_simple=True), Written(1)),
        "claim of ids with tabs": told(claims.claim(["task:a\tb", "task:c"], "w", "token")),
        "claimed": told(claims.claimed(TWO, "token")),
        "claim at an instant": pipelines.claim("w", "run", NOW),
        "short claim at an instant": [pipelines.unbegun(ONE, NOW), pipelines.claim_unbegun("w", "run", NOW)],
        "finish one": told(claims.finish([SUCCESS])),
        "finish one simple": told(claims.finish([SUCCESS], timedelta(seconds=2), is_simple=True)),
        "finish several": told(claims.finish(SUCCESSES)),
        "finish several simple": told(claims.finish(SUCCESSES, is_simple=True, has_steps=True)),
        "finish several without values": told(claims.finish(VOID, is_simple=True)),
        "finish and go on": told(claims.finish(GOING_ON, is_simple=True)),
        "finish and owe the value": told(claims.finish(OWING)),
        "finish failures": told(claims.finish(FAILURES)),
        "finish failures with what was raised": told(claims.finish([RAISED, FAILURES[2]])),
        "finish one failure": told(claims.finish(FAILURES[:1], is_simple=True)),
        "finish a hand-back": told(claims.finish(FAILURES[2:])),
        "finish at an instant": [finish(FAILURES, NOW), pipelines.held_alone(SUCCESSES, NOW)],
        "short finish at an instant": pipelines.succeed(SUCCESSES, NOW),
        "finish in a transaction": told(claims.finish_in_transaction(SUCCESS)),
        "commit": told(transactions.commit(SUCCESS, lambda: True), Written(1)),
        "run statuses": told(claims.run_statuses(TWO, ["token-0", "token-1"], timedelta(seconds=2))),
        "ping one": told(claims.ping({"token-0": "task:k"}, 60_000, session_id=_SESSION), stored(now=None)),
        "ping one again": told(claims.ping({"token-0": "task:k"}, 60_000), {"_id": "task:k"}),
        "ping two": told(claims.ping({"token-0": "task:k", "token-1": "other:l"}, 60_000)),
        "ping two with two leases and progress": told(
            claims.ping(
                {"token-0": "task:k", "token-1": "other:l"},
                {"token-0": 60_000, "token-1": 30_000},
                {"token-0": {"fraction": 0.5, "note": "$half"}},
            )
        ),
        "ping two with equal leases": told(
            claims.ping({"token-0": "task:k", "token-1": "other:l"}, {"token-0": 1_000, "token-1": 1_000})
        ),
        "ping at an instant": pipelines.ping(["token-0"], 1_000, NOW),
        "settle": told(claims.settle(TWO), [lapsed]),
        "settle lapsed": told(claims.settle_lapsed(5_000, 10), [{"_id": "task:k"}]),
        "settle at an instant": pipelines.settle(NOW),
        "quarantine": told(claims.quarantine("task:k", "w", "r" * 100), DocumentTooLarge("1"), DocumentTooLarge("2")),
        "lapses closed": told(finding.lapses_closed(TWO, 2, NOW)),
        "sessions of a run": told(sessions.end_of_run("task:k", "token-0"), [lapsed], ...),
        "sessions ended": told(sessions.end([UUID(_SESSION)])),
        "returned value": told(transactions.store_return("task:k", "token-0", {"sum": 3})),
        "returned value lost": told(transactions.lose_return("task:k", "token-0", "gone")),
        "returned values owed": told(transactions.owed_returns()),
        "returned values lost": told(
            transactions.lose_returns_of(transactions.OwedReturns(TWO, {"incarnation": "w"}), ["incarnation"])
        ),
    }


def _finds() -> dict[str, object]:
    mine = (["default", "mail"], ["task", "other"], "w")
    return {
        "scan": told(finding.scan(*mine, 10_000, 100)),
        "scan of now, guarded": told(finding.scan(*mine, 0, 100, _GUARDS[:2], timedelta(seconds=2), {"queue": "mail"})),
        "scan behind": finding.behind(stored()),
        "scan of begun tasks": told(finding.scan_begun(*mine, 10_000, 100, _GUARDS[:1])),
        "scan of tenants": told(finding.scan_tenants("mail", ["task"], "w", 10_000, 100, {"$gt": "acme"}, _GUARDS[:1])),
        "tenants at the ends": told(finding.tenants_at_ends("mail"), [{"tenant": "a"}], [{"tenant": "b"}]),
        "look": told(finding.look(TWO)),
        "look at due": told(finding.look_at_due(TWO, 10_000)),
        "read": told(finding.read("task:k")),
        "lapsed": told(finding.lapsed(5_000, 10)),
        "undiscoverable": told(finding.undiscoverable(10)),
        "unserved names": told(finding.unserved_names(["mail"], ["task"], 2), [{"name": "other"}]),
        "names of tasks": told(walks.names_of_tasks(), ..., [{"_id": "task:k"}], [{"_id": "bad"}]),
    }


def _requests() -> dict[str, object]:
    again = stored(again={"task_option": TaskOption().stored()})
    new = NewParams({"b": "$2"}, "acme", [{"k": "order", "v": "43"}])
    every: Document = {
        "status": ["SUCCESS", "FAIL"],
        "name": "task",
        "queue": ["default", "mail"],
        "key": "k",
        "worker_id": "w",
        "params": {"a.b": 1},
    }
    return {
        "get": told(queries.get("task:k")),
        "get many": told(queries.get_many(TWO)),
        "get fields": told(queries.get_many(TWO, ["params.a", *views.DERIVED_FIELDS, "returns.sum"])),
        "get ended": told(queries.get_ended(TWO)),
        "created": told(queries.created("task:k")),
        "find": told(queries.find(every, 10)),
        "find all": told(queries.find({}, 0)),
        "find by lookup": told(queries.find({"lookup": {"order": ["42"], "user": ["a", "b"]}, "status": "FAIL"}, 10)),
        "find of a tenant behind a task": told(
            queries.find({"tenant": "acme", "key_prefix": "acme:a.b", "name": None}, 10, ["params"], (NOW, "task:k"))
        ),
        "count": told(queries.count(every)),
        "count all": told(queries.count({})),
        "count of a tenant": told(queries.count({"tenant": "acme"})),
        "cancel": told(queries.cancel("task:k")),
        "cancel if unchanged": told(queries.cancel("task:k", filters.unchanged(stored()))),
        "cancel at an instant": requests.cancel(NOW),
        "retry": told(queries.run_again("task:k", everything=False), None, stored(), has_sets=True),
        "rerun": told(queries.run_again("task:k", everything=True), stored(), has_sets=True),
        "retry that waits, with params": told(
            queries.run_again("task:k", everything=False, waits=True, params=[new], also={"queue": "mail"}),
            stored(),
            has_sets=True,
        ),
        "change of params": requests.change_params(NewParams({"b": 2})),
        "update option": told(queries.update_option("task:k", {"priority": 7}), again, again),
        "update option if unchanged": told(
            queries.update_option("task:k", {"priority": 7}, filters.unchanged(stored())), stored()
        ),
        "update option at an instant": requests.update_option(OPTION, NOW),
        "remove": told(queries.remove("task:k")),
        "remove if unchanged": told(queries.remove_unchanged("task:k", {"queue": "mail"})),
        "remove a step": told(queries.remove_step("task:k")),
        "statistics": told(queries.statistics()),
        "statistics of a tenant": told(queries.statistics("acme")),
        "purge": told(queries.remove_batch(queries.purgeable({"status": "SUCCESS"}, 60_000), 10), [{"_id": "task:k"}]),
        "purge count": told(queries.count_matched(queries.purgeable({"queue": "mail"}, None))),
        "keep the newest": told(
            queries.remove_older("mail", [TaskStatus.SUCCESS, TaskStatus.FAIL], 100, _GUARDS[:1]),
            [{"_id": "task:k", "task_state": {"finish_time": NOW}}],
        ),
        "keep the newest, index": told(queries.prepare_keep()),
    }


def _others() -> dict[str, object]:
    standing = Standing("task:k", "mail", ["w"], (1, -3, NOW), ["task"], "acme", viewer="acme")
    interrupted = Standing("task:k", "mail", [], (0, -3, NOW), None, "acme", is_fair=True)
    highest = [{"task_option": {"priority": 5}}]
    return {
        "position": told(positions.count_ahead(standing, NOW), [], highest),
        "position of an interrupted task": told(positions.count_ahead(interrupted, NOW), [], highest),
        "position in a fair queue": told(
            positions.count_ahead(Standing("task:k", "mail", [], (1, -3, NOW), None, "acme", is_fair=True), NOW)
        ),
        "first of tenants": told(positions.first_of_tenants("mail", NOW)),
        "finished lately": told(positions.finished_lately("mail", ["task"])),
        "is idle": told(is_idle()),
        "is idle with callbacks": told(is_idle(with_callbacks=True)),
        "due": told(due()),
        "due with callbacks": told(due(with_callbacks=True)),
        "until next": told(until_next()),
        "bring nearer": told(bring_nearer(_MINUTE)),
        "drop": told(drop()),
        "derive at an instant": [derive.close_lapsed(NOW), derive.derive(NOW), derive.derive_routinely(NOW)],
    }
