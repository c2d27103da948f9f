"""The indexes of the collections, and what each of them serves."""

from __future__ import annotations

from pymongo import ASCENDING, DESCENDING, IndexModel

DISCOVERY_INDEX = "mtask_discovery"
STATUS_INDEX = "mtask_status"
EXPIRY_INDEX = "mtask_expiry"
FINISHED_INDEX = "mtask_finished"
RECENT_INDEX = "mtask_recent"
LOOKUP_INDEX = "mtask_lookup"
FIRING_INDEX = "mtask_coming"
PENDING_INDEX = "mtask_pending"
FLOW_INDEX = "mtask_flow"
HELD_INDEX = "mtask_held"
OWED_INDEX = "mtask_owed"
CHILDREN_INDEX = "mtask_children"
HEAD_INDEX = "mtask_head"
UNENDED_INDEX = "mtask_unended"
TIME_INDEX = "mtask_time"
CALLBACKS_INDEX = "mtask_callbacks"
LOGS_INDEX = "mtask_logs"
TENANT_INDEX = "mtask_tenant"
TURNS_INDEX = "mtask_turns"


def task_indexes() -> list[IndexModel]:
    """Return the indexes of `tasks`.

    - `mtask_discovery` serves the batch query. It holds only tasks that some worker could still take. One range of the
      index holds the tasks without specific_worker_ids. Another range for each named worker holds its tasks. So a
      worker's query never examines tasks for other workers.
    - `mtask_status` serves searches, statistics and lapsed runs. Finished tasks have no next_preempt_time. So for
      finished tasks, it works like an index on (status, name, create_time).
    - `mtask_recent` serves lists of all tasks, the newest first. Its keys also tell names and queues.
    - `mtask_finished` serves lists of finished tasks, the last finished first, and queues that keep only their newest.
    - `mtask_expiry` serves retention.
    - `mtask_lookup` finds tasks by their lookups, the newest first. It holds only tasks that have lookups. Its last
      fields let the server reject tasks by status, name and queue without a read of their documents.
    - `mtask_flow` serves searches for the tasks of a flow.
    - `mtask_held` finds the tasks that an end concerns: those that the ended task holds, or whose end it caused.
    - `mtask_owed` finds the changes of which other tasks of a flow have not been told yet.
    - `mtask_children` finds the descendants of a task in a flow.
    - `mtask_unended` finds the first steps of flows that have not ended. These have the end_time null.
    - `mtask_callbacks` finds the tasks with ends that are still to be told.
    - `mtask_tenant` serves lists and counts of one tenant's tasks, the newest first.
    - `mtask_turns` finds the tasks that are due, tenant by tenant. It serves queues with fair turns, and tenants whose
      tasks wait at the gate. It does not hold specific_worker_ids: an array in it would keep the server from using the
      order of its keys.

    A task of no flow is in none of the five before these three. A task of no tenant is in none of the last two.
    """
    has_next = {"task_state.next_preempt_time": {"$exists": True}}
    return [
        IndexModel(
            [
                ("queue", ASCENDING),
                ("task_option.specific_worker_ids", ASCENDING),
                ("task_option.priority", DESCENDING),
                ("task_state.next_preempt_time", ASCENDING),
                ("name", ASCENDING),
            ],
            name=DISCOVERY_INDEX,
            partialFilterExpression=has_next,
        ),
        IndexModel(
            [
                ("task_state.status", ASCENDING),
                ("task_state.next_preempt_time", ASCENDING),
                ("name", ASCENDING),
                ("task_state.create_time", DESCENDING),
            ],
            name=STATUS_INDEX,
        ),
        IndexModel(
            [("task_state.create_time", DESCENDING), ("_id", DESCENDING), ("queue", ASCENDING)], name=RECENT_INDEX
        ),
        finished_index(),
        IndexModel(
            [("expire_time", ASCENDING)],
            name=EXPIRY_INDEX,
            expireAfterSeconds=0,
            partialFilterExpression={"expire_time": {"$exists": True}},
        ),
        IndexModel(
            [
                ("lookup.k", ASCENDING),
                ("lookup.v", ASCENDING),
                ("task_state.create_time", DESCENDING),
                ("_id", DESCENDING),
                ("task_state.status", ASCENDING),
                ("name", ASCENDING),
                ("queue", ASCENDING),
            ],
            name=LOOKUP_INDEX,
            partialFilterExpression={"lookup": {"$exists": True}},
        ),
        _index_where_set(FLOW_INDEX, "flow.key", "task_state.status"),
        _index_where_set(HELD_INDEX, "flow.held_by", "task_state.status"),
        _index_where_set(OWED_INDEX, "owed_since"),
        _index_where_set(CHILDREN_INDEX, "flow.ancestors", "task_state.status"),
        IndexModel(
            [("callback_owed.time", ASCENDING)],
            name=CALLBACKS_INDEX,
            partialFilterExpression={"callback_owed": {"$exists": True}},
        ),
        IndexModel(
            [("flow.end_time", ASCENDING)],
            name=UNENDED_INDEX,
            partialFilterExpression={"flow.end_time": {"$type": "null"}},
        ),
        _index_where_set(TENANT_INDEX, "tenant", ("task_state.create_time", DESCENDING), ("_id", DESCENDING)),
        IndexModel(
            [
                ("queue", ASCENDING),
                ("tenant", ASCENDING),
                ("task_option.priority", DESCENDING),
                ("task_state.next_preempt_time", ASCENDING),
                ("name", ASCENDING),
            ],
            name=TURNS_INDEX,
            partialFilterExpression={"tenant": {"$exists": True}, **has_next},
        ),
    ]


def _index_where_set(name: str, field: str, *more: str | tuple[str, int]) -> IndexModel:
    """Return an index that holds only the documents that have the field."""
    keys = [(path, ASCENDING) if isinstance(path, str) else path for path in (field, *more)]
    return IndexModel(keys, name=name, partialFilterExpression={field: {"$exists": True}})


def head_index() -> IndexModel:
    """Return the index of `tasks` that lets a flow's key have only one first task.

    Without this index, two services that publish a flow at the same time, in different shapes, could both succeed. A
    collection that is sharded by another field cannot have the index.
    """
    is_head = {"flow.head": {"$exists": True}}
    return IndexModel([("flow.head", ASCENDING)], name=HEAD_INDEX, unique=True, partialFilterExpression=is_head)


def finished_index() -> IndexModel:
    """Return the index of `tasks` that finds the newest finished tasks of a queue."""
    order = [("task_state.finish_time", DESCENDING), ("_id", DESCENDING)]
    has_ended = {"task_state.finish_time": {"$exists": True}}
    keys = [("queue", ASCENDING), ("task_state.status", ASCENDING), *order]
    return IndexModel(keys, name=FINISHED_INDEX, partialFilterExpression=has_ended)


def worker_indexes() -> list[IndexModel]:
    """Return the indexes of `workers`. A dead worker's document is removed a day after its registration expired."""
    return [IndexModel([("heartbeat_expire_time", ASCENDING)], name=EXPIRY_INDEX, expireAfterSeconds=86_400)]


def schedule_indexes() -> list[IndexModel]:
    """Return the indexes of `schedules`.

    - `mtask_coming` finds the schedules that fire next, among the schedules stored by clients. Schedules declared by
      apps, paused schedules and ended schedules are in other ranges of the index. So the query never examines them.
    - `mtask_pending` finds schedules with firings that have begun, but are not yet published.
    """
    return [
        IndexModel(
            [
                ("source", ASCENDING),
                ("paused", ASCENDING),
                ("schedule_state.next_fire_time", ASCENDING),
                ("_id", ASCENDING),
            ],
            name=FIRING_INDEX,
        ),
        IndexModel(
            [("_id", ASCENDING), ("source", ASCENDING)],
            name=PENDING_INDEX,
            partialFilterExpression={"schedule_state.pending.0": {"$exists": True}},
        ),
    ]


def place_indexes() -> list[IndexModel]:
    """Return the indexes of `places`. With this index, the server removes unused documents."""
    return [IndexModel([("expire_time", ASCENDING)], name=EXPIRY_INDEX, expireAfterSeconds=0)]


def action_indexes() -> list[IndexModel]:
    """Return the indexes of `actions`: the log by time, also that of one actor, intent or target; and its retention."""
    newest = ("time", DESCENDING)
    return [
        IndexModel([newest], name=TIME_INDEX),
        *(_index_where_set(f"mtask_{field}", field, newest) for field in ("actor", "intent", "target")),
        IndexModel([("expire_time", ASCENDING)], name=EXPIRY_INDEX, expireAfterSeconds=0),
    ]


def bulk_indexes() -> list[IndexModel]:
    """Return the indexes of `bulks`. With this index, the server removes the documents of old bulk changes."""
    return [IndexModel([("expire_time", ASCENDING)], name=EXPIRY_INDEX, expireAfterSeconds=0)]


def metrics_indexes() -> list[IndexModel]:
    """Return the indexes of `metrics`. With this index, the server removes tallies that are in the totals."""
    return [IndexModel([("expire_time", ASCENDING)], name=EXPIRY_INDEX, expireAfterSeconds=0)]


def log_indexes() -> list[IndexModel]:
    """Return the indexes of `logs`: the logs of a task's runs, the first run first; and their retention."""
    return [
        IndexModel([("task_id", ASCENDING), ("begin_time", ASCENDING)], name=LOGS_INDEX),
        IndexModel([("expire_time", ASCENDING)], name=EXPIRY_INDEX, expireAfterSeconds=0),
    ]
