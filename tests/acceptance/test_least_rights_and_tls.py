"""Publish, work, watch and administer with the least rights, over TLS; and no password shows anywhere.

This is the short form. With MTASK_TEST_SECURE=1 the other acceptance tests work with these roles, too.
"""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from mtask import AsyncClient, Client, Flow, TaskSpec
from mtask.cli.main import run
from mtask.database import setup
from mtask.database.schema import LAYOUTS
from mtask.errors import AccessDenied, DatabaseUnavailable
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver import roles as rights
from mtask.kernel.operations import change as retention
from mtask.local import ReplicaSet
from mtask.search.findings import Level
from tests.acceptance.app import EVENTS_VARIABLE
from tests.clients import open_store
from tests.mongo import PATIENCE, Document, eventually
from tests.mongo import Client as Mongo
from tests.security import SHOWN, Accounts, accounts, secure_server
from tests.workers import Stage, open_stage, runs_of

SHOP, BARE = "shop", "bare"


@pytest.fixture(scope="module")
def server(no_process_is_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaSet]:
    """Run a server that asks for passwords, over TLS."""
    with secure_server(tmp_path_factory.mktemp("secure")) as started:
        yield started


@pytest.fixture(scope="module")
def users(server: ReplicaSet) -> Accounts:
    """Make the users of one database that is set up."""
    return accounts(server, SHOP)


@pytest.fixture
def staged(server: ReplicaSet, users: Accounts, tmp_path: Path) -> Iterator[Stage]:
    """Set a stage on that database, as its publisher and operator, and its worker; empty it afterwards."""
    with open_stage(server.uri, SHOP, tmp_path, users) as stage:
        yield stage
        for name in (*LAYOUTS, "effects"):
            stage.mongo[SHOP][name].delete_many({})


def as_role(users: Accounts, role: str) -> Client:
    return Client(users.of(role), database=SHOP)


def mtask(uri: str, *arguments: str, database: str = SHOP) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, its URI in the environment."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in {"MTASK_URI": uri, "MTASK_DATABASE": database, "COLUMNS": "300"}.items():
            patch.setenv(name, value)
        code = run([*arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


# --- what each may ------------------------------------------------------------------------------------------


def test_server_takes_nobody_without_tls_or_with_a_wrong_password(server: ReplicaSet, users: Accounts) -> None:
    plain = users.publisher.replace("tls=true", "tls=false").partition("&tlsCAFile")[0]
    with Client(plain, database=SHOP, server_timeout=timedelta(seconds=2)) as client:
        with pytest.raises(DatabaseUnavailable) as unreachable:
            client.count()
        assert not any(secret in str(unreachable.value) for secret in SHOWN)
    with Client(server.uri_as("publisher_of_shop", "hunter2-wrong"), database=SHOP) as client:
        with pytest.raises(AccessDenied, match="Check user, password and authSource") as refused:
            client.count()
        assert not any(secret in str(refused.value) for secret in SHOWN)


def test_publisher_gathers_calls(staged: Stage, users: Accounts) -> None:
    with as_role(users, "publisher") as client:  # each call reads whether all live workers know of it
        assert client.publish("noop", key="k", if_running="again").created
        assert client.publish("noop", key="k", if_running="again").updated
        with client.tasks.database.client.start_session() as session, session.start_transaction():
            assert client.publish("noop", key="k", debounce=1, session=session).updated
        assert client.publish("noop", key="w", window=1).created


def test_lines_of_runs_are_kept_by_workers_and_read_by_publishers_and_operators(staged: Stage, users: Accounts) -> None:
    worker = staged.launch("A", "--keep-logs", "5", "--log-format", "json", app="tests.integration.app.traced:app")
    staged.wait_running(worker)
    for role in ("publisher", "operator"):
        with as_role(users, role) as client:
            client.publish("talk", {"lines": [role]}, key=role)
            assert eventually(lambda: client.logs("talk", role))[0].lines[0].message == role  # noqa: B023 it is called here
            with pytest.raises(OperationFailure, match="not authorized"):
                client.tasks.database["logs"].delete_many({})
    with as_role(users, "worker") as client, pytest.raises(OperationFailure, match="not authorized"):
        client.tasks.database["logs"].delete_many({})
    assert not any(secret in worker.log for secret in SHOWN)


@contextmanager
def without(staged: Stage, role: rights.Role, *actions: str) -> Iterator[None]:
    """Take these rights on the registry of handlers from a role during the block, as before an upgrade of the roles."""
    taken = [{"resource": {"db": SHOP, "collection": "handlers"}, "actions": list(actions)}]
    staged.mongo.admin.command("revokePrivilegesFromRole", rights.role_name(SHOP, role), privileges=taken)
    try:
        yield
    finally:
        staged.mongo.admin.command("grantPrivilegesToRole", rights.role_name(SHOP, role), privileges=taken)


def test_publisher_who_may_not_read_the_registry_publishes_as_before_and_is_told_once(
    staged: Stage, users: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    with without(staged, "publisher", "find"), as_role(users, "publisher") as client:
        for key in "ab":
            assert client.publish("noop", key=key).created
        assert client.publish("another", key="a").created
        with client.tasks.database.client.start_session() as session, session.start_transaction():
            assert client.publish("third", key="a", session=session).created
    assert caplog.text.count("published by name without what their handlers declare") == 1


def test_worker_that_may_not_write_the_registry_runs_its_tasks(staged: Stage, users: Accounts) -> None:
    with without(staged, "worker", "insert", "update"):
        worker = staged.start("W")
        with as_role(users, "publisher") as client:
            client.publish("noop", {"value": 5}, key="a")
            assert client.wait("noop", "a", timeout=PATIENCE).returns == 5
        eventually(lambda: "handlers not registered" in worker.log)


def test_publisher_knows_what_a_worker_has_registered(staged: Stage, users: Accounts) -> None:
    staged.start("W")
    with as_role(users, "publisher") as client:
        eventually(lambda: "noop" in {handler.name for handler in client.handlers()})
        client.publish("noop", {"value": 5}, key="a")
        assert client.get("noop", "a").declared is not None
        with pytest.raises(OperationFailure, match="not authorized"):
            client.tasks.database["handlers"].delete_many({})


def test_publisher_publishes_reads_waits_and_follows_events(staged: Stage, users: Accounts) -> None:
    with as_role(users, "publisher") as client, client.events(name=["noop", "hold"]) as happening:
        assert client.publish("noop", key="a").created
        assert not client.publish("noop", {"value": 5}, key="a", if_exists="update").created
        client.publish_many([TaskSpec("noop", key=key) for key in "bc"])
        client.publish("noop", key="a", clean_failed=True)
        assert client.update_option("noop", "b", priority=3).task_option.priority == 3
        assert client.cancel("noop", "c").status == "CANCELED"
        assert client.retry("noop", "c").status == "INIT"
        assert {task.key for task in client.find(name="noop")} == {"a", "b", "c"}
        staged.start("W")
        assert client.wait("noop", "a", timeout=PATIENCE).returns == 5
        followed: list[Any] = []
        waiter = threading.Thread(target=lambda: followed.append(client.wait("hold", "late", timeout=PATIENCE)))
        client.publish("hold", {"gate": staged.gate()}, key="late")
        waiter.start()
        eventually(lambda: streams_on_tasks(staged, "hold:late"), PATIENCE, "the wait follows the task")
        staged.open_gate()
        waiter.join()
        assert followed[0].status == "SUCCESS"
        seen: list[str] = []
        while "late/succeeded" not in seen:
            event = happening.poll(PATIENCE)
            assert event is not None, seen
            seen.append(f"{event.key}/{event.kind}")
        assert {"a/published", "a/succeeded", "c/canceled", "late/claimed"} <= set(seen)
    own: Mongo = MongoClient(users.publisher)
    with own:  # in the publisher's own transaction
        client = Client(own, database=SHOP)
        with own.start_session() as session, session.start_transaction():
            client.publish("noop", key="in/transaction", session=session)
        assert client.get("noop", "in/transaction").key == "in/transaction"


def test_nobody_changes_the_action_log(staged: Stage, users: Accounts) -> None:
    with as_role(users, "publisher") as publisher, as_role(users, "operator") as operator:
        publisher.publish("noop", key="logged")
        publisher.cancel("noop", "logged")
        operator.pause(queue="logged")
        operator.resume(queue="logged")
        found = operator.actions()
        assert [(action.intent, action.result) for action in found] == [
            ("resume", "done"),
            ("pause", "done"),
            ("cancel", "done"),
        ]
        with pytest.raises(AccessDenied, match="operator"):
            publisher.actions()
    for role in ("publisher", "worker", "operator", "deployer"):
        own: Mongo = MongoClient(users.of(role))
        with own:
            log = own[SHOP]["actions"]
            changes: list[Callable[[], object]] = [
                partial(log.update_one, {}, {"$set": {"actor": "another"}}),
                partial(log.delete_many, {}),
                log.drop,
            ]
            for change in changes:
                with pytest.raises(OperationFailure, match="not authorized"):
                    change()
    assert len(staged.mongo[SHOP]["actions"].distinct("actor")) == 1


def streams_on_tasks(stage: Stage, what: str) -> list[Document]:
    streams: list[Document] = [
        {"$currentOp": {"allUsers": True, "idleCursors": True}},
        {"$match": {"ns": f"{SHOP}.tasks"}},
    ]
    return [op for op in stage.mongo.admin.aggregate(streams) if "$changeStream" in str(op) and what in str(op)]


def test_workers_in_processes_run_limit_schedule_commit_pause_and_keep(staged: Stage, users: Accounts) -> None:
    environment = {EVENTS_VARIABLE: str(staged.events.path)}
    supervisor = staged.launch("S", "--processes", "2", environment=environment)
    for worker_id in ("S-0", "S-1"):
        eventually(lambda one=worker_id: is_running(staged, one), PATIENCE, worker_id)  # type: ignore[misc]
    with as_role(users, "operator") as operator:
        operator.limit("default", concurrency=3, key_rate=(2, 0.5))
        operator.keep("default", success=5)
        operator.publish_many([TaskSpec("noop", key=f"n{n}", limit_key=f"k{n % 3}") for n in range(9)])
        deposits = [operator.publish(f"deposit{kind}", {"database": SHOP}, key="d") for kind in ("", "_plain")]
        operator.add_schedule("tick", "noop", timedelta(seconds=1))
        for published in deposits:
            assert runs_of(staged.wait_status(published.task_id, "SUCCESS"))
        eventually(lambda: operator.get_schedule("tick").schedule_state.fired_cnt >= 2, PATIENCE, "two firings")
        operator.pause(queue="default")  # returns when each worker goes by it
        operator.pause_schedule("tick")
        assert operator.publish("noop", key="paused").created
        operator.resume(queue="default")
        staged.wait_status("noop:paused", "SUCCESS")
        held = operator.publish("hold", {"gate": staged.gate()}, key="h")
        staged.wait_run(held.task_id)
        assert operator.cancel("hold", "h").status in ("RUNNING", "CANCELED")
        staged.wait_status("hold:h", "CANCELED")
        failing = operator.publish("fail", key="f", max_retries=0)
        staged.wait_status(failing.task_id, "FAIL")
        with open_store(users.worker, SHOP) as store:
            store.run(retention.prepare_keep())
            # The workers may have done it by now, so fewer are kept than they keep.
            assert store.run(retention.remove_older("default", [TaskStatus.SUCCESS], 2)) > 0
        assert operator.purge(status="SUCCESS") >= 2
    assert staged.mongo[SHOP]["effects"].count_documents({}) == 2
    supervisor.terminate()
    assert supervisor.wait() == 0
    for word in ("refused access", "not authorized"):
        assert word not in supervisor.log, supervisor.log


def is_running(stage: Stage, worker_id: str) -> bool:
    document = stage.worker_document(worker_id)
    return document is not None and document["status"] == "running"


def test_operator_looks_after_tasks_queues_schedules_and_workers(staged: Stage, users: Accounts) -> None:
    worker = staged.start("W")
    with as_role(users, "operator") as client, client.events() as happening:
        client.publish("fail", key="f", max_retries=0)
        assert client.wait("fail", "f", timeout=PATIENCE).status == "FAIL"
        assert client.retry("fail", "f").status == "INIT"
        assert client.wait("fail", "f", timeout=PATIENCE).status == "FAIL"
        assert next(happening).kind == "published"
        client.pause(queue="default")
        assert [control.paused for control in client.controls()] == [True]
        client.resume(queue="default")
        client.limit("default", concurrency=5)
        client.keep("default", fail=100)
        client.add_schedule("nightly", "noop", timedelta(days=1))
        assert client.schedules()
        assert client.remove_schedule("nightly")
        assert [found.id for found in client.workers()] == ["W"]
        assert client.set_worker("W", concurrency=3).id == "W"
        assert client.stats()
        assert client.inspect("fail:f").task is not None
        assert client.purge(status="FAIL") == 1
        assert not client.remove("fail", "f")
        findings = client.diagnose()
        assert not [found for found in findings if found.level is Level.FAIL], findings
        assert next(found for found in findings if found.check == "rights").fields["roles"] == ["publisher", "operator"]
        assert next(found for found in findings if found.check == "storage engine").level is Level.OK
        client.stop_worker("W")
    assert worker.wait() == 0


def a_flow(key: str, gate: str) -> Flow:
    flow = Flow(key, max_retries=0)
    held = flow.add("held", "hold", {"gate": gate})
    flow.add("clean", "noop", after=[held, flow.add("bad", "fail")], on_failed="run")
    flow.add("total", "noop", after=[held])
    return flow


@pytest.mark.parametrize("role", ["publisher", pytest.param("operator", marks=pytest.mark.long)])
def test_flows_are_published_shown_canceled_retried_and_awaited(staged: Stage, users: Accounts, role: str) -> None:
    staged.start("W")
    with as_role(users, role) as client:
        assert client.publish_flow(a_flow("f", staged.gate())).created
        staged.wait_run("hold:f/held")
        assert client.flow("f")["total"].status == "WAITING"
        assert [row.key for row in client.flows()] == ["f"]
        assert [reason.code for reason in client.position("noop", "f/total").reasons] == ["waits"]
        assert len(client.cancel_flow("f").task_ids) >= 2
        assert client.wait_flow("f", timeout=PATIENCE)["clean"].status == "SUCCESS"
        assert client.retry_flow("f").task_ids
        staged.open_gate()
        assert client.wait_flow("f", timeout=PATIENCE)["total"].status == "SUCCESS"
        if role == "operator":
            assert client.remove("noop", "f/total")
            assert [found.level for found in client.diagnose() if found.check == "flows"] == [Level.OK]
    uri = users.of(role)
    for arguments in (["list"], ["show", "f"], ["retry", "f"], ["cancel", "f"]):
        ended = mtask(uri, "flow", *arguments)
        assert ended.returncode == 0, ended
        assert "f  " in ended.stdout
        assert no_secret(ended.stdout + ended.stderr)
    for word in ("refused access", "not authorized"):
        assert word not in staged_log(staged)


def test_worker_stores_metrics_and_operator_reads_them(staged: Stage, users: Accounts) -> None:
    worker = staged.start("W")
    staged.client.publish("noop", key="k")
    staged.wait_status("noop:k", "SUCCESS")
    worker.terminate()
    assert worker.wait() == 0
    assert "metrics not stored" not in staged_log(staged)
    shown = mtask(users.operator, "metrics")
    assert shown.returncode == 0, shown.stderr
    assert 'mtask_runs_total{name="noop",outcome="SUCCESS",queue="default"} 1.0' in shown.stdout
    assert 'mtask_tasks{queue="default",status="SUCCESS"} 1.0' in shown.stdout
    assert mtask(users.operator, "top", "--once").returncode == 0
    refused = mtask(users.publisher, "metrics")
    assert refused.returncode == 3
    assert "mtask_shop_operator" in refused.stderr


def staged_log(stage: Stage) -> str:
    return "".join(path.read_text(errors="replace") for path in stage.folder.glob("worker-*.log"))


def test_deployer_sets_a_database_up_and_everybody_else_can_then_work(server: ReplicaSet, tmp_path: Path) -> None:
    bare = accounts(server, BARE, set_up=False)
    with Client(server.uri, database=BARE) as administrator:
        made = administrator._store.run(setup.make(BARE))
        assert set(made.values()) == {"made"}
        assert set(administrator._store.run(setup.make(BARE)).values()) == {"in place"}
    mongo: Mongo = MongoClient(server.uri)
    with mongo:
        for role in rights.ROLES:
            granted = [{"role": rights.role_name(BARE, role), "db": "admin"}]
            mongo.admin.command("grantRolesToUser", f"{role}_of_{BARE}", roles=granted)
        mongo.admin.command("updateRole", f"mtask_{BARE}_publisher", privileges=[])
    with Client(bare.worker, database=BARE) as early, pytest.raises(AccessDenied, match=f"mtask_{BARE}_deployer"):
        early.init(repair=False)
    done = mtask(bare.deployer, "init", "--json", database=BARE)
    assert done.returncode == 0, done.stderr
    with Client(bare.deployer, database=BARE) as deployer:
        deployer.init()
    with Client(server.uri, database=BARE) as administrator:
        changed = administrator._store.run(setup.make(BARE))
        assert changed.pop(f"mtask_{BARE}_publisher") == "changed"
        assert set(changed.values()) == {"in place"}
    with Client(bare.publisher, database=BARE) as publisher:
        assert publisher.publish("noop", key="k").created
    with open_stage(server.uri, BARE, tmp_path, bare) as stage:
        stage.start("W")
        stage.wait_status("noop:k", "SUCCESS")


def test_command_line_makes_and_prints_the_roles_and_the_doctor_says_what_each_may_not_see(
    server: ReplicaSet, users: Accounts
) -> None:
    made = mtask(server.uri, "init", "--roles", "--json")
    assert made.returncode == 0, made.stderr
    printed = mtask(users.nobody, "roles")
    for role in rights.ROLES:
        assert rights.role_name(SHOP, role) in made.stdout
        assert rights.role_name(SHOP, role) in printed.stdout
    for role in ("publisher", "worker", "operator", "deployer"):
        with as_role(users, role) as client:
            assert not [found for found in client.diagnose() if found.level is Level.FAIL], role
    told = mtask(users.publisher, "doctor")
    assert told.returncode == 0, told
    assert "WARN  server status" in told.stdout
    assert "Ask as a user with the role mtask_shop_operator" in told.stdout
    nobody = mtask(users.nobody, "doctor")
    assert nobody.returncode == 7
    assert "such as mtask_shop_publisher" in nobody.stdout
    for ended in (made, printed, told, nobody):
        assert no_secret(ended.stdout + ended.stderr)


# --- what each may not --------------------------------------------------------------------------------------

Asked = Callable[[Client], Any]
_DELAY = timedelta(days=1)
FORBIDDEN: list[tuple[str, str, Asked, tuple[str, ...]]] = [
    ("publisher", "remove", lambda c: c.remove("noop", "k"), ("worker", "operator")),
    ("publisher", "purge", lambda c: c.purge(status="INIT"), ("worker", "operator")),
    ("publisher", "pause", lambda c: c.pause(queue="q"), ("worker", "operator")),
    ("publisher", "limit", lambda c: c.limit("q", concurrency=1), ("worker", "operator")),
    ("publisher", "schedules", lambda c: c.schedules(), ("worker", "operator", "deployer")),
    ("publisher", "controls", lambda c: c.controls(), ("worker", "operator", "deployer")),
    ("publisher", "metrics", lambda c: c.metrics(), ("worker", "operator", "deployer")),
    ("publisher", "stop worker", lambda c: c.stop_worker("W"), ("worker", "operator")),
    ("publisher", "init", lambda c: c.init(), ("deployer",)),
    ("worker", "remove schedule", lambda c: c.remove_schedule("s"), ("operator",)),
    ("worker", "init", lambda c: c.init(), ("deployer",)),
    ("operator", "init", lambda c: c.init(), ("deployer",)),
    ("operator", "make roles", lambda c: c.init(roles=True), ()),
    ("deployer", "publish", lambda c: c.publish("noop", key="x"), ("publisher", "worker", "operator")),
    ("deployer", "events", lambda c: c.events(), ("publisher", "worker", "operator")),
    ("deployer", "cancel", lambda c: c.cancel("noop", "k"), ("publisher", "worker", "operator")),
    ("deployer", "make roles", lambda c: c.init(roles=True), ()),
    ("nobody", "get", lambda c: c.get("noop", "k"), ("publisher", "worker", "operator", "deployer")),
]


@pytest.mark.parametrize(
    ("role", "asked", "allowed"),
    [pytest.param(role, asked, allowed, id=f"{role} {what}") for role, what, asked, allowed in FORBIDDEN],
)
def test_what_a_role_may_not_do_is_refused_with_the_role_that_may(
    staged: Stage, users: Accounts, role: str, asked: Asked, allowed: tuple[str, ...]
) -> None:
    staged.client.publish("noop", key="k", delay=_DELAY)
    with as_role(users, role) as client, pytest.raises(AccessDenied) as refused:
        asked(client)
    names = tuple(rights.role_name(SHOP, one) for one in rights.ROLES if one in allowed)
    assert names or "user administrator" in str(refused.value)
    assert refused.value.roles == names
    assert all(name in str(refused.value) for name in names)
    assert not any(secret in str(refused.value) + repr(vars(refused.value)) for secret in SHOWN)


def test_asyncio_client_is_refused_with_the_role_that_may(staged: Stage, users: Accounts) -> None:
    async def refused(role: str, ask: Callable[[AsyncClient], Awaitable[Any]]) -> AccessDenied:
        async with AsyncClient(users.of(role), database=SHOP) as client:
            with pytest.raises(AccessDenied) as caught:
                await ask(client)
            return caught.value

    async def follow(client: AsyncClient) -> None:
        async with client.events() as happening:
            await happening.poll(1)

    paused = asyncio.run(refused("publisher", lambda client: client.pause(queue="q")))
    assert paused.roles == ("mtask_shop_worker", "mtask_shop_operator")
    followed = asyncio.run(refused("deployer", follow))
    assert followed.roles == ("mtask_shop_publisher", "mtask_shop_worker", "mtask_shop_operator")


def test_publisher_that_runs_a_worker_is_told_the_role_of_workers(staged: Stage, users: Accounts) -> None:
    staged.worker_uri = users.publisher
    worker = staged.launch("W")
    assert worker.wait() == 3
    assert "mtask_shop_worker" in worker.log
    assert "Traceback" not in worker.log


# --- the password -------------------------------------------------------------------------------------------


def test_no_process_list_log_error_or_document_shows_the_password(
    staged: Stage, users: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "mtask"):
        supervisor = staged.launch("S", "--processes", "2", "--log-level", "DEBUG")
        for worker_id in ("S-0", "S-1"):
            eventually(lambda one=worker_id: is_running(staged, one), PATIENCE, worker_id)  # type: ignore[misc]
        with as_role(users, "operator") as client:
            client.publish("noop", key="k")
            client.publish("fail", key="f", max_retries=0)
            client.wait("noop", "k", timeout=PATIENCE)
            client.wait("fail", "f", timeout=PATIENCE)
            debugged = mtask(users.publisher, "pause", "--queue", "default", "--debug", "--verbose")
            findings = repr(client.diagnose())
            assert debugged.returncode == 3
            assert "Traceback" in debugged.stderr
            assert no_secret(command_lines()), "ps"
            shown = repr(client) + repr(client._store) + repr(vars(client))
        supervisor.terminate()
        supervisor.wait()
    assert no_secret(supervisor.log)
    assert no_secret(caplog.text)
    assert no_secret(debugged.stdout + debugged.stderr + findings + shown)
    stored = [found for name in staged.mongo[SHOP].list_collection_names() for found in staged.mongo[SHOP][name].find()]
    assert len(stored) >= 4
    assert no_secret(repr(stored))


def command_lines() -> str:
    """Return what every user of the machine can read of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:  # it has ended
            continue
    text = b"\n".join(found).replace(b"\0", b" ").decode(errors="replace")
    assert "mtask.cli.worker" in text
    return text


def no_secret(text: str) -> bool:
    return not any(secret in text for secret in SHOWN)
