"""The updates of pools of permits: they grant permits, return them, and call those who may have the next ones.

`mtask.features.limits.operations` tells what a pool is. A request is a document there: see `PermitRequest.document`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mtask.features.controls.rules import MAX_WINDOW_MS
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.statements import expressions as x

Document = dict[str, Any]
Stage = Mapping[str, Any]
#: Time limit of a claim, in ms, counted from the update that takes its permits.
CLAIM_MS = 2_000
#: A start is permitted this time before another one leaves the window, in ms: the lookup, the permit and the claim take
#: about as long. Its handler waits for the time at which the window has room.
LEAD_MS = 400
#: The time for which a worker's waiting tasks are kept in a pool, in ms. A worker that still waits asks before that.
#: One that has died, or has no room any more, keeps no permit from others for longer.
WAIT_MS = 5_000
#: The time for which the document of an unused pool is kept, in ms.
_KEPT_MS = 3_600_000
#: The furthest that a well-formed instant can lie in the future, in ms. No claim writes a later instant, even if the
#: clocks of two servers differ.
_ABSURD_MS = 60_000
#: The most tenants whose turns a pool remembers.
_MAX_TURNS = 1_000
#: A rank behind all others, for a worker that knows of no other.
_LAST = [9]
#: What names an entry: see `name_of`.
_NAME = {"$concat": ["$$entry.token", " ", "$$entry.task_id"]}
#: What a request asks for, while an update is made.
_REQUEST = "$_request"


def name_of(task_id: str, token: str) -> str:
    """Return the name of a permit: it tells the task and the claim."""
    return f"{token} {task_id}"


def left_by(call: object) -> int:
    """Return how many permits a call leaves to those that it names. If the call does not tell: 1."""
    try:
        return max(1, int(str(call).partition("\n")[0].split(" ")[1]))
    except (ValueError, IndexError):
        return 1


def _array(path: str) -> x.Expression:
    return {"$cond": [{"$isArray": [path]}, path, []]}


def _sound(path: str, instant: str) -> x.Expression:
    """Return the well-formed entries of an array. A malformed entry would use up a permit for ever."""
    entry = "$$entry"
    is_near = {"$lt": [f"{entry}.{instant}", x.add_ms(x.NOW, _ABSURD_MS)]}
    types = [("task_id", "string"), ("token", "string"), (instant, "date")]
    conditions = [*({"$eq": [{"$type": f"{entry}.{field}"}, name]} for field, name in types), is_near]
    return {"$filter": {"input": _array(path), "as": "entry", "cond": {"$and": conditions}}}


#: The well-formed entries of the arrays `starts` and `running`.
STARTS, RUNNING = _sound("$starts", "time"), _sound("$running", "claim_by")


def _kept_while_used(running: x.Expression, window_ms: x.Expression) -> x.Expression:
    unused = {"$eq": [{"$size": running}, 0]}
    return {"$cond": [unused, {"$add": [x.NOW, _KEPT_MS, window_ms]}, "$$REMOVE"]}


# --- granting ---------------------------------------------------------------------------------------------------------


def take(requests: Mapping[str, Document], worker_id: str, token: str, dead: Sequence[str] = ()) -> list[Stage]:
    """Return the update that grants the requested permits, as far as they are free. It serves all requested pools.

    `requests` are by the `_id` of their pool. `dead` names permits of closed runs, which are returned first.
    """
    is_fair = any(request["is_fair"] for request in requests.values())
    is_timed = any(request["starts"] is not None for request in requests.values())
    mine = {"$arrayElemAt": [x.literal([*requests.values()]), {"$indexOfArray": [x.literal([*requests]), "$_id"]}]}
    own = {
        "worker_id": x.literal(worker_id),
        "until": x.add_ms(x.NOW, WAIT_MS),
        "has_room": {"$gt": [f"{_REQUEST}.at_hand", 0]},
        "tasks": "$_waits",
    }
    turns = _sound_turns(f"{_REQUEST}.is_fair") if is_fair else {"turn": "$$REMOVE", "turns": "$$REMOVE"}
    names = (
        "request",
        "times",
        "under_way",
        "begun",
        "still_waiting",
        "open",
        "rivals",
        "granted",
        "got",
        "got_ids",
        "waits",
        "run_out",
    )
    return [
        {"$set": {"_request": mine}},
        {
            "$set": {
                **_in_window(),
                "running": without(RUNNING, dead),
                "waiting": _waiting({"$ne": ["$$worker.worker_id", own["worker_id"]]}),
                "concurrency": {"$ifNull": [f"{_REQUEST}.concurrency", "$$REMOVE"]},
                **turns,
            }
        },
        {"$set": {"_times": _times() if is_timed else []}},
        {"$set": {"_free": _free(), "_under_way": _under_way(), "_begun": _begun() if is_fair else []}},
        {
            "$set": {
                # Another request of the worker may have got permits for some of those that wait.
                "_still_waiting": _still_waiting(f"{_REQUEST}.waiting", is_fair=is_fair),
                "_open": _keyed(_still_waiting(f"{_REQUEST}.wanted", is_fair=is_fair, within_ms=CLAIM_MS)),
            }
        },
        {"$set": {"_rivals": _rivals(is_fair=is_fair)}},
        *(_by_turns() if is_fair else []),
        {"$set": {"_granted": _granted_cnt()}},
        {"$set": {"_got": {"$cond": [{"$gt": ["$_granted", 0]}, _first("$_open", "$_granted"), []]}}},
        {"$set": {"_got_ids": _ids("$_got")}},
        {
            "$set": {
                **_with_granted(token),
                "waiting": _without_granted(),
                "_run_out": _run_out(),
                "left": {"$subtract": ["$_free", "$_granted"]},
                "_waits": _waits(),
                "schema_version": SCHEMA_VERSION,
            }
        },
        {"$set": {"expire_time": _kept_while_used("$running", f"{_REQUEST}.window_ms")}},
        *(_turned() if is_fair else []),
        *_calling(
            {"$subtract": ["$_free", "$_granted"]},
            {"$cond": [{"$eq": ["$_waits", []]}, [], [own]]},
            f"{_REQUEST}.at_hand",
            "$_run_out",
        ),
        {"$unset": [f"_{name}" for name in names]},
    ]


def answer(token: str, wanted: Sequence[str]) -> Document:
    """Return the view of a pool after the update: what concerns this claim or these tasks, and the times of all starts.

    A pool may hold thousands of starts, and list hundreds of tasks.
    """

    def own(entries: str) -> x.Expression:
        is_own = {"$eq": ["$$entry.token", x.literal(token)]}
        is_wanted = {"$in": ["$$entry.task_id", "$$wanted"]}
        concerned = {"$filter": {"input": entries, "as": "entry", "cond": {"$or": [is_own, is_wanted]}}}
        held = {"$setIntersection": [f"{entries}.task_id", x.literal([*wanted])]}
        return _with({"wanted": held}, concerned)

    listed = {"worker_id": "$$worker.worker_id", "task_cnt": {"$size": "$$worker.tasks"}}
    return {
        "starts": own("$starts"),
        "times": {"$concatArrays": [_array("$start_times"), "$starts.time"]},
        "running": own("$running"),
        "running_cnt": {"$size": "$running"},
        "listed": {"$map": {"input": {"$ifNull": ["$waiting", []]}, "as": "worker", "in": listed}},
        **dict.fromkeys(("left", "turn", "turns"), 1),
    }


def _in_window() -> Document:
    """Return the starts that are in the window."""
    bounds = {"from": {"$subtract": [x.NOW, f"{_REQUEST}.window_ms"]}, "absurd": x.add_ms(x.NOW, _ABSURD_MS)}
    starts = {"$filter": {"input": STARTS, "as": "start", "cond": {"$gt": ["$$start.time", "$$from"]}}}
    # Only times are greater than a time and less than another.
    is_in = {"$and": [{"$gt": ["$$time", "$$from"]}, {"$lt": ["$$time", "$$absurd"]}]}
    times = {"$filter": {"input": _array("$start_times"), "as": "time", "cond": is_in}}
    return {"starts": _with(bounds, starts), "start_times": _with(bounds, times)}


def _times() -> x.Expression:
    """Return the times of all starts, the earliest first."""
    return {"$sortArray": {"input": {"$concatArrays": ["$start_times", "$starts.time"]}, "sortBy": 1}}


def _free() -> x.Expression:
    """Return the number of permits that may be granted now."""
    ends = x.add_ms({"$subtract": [x.NOW, f"{_REQUEST}.window_ms"]}, LEAD_MS)
    soon = {"$filter": {"input": "$_times", "as": "time", "cond": {"$lte": ["$$time", "$$ends"]}}}

    def left(limit: str, in_use: x.Expression) -> x.Expression:
        return {"$subtract": [{"$ifNull": [limit, {"$add": [in_use, 1_000_000]}]}, in_use]}

    by_runs = left(f"{_REQUEST}.concurrency", {"$size": "$running"})
    in_use = {"$subtract": [{"$size": "$_times"}, {"$size": _with({"ends": ends}, soon)}]}
    by_starts = left(f"{_REQUEST}.starts", in_use)
    return {"$max": [0, {"$min": [by_runs, by_starts]}]}


def _under_way() -> x.Expression:
    """Return the tasks for which a claim may be under way. Their permits are fresh."""

    def fresh(entries: str, instant: str) -> x.Expression:
        is_fresh = {"$gt": [f"$$entry.{instant}", x.NOW]}
        return {"$map": {"input": {"$filter": {"input": entries, "as": "entry", "cond": is_fresh}}, **_ID_OF_ENTRY}}

    return {"$setUnion": [fresh("$running", "claim_by"), fresh("$starts", "time")]}


_ID_OF_ENTRY = {"as": "entry", "in": "$$entry.task_id"}


def _begun() -> x.Expression:
    """Return the tasks that have a permit, each with a time before which its run began."""
    entry = {"task_id": "$$entry.task_id", "time": "$$entry.claim_by"}
    return {"$concatArrays": ["$starts", {"$map": {"input": "$running", "as": "entry", "in": entry}}]}


def _still_waiting(tasks: str, *, is_fair: bool, within_ms: int | None = None) -> x.Expression:
    """Return those of these tasks for which nobody else has a permit already.

    Where tenants take turns, also without those that have begun: `within_ms`, or at any time that the pool tells. What
    a worker does not know to be gone would have the turn of its tenant.
    """
    is_taken: x.Expression = {"$in": ["$$task.task_id", "$$taken"]}
    shared: dict[str, x.Expression] = {"taken": {"$setIntersection": [_ids(tasks), "$_under_way"]}}
    if is_fair:
        begins, _, due = ({"$arrayElemAt": ["$$task.rank", place]} for place in range(3))
        time = {"$arrayElemAt": ["$$times", {"$indexOfArray": ["$$begun", "$$task.task_id"]}]}
        # A task that waits again after its run is due later than that run began, or it was interrupted.
        is_begun = [{"$in": ["$$task.task_id", "$$begun"]}, {"$eq": [begins, 1]}, {"$gte": [time, due]}]
        is_late = [] if within_ms is None else [{"$gt": [time, x.add_ms(x.NOW, -within_ms)]}]
        is_taken = {"$or": [is_taken, {"$and": [*is_begun, *is_late]}]}
        shared |= {"begun": "$_begun.task_id", "times": "$_begun.time"}
    cond = {"$not": [{"$and": ["$$task.is_single", is_taken]}]}
    return _with(shared, {"$filter": {"input": tasks, "as": "task", "cond": cond}})


def _rivals(*, is_fair: bool) -> x.Expression:
    """Return the waiting tasks of others, each once, with its key."""
    # Where tenants take turns, the worker may not know yet whose turn it is, and may ask for the wrong one of its own.
    # If it asks for one of a tenant, its others of the tenant cannot go, are about to be asked for, or are gone.
    tenants = {"$map": {"input": "$_open", "as": "task", "in": "$$task.tenant"}}
    asks_too = {"$in": [{"$ifNull": ["$$task.tenant", ""]}, "$$tenants"]}
    others = {"$filter": {"input": "$_still_waiting", "as": "task", "cond": {"$not": [asks_too]}}}
    of_others = _with({"tenants": tenants}, _keyed(others))
    own = [{"$cond": [f"{_REQUEST}.is_fair", of_others, []]}] if is_fair else []
    # A set, because several workers may wait for the same task.
    tasks: x.Expression = "$$worker.tasks"
    if not is_fair:  # the best ones come first, and no more of them matter
        tasks = _first(tasks, {"$add": ["$_free", {"$size": f"{_REQUEST}.wanted"}]})
    every = {"$setUnion": [_all_tasks("$waiting", _keyed(tasks)), *own]}
    is_mine = {"$in": ["$$task.task_id", "$$mine"]}
    rivals = {"$filter": {"input": every, "as": "task", "cond": {"$not": [is_mine]}}}
    return _with({"mine": _ids(f"{_REQUEST}.wanted")}, rivals)


def _by_turns() -> list[Stage]:
    """Return the stages that put candidates and rivals in the order of the turns, where tenants take turns."""
    line = _in_turns({"$concatArrays": ["$_open", "$_rivals"]})
    is_open = {"$in": ["$$task.task_id", "$$open"]}

    def of_line(cond: x.Expression) -> x.Expression:
        return _with({"open": _ids("$_open")}, {"$filter": {"input": "$_line", "as": "task", "cond": cond}})

    fair = {"$and": [f"{_REQUEST}.is_fair", {"$gt": ["$_free", 0]}]}
    return [
        {"$set": {"_line": {"$cond": [fair, line, []]}}},
        {
            "$set": {
                "_open": {"$cond": [fair, of_line(is_open), "$_open"]},
                "_rivals": {"$cond": [fair, of_line({"$not": [is_open]}), "$_rivals"]},
            }
        },
        {"$unset": "_line"},
    ]


def _granted_cnt() -> x.Expression:
    """Return how many of the candidates get a permit: those for which one is left by the rivals that are better."""
    room = {"$min": ["$_free", f"{_REQUEST}.most", {"$size": "$_open"}]}

    def keys(tasks: str, *, is_rival: int) -> x.Expression:
        entry = {"key": "$$task.key", "is_rival": is_rival}
        return {"$map": {"input": tasks, "as": "task", "in": entry}}

    # Of equals, the candidates come first.
    line = _in_order({"$concatArrays": [keys("$_open", is_rival=0), keys("$_rivals", is_rival=1)]})
    first = {"$filter": {"input": _first(line, "$_free"), "as": "task", "cond": {"$eq": ["$$task.is_rival", 0]}}}
    return {
        "$cond": [{"$or": [{"$eq": ["$_rivals", []]}, {"$eq": [room, 0]}]}, room, {"$min": [room, {"$size": first}]}]
    }


def _with_granted(token: str) -> Document:
    """Return the entries of the pool, with those of the granted permits."""
    claim_by = x.add_ms(x.NOW, CLAIM_MS)
    entry = {"task_id": {"$arrayElemAt": ["$_got_ids", "$$place"]}, "token": token}
    # The start that must have left the window before this one begins.
    index = {"$subtract": [{"$add": [{"$size": "$_times"}, "$$place"]}, f"{_REQUEST}.starts"]}
    passing = {"$arrayElemAt": ["$_times", index]}
    not_before = {"$cond": [{"$gte": [index, 0]}, {"$add": [passing, f"{_REQUEST}.window_ms"]}, "$$REMOVE"]}

    def added(name: str, limit: str, made: Document) -> x.Expression:
        entries = {"$map": {"input": {"$range": [0, {"$size": "$_got"}]}, "as": "place", "in": made}}
        return {"$concatArrays": [name, {"$cond": [{"$gt": [limit, None]}, entries, []]}]}

    return {
        "starts": added("$starts", f"{_REQUEST}.starts", {**entry, "time": claim_by, "not_before": not_before}),
        "running": added("$running", f"{_REQUEST}.concurrency", {**entry, "claim_by": claim_by}),
    }


def _without_granted() -> x.Expression:
    """Return what waits in other workers, without the tasks that have got a permit."""
    is_granted = {"$in": ["$$task.task_id", "$_got_ids"]}
    left = {"$filter": {"input": "$$worker.tasks", "as": "task", "cond": {"$not": [is_granted]}}}
    return {"$map": {"input": "$waiting", "as": "worker", "in": {"$mergeObjects": ["$$worker", {"tasks": left}]}}}


def _run_out() -> x.Expression:
    """Return the other workers of whose listed tasks none is left. Further ones may wait there, so they are called."""
    is_out = {"$and": [{"$ne": ["$$worker.tasks", []]}, {"$setIsSubset": ["$$worker.tasks.task_id", "$_got_ids"]}]}
    out = {"$filter": {"input": "$waiting", "as": "worker", "cond": is_out}}
    return {"$map": {"input": out, "as": "worker", "in": "$$worker.worker_id"}}


def _waits() -> x.Expression:
    """Return the tasks of this worker that the pool lists from now on, the best one first."""
    wanted = f"{_REQUEST}.wanted"
    over = {"$setIntersection": [_ids(wanted), {"$setUnion": ["$_got_ids", "$_under_way"]}]}
    is_over = {"$in": ["$$task.task_id", "$$over"]}
    refused = _with({"over": over}, {"$filter": {"input": wanted, "as": "task", "cond": {"$not": [is_over]}}})
    tasks = {"$concatArrays": [refused, "$_still_waiting"]}
    # A task that another request of the worker asks for may be better than those of this one.
    ranked = {"key": {"$ifNull": ["$$task.rank", x.literal(_LAST)]}, "task_id": "$$task.task_id", "task": "$$task"}
    line = _in_order({"$map": {"input": tasks, "as": "task", "in": ranked}})
    best = {"$map": {"input": _first(line, f"{_REQUEST}.kept"), "as": "each", "in": "$$each.task"}}
    return {"$cond": [{"$gt": [f"{_REQUEST}.kept", 0]}, best, []]}


def _first(tasks: x.Expression, count: x.Expression | int) -> x.Expression:
    # The server refuses to slice nothing.
    return {"$slice": [tasks, {"$max": [count, 1]}]}


def _turned() -> list[Mapping[str, Any]]:
    """Return the stages that count the turns of the tasks that got a permit, which are in the order of their turns."""
    tenant = {"$getField": {"field": "tenant", "input": {"$arrayElemAt": ["$_got", "$$place"]}}}
    turn = {"tenant": {"$ifNull": [tenant, ""]}, "turn": {"$add": ["$turn", 1, "$$place"]}}
    taken = {"$map": {"input": {"$range": [0, "$_granted"]}, "as": "place", "in": turn}}
    tenants = {"$setUnion": ["$_taken.tenant"]}
    of_tenant = {"$filter": {"input": "$_taken", "as": "each", "cond": {"$eq": ["$$each.tenant", "$$tenant"]}}}
    last = {"$max": {"$map": {"input": of_tenant, "as": "each", "in": "$$each.turn"}}}
    moved = {"$map": {"input": tenants, "as": "tenant", "in": {"tenant": "$$tenant", "turn": last}}}
    stays = {"$not": [{"$in": ["$$of.tenant", "$_taken.tenant"]}]}
    turns = {"$concatArrays": [{"$filter": {"input": "$turns", "as": "of", "cond": stays}}, moved]}
    is_fair = f"{_REQUEST}.is_fair"
    return [
        {"$set": {"_taken": {"$cond": [is_fair, taken, []]}}},
        {
            "$set": {
                # Those whose last turn came longest ago are forgotten first: they have the next turn anyway.
                "turns": {"$cond": [is_fair, {"$slice": [turns, -_MAX_TURNS]}, "$$REMOVE"]},
                "turn": {"$cond": [is_fair, {"$add": ["$turn", "$_granted"]}, "$$REMOVE"]},
            }
        },
        {"$unset": "_taken"},
    ]


# --- returning --------------------------------------------------------------------------------------------------------


def give_back(names: Sequence[str], worker_id: str, at_hand: int) -> list[Stage]:
    """Return the update that returns these permits for runs, and calls the workers whose tasks may have them.

    `at_hand`: the number of its listed tasks, the best ones, that this worker asks for at once.
    """
    return _returning({"running": without(RUNNING, names)}, worker_id, at_hand)


def settle(begun: Mapping[str, datetime], lost: Sequence[str], worker_id: str, at_hand: int) -> list[Stage]:
    """Return the update that stores the times of handlers' starts, and returns the permits that are lost.

    Of a start that has its time, nothing else is kept, as there may be many. Only where tenants take turns, its task is
    still told: see `_still_waiting`.
    """
    names = x.literal([*begun])
    time = {"$arrayElemAt": [x.literal([*begun.values()]), {"$indexOfArray": [names, _NAME]}]}
    settled = {"$filter": {"input": "$starts", "as": "entry", "cond": {"$in": [_NAME, names]}}}
    of_settled = {"input": settled, "as": "entry"}
    times = {"$map": {**of_settled, "in": time}}
    timed = {"$map": {**of_settled, "in": {"$mergeObjects": ["$$entry", {"time": time}]}}}
    is_fair = {"$isArray": ["$turns"]}
    stored = {
        "starts": {"$concatArrays": [without("$starts", [*begun]), {"$cond": [is_fair, timed, []]}]},
        "start_times": {"$concatArrays": [_array("$start_times"), {"$cond": [is_fair, [], times]}]},
    }
    returned = {"starts": without(STARTS, lost), "running": without(RUNNING, lost)}
    return [{"$set": returned}, *([{"$set": stored}] if begun else []), *_returning({}, worker_id, at_hand)]


def _returning(change: Mapping[str, x.Expression], worker_id: str, at_hand: int) -> list[Stage]:
    free = {"$subtract": [{"$cond": [{"$isNumber": "$concurrency"}, "$concurrency", 0]}, {"$size": "$running"}]}
    names = ["$$worker.worker_id", x.literal(worker_id)]
    lists = {"waiting": _waiting({"$ne": names}), "_own": _waiting({"$eq": names})}
    return [
        {"$set": {**change, **lists, **_sound_turns({"$isArray": ["$turns"]})}},
        {"$set": {"expire_time": _kept_while_used("$running", MAX_WINDOW_MS)}},
        *_calling(free, "$_own", at_hand),
        {"$unset": "_own"},
    ]


def without(entries: x.Expression, names: Sequence[str]) -> x.Expression:
    """Return the entries without those of these names."""
    if not names:
        return entries
    return {"$filter": {"input": entries, "as": "entry", "cond": {"$not": [{"$in": [_NAME, x.literal([*names])]}]}}}


# --- those that wait ------------------------------------------------------------------------------------------------


def _waiting(cond: x.Expression) -> x.Expression:
    """Return the well-formed entries of `waiting` that still hold, of the workers for which the condition is true."""
    task = "$$task"
    is_task = {
        "$and": [
            {"$eq": [{"$type": f"{task}.task_id"}, "string"]},
            {"$isArray": [f"{task}.rank"]},
            {"$isNumber": {"$arrayElemAt": [_array(f"{task}.rank"), 1]}},
        ]
    }
    sound_tasks = {"$filter": {"input": _array("$$worker.tasks"), "as": "task", "cond": is_task}}
    holds = {
        "$and": [
            {"$eq": [{"$type": "$$worker.worker_id"}, "string"]},
            cond,
            {"$eq": [{"$type": "$$worker.until"}, "date"]},
            {"$gt": ["$$worker.until", x.NOW]},
            {"$lt": ["$$worker.until", x.add_ms(x.NOW, _ABSURD_MS)]},
        ]
    }
    live = {"$filter": {"input": "$waiting", "as": "worker", "cond": holds}}
    checked = {"$map": {"input": live, "as": "worker", "in": {"$mergeObjects": ["$$worker", {"tasks": sound_tasks}]}}}
    has_some = {"$and": [{"$isArray": ["$waiting"]}, {"$ne": ["$waiting", []]}]}
    return {"$cond": [has_some, checked, []]}


def _keyed(tasks: x.Expression) -> x.Expression:
    """Return these tasks, each with its key: its rank."""
    key = {"$ifNull": ["$$task.rank", x.literal(_LAST)]}
    entry = {"key": key, "task_id": "$$task.task_id", "tenant": {"$ifNull": ["$$task.tenant", ""]}}
    return {"$map": {"input": tasks, "as": "task", "in": entry}}


def _in_order(entries: x.Expression) -> x.Expression:
    return {"$sortArray": {"input": entries, "sortBy": 1}}  # by the key, as it comes first


def _in_turns(entries: x.Expression) -> x.Expression:
    """Return the entries of `_keyed` in the order of the turns, with keys that tell it.

    The first tasks of all tenants come before the second ones, and so on. Of these, the one comes first whose tenant
    had its last turn longest ago. Interrupted tasks wait for no turn.
    """
    by_tenant = {"$map": {"input": entries, "as": "task", "in": {"of": "$$task.tenant", "task": "$$task"}}}
    begins, priority, time = ({"$arrayElemAt": ["$$each.task.key", place]} for place in range(3))
    # How many tasks of the tenant go before this one.
    index = {"$subtract": ["$$place", {"$indexOfArray": ["$$tenants", "$$each.of"]}]}
    tenant = {"$indexOfArray": ["$$known", "$$each.of"]}
    last = {"$cond": [{"$gte": [tenant, 0]}, {"$arrayElemAt": ["$$turns", tenant]}, 0]}
    entry = {"$mergeObjects": ["$$each.task", {"key": [begins, index, last, priority, time]}]}
    turned = {
        "$map": {
            "input": {"$range": [0, {"$size": "$$line"}]},
            "as": "place",
            "in": _with({"each": {"$arrayElemAt": ["$$line", "$$place"]}}, entry),
        }
    }
    shared = {"tenants": "$$line.of", "known": "$turns.tenant", "turns": "$turns.turn"}
    return _in_order(_with({"line": _in_order(by_tenant)}, _with(shared, turned)))


def _sound_turns(is_fair: x.Expression) -> Document:
    """Return the turns of a fair pool. What is malformed begins anew."""
    is_sound = {"$and": [{"$eq": [{"$type": "$$of.tenant"}, "string"]}, {"$isNumber": "$$of.turn"}]}
    turns = {"$filter": {"input": _array("$turns"), "as": "of", "cond": is_sound}}
    return {
        "turn": {"$cond": [is_fair, {"$cond": [{"$isNumber": "$turn"}, "$turn", 0]}, "$$REMOVE"]},
        "turns": {"$cond": [is_fair, turns, "$$REMOVE"]},
    }


def _with(shared: Mapping[str, x.Expression], expression: x.Expression) -> x.Expression:
    """Return an expression with variables, which the server evaluates once, not for each entry of an array."""
    return {"$let": {"vars": shared, "in": expression}}


def _ids(tasks: x.Expression) -> x.Expression:
    return {"$map": {"input": tasks, "as": "task", "in": "$$task.task_id"}}


def _all_tasks(workers: str, tasks: x.Expression) -> x.Expression:
    """Return `tasks` of each of these entries of `waiting`, as one array."""
    each = {"$map": {"input": workers, "as": "worker", "in": tasks}}
    return {"$reduce": {"input": each, "initialValue": [], "in": {"$concatArrays": ["$$value", "$$this"]}}}


def _calling(
    free: x.Expression, own: x.Expression, at_hand: int | str, run_out: x.Expression = ()
) -> list[Mapping[str, Any]]:
    """Return the last stages of an update: call the workers of the tasks for which `free` permits are left.

    `own`: the entry of the worker itself. It is not called, and nobody else is for the first `at_hand` tasks that it
    lists, because it asks for them now. If it is the only one, nobody hears of the update. `run_out`: the workers that
    are called in any case.
    """

    def every(tasks: x.Expression) -> x.Expression:
        return {"$setUnion": [_all_tasks("$waiting", _keyed(tasks)), _keyed("$$mine")]}

    best = every(_first("$$worker.tasks", "$_free"))  # the best ones come first
    in_order = {"$cond": [{"$isArray": ["$turns"]}, _in_turns(every("$$worker.tasks")), _in_order(best)]}
    mine = {"$cond": [{"$gt": [at_hand, 0]}, _first(_all_tasks("$_mine", "$$worker.tasks"), at_hand), []]}
    first = _with({"mine": mine}, {"$setDifference": [_ids(_first(in_order, "$_free")), _ids("$$mine")]})
    # Several workers may list the same task: one is called, that had room for more, and has asked last.
    theirs = _ids("$$this.tasks")
    has_one = {"$ne": [{"$setIntersection": [theirs, "$$value.first"]}, []]}
    called = {
        "$reduce": {
            "input": {"$sortArray": {"input": "$waiting", "sortBy": {"has_room": -1, "until": -1}}},
            "initialValue": {"first": first, "names": []},
            "in": {
                "$cond": [
                    has_one,
                    {
                        "first": {"$setDifference": ["$$value.first", theirs]},
                        "names": {"$concatArrays": ["$$value.names", ["$$this.worker_id"]]},
                    },
                    "$$value",
                ]
            },
        }
    }
    workers = _with({"called": called}, "$$called.names")
    is_any = {"$and": [{"$gt": ["$_free", 0]}, {"$ne": ["$waiting", []]}]}
    # The time makes each call a change, so that the stream tells of it.
    text = {
        "$reduce": {
            "input": "$_called",
            "initialValue": {"$concat": [{"$toString": x.NOW}, " ", {"$toString": "$_free"}, "\n"]},
            "in": {"$concat": ["$$value", "$$this", "\n"]},
        }
    }
    is_called = {"$ne": ["$_called", []]}
    everybody = {"$concatArrays": ["$waiting", "$_mine"]}
    return [
        {"$set": {"_mine": own, "_free": free}},
        {"$set": {"_called": {"$setUnion": [{"$cond": [is_any, workers, []]}, run_out]}}},
        {
            "$set": {
                "call": {"$cond": [is_called, text, "$call"]},
                "quiet_time": {"$cond": [is_called, "$quiet_time", x.NOW]},
                "waiting": {"$cond": [{"$eq": [everybody, []]}, "$$REMOVE", everybody]},
            }
        },
        {"$unset": ["_mine", "_free", "_called"]},
    ]
