"""Documents that no validator saw, changed at random: each fails clearly or is left alone, and disturbs nothing."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest
from bson import DBRef
from bson.datetime_ms import DatetimeMS
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pymongo.errors import WriteError

from mtask import App
from mtask.kernel.document import rules
from mtask.kernel.document.status import FINAL_STATUSES
from mtask.kernel.document.task import StoredTask
from mtask.kernel.driver.errors import NOT_STORABLE
from tests.faults import changing, fuzzing
from tests.faults.fuzzing import LIMIT, PATIENCE, Lab, fuzz
from tests.faults.malformed import good
from tests.mongo import Client, Document, until

pytestmark = pytest.mark.timeout(LIMIT)
T = TypeVar("T")
app = App()
_numbers = itertools.count()
_AGO = datetime(2024, 1, 1, tzinfo=UTC)


@app.task
async def noop() -> None:
    """Do nothing."""


_gates: list[asyncio.Event] = []


@app.task
async def hold() -> None:
    """Do nothing until the gate opens."""
    await _gates[-1].wait()


@pytest.fixture
def lab(mongo_uri: str, database_name: str, mongo: Client) -> Iterator[Lab]:
    with Lab(mongo_uri, database_name, mongo, app) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Changed:
    """A document, and what was done to it."""

    document: Document
    changes: list[str]


class Batch:
    """Documents that are told one by one where they fail, and not each time."""

    def __init__(self, documents: list[Changed]) -> None:
        self.documents = documents

    def __repr__(self) -> str:
        return f"{len(self.documents)} documents"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))


class _Drawn:
    """What Hypothesis chooses."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def of(self, options: Sequence[T]) -> T:
        chosen: T = self._draw(st.sampled_from(options))
        return chosen

    def value(self) -> Any:
        return self._draw(fuzzing.values)

    def name(self) -> str:
        drawn: str = self._draw(fuzzing.field_names)
        return drawn


@st.composite
def changed_documents(draw: st.DrawFn) -> Changed:
    """Draw a task's document with one to three things wrong, or nothing at all; or one in which nothing is right."""
    status, runs = draw(st.sampled_from(changing.STATES))
    choice, key = _Drawn(draw), f"bad-{next(_numbers)}"
    if draw(st.integers(0, 9)) == 0:
        return Changed(changing.anything(choice, key), ["anything"])
    document = changing.in_state(key, status, runs)
    number = draw(st.sampled_from([0, 1, 1, 1, 1, 2, 3]))
    return Changed(document, [status, *(changing.change(choice, document) for _ in range(number))])


def _state_of(document: Document) -> Any:
    state = document.get("task_state")
    return dict(state.as_doc()) if isinstance(state, DBRef) else state  # an object with $ref and $id, on the server


def _status_of(document: Document) -> Any:
    state = _state_of(document)
    return state.get("status") if isinstance(state, dict) else None


def _is_final(document: Document) -> bool:
    return _status_of(document) in [*FINAL_STATUSES]


def _in(wanted: str, value: Any) -> bool:
    """Whether MongoDB takes the value for the wanted text, or for none at all."""
    return value is None or value == wanted or (isinstance(value, list) and (wanted in value or None in value))


def _must_be_met(before: Document, now: datetime) -> bool:
    """Whether this worker has to find this malformed document."""
    option, state = before.get("task_option"), before.get("task_state")
    if not isinstance(state, dict):
        return True  # nothing tells that it could wait for another worker, or for its time
    named = option.get("specific_worker_ids", []) if isinstance(option, dict) else []
    due = state.get("next_preempt_time")
    return (
        not _is_final(before)
        and (named == [] or _in("w1", named))
        and isinstance(due, datetime)
        and due <= now
        and _in("noop", before.get("name"))
        and _in("default", before.get("queue"))
    )


def _is_settled(before: Document, after: Document | None) -> bool:
    """Whether the worker has done with this document what it should."""
    now = datetime.now(UTC)
    if after is None:
        return "expire_time" in before  # removed by its retention
    state = _state_of(after)
    reason = ""
    if isinstance(state, dict) and _is_final(after):
        runs = state.get("worker_states")
        if isinstance(runs, list) and runs and isinstance(runs[-1], dict):
            reason = str(runs[-1].get("fail_reason"))
    if "malformed document: " in reason:
        return "next_preempt_time" not in state and len(reason) > len("malformed document: ")
    if not _is_well_formed(before):
        # Left alone; what is derived from the rest may be derived anew, but nothing ends without a word.
        return not _must_be_met(after, now) and (_status_of(after) == _status_of(before) or not _is_final(after))
    if _is_final(after):
        return True
    try:
        task = StoredTask.model_validate(after)
    except ValidationError:
        return False  # it was well-formed, and the engine made it malformed
    if task.name != "noop" or task.queue != "default":
        return True
    moment = rules.preemptable_at(task, "w1", now)
    stored = task.task_state.next_preempt_time
    return moment is None or moment > now or (stored is not None and stored > now)


def _is_well_formed(document: Document) -> bool:
    """Whether the engine takes it for a task: what it derives anew may have been anything."""
    mended = copy.deepcopy(document)
    mended.pop("expire_time", None)
    state = mended.get("task_state")
    if isinstance(state, dict):
        state.pop("finish_time", None)
        if state.get("cancel_requested", ...) is None:
            state["cancel_requested"] = False
        if isinstance(state.get("next_preempt_time"), DatetimeMS) and state["next_preempt_time"] < DatetimeMS(0):
            state["next_preempt_time"] = _AGO
    try:
        StoredTask.model_validate(mended)
    except ValidationError:
        return False
    return True


def _told(changed: Changed, after: Document | None) -> str:
    """Return what is odd about a document, and what became of it."""
    state = after.get("task_state") if after else None
    if isinstance(state, dict):
        runs = state.get("worker_states")
        state = {**state, "worker_states": runs[-1:] if isinstance(runs, list) else runs}
    return f"{changed.changes} became {state}"


async def _serve(
    lab: Lab, batch: Batch, *, is_settled: Callable[[Document, Document | None], bool] = _is_settled
) -> None:
    """Let the worker meet these among good tasks, and see what becomes of each."""
    number = next(_numbers)
    right = [good(f"right-{number}-{place}") for place in range(3)]
    lab.insert(right[:1])
    held = [(changed, before[0]) for changed in batch.documents if (before := lab.insert([changed.document]))]
    lab.insert(right[1:])
    lab.scan()

    def left() -> list[tuple[Changed, Document | None]]:
        lab.assert_well()
        found = [(changed, before, lab.find(before["_id"])) for changed, before in held]
        return [(changed, after) for changed, before, after in found if not is_settled(before, after)]

    def unfinished() -> int:
        lab.assert_well()
        return len(right) - lab.tasks.count_documents(
            {"_id": {"$in": [task["_id"] for task in right]}, "task_state.status": "SUCCESS"}
        )

    await until(lambda: not unfinished(), PATIENCE, f"good tasks beside {[changed.changes for changed, _ in held]}")
    try:
        await until(lambda: not left(), PATIENCE)
    except AssertionError:
        stuck = "\n".join(_told(changed, after) for changed, after in left())
        raise AssertionError(f"not settled:\n{stuck}") from None
    finally:
        lab.tasks.delete_many({})


@fuzz(3, shrink=False)
@given(batch=st.lists(changed_documents(), min_size=15, max_size=30).map(Batch))
def test_worker_gets_over_documents_changed_at_random_and_finishes_the_good_ones(lab: Lab, batch: Batch) -> None:
    lab.run(_serve(lab, batch))


async def _hold(lab: Lab, choice: changing.Choice) -> None:
    """Let the worker hold tasks, change some of them under its hands, and see that the others keep their lease."""
    gate = asyncio.Event()
    _gates.append(gate)
    try:
        await _change_held(lab, choice, gate)
    finally:
        gate.set()
        lab.tasks.delete_many({})


async def _change_held(lab: Lab, choice: changing.Choice, gate: asyncio.Event) -> None:
    number = next(_numbers)
    tasks = [good(f"held-{number}-{place}", name="hold") for place in range(4)]
    for task in tasks:
        task["task_option"] |= {"ping_interval_ms": 100, "worker_timeout_ms": 60_000}
    lab.insert(tasks)
    ids = [task["_id"] for task in tasks]

    def running() -> list[Document]:
        lab.assert_well()
        return list(lab.tasks.find({"_id": {"$in": ids}, "task_state.status": "RUNNING"}).sort("_id", 1))

    await until(lambda: len(running()) == len(ids), PATIENCE, "all held")
    changes = []
    for document in running()[:2]:
        changes.append(changing.change(choice, document, "_id"))
        with suppress(WriteError, *NOT_STORABLE):
            lab.tasks.replace_one({"_id": document["_id"]}, document, bypass_document_validation=True)

    def leases() -> list[datetime]:
        lab.assert_well()
        return [lab.bench.state(task_id)["worker_states"][0]["ping_expire_time"] for task_id in ids[2:]]

    before = leases()

    def are_pinged() -> bool:
        return all(after > lease for after, lease in zip(leases(), before, strict=True))

    await until(are_pinged, PATIENCE, f"the others pinged beside {changes}")
    gate.set()

    def are_done() -> bool:
        lab.assert_well()
        return all(lab.bench.state(task_id)["status"] == "SUCCESS" for task_id in ids[2:])

    await until(are_done, PATIENCE, f"the others done beside {changes}")
    assert all(len(lab.bench.state(task_id)["worker_states"]) == 1 for task_id in ids[2:])
    await until(lambda: not lab.bench.worker.parts.scope.ledger.runs, PATIENCE, f"no run left of {changes}")
    lab.assert_well()


@fuzz(3, shrink=False)
@given(seed=st.integers(0, 2**32))
def test_tasks_changed_at_random_while_they_run_cost_no_other_run_its_lease(lab: Lab, seed: int) -> None:
    # What is changed depends on what the server wrote, which Hypothesis cannot repeat: so it draws the seed alone.
    lab.run(_hold(lab, changing.Chance(seed)))


def test_documents_as_large_as_they_can_be_disturb_nothing(lab: Lab) -> None:
    limit = 16 * 2**20 - 700
    whole, wrong = good("large", params="x" * limit), good("large-and-wrong", params="x" * limit)
    wrong["task_state"]["status"] = 5
    batch = Batch([Changed(whole, ["large"]), Changed(wrong, ["large and wrong"])])
    lab.run(_serve(lab, batch, is_settled=lambda *_: True))
