"""The load: what a publisher asks for, as a pure function of seed, publisher and number, so that it can be repeated.

A publisher asks in batches. What it does after a batch (cancel, update, publish again, retry) is decided by the same
seed, so that one that was killed goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from mtask import TaskSpec
from mtask.kernel.document.identity import stored_key
from tests.chaos.load.order import QUEUES, own_options, params_of, urgent_options

Operation = Literal["publish", "update", "cancel", "retry", "rerun", "gather"]

#: The queue of all handlers but those that have one of their own.
QUEUE = "load"
#: The handlers of what is limited, paused and scheduled; each has a queue of its own, of the same name.
LIMITED, PAUSABLE, TICK = "limited", "pausable", "tick"
#: The handlers whose tasks always fail, as they abort their transaction, and that never do, though they fork.
ABORTING, FORKING = "aborting", "forking"
#: The tenants to which some tasks belong.
_TENANTS = (*[None] * 8, "acme", "beta")
#: The tasks that tell how slow the machine is, and their queue. Nothing goes before them.
PROBE = "probe"
LIMIT_KEY = "k"
#: The queue in which chains of tasks end.
ARRIVALS = "arrivals"

#: The handlers of tasks that gather calls, the ways in which calls gather, and for how many batches each task is.
RENEWED, COLLECTED = "renewed", "collected"
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "again": {"if_running": "again"},
    "list": {"collect": True},
    "late": {"debounce": 0.6, "max_wait": 2.0},
}
_GATHER_BATCHES = 20

#: Tasks per call of publish_many.
BATCH = 40

#: A lease short enough that a killed worker's tasks are rescued many times in a run.
SHORT: dict[str, Any] = {"ping_interval": 1, "worker_timeout": 4, "retry_delay": 0.2}
#: A lease longer than the horizon of discovery: workers hear of its end from their scans alone.
_LONG: dict[str, Any] = {"worker_timeout": 12}
#: A task that faults hit often must not use its tries up: what ends as FAIL is what is meant to.
PATIENT: dict[str, Any] = {**SHORT, "max_retries": 50}
#: A task that waits behind no backlog, so that its rounds follow each other.
URGENT: dict[str, Any] = {**PATIENT, "priority": 10}
#: Such a task whose lease is longer than the time in which the death of its executor must be told.
LONG: dict[str, Any] = {**URGENT, **_LONG}


@dataclass(frozen=True, slots=True)
class Deed:
    """Something that the publisher does to a task that it published."""

    operation: Operation
    number: int


def key_of(publisher: str, number: int) -> str:
    """Return the key of a publisher's task."""
    return f"{publisher}/{number}"


def specs(seed: int, publisher: str, batch: int, workers: list[str], database: str) -> list[TaskSpec]:
    """Return the tasks of one batch, the same whenever it is asked for."""
    first = batch * BATCH
    return [
        _spec(Random(f"{seed}/{publisher}/{n}"), publisher, n, workers, database) for n in range(first, first + BATCH)
    ]


def _spec(random: Random, publisher: str, number: int, workers: list[str], database: str) -> TaskSpec:
    key = key_of(publisher, number)
    kind = random.choices(*zip(*_SHARES.items(), strict=True))[0]
    extra: dict[str, Any] = {**PATIENT, "priority": random.choice((0, 0, 0, 5))}
    if random.random() < 0.05:
        extra["delay"] = random.uniform(0.5, 5.0)
    params: dict[str, Any]
    match kind:
        case "quick" | "plain" | "loud":
            params = {"value": number}
            if (tenant := random.choice(_TENANTS)) is not None:
                extra["tenant"] = tenant
            if random.random() < 0.5:
                extra |= _LONG
        case "forking":
            params = {}
        case "aborting":
            params = {"database": database}
            extra["max_retries"] = random.randint(0, 2)
        case "slow" | "slow_plain":
            params = {"seconds": round(random.uniform(0.3, 5.0), 2)}
        case "isolated" | "isolated_async":
            params = {"seconds": random.choice((0.0, 0.1, 0.3, 2.0))}
            if random.random() < 0.5:
                extra |= _LONG
        case "team":
            params = {"seconds": round(random.uniform(0.0, 1.0), 2)}
            extra["concurrent_worker_cnt"] = random.choice((2, 3))
            if random.random() < 0.3:
                extra |= {"specific_worker_ids": random.sample(workers, 3), "retry_scope": "worker"}
        case "flaky":
            params = {"failures": random.randint(1, 4), "seconds": round(random.uniform(0.0, 0.3), 2)}
        case "doomed":
            params = {"is_final": random.random() < 0.3}
            extra["max_retries"] = random.randint(0, 2)
        case "limited":
            params = {"seconds": round(random.uniform(0.2, 1.2), 2)}
            if random.random() < 0.5:
                extra["limit_key"] = LIMIT_KEY
        case "pausable":
            params = {"seconds": round(random.uniform(0.0, 0.3), 2)}
        case "relay":
            params = {"left": random.choice((0, 1))}
        case "probe":
            params = {}
            extra["priority"] = 1_000
            extra.pop("delay", None)
        case "ours" | "theirs" | "metered" | "fairly":
            params = params_of(random)
            extra |= {**urgent_options(random), **own_options(random, kind)}
        case _:
            params = {"database": database, "seconds": round(random.choice((0.0, 0.0, 0.5, 2.0)), 2)}
            if kind == "deposit" and random.random() < 0.2:
                params["goes_on"] = True
    return TaskSpec(kind, params, key=key, queue=_OWN_QUEUES.get(kind, QUEUE), **extra)


def task_id_of(spec: TaskSpec) -> str:
    """Return the id under which a task is stored."""
    return f"{spec.task}:{stored_key(spec.tenant, spec.key)}"


#: How often each handler is asked for, per thousand.
_SHARES = {
    "quick": 525,
    "loud": 10,
    "aborting": 5,
    "forking": 2,
    "probe": 25,
    "plain": 200,
    "slow": 15,
    "slow_plain": 5,
    "isolated": 12,
    "isolated_async": 6,
    "team": 30,
    "flaky": 35,
    "doomed": 20,
    "deposit": 25,
    "deposit_plain": 15,
    "deposit_isolated": 8,
    "limited": 12,
    "pausable": 20,
    "relay": 10,
    "ours": 4,
    "theirs": 4,
    "metered": 4,
    "fairly": 8,
}
_OWN_QUEUES: Mapping[str, str] = {LIMITED: LIMITED, PAUSABLE: PAUSABLE, PROBE: PROBE, **QUEUES}


@dataclass(frozen=True, slots=True)
class GatherCall:
    """A call that gathers, under a key that all publishers share."""

    name: str
    key: str
    call_id: str
    seconds: float  #: for which the handler works
    way: Mapping[str, Any]  #: the arguments of `publish` by which it gathers


def gather_calls(seed: int, publisher: str, batch: int) -> list[GatherCall]:
    """Return the calls that come with this batch: a few, one after the other."""
    random = Random(f"{seed}/{publisher}/gather/{batch}")
    calls = []
    for number in range(random.choice((0, 1, 1, 2, 3))):
        way = random.choices(list(_WAYS), (5, 3, 2))[0]
        # Others come after a while: a document remembers the ids of all its calls.
        key = f"{way}/{batch // _GATHER_BATCHES}"
        seconds = round(random.choice((0.0, 0.2, 1.0, 2.5)), 2)
        name = COLLECTED if way == "list" else RENEWED
        calls.append(GatherCall(name, key, f"{publisher}-{batch}-{number}", seconds, _WAYS[way]))
    return calls


def deeds(seed: int, publisher: str, batch: int) -> list[Deed]:
    """Return what is done to earlier tasks after this batch: now and then one of each kind."""
    random = Random(f"{seed}/{publisher}/deeds/{batch}")
    newest = (batch + 1) * BATCH
    chosen: list[Deed] = []
    for operation, share in _DEEDS.items():
        if random.random() < share:
            recent = max(0, newest - 10 * BATCH)
            chosen.append(Deed(operation, random.randrange(recent, newest)))
    return chosen


_DEEDS: dict[Operation, float] = {
    "publish": 0.10,
    "update": 0.10,
    "cancel": 0.10,
    "retry": 0.05,
    "rerun": 0.05,
}
