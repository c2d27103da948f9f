"""The examples run: handlers in real worker processes, services in processes of their own, programs in this one."""

from __future__ import annotations

import ast
import asyncio
import re
import shlex
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from examples import app as first
from examples import guild_queues, limits, middleware, progress, schedule, several_workers, transaction
from examples.fastapi_service import client_of, service
from mtask import AsyncClient, Client, RunStatus, TaskStatus
from mtask.app.app import load_app
from mtask.testing import bench
from tests.integration.house import examples_app
from tests.mongo import PATIENCE, eventually
from tests.mongo import Client as Mongo
from tests.workers import ROOT, WorkerProcess

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "__init__")
COMMAND = re.compile(r"\b(mtask-worker|python -m|uvicorn) (examples\..*)$", re.MULTILINE)


def commands(example: str) -> list[tuple[str, list[str]]]:
    """Return what the example's docstring says is to be run: a program, and its arguments."""
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / f"{example}.py").read_text()))
    return [(program, shlex.split(rest)) for program, rest in COMMAND.findall(docstring or "")]


class Server:
    """A service in a process of its own."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def address(self) -> str:
        """Wait until it says where it listens."""

        def found() -> str | None:
            assert self._process.poll() is None, self.log
            address = re.search(r"http://127\.0\.0\.1:[1-9]\d+", self.log)
            return address[0] if address else None

        address = eventually(found, PATIENCE, f"an address in {self._log}")
        assert address is not None
        return address

    def end(self) -> None:
        """End it, and print its log, which pytest shows if a test failed."""
        self._process.kill()
        self._process.wait(PATIENCE)
        print(f"--- {self._log.name}\n{self.log}")


@pytest.fixture(scope="module")
def environment(mongo_uri: str, mongo_session_client: Mongo) -> Iterator[str]:
    """Have all that runs here, and what it starts, find a database for these tests; return its name."""
    database = f"test_{uuid.uuid4().hex}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MTASK_URI", mongo_uri), ("MTASK_DATABASE", database), ("SHOP_DATABASE", database)):
            patch.setenv(name, value)
        patch.setenv("PYTHONUNBUFFERED", "1")
        patch.setattr(transaction, "SHOP", database)
        with Client() as deployer:
            deployer.init()
        yield database
    mongo_session_client.drop_database(database)


@pytest.fixture(scope="module")
def workers(environment: str, mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start two worker processes that run the handlers of all examples."""
    folder = tmp_path_factory.mktemp("workers")
    app = "tests.integration.house.examples_app:app"
    started = [WorkerProcess(mongo_uri, environment, name, folder=folder, app=app) for name in ("berlin", "oslo")]
    yield
    for worker in started:
        worker.reap()
        print(f"--- {worker.log_path.name}\n{worker.log}")


@pytest.fixture(scope="module")
def services(workers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Start the services as their docstrings say, on ports that are free."""
    folder = tmp_path_factory.mktemp("services")
    found = {example: arguments for example in EXAMPLES for program, arguments in commands(example)[1:]}
    started = {
        "fastapi_service": Server(["uvicorn", *found["fastapi_service"], "--port=0"], folder / "fastapi.log"),
        "django_service": Server([*found["django_service"], "127.0.0.1:0"], folder / "django.log"),
    }
    yield started
    for server in started.values():
        server.end()


@pytest.fixture
def client(services: dict[str, Server]) -> Iterator[Client]:
    """Give a client of the database that all examples use; workers and services run."""
    with Client() as made:
        yield made


Printed = Callable[[ModuleType], list[str]]


@pytest.fixture
def printed(client: Client, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Run an example's program, and return the lines that it prints."""

    def run(example: ModuleType) -> list[str]:
        capsys.readouterr()
        example.main()
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("example", EXAMPLES)
def test_docstring_says_how_to_run_worker_and_program(example: str) -> None:
    *to_work, (program, (target, *_)) = commands(example)
    assert [worker for worker, _ in to_work] == ["mtask-worker"] * (2 if example == "several_workers" else 1)
    assert f"{program} {target}" in (f"python -m examples.{example}", f"uvicorn examples.{example}:service")
    for _, (app, *flags) in to_work:
        assert load_app(app).handlers
        assert flags in ([], ["--queues", "mail"], ["--worker-id", "berlin"], ["--worker-id", "oslo"])


def test_every_app_is_among_those_that_run_here() -> None:
    apps = {app for example in EXAMPLES for program, (app, *_) in commands(example) if program == "mtask-worker"}
    assert {name for app in apps for name in load_app(app).handlers} == set(examples_app.app.handlers)


def test_app_prints_what_its_handler_returned(printed: Printed) -> None:
    assert printed(first) == ["'Welcome' sent to ada@example.com, attempt 1"]


def test_transfer_happens_once_or_not_at_all(printed: Printed) -> None:
    assert printed(transaction) == [
        "rent/march SUCCESS",
        "rent/april FAIL ada has less than 1000",
        "{'ada': 70, 'bob': 30}",
    ]


def test_exports_keep_to_both_limits(printed: Printed, client: Client) -> None:
    assert len(printed(limits)) == 12
    ended = client.find(status="SUCCESS", name="export")
    spans = [(run.claim_time, run.end_time, task.task_option.limit_key) for task in ended for run in task.runs]
    assert len(spans) == 12
    for begin, _, customer in spans:
        at_once = [other for start, end, other in spans if end is not None and start <= begin < end]
        assert len(at_once) <= 3, at_once
        assert at_once.count(customer) == 1


def test_schedules_of_the_app_and_of_the_program_fire(printed: Printed, client: Client, mongo_uri: str) -> None:
    told = printed(schedule)
    assert len(told) == 3
    for line in told:
        assert re.fullmatch(r"digest fires at (Mon|Tues|Wednes|Thurs|Fri)day 1[23]:00 UTC", line)
    eventually(lambda: client.count(name="report", status="SUCCESS") >= 2, PATIENCE, "two pulses")
    pulses = client.find(name="report")
    assert {task.returns for task in pulses if task.status is TaskStatus.SUCCESS} == {"pulse reported"}
    instants = sorted(task.key for task in pulses)
    assert all(key.startswith("pulse/") for key in instants)
    assert {made.id for made in client.schedules()} == {"nightly", "pulse", "digest"}
    with bench(schedule.app, uri=mongo_uri) as made:
        assert [task.returns for task in made.fire("nightly")] == ["sales reported"]


def test_middleware_gives_priority_and_handlers_get_the_hooks_value(printed: Printed) -> None:
    assert printed(middleware) == ["ann 99 priority 10", "bob 9 priority 0"]


def test_orders_of_a_guild_go_through_their_queues(printed: Printed, client: Client) -> None:
    lines = printed(guild_queues)
    assert lines[0] == "orders before draft/3: 2"
    assert sorted(lines[1:]) == [
        "assemble:draft/3/whole SUCCESS ['piece 0 for ann']",
        "assemble:gift/2/whole SUCCESS ['piece 0 for bob', 'piece 1 for bob', 'piece 2 for bob']",
        "assemble:sword/1/whole SUCCESS ['piece 0 for ann', 'piece 1 for ann']",
        "ship:sword/1/whole/next-1 SUCCESS ann gets a sword of piece 0 for ann, piece 1 for ann",
        "wrap:gift/2/whole/next-1 SUCCESS bob gets 3 wrapped pieces",
    ]
    assert sorted(task.id for task in client.find(lookup={"user": "ann"})) == [
        "assemble:draft/3/whole",
        "assemble:sword/1/whole",
        "forge:draft/3/piece-0",
        "forge:sword/1/piece-0",
        "forge:sword/1/piece-1",
        "ship:sword/1/whole/next-1",
        "split:draft/3/split",
        "split:sword/1/split",
    ]
    assert len((ROOT / "examples" / "guild_queues.py").read_text().splitlines()) <= 60


def test_progress_is_followed_from_the_beginning_to_the_end(printed: Printed, client: Client) -> None:
    lines = printed(progress)
    kinds = [line.split()[0] for line in lines]
    assert (kinds[:2], kinds[-1]) == (["published", "claimed"], "succeeded")
    shown = [int(percent) for percent in re.findall(r"^progress (\d+)% (?:frame|done)", "\n".join(lines), re.MULTILINE)]
    assert shown, lines
    assert all(earlier <= later for earlier, later in pairwise(shown))
    (task,) = client.find(name="render")
    last = task.runs[-1].progress
    assert task.returns == 25
    assert last is not None
    assert (last.fraction, last.message) == (1, "done")


def test_task_for_two_workers_is_done_by_both(printed: Printed) -> None:
    assert printed(several_workers) == [
        "v7 SUCCESS ['v7 cached on berlin', 'v7 cached on oslo']",
        "v8/oslo SUCCESS ['v8 cached on oslo']",
    ]


def test_fastapi_service_publishes_each_request_once(client: Client, services: dict[str, Server]) -> None:
    mail = {"to": "ada@example.com", "subject": "Welcome"}
    before = client.count(name="send_email")
    once = {"Idempotency-Key": "request/1"}
    with httpx.Client(base_url=services["fastapi_service"].address(), timeout=PATIENCE) as http:
        answers = [http.post("/mails", json=mail, headers=once) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [202, 202]
        assert [answer.json() for answer in answers] == [
            {"key": "request/1", "created": True},
            {"key": "request/1", "created": False},
        ]
        where = answers[0].headers["Location"]
        assert where == "/mails/request/1"
        status = eventually(lambda: _ended(http, where), PATIENCE, "the mail is sent")
        assert status == {
            "status": "SUCCESS",
            "runs": 1,
            "returns": "'Welcome' sent to ada@example.com, attempt 1",
            "reason": None,
        }
        other = http.post("/mails", json={**mail, "subject": "Goodbye"}, headers=once)
        assert (other.status_code, other.json()["detail"]) == (409, "another mail has the key request/1")
        fresh = [http.post("/mails", json=mail).json()["key"] for _ in range(2)]
        assert len({*fresh, "request/1"}) == 3
        assert http.post("/mails", json=mail, headers={"Idempotency-Key": "k" * 600}).status_code == 422
        assert http.post("/mails", json={"to": "ada@example.com"}).status_code == 422
        assert http.get("/mails/unknown").status_code == 404
    assert client.count(name="send_email") - before == 3


def _ended(http: httpx.Client, where: str) -> dict[str, object] | None:
    found: dict[str, object] = http.get(where).raise_for_status().json()
    return found if found["status"] not in ("INIT", "RUNNING") else None


def test_fastapi_service_without_its_database_has_the_caller_ask_again() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        uri = f"mongodb://127.0.0.1:{unused.getsockname()[1]}"

        async def ask() -> httpx.Response:
            async with AsyncClient(uri, timeout=timedelta(seconds=0.2)) as gone:
                service.dependency_overrides[client_of] = lambda: gone
                transport = httpx.ASGITransport(service)
                async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
                    return await http.get("/mails/welcome/42")

        try:
            answer = asyncio.run(ask())
        finally:
            service.dependency_overrides.clear()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")


def test_django_service_stores_order_mail_and_stock_together_or_not_at_all(
    client: Client, services: dict[str, Server]
) -> None:
    wanted = {"item": "book", "to": "ada@example.com"}
    shop = client.tasks.database
    shop["stock"].insert_one({"_id": "book", "left": 1})
    with httpx.Client(base_url=services["django_service"].address(), timeout=PATIENCE) as http:
        taken = http.post("/orders/7", json=wanted)
        assert (taken.status_code, taken.json()) == (202, {"order": 7, "mail": "order/7"})
        assert shop["orders"].find_one({"_id": 7}) == {"_id": 7, "item": "book"}
        assert shop["stock"].find_one() == {"_id": "book", "left": 0}
        sent = client.wait("send_email", "order/7", timeout=PATIENCE)
        assert [run.status for run in sent.runs] == [RunStatus.SUCCESS]
        assert sent.params == {"to": "ada@example.com", "subject": "Your order 7"}

        again = http.post("/orders/7", json=wanted)
        assert (again.status_code, again.json()["problem"]) == (409, "this number is taken")
        none_left = http.post("/orders/8", json=wanted)
        assert (none_left.status_code, none_left.json()["problem"]) == (409, "sold out")
        assert shop["orders"].count_documents({}) == 1
        assert not client.find(key="order/8")
        assert http.get("/orders/7").status_code == 405
