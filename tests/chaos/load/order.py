"""The tasks of the queues whose order is judged: long backlogs behind limits, and what is to go before them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from mtask import TaskSpec

#: Queues with a limit on runs at once, with a limit on starts in a window, and with fair turns and limit_keys.
SHARED, METERED, FAIRLY = "shared", "metered", "fairly"
ORDERED = (SHARED, METERED, FAIRLY)
#: The handlers of the first queue. Each is in one of two apps.
OURS, THEIRS = "ours", "theirs"
QUEUES: Mapping[str, str] = {OURS: SHARED, THEIRS: SHARED, METERED: METERED, FAIRLY: FAIRLY}
#: The arguments of `client.limit`. So few start that the backlogs last for the most part of a run.
LIMITS: Mapping[str, Mapping[str, Any]] = {
    SHARED: {"concurrency": 2},
    METERED: {"rate": (5, 1.0)},
    FAIRLY: {"concurrency": 2, "key_concurrency": 1},
}
FAIR = frozenset({FAIRLY})
#: What a nemesis makes of these limits for a while.
OTHER_LIMITS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    SHARED: ({"concurrency": 1}, {"concurrency": 4}, {"concurrency": 2, "rate": (5, 1.0)}),
    METERED: ({"rate": (2, 0.5)}, {"rate": (10, 2.0), "concurrency": 2}),
    FAIRLY: ({"concurrency": 3, "tenant_concurrency": 1}, {"rate": (5, 1.0)}),
}
#: With these, the rest of the backlogs is done soon.
WIDE: Mapping[str, Any] = {"concurrency": 50}
#: Which worker has which app.
APPS: Mapping[str, str] = {"w1": "app", "w2": "sibling", "w3": "app", "w4": "app", "w5": "sibling"}
#: Tasks that wait in each queue from the beginning.
BACKLOG, BACKLOG_ONCE = 5_000, 200
#: Tasks in one call.
_CALL = 500


def backlog(seed: int, count: int, patient: Mapping[str, Any]) -> Iterator[list[TaskSpec]]:
    """Yield the tasks that wait from the beginning, in batches."""
    for queue in ORDERED:
        random = Random(f"{seed}/{queue}")
        made = []
        for number in range(count):
            name = random.choice((OURS, THEIRS)) if queue == SHARED else queue
            # The first tenant has most of the tasks, and the others wait for its turns.
            options = {**patient, **own_options(random, name), "priority": random.choice((0, 0, 0, 1))}
            made.append(TaskSpec(name, params_of(random), key=f"backlog/{number}", queue=queue, **options))
        for first in range(0, count, _CALL):
            yield made[first : first + _CALL]


def params_of(random: Random) -> dict[str, Any]:
    """Return the params of a task of these queues: most of them are quick."""
    return {"seconds": random.choice((0.0, 0.2, 0.4)), "failures": int(random.random() < 0.03)}


def own_options(random: Random, name: str) -> dict[str, Any]:
    """Return what decides when a task of these queues starts, beside its priority."""
    options: dict[str, Any] = {}
    if name == FAIRLY:
        options["tenant"] = random.choice(("acme", "acme", "acme", "beta", None))
        options["limit_key"] = random.choice((None, "k", "l"))
    if random.random() < 0.1:
        options["specific_worker_ids"] = [random.choice([worker for worker, app in APPS.items() if serves(app, name)])]
    return options


def urgent_options(random: Random) -> dict[str, Any]:
    """Return the options of a task that comes amid the backlog: some go before it, at once or after a delay."""
    options: dict[str, Any] = {"priority": random.choice((0, 5, 100))}
    if random.random() < 0.3:
        options["delay"] = random.choice((0.5, 3.0, 12.0))
    return options


def serves(app: str, name: str) -> bool:
    """Whether an app has a handler of this name."""
    return name != (THEIRS if app == "app" else OURS)
