"""The changes that the engine makes to tasks: claim, ping, finish, settle and quarantine.

If the reply to a change is lost, `claimed` and `finished` read the result back.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any, NamedTuple

from pymongo import ReturnDocument

from mtask.errors import DatabaseError, DocumentTooLarge
from mtask.kernel.document import rules
from mtask.kernel.document.identity import MAX_KEY_BYTES
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.parts import OWING, is_sealed, sealed_in
from mtask.kernel.document.status import FINAL, RunStatus
from mtask.kernel.document.task import MAX_HASH, MAX_VERSION, SCHEMA_VERSION, Run, StoredTask, known_option, runs_in
from mtask.kernel.driver.bson import rough_size, with_zones
from mtask.kernel.driver.operation import Operation, tasks, viewed
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations import sessions
from mtask.kernel.statements import claim as pipelines
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters
from mtask.kernel.statements import finish as ends
from mtask.kernel.statements.claim import Kept
from mtask.kernel.statements.derive import Pipeline
from mtask.kernel.statements.finish import Outcome

Document = dict[str, Any]

#: The index hint for updates by `_id`. Without it, the server could choose another index because of the guards.
BY_ID = "_id_"

#: The length of a shortened reason, in characters.
_SHORT = 80


def claim(
    task_ids: Sequence[str],
    worker_id: str,
    token: str,
    timeout: timedelta | None = None,
    also: Sequence[filters.Filter] = (),
    *,
    are_simple: bool = False,
    as_group: bool = False,
    tell_changed: Callable[[int], None] | None = None,
    tell_size: Callable[[int, int], None] | None = None,
) -> Operation[list[Document]]:
    """Claim these tasks, as far as the rules allow. Return the claimed documents, each with this worker's new run.

    A claim of one task takes one round trip, a claim of several takes two. `token` is new random text. The run_ids are
    made from it. If `timeout` is None, the usual limit of an operation applies. `also` holds further guards. Dates
    in the documents may have no time zone yet: see `mtask.kernel.operations.claim`.

    `are_simple` says that the tasks look simple, so the short statement is sent first. The short statement does not
    claim tasks that turn out not to be simple. If there are several tasks, the general statement then claims those
    tasks, in one more round trip. If there is only one task, nothing more is sent: the task stays unclaimed, as if
    another worker had it.

    `tell_changed` is called with the number of tasks that the claim has changed but not won: it has closed their lapsed
    runs. `as_group` claims even a single task in the form for several, which always knows that number. The form for one
    task only knows it if the task has ended.

    `tell_size` is called with the number of tasks that were won, and the size of their params in bytes.
    """
    run_id = pipelines.run_id_in_group(token, task_ids)
    if are_simple:
        guard = filters.with_guards(pipelines.unbegun(task_ids), also)
        pipeline = pipelines.claim_unbegun(worker_id, run_id)
    else:
        guard, pipeline = _claim_by_all_rules(task_ids, worker_id, run_id, also)
    if len(task_ids) == 1 and not as_group:
        one = tasks("find_one_and_update", guard, pipeline, return_document=ReturnDocument.AFTER, hint=BY_ID)
        document = yield one.within(timeout)
        if document and run_of(document, f"{token}-0"):
            if tell_size is not None:
                tell_size(1, rough_size(document.get("params")))
            return [document]
        if document and tell_changed is not None and document["task_state"].get("status") in FINAL:
            tell_changed(1)  # the task was open before, and a claim ends a task only by closing lapsed runs
        return []
    claimed_cnt = (yield tasks("update_many", guard, pipeline, hint=BY_ID).within(timeout)).modified_count
    if are_simple and claimed_cnt < len(task_ids):
        guard, pipeline = _claim_by_all_rules(task_ids, worker_id, run_id, also)
        # This process may have been frozen since the short statement, for longer than a lease. Then tasks claimed by
        # the short statement may be due again. The guard excludes them.
        guard[f"{filters.RUNS}.run_id"] = {"$nin": list(run_ids_of(task_ids, token).values())}
        claimed_cnt += (yield tasks("update_many", guard, pipeline, hint=BY_ID).within(timeout)).modified_count
    documents = (yield from claimed(task_ids, token, tell_size)) if claimed_cnt else []
    if tell_changed is not None and claimed_cnt > len(documents):
        tell_changed(claimed_cnt - len(documents))
    return documents


def _claim_by_all_rules(
    task_ids: Sequence[str], worker_id: str, run_id: x.Expression, also: Sequence[filters.Filter]
) -> tuple[filters.Filter, Pipeline]:
    return filters.with_guards(filters.due_tasks(task_ids), also), pipelines.claim(worker_id, run_id)


def fresh_token() -> str:
    """Return 96 random bits in hex. They serve as the random part of run_ids, or as a worker's incarnation."""
    return secrets.token_hex(12)


def run_ids_of(task_ids: Sequence[str], token: str) -> dict[str, str]:
    """Return the run_id of each task in a claim with this token."""
    return {task_id: f"{token}-{place}" for place, task_id in enumerate(task_ids)}


def token_of(run_id: str) -> str:
    """Return the token of the claim that made a run."""
    return run_id.partition("-")[0]


def claimed(
    task_ids: Sequence[str], token: str, tell_size: Callable[[int, int], None] | None = None
) -> Operation[list[Document]]:
    """Return the tasks that the claim with this token got. Use this to read the result back after a lost reply.

    The dates in them have no time zone yet: see `mtask.kernel.operations.claim`. `tell_size`: see `claim`.
    """
    run_ids = list(run_ids_of(task_ids, token).values())
    call = tasks("find_naive", filters.with_runs(task_ids, run_ids), batch_size=len(task_ids) + 1)
    found: list[Document] = yield call
    if tell_size is not None:
        tell_size(len(found), sum(rough_size(document.get("params")) for document in found))
    return found


def run_of(document: Document, run_id: str) -> Document | None:
    """Return the document's run with this run_id."""
    return next((run for run in reversed(runs_in(document)) if run.get("run_id") == run_id), None)


def finish(
    outcomes: Sequence[Outcome],
    timeout: timedelta | None = None,
    *,
    is_simple: bool = False,
    has_steps: bool = False,
) -> Operation[set[str]]:
    """Close these runs; return the run_ids of runs with a stored outcome. The other runs had lost their lease.

    If `timeout` is None, the usual limit of an operation applies. `is_simple` says that the tasks look simple, so the
    short statement is sent first for successes. `has_steps` says that some of them are steps of flows. After an error,
    the caller can call this again. Then a finished run does not change, and its run_id is returned, too.
    """
    task_ids = [outcome.task_id for outcome in outcomes]
    run_ids = [outcome.run_id for outcome in outcomes]
    closed_cnt = 0
    goes_on = any(outcome.next is not None for outcome in outcomes)
    if is_simple and not goes_on and outcomes[0].status is RunStatus.SUCCESS:
        guard = pipelines.held_alone(outcomes, has_steps=has_steps)
        pipeline = pipelines.succeed(outcomes, has_steps=has_steps)
        update = tasks("update_many", guard, pipeline, hint=BY_ID)
        closed_cnt = (yield update.within(timeout)).matched_count
    if closed_cnt < len(outcomes):
        guard = filters.held_runs(task_ids, run_ids)
        general = tasks("update_many", guard, ends.finish(outcomes), hint=BY_ID)
        closed_cnt += (yield general.within(timeout)).matched_count
    if closed_cnt == len(outcomes):
        return set(run_ids)
    return (yield from finished(outcomes, timeout))


def finished(outcomes: Sequence[Outcome], timeout: timedelta | None = None) -> Operation[set[str]]:
    """Return the run_ids of the runs that are stored with the status of their outcome.

    Use this to read the result of `finish` back, if a run did not match the update or if a reply was lost.
    """
    wanted = {outcome.run_id: outcome.status.value for outcome in outcomes}
    states = yield from run_statuses([outcome.task_id for outcome in outcomes], list(wanted), timeout)
    return {run_id for run_id, status in states.items() if status == wanted[run_id]}


def run_statuses(
    task_ids: Sequence[str], run_ids: Sequence[str], timeout: timedelta | None = None
) -> Operation[dict[str, str]]:
    """Return the status of each of these runs that still exists."""
    projection = {"task_state.worker_states.run_id": 1, "task_state.worker_states.status": 1}
    found = yield tasks("find", filters.with_runs(task_ids, run_ids), projection).within(timeout)
    wanted = set(run_ids)
    states: dict[str, str] = {}
    for document in found:
        for run in runs_in(document):
            run_id, status = run.get("run_id"), run.get("status")
            if isinstance(run_id, str) and run_id in wanted and isinstance(status, str):
                states[run_id] = status
    return states


def finish_in_transaction(outcome: Outcome) -> Operation[bool]:
    """Close one run in the caller's transaction; return whether the run still held its lease."""
    result = yield tasks("update_one", filters.held_runs([outcome.task_id], [outcome.run_id]), ends.finish([outcome]))
    return bool(result.matched_count)


HELD_VIEW = {
    "task_option.ping_interval_ms": 1,
    "task_option.specific_worker_ids": 1,
    "task_state.cancel_requested": 1,
    "task_state.worker_states.run_id": 1,
    "task_state.worker_states.status": 1,
    "task_state.worker_states.ping_expire_time": 1,
    "now": x.NOW,
}


def ping(
    runs: Mapping[str, str],
    lease_ms: int | Mapping[str, int],
    progress: Mapping[str, Mapping[str, Any]] | None = None,
    timeout: timedelta | None = None,
    session_id: str | None = None,
) -> Operation[list[Document]]:
    """Extend the leases of these runs. Return the tasks of these runs as they are afterwards.

    `runs` maps each run_id to its task_id. `lease_ms` is one length for all leases, or the length of each lease by
    run_id. `progress` is the reported progress of some runs, by run_id. If `timeout` is None, the usual limit of an
    operation applies. `session_id` is only given for a single run: it is the session of the transaction that this run
    is about to begin.

    A run has lost its lease if it is not RUNNING in the answer, or if the answer lacks its task.
    """
    task_ids, run_ids = list(runs.values()), list(runs)
    guard = filters.held_runs(task_ids, run_ids)
    pipeline = pipelines.ping(run_ids, lease_ms, progress=progress, session_id=session_id)
    if len(runs) == 1:
        one = tasks("find_one_and_update", guard, pipeline, projection=HELD_VIEW, return_document=ReturnDocument.AFTER)
        document = yield from viewed(one.within(timeout), "now")
        return [] if document is None else [document]
    yield tasks("update_many", guard, pipeline).within(timeout)
    return (yield from held(task_ids, timeout))


def held(task_ids: Sequence[str], timeout: timedelta | None = None) -> Operation[list[Document]]:
    """Return the parts of these tasks that their holder needs: runs, admitted workers, and a request to cancel."""
    found: list[Document] = yield tasks("find", filters.by_ids(task_ids), HELD_VIEW).within(timeout)
    return found


def settle(task_ids: Sequence[Any], timeout: timedelta | None = None) -> Operation[int]:
    """Mark the lapsed runs of these tasks TIMEOUT; return the number of tasks that changed."""
    with suppress(DatabaseError):  # after an error, the next settlement of the tasks tries again
        yield from sessions.end_lapsed(task_ids)
    result = yield tasks("update_many", filters.sound(task_ids), pipelines.settle()).within(timeout)
    return int(result.modified_count)


def settle_lapsed(grace_ms: int, limit: int) -> Operation[int]:
    """Settle up to `limit` tasks with a run that lapsed at least `grace_ms` ago. Return the number of changed tasks.

    No worker has preempted these tasks since the run lapsed, because a preemption would have closed the run.
    """
    task_ids = yield from finding.lapsed(grace_ms, limit)
    return (yield from settle(task_ids)) if task_ids else 0


def shortened(text: str, limit: int) -> str:
    """Return the text, cut to `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quarantine(document_id: Any, worker_id: str, reason: str, timeout: timedelta | None = None) -> Operation[bool]:
    """Mark a malformed document FAIL with a reason; return whether this call changed the document.

    If the document has too little room below 16 MB, closed runs without a SUCCESS are dropped, and the reason is
    shortened. If the document still has too little room, the FAIL is stored without a reason. Raises DocumentTooLarge
    if even the FAIL without a reason does not fit. `timeout` limits each attempt. If it is None, the usual limit of an
    operation applies.
    """
    guard = filters.not_quarantined(document_id)
    reasons = {Kept.ALL: reason, Kept.RESULTS: shortened(reason, _SHORT), Kept.BARE: ""}
    for kept, words in reasons.items():
        try:
            pipeline = pipelines.quarantine(str(document_id), worker_id, words, kept=kept)
            result = yield tasks("update_one", guard, pipeline).within(timeout)
        except DocumentTooLarge:
            if kept is Kept.BARE:
                raise
        else:
            return bool(result.modified_count)
    return False


# --- claimed ---------------------------------------------------------------------------------------------

# Claimed tasks: what a run needs of a task's document, and the task itself, which few runs ask for.
#
# To check a whole document takes longer than anything else that a worker does for a task without work. So the document
# of a simple task is checked only as far as its shape goes: `simple_facts` recognizes the commonest shape, and whatever
# has this shape is well-formed. Any other document is checked in full, and its task is made, before its run starts.

#: The fields that the document of a simple task must have, then those of its state, and of its only run.
_of_task = itemgetter("_id", "name", "key", "queue", "task_option", "task_state", "schema_version")
_of_state = itemgetter("status", "create_time", "next_preempt_time", "failed_cnt", "cancel_requested", "worker_states")
_of_run = itemgetter("run_id", "worker_id", "attempt", "status", "claim_time", "ping_expire_time")
_TASK_CNT, _STATE_CNT, _RUN_CNT = 7, 6, 6
_TIME_OR_NONE = (datetime, type(None))
#: A key of so few characters is not longer than MAX_KEY_BYTES in UTF-8.
_SHORT_KEY = MAX_KEY_BYTES // 4
#: The status of the task, and of its run.
_RUNNING = "RUNNING"
_NOBODY: frozenset[str] = frozenset()


class RunFacts(NamedTuple):
    """What a worker needs to know of each run that it has claimed. The times may have no time zone; then none has."""

    task_id: str
    name: str
    key: str
    queue: str
    option: TaskOption
    run_id: str
    attempt: int
    claim_time: datetime
    ping_expire_time: datetime
    #: Whether the task wants one worker, and this run is its first, as far as the document tells.
    is_simple: bool
    owes: frozenset[str]  #: those of the fields `OWING` that the task has
    due: datetime  #: the next_preempt_time that the task had when this run claimed it
    is_interrupted: bool  #: whether the run before this one lapsed or was handed back


def facts_of(task: StoredTask, run: Run) -> RunFacts:
    """Return the facts of a run of this task."""
    state, option = task.task_state, task.task_option
    is_simple = len(state.worker_states) == 1 and not state.failed_cnt and option.concurrent_worker_cnt == 1
    due, is_interrupted = _standing(task, run)
    return RunFacts(
        task.id,
        task.name,
        task.key,
        task.queue,
        option,
        run.run_id,
        run.attempt,
        run.claim_time,
        run.ping_expire_time,
        is_simple,
        frozenset(name for name in OWING if getattr(task, name) is not None),
        due,
        is_interrupted,
    )


def _standing(task: StoredTask, own: Run) -> tuple[datetime, bool]:
    """Return the next_preempt_time that the task had when this run claimed it, and whether it had been interrupted."""
    due, delayed = rules.due_time(task), rules.retry_time(task, "")
    due = max(due, delayed or due)
    former = [run for run in rules.current_runs(task) if run is not own and run.claim_time <= own.claim_time]
    last_claim = max((run.claim_time for run in former), default=None)
    # What was claimed after an interruption has had its turn.
    ends = [run for run in former if last_claim and run.fail_time and run.fail_time > last_claim]
    lapsed = [run for run in ends if run.status is RunStatus.TIMEOUT]
    handed_back = any(run.status is RunStatus.CANCELED and run.retry_time is None for run in ends)
    # The claim itself closes runs whose leases have lapsed. Until then, the task was due at the end of the lease.
    due = max((run.ping_expire_time for run in lapsed if run.fail_time == own.claim_time), default=due)
    return due, handed_back or bool(lapsed)


def simple_facts(document: Document, run_id: str, worker_id: str, names: Container[str]) -> RunFacts | None:
    """Return the facts of a simple task that was claimed by this run.

    The names in `names` must be valid. None: the document is of another shape, and only `claimed_task` tells whether it
    is well-formed. Otherwise `claimed_task` makes a task of it that is readable, RUNNING and not canceled, admits
    every worker, and has no other run.
    """
    try:
        task_id, name, key, queue, option, state, version = _of_task(document)
        status, created, preempts, failed_cnt, is_canceled, runs = _of_state(state)
        run = runs[0]
        own_id, holder, attempt, own_status, claimed, expires = _of_run(run)
    except (KeyError, IndexError, TypeError):
        return None
    start = state.get("start_time")
    # JavaScript code is read as a subclass of `str`: its type is another one, and it equals no text.
    if (
        not (type(name) is type(key) is type(queue) is str)
        or not (type(version) is type(attempt) is type(failed_cnt) is int)
        or not (type(created) is type(preempts) is type(claimed) is type(expires) is datetime)
        or not (type(state) is type(run) is dict and type(runs) is list)
        or own_id != run_id
        or holder != worker_id
        or attempt != 1
        or own_status != _RUNNING
        or status != _RUNNING
        or is_canceled is not False
        or failed_cnt
        or version != SCHEMA_VERSION
        # There are no other fields.
        or len(run) != _RUN_CNT
        or len(runs) != 1
        or len(state) != _STATE_CNT + ("start_time" in state) + ("not_after" in state)
        or len(document)
        != _TASK_CNT
        + ("params" in document)
        + ("quiet_time" in document)
        + ("declared" in document)
        + ("version" in document)
        or type(start) not in _TIME_OR_NONE
        or type(state.get("not_after")) not in _TIME_OR_NONE
        or type(document.get("quiet_time")) not in _TIME_OR_NONE
        or type(declared := document.get("declared", "")) is not str
        or len(declared) > MAX_HASH
        or type(made_for := document.get("version", 1)) is not int
        or not 1 <= made_for <= MAX_VERSION
        or is_sealed(document.get("params"))
        or name not in names
        or not 0 < len(key) <= _SHORT_KEY
        or task_id != f"{name}:{key}"
        or not queue
        or (checked := known_option(option)) is None
        or checked.concurrent_worker_cnt != 1
    ):
        return None
    # The constructor of a named tuple is a function in Python, and takes as long as half of the checks above.
    due = start or created
    facts = (task_id, name, key, queue, checked, run_id, 1, claimed, expires, True, _NOBODY, due, False)
    return tuple.__new__(RunFacts, facts)


def claimed_task(document: Document) -> StoredTask:
    """Return the task of a claimed document, and give each date in the document a time zone; raise ValidationError."""
    # A good task has no date in its options, and they are a third of its values.
    options = {"task_option": document.pop("task_option")} if "task_option" in document else {}
    with_zones(document).update(options)
    return StoredTask.model_validate(document)


def claimed_params(document: Mapping[str, Any]) -> Any:
    """Return the params of a claimed document, as its task has them: the very object, if it is a mapping or a list."""
    params = document.get("params")
    return sealed_in(with_zones(params)) if params else params
