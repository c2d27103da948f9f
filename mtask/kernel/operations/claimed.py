"""Claimed tasks: what a run needs of a task's document, and the task itself, which few runs ask for.

To check a whole document takes longer than anything else that a worker does for a task without work. So the document
of a simple task is checked only as far as its shape goes: `simple_facts` recognizes the commonest shape, and whatever
has this shape is well-formed. Any other document is checked in full, and its task is made, before its run starts.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple

from mtask.kernel.document import rules
from mtask.kernel.document.identity import MAX_KEY_BYTES
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.parts import is_sealed, sealed_in
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import SCHEMA_VERSION, Run, StoredTask, known_option
from mtask.kernel.driver.bson import with_zones

Document = dict[str, Any]

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
    is_step: bool  #: whether the task is a step of a flow
    is_chained: bool  #: whether another task went on as this one
    owes: frozenset[str]  #: the fields of the task that say whom its end concerns
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
        task.flow is not None,
        task.chain is not None,
        frozenset(name for name in ("flow", "callback") if getattr(task, name) is not None),
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
        or len(state) != _STATE_CNT + ("start_time" in state)
        or len(document) != _TASK_CNT + ("params" in document) + ("quiet_time" in document)
        or type(start) not in _TIME_OR_NONE
        or type(document.get("quiet_time")) not in _TIME_OR_NONE
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
    facts = (task_id, name, key, queue, checked, run_id, 1, claimed, expires, True, False, False, _NOBODY, due, False)
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
