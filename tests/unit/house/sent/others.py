"""What is sent about workers, queues and their permits, streams, bulk changes, logs, actions, and the layout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mtask.database import schema, setup
from mtask.errors import DuplicateKey, OperationFailed
from mtask.features.audit_log import operations as actions
from mtask.features.audit_log.rules import Actor
from mtask.features.breaker import operations as breakers
from mtask.features.bulk import operations as bulk
from mtask.features.bulk.rules import Plan, signed
from mtask.features.controls import operations as controls
from mtask.features.controls.rules import Limit
from mtask.features.encryption.codec import REVISION
from mtask.features.events import readers
from mtask.features.events.readers import Detail, Opening
from mtask.features.flows import doctor
from mtask.features.limits import operations as permits
from mtask.features.limits import usage as pools
from mtask.features.limits.operations import HeldPermit, PermitPool, PermitRequest, Wanted
from mtask.features.logs import operations as run_logs
from mtask.features.logs.operations import RunLines
from mtask.features.registry import operations as handlers
from mtask.features.rollout import operations as rollouts
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.driver import indexes
from mtask.kernel.driver.operation import owned
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import publish as publishing
from mtask.kernel.operations import stream_filter as concerns
from mtask.kernel.operations import workers
from mtask.kernel.operations.publish import Policy
from mtask.parts.relays import RELAYS
from mtask.search import lists as listing
from mtask.search.walks import Asked
from tests.unit.house.sent.conversation import NOW, Written, told
from tests.unit.house.sent.parts import FULL, LATER, RUN, TWO, Document, stored

_QUEUES = ["default", "mail"]
_SECRET = "0f" * 32


def cases() -> dict[str, object]:
    """Return the cases, by name."""
    return {**_workers(), **_handlers(), **_permits(), **_streams(), **_bulks(), **_logs(), **_layout(), **_tenants()}


def _handlers() -> dict[str, object]:
    declared = {"send": {"hash": "a1", "queue": "mail", "options": {"priority": 1}, "schema": "{}"}}
    found = [{"_id": "send", "current": "a1", "versions": [{"hash": "a1"}, {"hash": "b2"}]}]
    return {
        "handlers registered": told(handlers.start("w", "i", declared), [{"_id": "send@b2"}]),
        "handlers registered, which others have": told(handlers.start("w", "i", declared), [{"_id": "send@a1"}]),
        "handlers declared": told(handlers.current(["send", "$x"])),
        "handlers: names": told(handlers.names()),
        "handlers: served names": told(handlers.served(["send"]), [{"_id": "w", "names": ["send"]}]),
        "handlers": told(handlers.every()),
        "handler": told(handlers.one("send")),
        "handlers: live workers": told(handlers.live_workers()),
        "handlers: hashes": told(handlers.hashes()),
        "rollout: versions started": told(rollouts.started("$x"), {"versions": [{"hash": "a1"}]}),
        "rollout: tasks handed on": told(rollouts.handed_on(100)),
        "handlers: another version is current": told(handlers.succeed(found), [{"_id": "send@b2"}]),
    }


def _workers() -> dict[str, object]:
    timeout = timedelta(seconds=30)
    me = workers.Registration("w", "i", "host", 7, "scope", _QUEUES, ["task"], 10, "0.2", timeout)
    beat = workers.Heartbeat(WorkerStatus.RUNNING, 1, 10, ["$x"], [{"_id": "queue:mail", "revision": 3}], ["acme"], 2)
    peer = {"_id": "v", "incarnation": "j", "names": ("task",), "queues": ("mail",)}
    return {
        "worker registers": told(workers.register(me), {"incarnation": "i"}),
        "worker registers after a dead one": told(workers.register(me, "dead"), *[DuplicateKey("w")] * 5),
        "worker found": told(workers.find("w")),
        "worker heartbeat": told(workers.heartbeat(me, beat)),
        "workers without flows": told(workers.without_flows(5)),
        "workers without callbacks": told(workers.without_field("callback", 5)),
        "workers without tenants": told(workers.without_tenants(5)),
        "workers without encryption": told(workers.older(REVISION, 5)),
        "workers live": told(workers.live()),
        "workers: peers": told(workers.peers("w", _QUEUES, [peer]), [peer, {"_id": "u", "incarnation": "k"}]),
        "workers": told(workers.every()),
        "workers: signs of life": told(workers.signs_of_life(["w", "v"])),
        "worker controlled": told(workers.control("w", {"stop": True, "concurrency": 3})),
        "control": told(controls.put("queue", "mail", {"paused": True, "note": "$x"})),
        "control that ends": told(controls.put("name", "task", {"paused": True, "until": timedelta(minutes=1)})),
        "control of a rate": told(controls.hold("name", "task", timedelta(minutes=1))),
        "control of a rate of a key": told(controls.hold("queue", "mail", timedelta(minutes=1), "$key")),
        "breaker opened": told(breakers.open_("queue", "mail", "$w", 300, "$why")),
        "breaker probed": told(breakers.take_probe("queue", "mail", "$w")),
        "breaker closed": told(breakers.close("queue", "mail", "$w")),
        "breaker reopened": told(breakers.reopen("queue", "mail", "$w", "$why")),
        "control of limits": told(controls.put("tenant", "acme", {"limit": {"concurrency": 3}})),
        "controls": told(controls.every()),
        "controls of queues and names": told(controls.of(_QUEUES, ["task"])),
    }


def _permits() -> dict[str, object]:
    queue, key, tenant = PermitPool("mail"), PermitPool("mail", "key", "acme"), PermitPool(None, tenant="acme")
    runs, starts = Limit(concurrency=3), Limit(concurrency=5, starts=2, window_ms=60_000)
    wanted = [Wanted("task:k", (0, -3, NOW), "acme"), Wanted("other:l", is_single=False)]
    simple = PermitRequest(queue, runs, wanted[:1])
    timed = PermitRequest(key, starts, wanted, 1, [Wanted("task:m", (1, 0, NOW))], 2)
    fair = PermitRequest(tenant, starts, wanted, waiting=wanted, does_wait=False, is_fair=True)
    held = [HeldPermit(queue, "task:k", "token"), HeldPermit(key, "other:l", "token")]
    granted: Document = {"running": [], "starts": [], "times": [], "running_cnt": 0, "listed": []}
    entry = {"task_id": "task:k", "token": "token", "claim_by": NOW - timedelta(minutes=1)}
    document = {"_id": queue.id, "running": [entry], "now": NOW}
    later = {**document, "now": NOW + permits.RESCUE}
    ended = stored(task_state={"status": "FAIL", "worker_states": [{**RUN, "status": "FAIL"}]})
    return {
        "permit": told(permits.take([simple], "w", "token"), granted),
        "permit of starts": told(permits.take([timed], "w", "token", held), granted),
        "permit in turns": told(permits.take([fair], "w", "token"), granted),
        "permits": told(permits.take([simple, timed, fair], "w", "token", held)),
        "permits settled": told(
            permits.settle([queue, key], "w", {("task:k", "token"): NOW}, [("other:l", "token")], 2)
        ),
        "permits lost": told(permits.settle([queue], "w", {}, [("other:l", "token")])),
        "permits given back": told(permits.give_back(held, "w", 2)),
        "permits reclaimed": told(permits.reclaim([queue, key], "w"), [later], [stored()], [], Written(1), [ended]),
        "pools": told(pools.read([queue, key])),
        "pools of a queue": told(pools.of_queue("mail", 10)),
        "permits: holders": told(pools.holders([pools.Held("task:k", "token", NOW)])),
    }


def _streams() -> dict[str, object]:
    wanted: dict[str, readers.Wanted] = {
        "all": readers.Wanted(),
        "one task": readers.Wanted(task_id="task:k", needs_document=False),
        "tasks": readers.Wanted(task_ids=TWO, ends_only=True),
        "a flow": readers.Wanted(flow_key="fl.o\0w"),
        "names and keys": readers.Wanted(names=["task", "a.b"], keys=["k"]),
        "many names": readers.Wanted(names=[f"name_{number}" for number in range(1_000)]),
        "queues": readers.Wanted(queues=_QUEUES),
        "a tenant": readers.Wanted(names=["task"], tenant="acme"),
    }
    found: dict[str, object] = {
        f"stream of {name}, {detail.name}": [Opening(each, detail).pipeline, Opening(each, detail).options()]
        for name, each in wanted.items()
        for detail in Detail
    }
    change = {"documentKey": {"_id": "task:k"}, "clusterTime": readers.in_oplog(NOW)}
    shares = [(["task"], "01"), (["other", "third"], "10")]
    return found | {
        "stream of a worker": concerns.pipeline("w", _QUEUES, 10_000),
        "stream of a worker with shares": concerns.pipeline("w", _QUEUES, 10_000, shares),
        "stream that goes on": [
            Opening(readers.Wanted(), after="token").options(),
            Opening(readers.Wanted(), since=readers.place_in_oplog(7, 1)).options(),
        ],
        "stream: the document then": told(readers.with_document_then(change)),
    }


def _bulks() -> dict[str, object]:
    def plan(action: Any) -> str:
        criteria = '{"status": ["FAIL"], "queue": "$mail"}'
        return signed(Plan("bulk", action, criteria, "acme:", NOW, LATER), bytes.fromhex(_SECRET))

    def begun(action: str, **criteria: str) -> Document:
        text = '{"status": ["FAIL"]}' if action != "cancel" else '{"queue": "mail"}'
        return {"_id": "bulk", "action": action, "criteria": text, "cutoff": NOW, "begin_time": NOW}

    def rows(**flow: str) -> list[Document]:
        part = flow.get("key")
        return [{"_id": "task:k", "p": NOW, "f": [None]}, {"_id": "other:l", "p": NOW, "f": [part]}]

    return {
        "bulk secret": told(bulk.secret(), ..., *[...] * 4, {"secret": _SECRET}, random=("secret",)),
        "bulk begun": told(bulk.begin(plan("retry"), "retry", "acme:", NOW), {"secret": _SECRET}, begun("retry")),
        "bulk read": told(bulk.get("bulk")),
        "bulks": told(bulk.every(10)),
        "bulks within": told(bulk.every(10, "acme:")),
        "bulk step of nothing": told(bulk.step("bulk", "holder", RELAYS), begun("cancel")),
        "bulk step: cancel": told(bulk.step("bulk", "holder", RELAYS), begun("cancel"), ..., rows()),
        "bulk step: cancel steps": told(bulk.step("bulk", "holder", RELAYS), begun("cancel"), ..., rows(key="flow")),
        "bulk step: retry": told(bulk.step("bulk", "holder", RELAYS), begun("retry"), [{"_id": "mail"}], rows()),
        "bulk step: retry steps": told(
            bulk.step("bulk", "holder", RELAYS), begun("retry"), [{"_id": "mail"}], rows(key="flow")
        ),
        "bulk step: remove": told(
            bulk.step("bulk", "holder", RELAYS), begun("remove"), [{"_id": "mail"}], rows(key="flow")
        ),
        "bulk step elsewhere": told(bulk.step("bulk", "holder", RELAYS)),
    }


def _logs() -> dict[str, object]:
    lines = RunLines("run", "task", "k", "default", "w", 1, 5, [{"text": "$a"}], True, "trace", 12)
    sealed = RunLines("run", "task", "k", "default", "w", 1, 0, [], False, None, 12, b"sealed", 3, "acme", "acme")
    actor = Actor("ann", "web")
    random = ("expire_time",)
    return {
        "logs made ready": told(run_logs.make_ready()),
        "logs encoded": told(run_logs.encoded([lines])),
        "logs written": told(run_logs.write([lines, sealed], timedelta(days=7))),
        "logs of a task": told(run_logs.of_task("task:k", None)),
        "logs of a run, of a tenant": told(run_logs.of_task("task:k", "run", run_logs.of_tenant("acme", is_own=True))),
        "logs, foreign": run_logs.of_tenant("acme", is_own=False),
        "logs: is task": told(run_logs.is_task("task:k")),
        "action begun": told(actions.begin(actor, "cancel", "task:k", "d" * 600, "action"), random=random),
        "action ended": told(actions.end("action", "done"), random=random),
        "actions": told(
            actions.find({"actor": ["ann"]}, NOW, 10, "action"),
            {"time": readers.in_oplog(NOW)},
            [{"_id": "action", "time": None}],
        ),
    }


def _layout() -> dict[str, object]:
    old: Document = {"name": "tasks", "type": "collection", "options": {}}
    missing = OperationFailed("ns exists", 48)
    validators = {name: layout.validator() for name, layout in schema.LAYOUTS.items()}
    made = {name: [*layout.indexes()] for name, layout in schema.LAYOUTS.items()}
    return {
        **{f"validator of {name}": validator for name, validator in validators.items()},
        **{f"indexes of {name}": made for name, made in made.items()},
        "indexes of tasks that not all have": [indexes.head_index(), indexes.finished_index()],
        "misfits": schema.misfits(),
        "setup": told(setup.ensure()),
        "setup of an old database": told(setup.ensure(["tasks"]), ..., {"cursor": {"firstBatch": [old]}}),
        "setup in a race": told(setup.make_sure(["actions"]), ..., missing),
        "setup: is there": told(setup.is_there()),
        "setup with roles": told(setup.ensure_with_roles("shop")),
        "roles": told(setup.make("shop"), {"roles": [{"roles": ["read"]}]}),
    }


def _tenants() -> dict[str, object]:
    """Return what a client of one tenant sends: each call gets the tenant as a condition."""
    return {
        "of a tenant, get": told(owned(queries.get("task:k"), "acme")),
        "of a tenant, find": told(owned(queries.find({"tenant": "other", "status": "FAIL"}, 10), "acme")),
        "of a tenant, statistics": told(owned(queries.statistics("acme"), "acme")),
        "of a tenant, cancel": told(owned(queries.cancel("task:k"), "acme")),
        "of a tenant, publish": told(owned(publishing.publish(FULL, Policy("update")), "acme")),
        "of a tenant, flow steps": told(owned(doctor.headless(10), "acme")),
        "of a tenant, page": told(owned(listing.page(Asked({"key_prefix": "acme:"}), 2, None, None), "acme")),
    }
