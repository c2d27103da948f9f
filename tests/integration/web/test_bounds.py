"""What the server examines for each address of the API and of the page, told by the database's own profile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any
from urllib.parse import quote

import pytest

from mtask import App, Client, Flow
from mtask.kernel.driver.stores import SyncStore
from mtask.search import by_queue, due
from mtask.search import counts as counting
from mtask.search import lists as listing
from mtask.web import sharing
from mtask.web.page.page import all_addresses
from mtask.web.settings import WebSettings
from tests.integration.features.registry.apps import registered
from tests.integration.web.serving import Serving, serving_on
from tests.spread import tasks_of_all_kinds

#: The bounds are as small as this database is, in comparison with one of millions of tasks.
STEPS, SORTED, DOCUMENTS, MOST = (100, 500), 200, 600, 60
#: The most documents that one request examines: for a page of a list, and for the counts of seven statuses.
BOUND = 900
FLOWS, STEPS_OF_A_FLOW = 400, 3
FILTERS: Mapping[str, Mapping[str, Any]] = {
    "all": {},
    "queue": {"queue": "q03"},
    "name": {"name": "n2"},
    "name and queues": {"name": "n2", "queue": ["q03", "q04"]},
    "worker": {"worker_id": "nobody"},
    "failed": {"status": "FAIL"},
    "final of queues": {"status": ["SUCCESS", "FAIL"], "queue": ["q07", "q08"]},
    "failed of a name": {"status": "FAIL", "name": "n3"},
    "failed by params": {"status": "FAIL", "params.user.id": 7},
    "failed of a worker": {"status": "FAIL", "worker_id": "nobody"},
    "initial": {"status": "INIT"},
    "running of a queue": {"status": "RUNNING", "queue": "q11"},
    "open of a name": {"status": ["INIT", "RUNNING"], "name": "n5"},
    "mixed": {"status": ["FAIL", "INIT"]},
    "waiting": {"status": "WAITING"},
    "lookup": {"lookup.order": 3},
    "lookup and more": {"lookup.order": 3, "status": "FAIL", "name": "n1"},
    "params": {"params.user.id": 7},
    "a key": {"key": "t1:000000001"},
    "a key of a name": {"key": "t1:000000001", "name": "n1"},
    "nothing": {"queue": "q99", "status": "FAIL"},
}
Document = dict[str, Any]
PAGE_OF_FLOWS = "/flow?key=flow/0"


@pytest.fixture(scope="module")
def filled(module_store: SyncStore, mongo_uri: str) -> Iterator[str]:
    """Give a database with tasks of all kinds, with flows, and with a profile of all commands."""
    database = module_store.database
    module_store.tasks.insert_many(tasks_of_all_kinds(), ordered=False, bypass_document_validation=True)
    with Client(mongo_uri, database=database.name) as client:
        flow = Flow("flow/0")
        flow.add("a", "n0", delay=86_400)
        flow.add("b", "n0", after=["a"])
        flow.add("c", "n0", after=["b"])
        client.publish_flow(flow)
        client.publish("n1", key="later", delay=86_400)
        client.cancel("n1", "later")
        client.add_schedule("nightly", "n0", "0 0 1 1 *", paused=True)
    steps = list(database["tasks"].find({"flow.key": "flow/0"}))
    copies = [_copied(step, f"flow/{number}") for number in range(1, FLOWS) for step in steps]
    module_store.tasks.insert_many(copies, ordered=False, bypass_document_validation=True)
    database.create_collection("system.profile", capped=True, size=16 * 1024 * 1024)
    database.command("profile", 2)
    yield database.name
    database.command("profile", 0)


def _copied(step: Mapping[str, Any], key: str) -> Document:
    """Return a step of a flow as one of another flow."""
    flow = {**step["flow"], "key": key}
    flow |= {"head": key} if "head" in flow else {}
    flow |= {"after": [one.replace("flow/0", key) for one in flow.get("after", ())]}
    return {**step, "_id": step["_id"].replace("flow/0", key), "key": step["key"].replace("flow/0", key), "flow": flow}


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "STEPS", STEPS)
    monkeypatch.setattr(due, "SORTED", SORTED)
    monkeypatch.setattr(counting, "DOCUMENTS", DOCUMENTS)
    for module in (counting, by_queue, sharing):
        monkeypatch.setattr(module, "MOST", MOST)
    monkeypatch.setattr(sharing, "STATISTICS", MOST)


class Profile:
    """What the requests of one server examined."""

    def __init__(self, store: SyncStore, database: str, appname: str) -> None:
        self._profile = store.client[database]["system.profile"]
        self._tasks = f"{database}.tasks"
        self._appname = appname
        self._last = datetime.min.replace(tzinfo=UTC)

    def news(self) -> list[Document]:
        """Return the commands on tasks since the last call."""
        wanted = {"ns": 1, "ts": 1, "docsExamined": 1, "planSummary": 1}  # not the commands: their dates may be any
        newest = self._profile.find({"appName": self._appname}, wanted, batch_size=20).sort("$natural", -1)
        found = list(takewhile(lambda one: one["ts"] > self._last, newest))
        self._last = found[0]["ts"] if found else self._last
        return [one for one in found if one["ns"] == self._tasks]

    def faults(self) -> list[str]:
        """Return what the commands since the last call did that no request may do."""
        news = self.news()
        examined = sum(one.get("docsExamined", 0) for one in news)
        found = [f"examined {examined} documents"] if examined > BOUND else []
        return found + [one["planSummary"] for one in news if "COLLSCAN" in one.get("planSummary", "")]


def query_of(criteria: Mapping[str, Any], **more: Any) -> str:
    """Return criteria as the query of the API."""
    pairs = [
        (name, value)
        for name, values in {**criteria, **more}.items()
        for value in (values if isinstance(values, list) else [values])
    ]
    return "&".join(f"{name}={quote(str(value), safe='')}" for name, value in pairs)


def on_page(criteria: Mapping[str, Any]) -> Document:
    """Return criteria as the page has them."""
    made: Document = {}
    for name, value in criteria.items():
        kind, dot, rest = name.partition(".")
        made[kind if dot else name] = f"{rest}{'=' if kind == 'lookup' else ':'}{value}" if dot else value
    return made


@asynccontextmanager
async def examining(filled: str, uri: str, store: SyncStore, appname: str) -> AsyncIterator[tuple[Serving, Profile]]:
    """Run a server, and have the profile of its commands."""
    async with serving_on(uri, filled, WebSettings(port=0, is_open=True), appname=appname) as server:
        yield server, Profile(store, filled, appname)


async def test_each_filter_with_and_without_a_cursor_examines_a_bounded_number_of_documents(
    mongo_uri: str, filled: str, module_store: SyncStore
) -> None:
    faults: dict[str, list[str]] = {}

    async with examining(filled, mongo_uri, module_store, "mtask-bounds-lists") as (server, profile):
        for criteria in FILTERS.values():
            cursors: list[str | None] = [None]
            while cursors[-1] != "" and len(cursors) < 4:
                given = {} if cursors[-1] is None else {"cursor": cursors[-1]}
                path = f"/v1/tasks?{query_of(criteria, limit=25, **given)}"
                answer = await server.ask("GET", path, token=None)
                assert answer.status_code == 200, (path, answer.text)
                faults[path] = profile.faults()
                path = f"/tasks?{query_of(on_page(criteria), **given)}"
                assert (await server.ask("GET", path, token=None)).status_code == 200, path
                faults[path] = profile.faults()
                cursors.append(answer.json()["next_cursor"] or "")
            path = f"/v1/tasks:count?{query_of(criteria)}"
            assert (await server.ask("GET", path, token=None)).status_code == 200, path
            faults[path] = profile.faults()
            if criteria:
                body = {"filter": _filter(criteria), "dry_run": True}
                await server.ask("POST", "/v1/bulk/remove", token=None, json=body)
                faults[f"bulk {criteria}"] = profile.faults()
    assert len(faults) > 120
    assert {path: found for path, found in faults.items() if found} == {}


def _filter(criteria: Mapping[str, Any]) -> Document:
    """Return criteria as the body of a bulk change."""
    made: Document = {}
    for name, value in criteria.items():
        kind, dot, rest = name.partition(".")
        if kind == "lookup":
            made["lookup"] = {rest: [value]}
        elif dot:
            made["params"] = {rest: value}
        else:
            made[name] = value if isinstance(value, list) else [value]
    return made


async def test_each_view_of_the_page_and_each_read_of_the_api_examines_a_bounded_number_of_documents(
    mongo_uri: str, filled: str, module_store: SyncStore
) -> None:
    faults: dict[str, list[str]] = {}
    by_status = {task["task_state"]["status"]: task for task in tasks_of_all_kinds(50)}
    single = [f"name={task['name']}&key={quote(task['key'], safe='')}" for task in by_status.values()]
    paths = [
        *("/", "/queues", "/queue?queue=q03", "/workers", "/workers?gone=1", "/schedules", "/log", "/bulk", "/charts"),
        *("/flows", "/flows?prefix=flow/1", PAGE_OF_FLOWS, *(f"/task?{one}" for one in single)),
        *("/v1/queues", "/v1/stats", "/v1/controls", "/v1/workers?gone=true", "/v1/schedules", "/v1/actions"),
        *("/handlers", "/handler?name=bound", "/v1/handlers", "/v1/handlers/bound"),
        *("/v1/bulk", "/v1/flows?limit=50", "/v1/flows?prefix=flow/1&limit=50", "/v1/flows/flow%2F0", "/metrics"),
        *(f"/v1/task?{one}" for one in single),
        *(f"/v1/task/position?{one}" for one in single),
        *(f"/v1/task/logs?{one}" for one in single),
    ]

    app = App()

    @app.task
    async def bound() -> None: ...

    registered(module_store, app)
    async with examining(filled, mongo_uri, module_store, "mtask-bounds-views") as (server, profile):
        views = {path for method, path in all_addresses() if method == "GET"} - {"/live"}
        assert views <= {path.partition("?")[0] for path in [*paths, "/tasks"]}, "each view is asked for"
        for path in paths:
            answer = await server.ask("GET", path, token=None)
            assert answer.status_code in (200, 409), (path, answer.text)
            faults[path] = profile.faults()
    assert {path: found for path, found in faults.items() if found} == {}


async def test_the_profile_sees_a_scan(mongo_uri: str, filled: str, module_store: SyncStore) -> None:
    async with examining(filled, mongo_uri, module_store, "mtask-bounds-scan") as (server, profile):
        await server.client.count(queue="q03")
        assert profile.faults()
