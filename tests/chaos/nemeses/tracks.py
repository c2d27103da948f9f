"""The nemeses: what is done to processes, database, network, handlers and queues, in tracks that run at the same time.

Each track takes its own nemeses in an order, and with pauses, that come from the seed alone: a run that failed is
repeated by its seed. Within a track one thing is done at a time; a place belongs to one nemesis at a time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from mtask.local import ReplicaSet
from tests.chaos.controls import CONCURRENCY
from tests.chaos.fleet import Place, State
from tests.chaos.judge.executors import KILLING
from tests.chaos.load.order import LIMITS, ORDERED, OTHER_LIMITS
from tests.chaos.load.release import PARAMS, RELEASES, VARIABLE, Release
from tests.chaos.load.tasks import LIMIT_KEY, LIMITED, LONG, PATIENT, PAUSABLE, SHORT
from tests.chaos.nemeses import breaks
from tests.chaos.nemeses.links import Direction
from tests.chaos.world import World
from tests.mongo import eventually

Nemesis = Callable[[World, Random], None]
#: The workers to which a release is deployed, the tasks of each name that come at each, and the time for all of them.
_DEPLOYED_TO, _OF_EACH, _DEPLOYED = 2, 10, 60.0
_Loss = Callable[[ReplicaSet], AbstractContextManager[breaks.Break]]


@dataclass(frozen=True, slots=True)
class Track:
    """Nemeses that take turns, with pauses (seconds) in between."""

    name: str
    pause: tuple[float, float]
    nemeses: dict[str, Nemesis]


# --- processes ------------------------------------------------------------------------------------------------


def kill_worker(world: World, random: Random) -> None:
    """SIGKILL a worker; it comes back under its worker_id."""
    _kill(world, random, world.mortals, "kill worker")


def kill_publisher(world: World, random: Random) -> None:
    """SIGKILL a publisher; it comes back and goes on by its ledger."""
    _kill(world, random, world.publishers.places, "kill publisher")


def _kill(world: World, random: Random, places: Sequence[Place], name: str) -> None:
    down = random.uniform(0.2, 4.0)
    with world.any_place(places, random) as place:
        if place is not None:
            with world.fault(name, place.name):
                place.kill()
                world.wait(down)
                place.start()


def kill_all_workers(world: World, random: Random) -> None:
    """SIGKILL the whole fleet of workers at once, as a power cut does."""
    down = random.uniform(0.2, 2.0)
    held = [place for place in world.mortals if place.lock.acquire(blocking=False)]
    try:
        with world.fault("kill all workers", " ".join(place.name for place in held)) as episode:
            episode.detail["is_fleet_away"] = world.spared is None
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
    _freeze(world, random, world.workers.places, "freeze worker", random.uniform(5.0, 9.0))


def freeze_publisher(world: World, random: Random) -> None:
    """SIGSTOP a publisher for a while."""
    _freeze(world, random, world.publishers.places, "freeze publisher", random.uniform(2.0, 8.0))


def _freeze(world: World, random: Random, places: Sequence[Place], name: str, seconds: float) -> None:
    with world.any_place(places, random) as place:
        if place is not None:
            with world.fault(name, place.name):
                place.freeze()
                world.wait(seconds)
                place.thaw()


def rolling_restart(world: World, random: Random) -> None:
    """Restart all workers one after the other, in good order, as a deployment does."""
    places = random.sample(world.mortals, len(world.mortals))
    with world.fault("rolling restart", " ".join(place.name for place in places)) as episode:
        codes = {}
        for place in places:
            with place.lock:
                if (code := _restart(place)) is not None:
                    codes[place.name] = code
            world.wait(0.5)
        episode.detail["exit_codes"] = codes


def _restart(place: Place) -> int | None:
    """Restart a process in good order, and return its exit code; None: it was not up."""
    if place.state != State.UP or place.pid is None:
        return None
    code = place.stop()
    place.start()
    return code


def rolling_deploy(world: World, random: Random) -> None:
    """Deploy a release with other params while its tasks come in, to one worker after the other; then go back.

    The others stay behind, as those do that are still to come.
    """
    places = random.sample(world.mortals, min(_DEPLOYED_TO, len(world.mortals)))
    with world.fault("rolling deploy", " ".join(place.name for place in places)) as episode:
        world.wait_working(places)
        published = _publish_for(world, "new")  # the publishers are deployed first
        for place in places:
            _deploy(world, place, "new")
            published += _publish_for(world, "former") + _publish_for(world, "new")
        published += _publish_for(world, "new")
        episode.detail["published"] = published
        # What is made for the new release does not run on the former one. While it waits, no worker goes back.
        with suppress(AssertionError):
            eventually(
                lambda: world.have_ended(published), _DEPLOYED, "the new release has done its tasks", interval=0.2
            )
            episode.detail["is_undone"] = True
            for place in places:
                _deploy(world, place, "former")
                _publish_for(world, "former")


def _deploy(world: World, place: Place, release: Release) -> None:
    """Give a worker this release, and wait until it works: then the next one has its turn."""
    with place.lock:
        place.environment[VARIABLE] = release
        if _restart(place) is not None:
            world.wait_working([place])


def _publish_for(world: World, release: Release) -> list[str]:
    handlers = RELEASES[release].handlers
    return [
        world.publish(handlers[name], params, **PATIENT)
        for name, params in PARAMS[release].items()
        for _ in range(_OF_EACH)
    ]


# --- the database ---------------------------------------------------------------------------------------------


def kill_primary(world: World, random: Random) -> None:
    """SIGKILL the primary; start it again a while after another one has been elected."""
    _lose_primary(world, "kill primary", breaks.killed_primary, "one member down", random.uniform(0.5, 5.0))


def freeze_primary(world: World, random: Random) -> None:
    """SIGSTOP the primary until another one has been elected, and a while longer."""
    _lose_primary(world, "freeze primary", breaks.frozen_primary, "one member frozen", random.uniform(1.0, 5.0))


def _lose_primary(world: World, name: str, lose: _Loss, then: str, seconds: float) -> None:
    with ExitStack() as mending:
        with world.fault(name, is_database_away=True) as episode:
            broken = mending.enter_context(lose(world.replica_set))
            episode.target = broken.nodes[0].address
            episode.detail |= {"elected_at": broken.elected, "committing_at": world.wait_committing()}
        with world.fault(then, episode.target):
            world.wait(seconds)
            mending.close()


def step_down(world: World, random: Random) -> None:
    """Make the primary give up its role."""
    with world.fault("step down", is_database_away=True) as episode:
        broken = breaks.step_down(world.replica_set, random.randint(3, 8))
        episode.target = broken.nodes[0].address
        episode.detail |= {"elected_at": broken.elected, "committing_at": world.wait_committing()}


def kill_all_members(world: World, random: Random) -> None:
    """SIGKILL all members at once, and start them again."""
    down = random.uniform(0.2, 4.0)
    with world.fault("kill all members", is_database_away=True) as episode:
        with breaks.killed_servers(world.replica_set) as broken:
            world.wait(down)
        episode.detail |= {"elected_at": broken.elected, "committing_at": world.wait_committing()}


def kill_streams(world: World, random: Random) -> None:
    """Kill the cursors of all workers' change streams."""
    with world.fault("kill cursors") as episode:
        episode.detail["cursors"] = len(breaks.kill_streams(world.replica_set, world.database))


def kill_sessions(world: World, random: Random) -> None:
    """Kill whatever a worker has under way in the server: cursors, operations, transactions."""
    name = random.choice(world.workers.places).name
    with world.fault("kill sessions", name) as episode:
        episode.detail["sessions"] = breaks.kill_sessions(world.replica_set, f"mtask-worker:{name}")


def failing(name: str, *operations: breaks.Operation, app: str | None = None) -> Nemesis:
    """Return the nemesis that has the server fail one of these operations of a worker, or of the app given."""

    def fail(world: World, random: Random) -> None:
        operation, failure = random.choice(operations), random.choice(sorted(breaks.FAILURES))
        whose = app or f"mtask-worker:{random.choice(world.workers.places).name}"
        seconds = random.uniform(0.5, 4.0)
        with world.fault(name, whose) as episode:
            with breaks.failing(world.replica_set, operation, failure, app=whose, database=world.database) as armed:
                world.wait(seconds)
            episode.detail |= {"operation": operation, "failure": failure, "count": armed.count}

    return fail


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
        episode.detail["task_id"] = world.publish("hog", {"seconds": seconds}, **SHORT)
        world.wait(seconds)


def killer(world: World, random: Random) -> None:
    """Publish a task that kills every worker that runs it, until its tries are used up."""
    tries = random.choice((0, 1))
    with world.fault("killer task") as episode:
        named = {"specific_worker_ids": [place.name for place in world.mortals]} if world.spared else {}
        episode.detail["task_id"] = world.publish("killer", {}, max_retries=tries, **named, **SHORT)
        world.wait(5.0 * (tries + 1))


# --- executors ------------------------------------------------------------------------------------------------


#: How long the nemesis waits for the handler that it is about to hit, in seconds: an executor may have to start first.
_BEGINS = 15.0


def kill_executor(world: World, random: Random) -> None:
    """Have a handler work in an executor, and kill the executor as a crash does, a few times in a row."""
    place = random.choice(world.workers.places)  # nobody's place: its worker may be frozen, killed or stopped meanwhile
    with world.fault(KILLING, place.name) as episode:
        killed: list[dict[str, Any]] = []
        episode.detail["killed"] = killed
        for _ in range(random.randint(2, 3)):
            _crash(world, random, place, killed)


def _crash(world: World, random: Random, place: Place, killed: list[dict[str, Any]]) -> None:
    name, params = random.choice(
        (
            ("isolated", {"seconds": 3.0}),
            ("isolated_async", {"seconds": 3.0}),
            ("deposit_isolated", {"database": world.database, "seconds": 2.0}),
        )
    )
    task_id = world.publish(name, params, specific_worker_ids=[place.name], **LONG)
    with suppress(AssertionError):  # the database is away, or the worker: then, what is there is killed
        eventually(lambda: world.is_over.is_set() or _has_begun(place, task_id), _BEGINS, interval=0.05)
    world.wait(random.uniform(0.0, 1.0))
    number = random.choice((signal.SIGKILL, signal.SIGSEGV))
    for pid in executors_of(place.pid):
        at = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            killed.append({"pid": pid, "signal": number.name, "at": at})


def _has_begun(place: Place, task_id: str) -> bool:
    """Whether an executor of this worker has noted the start of this task's handler."""
    notes = [place.history.notes_path(pid) for pid in executors_of(place.pid)]
    return any(path.exists() and task_id in path.read_text() for path in notes)


def executors_of(pid: int | None) -> list[int]:
    """Return the executors of a worker process."""
    found: list[int] = []
    threads: list[Path] = []
    with suppress(OSError):  # the worker ends just now
        threads += Path(f"/proc/{pid}/task").glob("*/children")
    for listed in threads:
        with suppress(OSError):
            found += [int(child) for child in listed.read_text().split()]
    return [child for child in found if _is_executor(child)]


def _is_executor(pid: int) -> bool:
    try:
        return b"mtask.features.isolation.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# --- queues ---------------------------------------------------------------------------------------------------


def pause_queue(world: World, random: Random) -> None:
    """Pause a queue, or the name of its tasks, a few times in a row, each time until it is resumed."""
    target = random.choice(({"queue": PAUSABLE}, {"name": PAUSABLE}))
    with world.fault("pause queue", PAUSABLE) as episode:
        pauses = [
            world.controls.pause(random.uniform(1.0, 4.0), world.wait, **target) for _ in range(random.randint(2, 3))
        ]
        stood = [pause for pause in pauses if pause is not None]
        episode.detail |= {"by": next(iter(target)), "pauses": stood, "unknown": len(pauses) - len(stood)}


def crowd_queue(world: World, random: Random) -> None:
    """Publish more than a limited queue may run at once."""
    with world.fault("crowd queue", LIMITED):
        for _ in range(4 * CONCURRENCY):
            seconds, key = round(random.uniform(0.2, 1.0), 2), random.choice((None, LIMIT_KEY))
            world.publish(LIMITED, {"seconds": seconds}, queue=LIMITED, limit_key=key, **PATIENT)
        world.wait(random.uniform(2.0, 5.0))


def change_limits(world: World, random: Random) -> None:
    """Give a queue with a long backlog other limits for a while."""
    queue = random.choice(ORDERED)
    with world.fault("change limits", queue):
        world.controls.bound(queue, random.choice(OTHER_LIMITS[queue]))
        world.wait(random.uniform(3.0, 8.0))
        world.controls.bound(queue, LIMITS[queue])


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
            "rolling deploy": rolling_deploy,
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
            "kill all members": kill_all_members,
            "kill cursors": kill_streams,
            "kill sessions": kill_sessions,
            "fail claims and pings": failing("fail claims and pings", "claim", "ping"),
            "fail finishes": failing("fail finishes", "write"),
            "fail reads": failing("fail reads", "read"),
            "fail commits": failing("fail commits", "commit"),
            "fail streams": failing("fail streams", "stream", "open stream"),
            "fail publishes": failing("fail publishes", "publish", app="mtask"),
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
    Track("executors", (3.0, 12.0), {KILLING: kill_executor}),
    Track(
        "queues", (3.0, 10.0), {"pause queue": pause_queue, "crowd queue": crowd_queue, "change limits": change_limits}
    ),
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

    # An interrupted run must not wait for a nemesis that still insists.
    threads = [
        threading.Thread(target=run, args=(track,), name=f"nemesis-{track.name}", daemon=True) for track in TRACKS
    ]
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
