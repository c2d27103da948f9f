"""The nemeses: what is done to processes, database, network and handlers, in four tracks that run at the same time.

Each track takes its own nemeses in an order, and with pauses, that come from the seed alone: a run that failed is
repeated by its seed. Within a track one thing is done at a time; a place belongs to one nemesis at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

from tests.faults.fleet import Fleet, State
from tests.faults.links import Direction
from tests.faults.world import World

Nemesis = Callable[[World, Random], None]


@dataclass(frozen=True, slots=True)
class Track:
    """Nemeses that take turns, with pauses (seconds) in between."""

    name: str
    pause: tuple[float, float]
    nemeses: dict[str, Nemesis]


# --- processes ------------------------------------------------------------------------------------------------


def kill_worker(world: World, random: Random) -> None:
    """SIGKILL a worker; it comes back under its worker_id."""
    _kill(world, random, world.workers, "kill worker")


def kill_publisher(world: World, random: Random) -> None:
    """SIGKILL a publisher; it comes back and goes on by its ledger."""
    _kill(world, random, world.publishers, "kill publisher")


def _kill(world: World, random: Random, fleet: Fleet, name: str) -> None:
    down = random.uniform(0.2, 4.0)
    with world.any_place(fleet, random) as place:
        if place is not None:
            with world.fault(name, place.name):
                place.kill()
                world.wait(down)
                place.start()


def kill_all_workers(world: World, random: Random) -> None:
    """SIGKILL the whole fleet of workers at once, as a power cut does."""
    down = random.uniform(0.2, 2.0)
    held = [place for place in world.workers.places if place.lock.acquire(blocking=False)]
    try:
        with world.fault("kill all workers", " ".join(place.name for place in held)) as episode:
            episode.detail["is_fleet_away"] = True
            for place in held:
                place.kill()
            world.wait(down)
            for place in held:
                place.start()
            world.wait_working(held)
    finally:
        for place in held:
            place.lock.release()


def freeze_worker(world: World, random: Random) -> None:
    """SIGSTOP a worker beyond its leases, then SIGCONT."""
    frozen = random.uniform(5.0, 9.0)
    with world.any_place(world.workers, random) as place:
        if place is not None:
            with world.fault("freeze worker", place.name):
                place.freeze()
                world.wait(frozen)
                place.thaw()


def freeze_publisher(world: World, random: Random) -> None:
    """SIGSTOP a publisher for a while."""
    frozen = random.uniform(2.0, 8.0)
    with world.any_place(world.publishers, random) as place:
        if place is not None:
            with world.fault("freeze publisher", place.name):
                place.freeze()
                world.wait(frozen)
                place.thaw()


def rolling_restart(world: World, random: Random) -> None:
    """Restart all workers one after the other, in good order, as a deployment does."""
    names = [place.name for place in world.workers.places]
    random.shuffle(names)
    with world.fault("rolling restart", " ".join(names)) as episode:
        codes = {}
        for name in names:
            place = world.workers[name]
            with place.lock:
                if place.state == State.UP and place.pid is not None:
                    codes[name] = place.stop()
                    place.start()
            world.wait(0.5)
        episode.detail["exit_codes"] = codes


# --- the database ---------------------------------------------------------------------------------------------


def kill_primary(world: World, random: Random) -> None:
    """SIGKILL the primary; start it again when another one has been elected."""
    down = random.uniform(0.5, 5.0)
    node = world.replica_set.primary()
    with world.fault("kill primary", node.address, is_database_away=True) as episode:
        world.replica_set.kill(node)
        episode.detail["elected_at"] = world.elected(other_than=node)
    with world.fault("one member down", node.address):
        world.wait(down)
        world.replica_set.restart(node)


def step_down(world: World, random: Random) -> None:
    """Make the primary give up its role."""
    node = world.replica_set.primary()
    with world.fault("step down", node.address, is_database_away=True) as episode:
        world.replica_set.step_down(timedelta(seconds=random.randint(3, 8)))
        episode.detail["elected_at"] = world.elected(other_than=node)


def freeze_primary(world: World, random: Random) -> None:
    """SIGSTOP the primary until another one has been elected, and a while longer."""
    frozen = random.uniform(1.0, 5.0)
    node = world.replica_set.primary()
    try:
        with world.fault("freeze primary", node.address, is_database_away=True) as episode:
            world.replica_set.pause(node)
            episode.detail["elected_at"] = world.elected(other_than=node)
        with world.fault("one member frozen", node.address):
            world.wait(frozen)
    finally:
        world.replica_set.resume(node)


def restart_all(world: World, random: Random) -> None:
    """SIGKILL all members at once, and start them again."""
    down = random.uniform(0.2, 4.0)
    with world.fault("kill all members", is_database_away=True) as episode:
        for node in world.replica_set.nodes:
            world.replica_set.kill(node)
        world.wait(down)
        for node in world.replica_set.nodes:
            world.replica_set.restart(node)
        episode.detail["elected_at"] = world.elected()


def kill_cursors(world: World, random: Random) -> None:
    """Kill the change streams of all workers."""
    with world.fault("kill cursors") as episode:
        episode.detail["cursors"] = world.kill_streams()


def fail_claims_and_pings(world: World, random: Random) -> None:
    """Make single claims and pings fail, in the server."""
    _fail_commands(world, random, "fail claims and pings", ["findAndModify"])


def fail_finishes(world: World, random: Random) -> None:
    """Make finishes, and claims and pings in groups, fail in the server."""
    _fail_commands(world, random, "fail finishes and groups", ["update"])


def fail_transactions(world: World, random: Random) -> None:
    """Make the commits of handlers' transactions fail."""
    _fail_commands(world, random, "fail commits", ["commitTransaction"])


def fail_streams(world: World, random: Random) -> None:
    """Make opening and reading the change streams fail, as if what lies behind their tokens were gone."""
    with world.fault("fail streams") as episode:
        commands = random.choice((["getMore"], ["aggregate"], ["getMore", "aggregate"]))
        code = random.choice((286, 280, 43, 91))  # history lost, fatal error, cursor not found, shutdown
        app_name = f"mtask-worker:{random.choice(world.workers.places).name}"
        episode.detail |= {"commands": commands, "error_code": code, "app_name": app_name}
        world.fail(commands, random.uniform(0.5, 4.0), error_code=code, app_name=app_name)


def fail_publishes(world: World, random: Random) -> None:
    """Make publishes fail: before the write, after it, or without an answer."""
    _fail_commands(world, random, "fail publishes", ["insert"], app_name="mtask")


def _fail_commands(world: World, random: Random, name: str, commands: list[str], app_name: str | None = None) -> None:
    app_name = app_name or f"mtask-worker:{random.choice(world.workers.places).name}"
    how: dict[str, Any] = random.choice(_FAILURES)
    with world.fault(name) as episode:
        episode.detail |= {"commands": commands, "app_name": app_name, **how}
        world.fail(commands, random.uniform(0.5, 4.0), app_name=app_name, **how)


#: Refused before the write; applied, but reported as not; the connection closed; late.
_FAILURES: tuple[dict[str, Any], ...] = (
    {"error_code": 91},
    {"error_code": 11600},
    {"error_code": 189},
    {"error_code": 112},
    {"write_concern_code": 91},
    {"close_connection": True},
    {"block_ms": 1500},
)


# --- the network between one worker and the database --------------------------------------------------------------


def cut(world: World, random: Random) -> None:
    """Reset all connections, a few times in a row."""
    with world.fault("cut connections", PROXIED) as episode:
        count = 0
        for _ in range(random.randint(1, 4)):
            count += world.proxy.cut()
            world.wait(random.uniform(0.05, 0.5))
        episode.detail["connections"] = count


def refuse(world: World, random: Random) -> None:
    """Reset all connections and refuse new ones, for longer than a lease."""
    with world.fault("refuse connections", PROXIED), _healing(world):
        world.proxy.refuse()
        world.wait(random.uniform(1.0, 8.0))


def delay(world: World, random: Random) -> None:
    """Deliver everything late."""
    seconds = random.choice((0.02, 0.1, 0.4))
    with world.fault("delay messages", PROXIED) as episode, _healing(world):
        world.proxy.delay(seconds, jitter=seconds)
        episode.detail["seconds"] = seconds
        world.wait(random.uniform(3.0, 8.0))


def drop_replies(world: World, random: Random) -> None:
    """Lose replies after the server has applied the write: of claims, of finishes, of pings, of any."""
    text = random.choice((b"claim_time", b"success_time", b""))
    with world.fault("drop replies", PROXIED) as episode, _healing(world):
        loss = world.proxy.drop_replies(share=random.choice((0.05, 0.3)), text=text)
        world.wait(random.uniform(3.0, 6.0))
        episode.detail |= {"text": text.decode(), "replies": len(loss.dropped)}


def black_hole(world: World, random: Random) -> None:
    """Hold connections half open: what is sent in one direction, or in both, is swallowed."""
    direction: Direction = random.choice(("both", "requests", "replies"))
    with world.fault("half-open connections", PROXIED) as episode, _healing(world):
        world.proxy.black_hole(direction)
        episode.detail["direction"] = direction
        world.wait(random.uniform(2.0, 9.0))


@contextmanager
def _healing(world: World) -> Iterator[None]:
    try:
        yield
    finally:
        world.proxy.heal()


#: The worker that reaches the database through the proxy.
PROXIED = "w3"


# --- handlers -------------------------------------------------------------------------------------------------


def hog(world: World, random: Random) -> None:
    """Have a handler block its worker's event loop, for longer than its lease."""
    seconds = round(random.uniform(4.5, 7.0), 1)
    with world.fault("hog") as episode:
        episode.detail["task_id"] = world.publish("hog", {"seconds": seconds}, **_SHORT)
        world.wait(seconds)


def killer(world: World, random: Random) -> None:
    """Publish a task that kills every worker that runs it, until its tries are used up."""
    tries = random.choice((0, 1))
    with world.fault("killer task") as episode:
        episode.detail["task_id"] = world.publish("killer", {}, max_unexpected_retries=tries, **_SHORT)
        world.wait(5.0 * (tries + 1))


_SHORT = {"ping_interval_ms": 1000, "worker_timeout_ms": 4000, "unexpected_retry_delay_ms": 200}

TRACKS = (
    Track(
        "processes",
        (1.0, 5.0),
        {
            "kill worker": kill_worker,
            "freeze worker": freeze_worker,
            "kill publisher": kill_publisher,
            "freeze publisher": freeze_publisher,
            "rolling restart": rolling_restart,
            "kill all workers": kill_all_workers,
        },
    ),
    Track(
        "database",
        (3.0, 10.0),
        {
            "kill primary": kill_primary,
            "step down": step_down,
            "freeze primary": freeze_primary,
            "kill all members": restart_all,
            "kill cursors": kill_cursors,
            "fail claims and pings": fail_claims_and_pings,
            "fail finishes and groups": fail_finishes,
            "fail commits": fail_transactions,
            "fail streams": fail_streams,
            "fail publishes": fail_publishes,
        },
    ),
    Track(
        "network",
        (4.0, 12.0),
        {
            "cut connections": cut,
            "refuse connections": refuse,
            "delay messages": delay,
            "drop replies": drop_replies,
            "half-open connections": black_hole,
        },
    ),
    Track("handlers", (8.0, 20.0), {"hog": hog, "killer task": killer}),
)


#: Pauses are that much shorter where each nemesis has one turn only.
_HASTE = 0.25


def names() -> list[str]:
    """Return all nemeses by name."""
    return [name for track in TRACKS for name in track.nemeses]


def unleash(world: World, seed: int, minutes: float, only: Sequence[str], is_once: bool) -> None:
    """Let them do their work for so long, or each once; return when all is mended. Raise what a nemesis raised."""
    errors: list[BaseException] = []

    def run(track: Track) -> None:
        try:
            random = Random(f"{seed}/{track.name}")
            for name in order(track, random, only, is_once):
                world.wait(random.uniform(*track.pause) * (_HASTE if is_once else 1.0))
                if world.is_over.is_set():
                    return
                track.nemeses[name](world, Random(random.random()))
        except BaseException as error:
            errors.append(error)
            world.is_over.set()

    threads = [threading.Thread(target=run, args=(track,), name=f"nemesis-{track.name}") for track in TRACKS]
    for thread in threads:
        thread.start()
    if not is_once:
        world.wait(minutes * 60)
        world.is_over.set()
    for thread in threads:
        thread.join()
    world.is_over.set()
    if errors:
        raise errors[0]


def order(track: Track, random: Random, only: Sequence[str], is_once: bool) -> Iterator[str]:
    """Yield the names in the order of their turns: all of a track, shuffled, round after round."""
    chosen = [name for name in track.nemeses if not only or name in only]
    while chosen:
        random.shuffle(chosen)
        yield from chosen
        if is_once:
            return
