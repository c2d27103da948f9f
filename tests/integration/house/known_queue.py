"""A queue whose documents are known: what docs/queries.md asks about, as it stands on 2 March 2026 at 12:00 UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from mtask.database import setup
from mtask.features.schedules.client import ScheduleSpec
from mtask.kernel.driver.stores import SyncStore
from tests import build
from tests.integration.stores import register

Document = dict[str, Any]

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
ACME, GLOBEX, INITECH = ({"customer": name} for name in ("acme", "globex", "initech"))
#: Finished tasks, and tasks that wait, that no question asks for: a query must not read them.
OLD, FAR = 1_500, 100
_QUEUES = {"send_email": "mail", "report": "reports", "import_file": "imports"}
_LEASE = timedelta(seconds=60)
_NO_COLUMN = "no column 'price'"


def at(text: str) -> datetime:
    """Return a time of 2 March; "1T23:30" is one of 1 March."""
    day, _, clock = text.rpartition("T")
    return datetime.fromisoformat(f"2026-03-{int(day or 2):02}T{clock}Z")


def run(worker_id: str, claim: str, end: str, status: str = "SUCCESS", reason: str | None = None) -> Document:
    """Return a run; `end` is that of its lease where it is RUNNING or TIMEOUT."""
    made: Document = {"worker_id": worker_id, "status": status, "claim_time": at(claim)}
    if status in ("RUNNING", "TIMEOUT"):
        made["ping_expire_time"] = at(end)
        if status == "TIMEOUT":
            made["fail_time"] = at(end) + timedelta(seconds=1)
    else:
        made["ping_expire_time"] = at(claim) + _LEASE
        made["success_time" if status == "SUCCESS" else "fail_time"] = at(end)
    return made if reason is None else {**made, "fail_reason": reason}


def task(
    name: str,
    key: str,
    params: Document,
    status: str,
    created: str | datetime,
    *runs: Document,
    due: str | datetime | None = None,
    start: str | None = None,
    workers: tuple[str, ...] = (),
) -> Document:
    """Return a task; a finished one ended with its last run, or when it was created."""
    create_time = at(created) if isinstance(created, str) else created
    state: Document = {"status": status, "failed_cnt": sum(each["status"] in ("FAIL", "TIMEOUT") for each in runs)}
    if start is not None:
        state["start_time"] = at(start)
    if status in ("SUCCESS", "FAIL", "CANCELED"):
        last: Document = runs[-1] if runs else {}
        state["finish_time"] = last.get("success_time") or last.get("fail_time") or create_time
    elif due is not None:
        state["next_preempt_time"] = at(due) if isinstance(due, str) else due
    else:
        state["next_preempt_time"] = max(each["ping_expire_time"] for each in runs)
    numbered = [{"run_id": f"{key}-{n}", "attempt": n, **each} for n, each in enumerate(runs, 1)]
    option = {"specific_worker_ids": list(workers)}
    made = build.task(
        f"{name}:{key}", *numbered, time=create_time, option=option, state=state, queue=_QUEUES[name], params=params
    )
    if "finish_time" in state:
        del made["task_state"]["next_preempt_time"]
    return made


def step(
    made: Document,
    *,
    after: tuple[str, ...] = (),
    on_failed: str = "cancel",
    held_by: str | None = None,
    ancestors: tuple[str, ...] = (),
    ended: str | None = None,
) -> Document:
    """Return the task as a step of a flow. One without dependencies and ancestors is the head; `ended`: its flow's."""
    key, _, name = made["key"].rpartition("/")
    part: Document = {"key": key, "step": name, "after": list(after), "on_failed": on_failed}
    if made["task_state"]["status"] != "WAITING":
        part["release_time"] = made["task_state"]["create_time"]
    if held_by is not None:
        part["held_by"] = held_by
    if ancestors:
        part["ancestors"] = list(ancestors)
    if not after and not ancestors:
        part |= {"head": key, "end_time": None if ended is None else at(ended)}
    return {**made, "flow": part}


def waiting(name: str, key: str, created: str) -> Document:
    """Return a task that waits for others of its flow."""
    made = task(name, key, ACME, "WAITING", created, due=created)
    del made["task_state"]["next_preempt_time"]
    return made


def flows() -> list[Document]:
    """Return the steps of three flows: one that goes on, one that has ended, and one that was just canceled."""
    fetch, part, sum_ = "import_file:nightly/1/fetch", "import_file:nightly/1/part-1", "report:stopped/7/sum"
    fetched = step(
        task("import_file", "nightly/1/fetch", ACME, "SUCCESS", "1T00:10", run("worker-1", "1T00:10:02", "1T00:11"))
    )
    fetched["flow"]["has_children"] = True
    failed = run("worker-1", "1T00:12", "1T00:12:05", "FAIL", _NO_COLUMN)
    parts = [
        task("import_file", "nightly/1/part-1", ACME, "SUCCESS", "1T00:11", run("worker-2", "1T00:11:02", "1T00:12")),
        task("import_file", "nightly/1/part-2", ACME, "INIT", "1T00:11", failed, due="14:00"),
        task("import_file", "nightly/1/part-3", ACME, "FAIL", "1T00:11", failed),
    ]
    inner = task(
        "import_file", "nightly/1/part-4", ACME, "SUCCESS", "1T00:12", run("worker-2", "1T00:12:02", "1T00:13")
    )
    total = step(
        waiting("report", "nightly/1/total", "1T00:10"), after=(fetch,), held_by="import_file:nightly/1/part-2"
    )
    mail = waiting("send_email", "nightly/1/mail", "1T00:10")
    ended = task("import_file", "nightly/0/fetch", ACME, "SUCCESS", "1T00:01", run("worker-1", "1T00:01:02", "1T00:02"))
    canceled = step(task("report", "stopped/7/sum", ACME, "CANCELED", "1T00:03"))
    canceled["task_state"]["finish_time"] = canceled["owed_since"] = at("11:59:50")
    return [
        {**fetched, "lookup": [{"k": "user_id", "v": 7}]},
        *(step(made, ancestors=(fetch,)) for made in parts),
        step(inner, ancestors=(fetch, part)),
        {**total, "lookup": [{"k": "user_id", "v": 7}, {"k": "user_id", "v": 8}]},
        step(mail, after=("report:nightly/1/total",), on_failed="run", held_by="report:nightly/1/total"),
        step(ended, ended="1T00:02"),
        canceled,
        step(waiting("send_email", "stopped/7/mail", "1T00:03"), after=(sum_,), held_by=sum_),
    ]


def gathering(since: str, newest: str) -> Document:
    """Return the gathering of a round, for the task's debounce of half an hour."""
    call = {"asked_time": at(newest), "call_id": "0"}
    return {"kind": "latest", "newest": call, "first_time": at(since), "debounce_ms": 1_800_000, "ids": [], "seen": []}


def tasks() -> list[Document]:
    """Return the tasks that the questions are about."""
    to_ada = {**ACME, "to": "ada@example.com"}
    big = task("report", "sales/acme", ACME, "SUCCESS", "09:00", run("worker-2", "09:00:10", "09:05:10"))
    big["task_state"]["worker_states"][0]["returns"] = "r" * 300_000
    halfway = run("worker-2", "11:58", "12:00:40", "RUNNING")
    halfway["progress"] = {"fraction": 0.4, "message": "page 4 of 10", "time": at("11:59:50")}
    running = task("report", "sales/initech", INITECH, "RUNNING", "11:57", halfway)
    running["again"] = {
        "params": INITECH,
        "queue": "reports",
        "task_option": running["task_option"],
        "gather": {**gathering("11:58:30", "11:59:10"), "debounce_ms": None},
    }
    news = task("send_email", "news/1", ACME, "INIT", "10:00", due="12:30", start="12:30")
    of_user = task("send_email", "welcome/4", ACME, "INIT", "11:30", due="11:30")
    return [
        *flows(),
        # Finished, the last of them yesterday in Berlin.
        task("send_email", "welcome/1", to_ada, "SUCCESS", "08:00", run("worker-1", "08:00:02", "08:00:04.500")),
        task("send_email", "welcome-1", to_ada, "SUCCESS", "08:30", run("worker-1", "08:30:01", "08:30:02")),
        task(
            *("send_email", "welcome/2", GLOBEX, "SUCCESS", "08:10"),
            run("worker-1", "08:10:02", "08:10:03", "FAIL", "421 try later"),
            run("worker-2", "08:10:20", "08:10:21"),
        ),
        task(
            *("send_email", "welcome/3", INITECH, "FAIL", "10:58"),
            run("worker-1", "10:58:04", "10:58:05", "FAIL", "421 try later"),
            run("worker-1", "10:59:00", "10:59:01", "FAIL", "421 try later"),
            run("worker-1", "11:00:00", "11:00:01", "FAIL", "550 no such mailbox"),
        ),
        big,
        task(
            *("report", "sales/globex", GLOBEX, "SUCCESS", "09:01"),
            run("worker-3", "09:01:30", "09:11:30", "TIMEOUT", "lapsed"),
            run("worker-2", "09:11:31", "09:13:31"),
        ),
        task(
            *("import_file", "a.csv", GLOBEX, "FAIL", "10:00"),
            run("worker-1", "10:00:05", "10:00:07", "FAIL", _NO_COLUMN),
        ),
        task(
            *("import_file", "b.csv", INITECH, "FAIL", "1T23:00"),
            run("worker-1", "1T23:30:00", "1T23:30:02", "FAIL", _NO_COLUMN),
            start="1T23:29",
        ),
        task("import_file", "stopped.csv", ACME, "CANCELED", "09:30"),
        task(
            *("import_file", "late.csv", INITECH, "FAIL", "1T22:29"),
            run("worker-1", "1T22:29:55", "1T22:30:00", "FAIL", _NO_COLUMN),
        ),
        # Running, the last of them with a lapsed lease.
        running,
        task(
            *("import_file", "c.csv", {**GLOBEX, "rows": "x" * 100_000}, "RUNNING", "11:59"),
            run("worker-1", "11:59:30", "12:00:30", "RUNNING"),
        ),
        task("import_file", "d.csv", ACME, "RUNNING", "11:40", run("worker-3", "11:40:10", "11:50", "RUNNING")),
        # Waiting: due, for workers that are named, and for later.
        {**of_user, "lookup": [{"k": "user_id", "v": 7}]},
        task("send_email", "welcome/5", GLOBEX, "INIT", "11:55", due="11:55"),
        task("report", "monthly/1", ACME, "INIT", "11:00", due="11:00", workers=("worker-3", "worker-4")),
        task("report", "monthly/2", ACME, "INIT", "11:59", due="11:59", workers=("worker-2", "worker-3")),
        {**news, "gather": gathering("10:00", "12:00")},
        task(
            *("send_email", "welcome/6", GLOBEX, "INIT", "11:50"),
            run("worker-1", "11:50:01", "11:50:02", "FAIL", "421 try later"),
            due="12:10",
        ),
        task("report", "news/2", ACME, "INIT", "10:00", due="13:00:01", start="13:00:01"),
    ]


def others() -> list[Document]:
    """Return tasks of all names and statuses that are too old, or wait for a day too far ahead, to be asked for."""
    january = datetime(2026, 1, 5, tzinfo=UTC)
    april = datetime(2026, 4, 5, tzinfo=UTC)
    statuses = ["SUCCESS", "SUCCESS", "CANCELED"]
    names = list(_QUEUES)
    old = [
        task(names[n % 3], f"old/{n}", ACME, statuses[n // 3 % 3], january + timedelta(seconds=n)) for n in range(OLD)
    ]
    far = [task(names[n % 3], f"far/{n}", ACME, "INIT", january, due=april + timedelta(seconds=n)) for n in range(FAR)]
    return [*old, *far]


def fill(store: SyncStore) -> None:
    """Put the known queue into a database; the validators see each document."""
    store.run(setup.ensure(setup.EVERY))
    store.tasks.insert_many([*tasks(), *others()])
    for worker_id in ("worker-1", "worker-2", "worker-3", "worker-4"):
        register(store, worker_id, queues=list(_QUEUES.values()), names=list(_QUEUES))
    # Far ahead: what has run out a day ago by the real clock is removed.
    alive = {"heartbeat_expire_time": datetime(2999, 1, 1, tzinfo=UTC)}
    registry = store.database["workers"]
    registry.update_many({}, {"$set": alive})
    registry.update_one({"_id": "worker-3"}, {"$set": {"heartbeat_expire_time": at("09:05")}})
    registry.update_one({"_id": "worker-4"}, {"$set": {"status": "stopped"}})
    for schedule_id, source, next_fire, paused in (
        ("digest", "client", "12:05", False),
        ("nightly", "app", "12:45", False),
        ("asleep", "client", "12:20", True),
        ("weekly", "client", "13:05", False),
    ):
        spec = ScheduleSpec(schedule_id, "report", timedelta(hours=6), queue="reports", paused=paused)
        made = spec.prepare().document(at("06:00"), "app" if source == "app" else "client")
        made["schedule_state"]["next_fire_time"] = at(next_fire)
        store.database["schedules"].insert_one(made)
