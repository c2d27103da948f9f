"""Task documents for the parity properties: every option, every kind of run, around one fixed instant.

A document takes some hundred choices. They are made by a random number generator with one drawn seed: that is a hundred
times as fast as to have hypothesis draw each of them, and properties compare many documents in a round trip.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, TypeVar

from hypothesis import strategies as st

from mtask.kernel.document.options import MAX_DURATION_MS, STORED_OPTIONS
from mtask.kernel.document.status import FINAL_STATUSES, RunStatus, TaskStatus
from mtask.kernel.document.task import Task

Document = dict[str, Any]
T = TypeVar("T")

#: MTASK_TEST_FUZZ=50 takes fifty times as many examples as a usual run, and makes those that fail as small as it can.
SCALE = int(os.environ.get("MTASK_TEST_FUZZ", "1"))
#: Far ahead, so that the TTL index leaves alone what the properties write.
NOW = datetime(2100, 1, 1, 12, 0, 0, 500_000, tzinfo=UTC)
WORKERS = ["w1", "w2", "$w3", "w4.5", "worker {6}"]
_RETRIES = [-1, -1, 0, 1, 2, 3]
_SHOWN = 3

#: What a handler told of its progress; mostly nothing.
PROGRESS: list[Document | None] = [
    None,
    None,
    {"fraction": 0.5},
    {"message": "$name"},
    {"fraction": 1.0, "message": "all"},
]


#: Draws generators with a seed. A failure is repeated as it was, and not made smaller.
_SEEDED = st.integers(0, 2**64 - 1).map(Random)


def made(make: Callable[[Random], T]) -> st.SearchStrategy[T]:
    """Draw what this function makes of a random number generator.

    If each choice of the generator is drawn, many examples are alike. So half of them have a seed.
    """
    if SCALE > 1:
        return st.one_of(st.randoms(use_true_random=False), _SEEDED).map(make)
    return st.randoms(use_true_random=True).map(lambda drawn: make(Random(drawn.getrandbits(64))))


def randoms() -> st.SearchStrategy[Random]:
    """Draw a random number generator."""
    return made(lambda random: random)


class Batch(list[T]):
    """Cases for one round trip. A property that fails says of which one; all of them would be hundreds of kilobytes."""

    def __repr__(self) -> str:
        return super().__repr__() if len(self) <= _SHOWN else f"<{len(self)} cases>"


def many(make: Callable[[Random], T], size: int) -> st.SearchStrategy[list[T]]:
    """Draw up to this number of what the function makes.

    It is slow to draw each choice, so then there are few of them. Half of the examples are as in a usual run.
    """

    def batch(random: Random) -> list[T]:
        return Batch(make(random) for _ in range(random.choice([1, 2, size, size, size])))

    if SCALE > 1:
        return st.one_of(st.lists(made(make), min_size=1, max_size=min(size, 10)), _SEEDED.map(batch))
    return made(batch)


def instant(random: Random) -> datetime:
    """Make an instant: one that meets others in many cases, the present among them, or any."""
    common = [-60_000, -1000, -1, 0, 0, 1, 1000, 60_000]
    offset = random.choice(common) if random.random() < 0.5 else random.randint(-100_000, 100_000)
    return NOW + timedelta(milliseconds=offset)


def earlier(random: Random) -> datetime:
    return NOW - timedelta(milliseconds=random.choice([1, 1000, 50_000]))


def whole(random: Random, low: int, high: int) -> int:
    """Make a whole number: at an end of the range, near a power of two, or any."""
    if random.random() < 0.7:
        return random.randint(low, high)
    near_power = (1 << random.randrange(high.bit_length())) + random.choice([-1, 0, 1])
    return min(max(low, random.choice([low, low + 1, high - 1, high, near_power, near_power])), high)


def option(random: Random, *, is_ordinary: bool = True) -> Document:
    """Make a task_option; an ordinary one has durations with which dates stay dates."""
    longest = 600_000 if is_ordinary else MAX_DURATION_MS

    def duration() -> int:
        return random.choice([0, 1, 1000, 1000]) if random.random() < 0.5 else whole(random, 0, longest)

    ping = whole(random, 1, 60_000)
    widest = 500_000 if is_ordinary else None
    drawn = {
        "priority": random.randint(-3, 3),
        "concurrent_worker_cnt": random.choice([1, 1, 2, 3, 4]),
        "ping_interval_ms": ping,
        "worker_timeout_ms": ping + whole(random, 1, 60_000),
        "specific_worker_ids": random.sample(WORKERS, random.randint(0, len(WORKERS))) if random.random() < 0.5 else [],
        "max_unexpected_retries": random.choice(_RETRIES),
        "unexpected_retry_delay_ms": duration(),
        "retry_backoff": random.choice([1, 1.0, 1.1, 1.5, 2, 2.0, 3.7, 1000]),
        "retry_max_delay_ms": widest if random.random() < 0.5 else duration(),
        "retry_scope": random.choice(["task", "worker"]),
        "run_timeout_ms": random.choice([None, 1, 5000]),
        "retain_success_ms": random.choice([None, 0, 1, 86_400_000]),
        "retain_fail_ms": random.choice([None, 0, 1, 86_400_000]),
    }
    assert drawn.keys() == set(STORED_OPTIONS)
    return drawn


def run(random: Random, number: int) -> Document:
    """Make an entry of worker_states; fields that a run may lack are missing, null or there."""
    status = random.choice(list(RunStatus))
    drawn: Document = {
        "run_id": f"run-{number}",
        "worker_id": random.choice(WORKERS),
        "attempt": random.randint(1, 5),
        "status": status.value,
        "claim_time": earlier(random),
        "ping_expire_time": instant(random),
    }
    if status is RunStatus.SUCCESS:
        drawn |= {"success_time": earlier(random), "returns": random.choice([None, "$name", {"$add": [1, 2]}])}
    elif status is not RunStatus.RUNNING:
        drawn |= {"fail_time": earlier(random), "fail_reason": random.choice(["broken", "$key", None])}
        retry = random.choice(["missing", "null", "there"])
        if retry != "missing":
            drawn["retry_time"] = instant(random) if retry == "there" else None
        if status is not RunStatus.TIMEOUT and random.random() < 0.25:
            drawn["final"] = True
    told = random.choice(PROGRESS)
    if told is not None:
        drawn["progress"] = {**told, "time": earlier(random)}
    if random.random() < 1 / 3:
        drawn["session_id"] = random.choice(["6a3f", "$name"])
    # No live run is ever of an earlier round: run_again leaves it in the round.
    past = random.choice([None, None, False, True])
    if past is not None:
        drawn["past"] = past and status is not RunStatus.RUNNING
    return drawn


def flow(random: Random) -> Document:
    """Make the part of a document that says for what it waits; a step that was released in half of the cases."""
    after = random.sample(["task:a", "task:$b", "task:c"], random.randint(0, 3))
    drawn: Document = {"key": "$flow", "step": "k", "after": after}
    drawn["on_failed"] = random.choice(["cancel", "run", "fail"])
    optional = {
        "fail_fast": random.random() < 0.5,
        "delay_ms": random.choice([0, 1, 70_000]),
        "release_time": instant(random),
        "held_by": random.choice(["task:a", "$held"]),
        "ancestors": ["task:z"],
        "has_children": True,
        "unwatched": random.random() < 0.8,
        "end_time": earlier(random),
    }
    return drawn | {name: value for name, value in optional.items() if random.random() < 0.5}


def callback(random: Random) -> Document:
    """Make a callback, with ends that are still to be told in some cases."""
    on = random.sample(["SUCCESS", "FAIL", "CANCELED"], random.randint(1, 3))
    drawn: Document = {"callback": {"url": "https://$host/$$NOW", "on": on}}
    if random.random() < 0.5:
        drawn["callback"] |= {"secret": "shop/a", "tenant": "shop"}
    if random.random() < 0.5:
        drawn["callback_cnt"] = random.randint(0, 3)
    if random.random() < 0.5:
        owed = {"status": "FAIL", "time": earlier(random), "url": "https://former"}
        drawn["callback_owed"] = [{"number": 1 + place, **owed} for place in range(random.choice([1, 2, 99, 100]))]
    return drawn


def mark(random: Random) -> Document:
    """Make the place of a call in the order of calls. Many are equal, or differ in one part only."""
    return {"asked_time": instant(random), "call_id": random.choice(["a", "b", "$c", "d"])}


def gathering(random: Random, kind: str | None = None) -> Document:
    """Make the calls that a round has gathered."""
    kind = kind or random.choice(["latest", "calls"])
    drawn: Document = {"kind": kind, "newest": mark(random), "first_time": instant(random)}
    optional: Document = {"consumed": mark(random), "debounce_ms": random.choice([0, 1, 1000, 70_000])}
    if "debounce_ms" in optional and random.random() < 0.5:
        optional["max_wait_ms"] = random.choice([0, 1000, 90_000])
    if kind == "calls":
        drawn["ids"] = [f"id-{number}" for number in range(random.randint(1, 3))]
        optional |= {"seen": ["a", "old"], "full": True}
    else:  # ids that callers chose
        optional |= {"seen": ["b", "old"], "ids": ["a", "other"]}
    drawn |= {name: value for name, value in optional.items() if random.random() < 0.5}
    return drawn


def following(random: Random) -> Document:
    """Make the round that is to follow the present one."""
    gather = gathering(random)
    for field in ("consumed", "seen"):
        gather.pop(field, None)
    collected = {"calls": [{"$literal": number} for number in range(len(gather.get("ids", [])))]}
    drawn: Document = {
        "params": collected if gather["kind"] == "calls" else random.choice([None, "$name", {"a": {"$add": [1, 2]}}]),
        "queue": random.choice(["default", "$other", "third"]),
        "task_option": option(random),
        "gather": gather,
    }
    if random.random() < 0.3:
        drawn["lookup"] = [{"k": "user_id", "v": 7}]
    if random.random() < 0.5:
        drawn["start_time"] = instant(random)
    return drawn


def gathers(random: Random, document: Document) -> Document:
    """Let the task gather calls, and be followed by another round in many cases."""
    if random.random() < 0.8:
        document["gather"] = gathering(random)
        if document["gather"]["kind"] == "calls":
            document["params"] = {"calls": [{"$literal": 1} for _ in document["gather"]["ids"]]}
        elif random.random() < 0.2:
            del document["gather"]["kind"]  # a plain publish has replaced the params
    if random.random() < 0.5:
        document["again"] = following(random)
    if random.random() < 0.3:
        document["lookup"] = [{"k": "order", "v": "$name"}]
    return document


def task(random: Random, max_runs: int = 6) -> Document:
    """Make a document that the validator accepts. Its derived fields are anything: the rules must not lean on them."""
    key = random.choice(["k", "a:b", "$key", "é", "{1}"])
    status = random.choice([*TaskStatus, TaskStatus.INIT, TaskStatus.RUNNING, TaskStatus.RUNNING])
    state: Document = {
        "status": status.value,
        "create_time": earlier(random),
        "failed_cnt": random.randint(0, 4),
        "cancel_requested": random.random() < 1 / 3,
        "worker_states": [run(random, number) for number in range(random.randint(0, max_runs))],
    }
    start = random.choice(["missing", "null", "there"])
    if start != "missing":
        state["start_time"] = instant(random) if start == "there" else None
    expiry = random.choice(["missing", "missing", "null", "there"])
    if expiry != "missing":
        state["not_after"] = instant(random) if expiry == "there" else None
    if status in FINAL_STATUSES:
        if random.random() < 0.5:
            state["finish_time"] = earlier(random)
    else:
        state["next_preempt_time"] = instant(random)
    if random.random() < 0.5:
        state |= {"clean_cnt": random.randint(0, 3), "queue_time": earlier(random)}
        state["former_queues"] = random.sample(["default", "$other", "third"], random.randint(0, 3))
    flow_fields: Document = {}
    if random.random() < 0.3:
        flow_fields["flow"] = flow(random)
        if random.random() < 0.3:
            flow_fields["expire_time"] = instant(random)
        if random.random() < 0.3:
            state["reason"] = "another $task failed"
    elif status is TaskStatus.WAITING:
        state["status"] = "INIT"
    if random.random() < 0.2:
        flow_fields["owed_since"] = instant(random)
        if random.random() < 0.5:
            flow_fields["owed_tasks"] = [{"_id": "task:$owed"}]
    if random.random() < 0.2:
        state["next_id"] = "task:$next"
    if random.random() < 0.2:
        flow_fields["chain"] = {"before": "task:$before", "first": "task:$k", "number": 2}
    if random.random() < 0.3:
        flow_fields |= callback(random)
    drawn = {
        "_id": f"task:{key}",
        **flow_fields,
        "name": "task",
        "key": key,
        "queue": "default",
        "params": random.choice([None, {"$literal": 1}, ["$name"]]),
        "task_option": option(random),
        "task_state": state,
        "schema_version": 1,
    }
    return gathers(random, drawn) if "flow" not in drawn and random.random() < 0.3 else drawn


def options() -> st.SearchStrategy[Document]:
    return made(option)


def numbered(documents: list[Document]) -> list[Document]:
    """Return the documents with keys that differ."""
    return Batch(
        document | {"key": f"{document['key']}/{place}", "_id": f"{document['_id']}/{place}"}
        for place, document in enumerate(documents)
    )


def bare(document: Document) -> Document:
    """Return the document without nulls, empty lists and false values in what it gathers: they mean nothing."""
    made = copy.deepcopy(document)
    for part in (made, made.get("again", {})):
        if part.get("start_time", NOW) is None:
            del part["start_time"]
        if "gather" in part:
            part["gather"] = {
                name: value for name, value in part["gather"].items() if value not in (None, []) and value is not False
            }
    return made


def parsed(document: Document) -> Task:
    """Return the document as the pure rules take it."""
    return Task.model_validate(document)
