"""What is sent for lists page by page, for counts, metrics and diagnosis."""

from __future__ import annotations

from mtask.doctor import operations as diagnosis
from mtask.errors import AccessDenied
from mtask.features.gathering import doctor as gathered
from mtask.features.metrics import client
from mtask.features.metrics import operations as tallies
from mtask.kernel.worker.process.counts import Tally
from mtask.search import by_queue
from mtask.search import counts as counting
from mtask.search import lists as listing
from mtask.search.order import Order, Place
from mtask.search.walks import Asked
from tests.unit.house.sent.conversation import NOW, Written, told
from tests.unit.house.sent.parts import LATER, Document, stored

_MANY = {"n": 1_000_000}
_FIELDS = ["params.a"]
_INIT = {"status": "INIT"}


def cases() -> dict[str, object]:
    """Return the cases, by name."""
    return {**_pages(), **_counts(), **_metrics(), **_diagnosis()}


def _pages() -> dict[str, object]:
    place, due = Place(NOW, "task:k"), Place(NOW, "task:k", NOW)
    done = {"status": ["SUCCESS", "FAIL"]}
    row = {"_id": "task:k", "p": NOW, "c": NOW, "f": [1]}
    lookup = {"lookup": {"order": ["42"], "user": ["a", "b"]}}

    def page(criteria: Document, after: Place | None = None, *replies: object, **more: object) -> object:
        return told(listing.page(Asked(criteria, **more), 2, after, _FIELDS), *replies)  # type: ignore[arg-type]

    return {
        "page of all": told(listing.page(Asked({}), 2, None, None)),
        "page of all behind a task": page({}, place, since=NOW, until=LATER),
        "page of names": page(
            {"name": ["task", "other"]}, place, [{"_id": "task:k", "task_state": {"create_time": NOW}}]
        ),
        "page of a queue": page({"queue": ["mail", "default"]}, None),
        "page of a queue behind a task": page({"queue": "mail", "params": {"a": 1}}, place),
        "page by lookup": page(lookup, place),
        "page of a tenant": page({"tenant": "acme", "status": "INIT"}, None),
        "page of a tenant behind a task": page({"tenant": "acme", "name": "task"}, place, by=Order.CREATED),
        "page of a tenant's key": page({"tenant": "acme", "key": "acme:k", "name": "task"}, None, _MANY),
        "page of keys": page({"key": ["k", "l"], "name": "task"}, None),
        "page of a key prefix": page({"key_prefix": "acme:", "name": ["task", "other"]}, place),
        "page of a key prefix that many have": page({"key_prefix": "acme:", "name": "task"}, None, _MANY),
        "page of finished tasks": page(done, None, [{"_id": "mail"}]),
        "page of finished tasks behind a task": page({**done, "queue": ["mail"]}, place),
        "page of finished tasks, tested in several parts": page(
            {**done, "queue": ["mail", "default"], "worker_id": "w"}, place, {"n": 1_000}
        ),
        "page of many finished tasks of a name": page(
            {**done, "name": "task"}, place, _MANY, [{"_id": "mail"}, {"_id": "default"}]
        ),
        "page of few finished tasks of a name": page({**done, "name": "task"}, place),
        "page of due tasks": page(_INIT),
        "page of due tasks behind a task": page(
            _INIT, due, _MANY, _MANY, _MANY, [{"_id": "task:a"}], [row, row], [row]
        ),
        "page of due tasks behind an instant": page(_INIT, Place(NOW, ""), {"n": 5}, [row, row, row]),
        "page of due tasks, tested": page(
            {**_INIT, "params": {"a": 1}}, None, [{"task_state": {"next_preempt_time": NOW}}], {"n": 7}, [row, row]
        ),
        "page of due tasks that ends in a batch": page(
            _INIT, None, [row, {**row, "p": LATER}, {"_id": "task:l", "p": LATER, "c": NOW}], {"n": 2}, [row]
        ),
        "page of due tasks, tested to the end": page(
            {**_INIT, "worker_id": "w"},
            due,
            *[{"n": 1}, [row], [{"task_state": {"next_preempt_time": LATER}}], {"n": 1_999}],
        ),
        "page of due tasks of a queue": page({"status": ["INIT", "RUNNING"], "queue": "mail"}, due),
        "page of due tasks of a worker": page({"status": "RUNNING", "worker_id": "w"}),
        "queues of finished tasks": told(listing.queues_of_finished()),
    }


def _counts() -> dict[str, object]:
    def counted(criteria: Document, *replies: object) -> object:
        return told(counting.count(criteria), *replies)

    first = {"queue": "mail", "task_option": {"specific_worker_ids": ["w"], "priority": 3}, "task_state": {}}
    highest = {"task_option": {"priority": 3}, "task_state": {"next_preempt_time": NOW}}
    return {
        "count up to, all": counted({}),
        "count up to, of statuses": counted({"status": ["INIT", "RUNNING", "WAITING", "SUCCESS"]}),
        "count up to, of a worker": counted({"worker_id": "w"}, {"n": 3}, [{"n": 2}]),
        "count up to, of names": counted({"name": ["task", "other"], "status": "FAIL"}),
        "count up to, of queues": counted({"queue": ["mail"]}, {"n": 3}, {"n": 3}),
        "count up to, of keys": counted({"key": ["k"], "key_prefix": "k", "name": "task"}, {"n": 3}),
        "count up to, of a key prefix": counted({"key_prefix": "k"}, ..., [{"_id": "task:k"}], []),
        "count up to, by lookup": counted({"lookup": {"order": ["42"]}, "status": "INIT"}, {"n": 3}),
        "count up to, by lookup of a tenant": counted({"lookup": {"order": ["42"]}, "tenant": "acme"}, _MANY),
        "count up to, of a tenant": counted({"tenant": "acme", "status": "INIT"}, {"n": 3}),
        "statistics up to": told(counting.statistics(100)),
        "queues": told(
            by_queue.queues(),
            [{"_id": "mail", "count": 1}],
            [],
            [first],
            [],
            [{"_id": "mail"}],
            {"n": 1},
            ...,
            _MANY,
            _MANY,
            ...,
            ...,
            ...,
            [highest],
        ),
    }


def _metrics() -> dict[str, object]:
    known = {"count_time": NOW, "queues": [], "admitted": [["mail", "task"]], "is_fresh": False}
    dead: Document = {"_id": "dead", "incarnation": "i", "kind": "worker", "folded": ["dead"]}
    return {
        "metrics: fleet": told(client.read_fleet(), {**known, "is_fresh": True}),
        "metrics: first counts": told(tallies.shared(), None, random=("holder",)),
        "metrics: counts": told(tallies.shared(), known, {"_id": "counts"}, random=("holder",)),
        "metrics: counts of a reader": told(tallies.shared(), known, AccessDenied("find"), random=("holder",)),
        "metrics: admitted": told(tallies.read_admitted()),
        "metrics: first tally": told(tallies.record("i", Tally().document(), is_first=True)),
        "metrics: tally": told(tallies.record("i", {"pairs": []}, is_first=False)),
        "metrics: tally found": told(tallies.find_tally("i")),
        "metrics: fold": told(tallies.fold(), [dead], [], ..., None, None, [dead], Written(1), dead),
    }


def _diagnosis() -> dict[str, object]:
    return {
        "diagnosis: inspect": told(diagnosis.inspect("5f5f5f5f5f5f5f5f5f5f5f5f"), stored()),
        "diagnosis: time": told(diagnosis.server_time()),
        "diagnosis: version": told(diagnosis.version({}), {"version": "7.0.1"}),
        "diagnosis: server status": told(diagnosis.server_status(), {}),
        "diagnosis: rights": told(diagnosis.rights("shop"), {"authInfo": {}}),
        "diagnosis: try": told(diagnosis.try_read_and_write()),
        "diagnosis: options": told(diagnosis.collection_options()),
        "diagnosis: indexes": told(diagnosis.index_state("tasks")),
        "diagnosis: misfits": told(diagnosis.misfits(10)),
        "diagnosis: oversized": told(diagnosis.oversized(10)),
        "diagnosis: due groups": told(diagnosis.due_groups(10)),
        "diagnosis: lapsed": told(diagnosis.lapsed_tasks(5_000, 10)),
        "diagnosis: held": told(diagnosis.held_by(["w", "v"])),
        "diagnosis: next rounds": told(gathered.ended_before_next_round(10)),
        "diagnosis: overdue": told(diagnosis.overdue_expiry(60_000)),
        "diagnosis: of no tenant": told(diagnosis.open_of_no_tenant("mail")),
    }
