"""web: POST /v1/tasks against publish; the page and the lists beside a drain in a large collection; many viewers."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from benchmarks.cases.publish import AT_ONCE, NAME, Act, in_parts, lanes
from benchmarks.measuring.counters import Cost, cpu_parts
from benchmarks.measuring.draining import drain_with, insert_backlog
from benchmarks.measuring.fleet import Fleet
from benchmarks.measuring.server import NotMeasured, Scratch, Server
from benchmarks.measuring.variety import fill
from benchmarks.measuring.viewers import watched
from benchmarks.measuring.web import Asked, Web, asking
from benchmarks.options import Options
from benchmarks.report.figures import Figure, Result, Target, compared, figure, quantile, turns
from mtask import AsyncClient
from mtask.web.server import build
from mtask.web.settings import WebSettings
from mtask.web.tokens import Tokens

Document = dict[str, Any]
TASKS = 100_000
#: Tasks that are drained for each one that is published.
POST_SHARE = 100
RATE = 20.0  #: requests a second, of all addresses together
VIEWERS = 200
PUBLISH, POST = "publish", "POST"
ALONE, BESIDE = "alone", "beside requests"
_PARAMS = {"to": "someone@example.com", "subject": "hello", "order": 4711}
_POSTS = Target.at_least(0.5)
_DRAIN = Target.at_least(0.9)
_P99 = Target.at_most(200.0, "value", "ms")
_FAILURES = Target.at_most(0.0, "value", "%")
_STREAMS = Target.at_most(1.0, "value")
_MEMORY = Target.at_most(1.1)
_DELIVERED = Target.at_least(100.0, "value", "%")

#: The filters of lists, as the API has them and as the page has them.
FILTERS = {
    "": "",
    "status=FAIL": "status=FAIL",
    "status=SUCCESS&queue=q07": "status=SUCCESS&queue=q07",
    "status=FAIL&name=n3": "status=FAIL&name=n3",
    "status=INIT": "status=INIT",
    "status=INIT&status=RUNNING&queue=q07": "status=INIT&status=RUNNING&queue=q07",
    "status=FAIL&status=INIT": "status=FAIL&status=INIT",
    "queue=q07": "queue=q07",
    "name=n3": "name=n3",
    "worker_id=nobody": "worker_id=nobody",
    "key=old%2F00000077": "key=old%2F00000077",
    "lookup.user_id=77": "lookup=user_id%3D77",
    "params.user.id=77": "params=user.id%3A77",
}
_VIEWS = ("/", "/flows", "/queues", "/queue?queue=q07", "/workers", "/schedules", "/log", "/bulk", "/charts")
_READS = (
    *(f"/v1/{what}" for what in ("flows", "queues", "stats", "controls", "workers", "schedules", "actions", "bulk")),
    "/metrics",
    "/healthz",
    "/readyz",
)


def measure(server: Server, options: Options) -> Result:
    """Publish over HTTP and without; ask for everything beside a drain; and keep many streams open."""
    count = options.tasks_or(TASKS)
    posts, post_cpu = _measure_posts(server, options, max(1, count // POST_SHARE))
    large = _measure_large(server, options, count)
    viewers = _measure_viewers(server, options)
    return Result(
        "web",
        f"`mtask web`: POST, {options.finished + options.delayed:,} tasks in the collection, {VIEWERS} viewers",
        [*posts, *large.figures, *viewers],
        {
            "finished": options.finished,
            "delayed": options.delayed,
            "tasks": count,
            "rate": options.rate_or(RATE),
            "viewers": VIEWERS,
            "window_s": options.window,
            "runs": options.runs,
        },
        samples=large.samples,
        cpu=post_cpu,
        notes=[
            "POST is the ASGI application in the same process as publish: without sockets and uvicorn.",
            "The time of a request runs from the instant at which it is due. Its load, the drain, and the server share "
            "the machine.",
            *large.notes,
        ],
    )


# --- POST /v1/tasks -----------------------------------------------------------------------------------------------


def _measure_posts(server: Server, options: Options, count: int) -> tuple[list[Figure], dict[str, dict[str, float]]]:
    """Publish the same tasks by the client and through the application, in turns."""
    figures: list[Figure] = []
    cpu: dict[str, dict[str, float]] = {}
    for name, at_once in (("POST /v1/tasks", 1), (f"POST /v1/tasks, {AT_ONCE} at once", AT_ONCE)):
        costs: dict[str, list[Cost]] = {PUBLISH: [], POST: []}
        for run in range(options.runs):
            server.say(f"web: run {run + 1} of {options.runs}, {name}")
            with server.scratch() as scratch, _posting(scratch, at_once) as acts:
                for side, cost in in_parts(server, acts, count, 50 * min(4, at_once)).items():
                    costs[side].append(cost)
        rates = {side: [cost.rate for cost in found] for side, found in costs.items()}
        figures.append(compared(name, "tasks/s", rates[POST], rates[PUBLISH], _POSTS, against_name=PUBLISH))
        parts = {side: [cost.client_us for cost in found] for side, found in costs.items()}
        title = f"{name}: CPU of the process a task"
        figures.append(compared(title, "µs", parts[POST], parts[PUBLISH], against_name=PUBLISH))
        cpu |= {f"{side}, {at_once} at once": cpu_parts(found) for side, found in costs.items()}
    return figures, cpu


@contextmanager
def _posting(scratch: Scratch, at_once: int) -> Iterator[dict[str, Act]]:
    """Give both sides on one event loop, with one client."""
    with asyncio.Runner() as runner:

        async def connect() -> AsyncClient:
            return AsyncClient(scratch.uri, database=scratch.name)

        client = runner.run(connect())
        make_client = partial(AsyncClient, scratch.uri, database=scratch.name)
        app, _ = build(client, WebSettings(is_open=True), Tokens(), make_client)

        def publish(label: str, count: int) -> Callable[[], None]:
            keys = iter([f"{label}/{number}" for number in range(count)])

            async def lane() -> None:
                for key in keys:
                    await client.publish(NAME, _PARAMS, key=key)

            return lambda: runner.run(lanes(lane, at_once))

        def post(label: str, count: int) -> Callable[[], None]:
            made = ({"name": NAME, "params": _PARAMS, "key": f"{label}/{number}"} for number in range(count))
            bodies = iter([json.dumps(one).encode() for one in made])

            async def lane() -> None:
                for body in bodies:
                    await _post(app, body)

            return lambda: runner.run(lanes(lane, at_once))

        try:
            yield {PUBLISH: publish, POST: post}
        finally:
            runner.run(client.close())


async def _post(app: Any, body: bytes) -> None:
    """Call the application as a web server does."""
    statuses: list[int] = []

    async def receive() -> Document:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    host = ("127.0.0.1", 8787)
    headers = {"host": f"{host[0]}:{host[1]}", "content-type": "application/json", "content-length": str(len(body))}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/tasks",
        "raw_path": b"/v1/tasks",
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "server": host,
        "client": (host[0], 1),
    }
    await app(scope, receive, send)
    if statuses != [201]:
        raise NotMeasured(f"POST /v1/tasks was answered with {statuses}.")


# --- a large collection -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Large:
    figures: list[Figure]
    samples: dict[str, list[float]]
    notes: list[str]


def _measure_large(server: Server, options: Options, count: int) -> _Large:
    """Ask every address at a steady rate while a worker drains a backlog, and drain without that, in turns."""
    rate = options.rate_or(RATE)
    costs: dict[str, list[Cost]] = {ALONE: [], BESIDE: []}
    asked: list[Asked] = []
    with server.scratch() as scratch:
        server.say(f"web: inserting {options.finished:,} finished and {options.delayed:,} delayed tasks")
        fill(scratch, options.finished, options.delayed)
        with Web(server, scratch) as web:
            paths = _paths(web)
            server.say(f"web: asking {len(paths)} addresses alone")
            examined = {path: _examined(server, web, path) for path in paths}
            # Shuffled, so that the addresses that cost most do not come one after the other.
            turn = itertools.cycle(random.Random(1).sample(paths, len(paths)))
            for run in range(options.runs):
                for side in turns(list(costs), run):
                    server.say(f"web: run {run + 1} of {options.runs}, a drain {side}")
                    backlog = insert_backlog(scratch, "noop", count, f"{side[:1]}{run}")
                    beside: Any = nullcontext
                    if side == BESIDE:
                        asked.append(Asked())
                        beside = partial(asking, web, turn, rate, asked[-1])
                    costs[side].append(drain_with(server, scratch, backlog, beside).cost)
    rates = {side: [cost.rate for cost in found] for side, found in costs.items()}
    return _Large(
        [
            compared("drain beside requests", "tasks/s", rates[BESIDE], rates[ALONE], _DRAIN, against_name=ALONE),
            *_request_figures(paths, asked, rate),
            figure("documents examined for one request, the most", "", [max(examined.values())]),
        ],
        {
            "pages": [time for one in asked for time in one.of([p for p in paths if not _is_of_api(p)])],
            "API": [time for one in asked for time in one.of([p for p in paths if _is_of_api(p)])],
        },
        _by_path(paths, asked, examined),
    )


def _request_figures(paths: Sequence[str], asked: Sequence[Asked], rate: float) -> list[Figure]:
    figures = []
    for what, is_of_api in (("pages", False), ("API", True)):
        chosen = [path for path in paths if _is_of_api(path) is is_of_api]
        figures += [
            figure(f"{what}, {part}", "ms", [quantile(one.of(chosen), share) for one in asked], target)
            for part, share, target in (("median", 0.5, None), ("p99", 0.99, _P99), ("slowest", 1.0, None))
        ]
    together = _together(asked)
    return [
        *figures,
        figure("p99 of the slowest address, all runs", "ms", [together.slowest()[1]], _P99),
        figure("answers other than 200", "%", [100 * one.failures.total() / one.count for one in asked], _FAILURES),
        figure("CPU of the web process a request", "ms", [1000 * one.cpu / one.count for one in asked]),
        figure("the same, of one core at this rate", "%", [100 * rate * one.cpu / one.count for one in asked]),
    ]


def _together(asked: Sequence[Asked]) -> Asked:
    made = Asked()
    for one in asked:
        for path, times in one.times.items():
            made.times.setdefault(path, []).extend(times)
        made.failures += one.failures
    return made


def _by_path(paths: Sequence[str], asked: Sequence[Asked], examined: Mapping[str, int]) -> list[str]:
    """Return a line for each address, the slowest first."""
    times = _together(asked).times
    known = sorted((path for path in paths if path in times), key=lambda path: -quantile(times[path], 0.99))
    return [
        f"{path}: median {quantile(times[path], 0.5):.0f}, p99 {quantile(times[path], 0.99):.0f}, slowest "
        f"{max(times[path]):.0f} ms of {len(times[path])}; documents examined {examined[path]:,}"
        for path in known
    ]


def _is_of_api(path: str) -> bool:
    return path.startswith("/v1/") or path in ("/metrics", "/healthz", "/readyz")


def _paths(web: Web) -> list[str]:
    """Return all addresses: lists from their beginning and from a cursor, counts, and what else the two show."""
    found = [*_VIEWS, *_READS]
    for filter_, on_page in FILTERS.items():
        joined = f"?{filter_}" if filter_ else ""
        found += [f"/tasks{f'?{on_page}' if on_page else ''}", f"/v1/tasks{joined}", f"/v1/tasks:count{joined}"]
        answer = web.get(f"/v1/tasks{joined}")
        if answer.status != 200:
            raise NotMeasured(f"/v1/tasks{joined} was answered with {answer.status}: {answer.body[:500]!r}")
        cursor = json.loads(answer.body)["next_cursor"]
        if cursor is not None:
            and_cursor = f"&cursor={quote(cursor)}"
            found += [f"/v1/tasks?{filter_}{and_cursor}".replace("?&", "?")]
            found += [f"/tasks?{on_page}{and_cursor}".replace("?&", "?")]
    for name, key in (("n0", "old/00000000"), ("n1", "delayed/00000001")):
        encoded = quote(key, safe="")
        found += [f"/task?name={name}&key={encoded}", f"/v1/tasks/{name}/{encoded}"]
    found += ["/flow?key=flow%2F7", "/v1/flows/flow%2F7", "/v1/tasks/n1/delayed%2F00000001/position"]
    return found


def _examined(server: Server, web: Web, path: str) -> int:
    """Return the number of documents that the server examines for a request."""
    with server.metered() as meter:
        web.get(path)
    return round(meter.cost(1).server.docs_examined)


# --- viewers ------------------------------------------------------------------------------------------------------


def _measure_viewers(server: Server, options: Options) -> list[Figure]:
    """Keep streams open while tasks are published and run."""
    found = []
    for run in range(options.runs):
        server.say(f"web: run {run + 1} of {options.runs}, {VIEWERS} viewers for {options.window:g} s")
        with server.scratch() as scratch, Web(server, scratch) as web, Fleet(server, scratch) as fleet:
            found.append(asyncio.run(watched(server, scratch, web, VIEWERS, options.window)))
            fleet.check()
    return [
        figure(f"{VIEWERS} viewers: change streams on the server", "", [one.streams for one in found], _STREAMS),
        compared(
            "the same: memory at the end",
            "MB",
            [one.memory[-1] / 1e6 for one in found],
            [one.memory[0] / 1e6 for one in found],
            _MEMORY,
            against_name="at the start",
        ),
        figure("the same: events delivered, of all", "%", [one.delivered for one in found], _DELIVERED),
        figure("the same: messages a second to a live page", "/s", [one.messages for one in found]),
        figure("the same: CPU of the web process, of one core", "%", [one.cpu for one in found]),
    ]
