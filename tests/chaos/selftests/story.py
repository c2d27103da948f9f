"""Makes histories for tests of the checker: documents by the engine's own pipelines, at instants of our choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bson
from pymongo import ReturnDocument, WriteConcern
from pymongo.collection import Collection

from mtask.features.flows import statements
from mtask.features.flows.next import Next, flow_part
from mtask.features.gathering import statements as gathering
from mtask.features.gathering.statements import SentCall
from mtask.kernel.document.identity import stored_key
from mtask.kernel.document.options import option_of
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import GatherKind, StoredTask
from mtask.kernel.statements import claim as pipelines
from mtask.kernel.statements import derive
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements.derive import Pipeline
from mtask.kernel.statements.finish import Outcome, finish
from mtask.kernel.statements.outbox import OwedTask
from tests.chaos.history import Call, Fault, History, Ledger, Note, Operation, Version
from tests.chaos.load.order import QUEUES

Document = dict[str, Any]
EPOCH = datetime(2024, 5, 1, 12, tzinfo=UTC)
#: How long a write takes, in seconds.
_TAKES = 0.002
#: The process of a handler, unless a scene says otherwise.
WORKER = 100
_SHORT = {"ping_interval": 1, "worker_timeout": 4, "retry_delay": 0.2}


def instant(seconds: float) -> datetime:
    """Return the server's instant, so many seconds after the beginning."""
    return EPOCH + timedelta(milliseconds=round(seconds * 1000))


def _fixed(task_id: str, params: Any = None, tenant: str | None = None, **options: Any) -> Document:
    name, _, key = task_id.partition(":")
    option = option_of({}, {**_SHORT, **options}).model_dump()
    fixed = {"_id": task_id, "name": name, "key": key, "params": params, "task_option": option}
    return fixed | {"queue": QUEUES.get(name, "load")} | ({} if tenant is None else {"tenant": tenant})


@dataclass
class Story:
    """A history that is being made. Its clock stands still but for `wait`; both clocks begin at 0."""

    tasks: Collection[Document]
    now: float = 1.0
    calls: list[Call] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    effects: list[Document] = field(default_factory=list)
    places: list[Document] = field(default_factory=list)
    #: What the documents at the end are, where they are not what the collection holds.
    documents: list[Document] | None = None
    facts: Document = field(default_factory=dict)
    #: The lines of the workers' logs.
    logs: dict[str, list[str]] = field(default_factory=dict)
    number: int = 0
    #: By how much the oplog's clock lies behind, in seconds.
    log_lag: float = 0.0

    def __post_init__(self) -> None:
        # A story outlives no crash: it need not wait for the journal at every step.
        self.tasks = self.tasks.with_options(write_concern=WriteConcern(w=1, j=False))

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def fresh(self, prefix: str) -> str:
        """Return a text that no other has."""
        self.number += 1
        return f"{prefix}-{self.number}"

    # --- publishers -------------------------------------------------------------------------------------------

    def call(
        self,
        operation: Operation,
        task_id: str,
        answer: str | None,
        *,
        takes: float = 0.05,
        gather_id: str | None = None,
    ) -> None:
        """Have something asked for now; without an answer it was never told."""
        sent = Call(self.fresh("call"), operation, task_id, "p1", self.now - 0.01, gather_id=gather_id)
        self.calls.append(sent)
        if answer is not None:
            self.calls.append(replace(sent, told=self.now + takes, answer=answer))

    def publish(
        self, name: str = "quick", *, delay: float | None = None, answer: str | None = "created", **options: Any
    ) -> str:
        """Publish a new task."""
        key = stored_key(options.get("tenant"), self.fresh("k"))
        return self.publish_again(f"{name}:{key}", delay=delay, answer=answer, **options)

    def publish_again(
        self, task_id: str, *, delay: float | None = None, answer: str | None = "created", **options: Any
    ) -> str:
        """Publish a task under this id, which no document has."""
        fixed = _fixed(task_id, {"n": 1}, **options)
        start = None if delay is None else instant(self.now + delay)
        document = requests.task_document(fixed, start, instant(self.now))
        self.tasks.insert_one(document)
        self.call("publish", task_id, answer)
        self._record(task_id, document)
        return task_id

    def publish_step(self, step: str, *after: str, on_failed: str = "cancel", **options: Any) -> str:
        """Publish a step of a flow, as part of it; `after` are the ids of its dependencies."""
        task_id, now = f"quick:f/{step}", instant(self.now)
        part: Document = {"key": "f", "step": step, "after": list(after), "on_failed": on_failed}
        part |= {"held_by": after[-1]} if after else {"release_time": now}
        document = requests.task_document({**_fixed(task_id, **options), "flow": part}, None, now)
        if after:
            document["task_state"]["status"] = "WAITING"
            del document["task_state"]["next_preempt_time"]
        self.tasks.insert_one(document)
        self.call("publish", task_id, "created")
        self._record(task_id, document)
        return task_id

    def gather(
        self,
        task_id: str,
        call_id: str,
        *,
        answer: str | None = "updated",
        asked: float | None = None,
        kind: GatherKind = "latest",
        **waits: int,
    ) -> None:
        """Publish a call that gathers; the first one creates the task. `asked` is when the call read the time."""
        now = instant(self.now)
        fixed = _fixed(task_id, {"call_id": call_id})
        content = {name: fixed[name] for name in ("params", "queue", "task_option")}
        asked_time = now if asked is None else instant(asked)
        call = SentCall(asked_time, call_id, kind, content, is_own_id=True, **waits)
        self.call("gather", task_id, answer, gather_id=call_id)
        if self.tasks.find_one({"_id": task_id}) is not None:
            stages = [*derive.close_lapsed(now), gathering.reopen(call, now), *derive.derive(now)]
            self.apply(task_id, [*stages, *gathering.add(call, now)])
            return
        first, start = gathering.first_round(call, now)
        if kind == "calls":
            fixed["params"] = {"calls": [content["params"]]}
        made = {"$mergeObjects": [x.literal(fixed), requests.task_document({"gather": first}, start, now)]}
        self.tasks.update_one({"_id": task_id}, [{"$replaceWith": made}], upsert=True)
        self._record(task_id, self.document(task_id))

    def ask(self, operation: Operation, task_id: str, pipeline: Pipeline, answer: str | None = "done") -> None:
        """Change a task as a client does."""
        self.call(operation, task_id, answer)
        self.apply(task_id, pipeline)

    def cancel(self, task_id: str) -> None:
        """Ask for the end."""
        self.ask("cancel", task_id, requests.cancel(instant(self.now)))

    def again(self, task_id: str, operation: Operation = "retry") -> None:
        """Retry or rerun."""
        self.ask(operation, task_id, requests.run_again(everything=operation == "rerun", now=instant(self.now)))

    def update_option(self, task_id: str, **changes: Any) -> None:
        """Change options."""
        option = option_of(self.document(task_id)["task_option"], changes)
        self.ask("update", task_id, requests.update_option(option, instant(self.now)), "updated")

    def clean(self, task_id: str, *, success: bool = False) -> None:
        """Drop the closed runs, so that the task runs again."""
        pipeline = requests.republish(
            replacement=None, start=None, clean_failed=True, clean_success=success, now=instant(self.now)
        )
        self.ask("update", task_id, pipeline, "updated")

    def remove(self, task_id: str, *, is_asked: bool = True) -> None:
        """Remove a task, as a client or the TTL index does."""
        if is_asked:
            self.call("remove", task_id, "done")
            if self.document(task_id)["task_state"]["status"] == "RUNNING":
                self.apply(task_id, [{"$set": {"task_state.cancel_requested": True}}])
        self.tasks.delete_one({"_id": task_id})
        self.versions.append(Version(task_id, instant(self.now + _TAKES), None))

    # --- workers ----------------------------------------------------------------------------------------------

    def claim(self, task_id: str, worker_id: str = "w1", *, starts: bool = True) -> str:
        """Claim a task and begin its handler; return the run_id."""
        run_id = self.fresh("run")
        self.apply(task_id, pipelines.claim(worker_id, x.literal(run_id), instant(self.now)))
        run = self.run(task_id, run_id)
        assert run is not None, "the rules do not allow this claim"
        if starts:
            self.note("start", task_id, run_id)
        return run_id

    def force(self, task_id: str, worker_id: str = "w1", *, attempt: int | None = None, **fields: Any) -> str:
        """Claim a task whatever the rules say."""
        runs = self.document(task_id)["task_state"]["worker_states"]
        lease = self.document(task_id)["task_option"]["worker_timeout_ms"] / 1000
        run_id = self.fresh("run")
        run = {
            "run_id": run_id,
            "worker_id": worker_id,
            "attempt": attempt if attempt is not None else max((run["attempt"] for run in runs), default=0) + 1,
            "status": "RUNNING",
            "claim_time": instant(self.now),
            "ping_expire_time": instant(self.now + lease),
            **fields,
        }
        added = {"$set": {"task_state.worker_states": {"$concatArrays": [x.RUNS, [x.literal(run)]]}}}
        now = instant(self.now)
        self.apply(task_id, [*derive.close_lapsed(now), added, *derive.derive(now)])
        self.note("start", task_id, run_id, worker_id=worker_id)
        return run_id

    def ping(self, task_id: str, run_id: str, lease: float = 4.0, session_id: str | None = None) -> None:
        """Move a lease, and name the session of a transaction."""
        self.apply(task_id, pipelines.ping([run_id], round(lease * 1000), instant(self.now), session_id=session_id))

    def finish(
        self,
        task_id: str,
        run_id: str,
        status: Any = RunStatus.SUCCESS,
        *,
        note: Any = "",
        final: bool = False,
        delay: float | None = None,
        following: OwedTask | None = None,
        reason: str = "no",
        error: Document | None = None,
    ) -> None:
        """End a run; its handler ends first."""
        ends = {RunStatus.SUCCESS: "end", RunStatus.FAIL: "raised", RunStatus.CANCELED: "cancelled"}
        if note is not None:
            self.note(note or ends[status], task_id, run_id)
        delay_ms = None if delay is None else round(delay * 1000)
        outcome = Outcome(
            task_id, run_id, status, reason=reason, final=final, delay_ms=delay_ms, jitter=0.5, next=following
        )
        outcome.error = error
        self.apply(task_id, finish([outcome], instant(self.now)))

    def next_of(self, task_id: str, run_id: str, **options: Any) -> OwedTask:
        """Return the task as which a run wants to go on, and have its handler say so."""
        self.note("next", task_id, run_id)
        before = StoredTask.model_validate(self.document(task_id))
        return Next("quick", None, **{**_SHORT, **options}).prepare(before, run_id=run_id)

    def owe(self, parent_id: str, *steps: str) -> list[str]:
        """Let a step owe children; return their ids."""
        parent = StoredTask.model_validate(self.document(parent_id))
        assert parent.flow is not None
        ancestors = [*parent.flow.ancestors, parent_id]
        children = [
            OwedTask(
                {
                    **_fixed(f"quick:{parent.flow.key}/{step}"),
                    "flow": flow_part(parent, step=step, ancestors=ancestors),
                }
            )
            for step in steps
        ]
        self.apply(parent_id, statements.add(children, instant(self.now)))
        return [child.task_id for child in children]

    def publish_owed(self, owner_id: str) -> list[str]:
        """Publish what a task owes, and take it out, with the mark; return the ids."""
        owner = self.document(owner_id)
        for document in owner["owed_tasks"]:
            self.insert(document)
        task_ids = [document["_id"] for document in owner["owed_tasks"]]
        self.apply(owner_id, statements.added(task_ids, owner["owed_since"], instant(self.now)))
        return task_ids

    def add(self, parent_id: str, run_id: str, *steps: str) -> list[str]:
        """Have a handler add children to its step, and be told so; return their ids."""
        self.owe(parent_id, *steps)
        task_ids = self.publish_owed(parent_id)
        self.note("added", parent_id, run_id, detail=task_ids)
        return task_ids

    def deposit(self, task_id: str, run_id: str) -> None:
        """Write an effect and the SUCCESS in one transaction, whose session is named first."""
        self.ping(task_id, run_id, session_id=self.fresh("session"))
        worker_id = self.note("written", task_id, run_id).worker_id
        self.effects.append({"task_id": task_id, "run_id": run_id, "worker_id": worker_id})
        self.finish(task_id, run_id)

    def settle(self, task_id: str) -> None:
        """Close what has lapsed."""
        self.apply(task_id, pipelines.settle(instant(self.now)))

    def done(self, name: str = "quick", worker_id: str = "w1", **options: Any) -> str:
        """Make a task that succeeds at once; return its id."""
        task_id = self.publish(name, **options)
        self.wait(0.02)
        run_id = self.claim(task_id, worker_id)
        self.wait(0.1)
        if name.startswith("deposit"):
            self.deposit(task_id, run_id)
        else:
            self.finish(task_id, run_id)
        self.wait(0.1)
        return task_id

    def running(self, name: str = "slow", **options: Any) -> tuple[str, str]:
        """Publish a task and claim it; return its id and the run_id."""
        task_id = self.publish(name, **options)
        self.wait(0.1)
        return task_id, self.claim(task_id)

    # --- what no engine does --------------------------------------------------------------------------------------

    def rewrite(self, task_id: str, runs: list[Document], counted: int = 0) -> None:
        """Replace the runs, and derive: an engine that follows the rules, and writes what it should not."""
        failed_cnt = {"$add": ["$task_state.failed_cnt", counted]}
        change = {"task_state.worker_states": x.literal(runs), "task_state.failed_cnt": failed_cnt}
        self.apply(task_id, [{"$set": change}, *derive.derive(instant(self.now))])

    def runs(self, task_id: str) -> list[Document]:
        """Return a task's runs as they are now."""
        runs: list[Document] = self.document(task_id)["task_state"]["worker_states"]
        return runs

    def change_run(self, task_id: str, **fields: Any) -> None:
        """Change a task's first run, and nothing else."""
        first, *others = self.runs(task_id)
        self.set(task_id, task_state__worker_states=[{**first, **fields}, *others])

    def set(self, task_id: str, **fields: Any) -> None:
        """Set fields by hand, `__` for a dot."""
        self.apply(task_id, [{"$set": {name.replace("__", "."): x.literal(value) for name, value in fields.items()}}])

    # --- records ----------------------------------------------------------------------------------------------

    def note(
        self,
        event: Any,
        task_id: str,
        run_id: str,
        worker_id: str | None = None,
        detail: Sequence[str] = (),
        pid: int = WORKER,
    ) -> Note:
        """Have a handler note something."""
        run = self.run(task_id, run_id) or {"worker_id": worker_id or "w1", "attempt": 1}
        note = Note(event, task_id, run_id, run["worker_id"], run["attempt"], pid, self.now + 0.001, list(detail))
        self.notes.append(note)
        return note

    def insert(self, document: Document) -> None:
        """Insert a task as it is."""
        self.tasks.insert_one(document)
        self._record(document["_id"], document)

    def document(self, task_id: str) -> Document:
        """Return a task as it is now."""
        document = self.tasks.find_one({"_id": task_id})
        assert document is not None
        return document

    def run(self, task_id: str, run_id: str) -> Document | None:
        """Return a run as it is now."""
        document = self.tasks.find_one({"_id": task_id}) or {"task_state": {"worker_states": []}}
        return next((run for run in document["task_state"]["worker_states"] if run["run_id"] == run_id), None)

    def apply(self, task_id: str, pipeline: Pipeline) -> Document:
        """Make a change, and record its version."""
        document = self.tasks.find_one_and_update({"_id": task_id}, pipeline, return_document=ReturnDocument.AFTER)
        assert document is not None
        self._record(task_id, document)
        return document

    def _record(self, task_id: str, document: Document) -> None:
        seen = deepcopy(document)
        seen.pop("params", None)
        for run in seen["task_state"]["worker_states"]:
            run.pop("returns", None)
        self.versions.append(Version(task_id, instant(self.now + _TAKES - self.log_lag), seen))

    def write(self, history: History) -> History:
        """Write it all down, as a run under faults leaves it behind."""
        facts = {
            "epoch": EPOCH.timestamp(),
            "started": 0.0,
            "drained_at": self.now + 1.0,
            "stopped_at": self.now + 2.0,
            "observer_gaps": 0,
            **self.facts,
        }
        history.facts_path.write_text(json.dumps(facts))
        ledgers: dict[Path, Sequence[Call | Note | Fault]] = {
            history.calls_path("p1"): self.calls,
            history.notes_path(WORKER): self.notes,
            history.faults_path: self.faults,
        }
        for path, records in ledgers.items():
            ledger = Ledger(path)
            ledger.write_all(records)
            ledger.close()
        versions = [
            {"_id": version.task_id, "at": version.at}
            | ({} if version.document is None else {"document": version.document})
            for version in self.versions
        ]
        for path, entries in {
            history.versions_path: versions,
            history.documents_path: list(self.tasks.find()) if self.documents is None else self.documents,
            history.effects_path: self.effects,
            history.places_path: self.places,
        }.items():
            path.write_bytes(b"".join(bson.encode(entry) for entry in entries))
        for worker, lines in self.logs.items():
            (history.folder / f"{worker}.log").write_text("\n".join(lines))
        return history
