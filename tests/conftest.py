"""Fixtures: real mongods. Tests that do not disturb each other share one."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, settings
from pymongo import MongoClient

from mtask import Client
from mtask.database import setup
from mtask.kernel.driver.stores import SyncStore
from mtask.local import ReplicaSet, temporary
from tests.clients import open_store
from tests.databases import Databases
from tests.loops import run_test
from tests.mongo import SESSION_VARIABLE, TEST_COMMANDS, eventually, processes_of_session
from tests.mongo import Client as Mongo
from tests.other_mongod import SERVER_VARIABLE, runs_outside
from tests.security import is_secure, security

#: The tests in these folders start no processes that may outlive them, so a database can be lent to one after another.
_LENT_BELOW = ("app", "cli", "client", "contrib", "database", "doctor", "features", "kernel", "search", "web")
_LENT = ("tests/parity/", *(f"tests/integration/{name}/" for name in _LENT_BELOW))
#: A folder in memory, and the free bytes that all test processes together need there.
_MEMORY, _NEEDED = "/dev/shm", 8 * 1024**3
# Machines differ in speed: no example fails by its time.
settings.register_profile("mtask", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mtask")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs all tests."""
    parser.addoption("--long", action="store_true", help="run the long tests, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long tests out, unless they are asked for by the option or by name.

    On a server that others started, only the tests run that need nothing else.
    """
    if SERVER_VARIABLE in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if not runs_outside(item)])
        items[:] = [item for item in items if runs_outside(item)]
    if config.getoption("--long") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("long") is not None]
    items[:] = [item for item in items if item.get_closest_marker("long") is None]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run_test(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looks for cycles: they take half of the time, and there are none. What is collected stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure() -> None:
    """Keep the files of mongods in memory if several test processes run: then the disk does not slow them.

    Under `nohup`, all processes that tests start would ignore SIGHUP.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    is_parallel = "PYTEST_XDIST_WORKER" in os.environ
    if is_parallel and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _NEEDED:
        os.environ["TMPDIR"] = tempfile.tempdir = _MEMORY


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail the session if a mongod that it started outlives it."""
    session = uuid.uuid4().hex
    os.environ[SESSION_VARIABLE] = session
    yield
    eventually(lambda: not processes_of_session(session), 40, f"no process left: {processes_of_session(session)}")
    del os.environ[SESSION_VARIABLE]


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    """Return the event loop of a test some of whose fixtures need one."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def mongo_server(no_process_is_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaSet]:
    """Run the one-node replica set that all tests share. A test must neither stop it nor make it step down."""
    protection = security(tmp_path_factory.mktemp("security")) if is_secure() else None
    with temporary(parameters=TEST_COMMANDS, security=protection) as server:
        yield server


@pytest.fixture(scope="session")
def mongo_uri(request: pytest.FixtureRequest) -> str:
    """Return the shared server's URI, without a database. On a server with passwords, it is the administrator's."""
    if SERVER_VARIABLE in os.environ:
        return os.environ[SERVER_VARIABLE]
    server: ReplicaSet = request.getfixturevalue("mongo_server")
    return server.uri


@pytest.fixture(scope="session")
def mongo_session_client(mongo_uri: str) -> Iterator[Mongo]:
    """Connect once, for the fixtures."""
    client: Mongo = MongoClient(mongo_uri, tz_aware=True)
    with client:
        yield client


@pytest.fixture(scope="session")
def dropping(mongo_session_client: Mongo) -> Iterator[Callable[[str], Future[None]]]:
    """Drop databases in the background. A drop waits for the disk, and no test needs to wait for it."""
    with ThreadPoolExecutor(1) as executor:
        yield lambda name: executor.submit(lambda: mongo_session_client.drop_database(name))


@pytest.fixture
def nothing_is_dropped(dropping: Callable[[str], Future[None]]) -> None:
    """Wait until the databases of former tests are dropped. A test that counts the work of the server needs this."""
    dropping("none").result()  # the drops are made one after the other


@pytest.fixture(scope="module")
def module_store(mongo_session_client: Mongo, dropping: Callable[[str], Future[None]]) -> Iterator[SyncStore]:
    """Set up a database for the tests of one module. Its validators refuse documents that break the schema."""
    made = SyncStore(mongo_session_client, f"test_{uuid.uuid4().hex}")
    made.run(setup.ensure())
    yield made
    dropping(made.database.name)


@pytest.fixture(scope="session")
def databases(mongo_session_client: Mongo) -> Databases:
    """Return the pool of databases that are set up."""
    return Databases(mongo_session_client)


def _may_be_lent(request: pytest.FixtureRequest) -> bool:
    folder = request.path.relative_to(request.config.rootpath).as_posix()
    # A stage ends its workers before its database goes to another test. Roles stay with their database.
    may_be = folder.startswith(_LENT) or ("stage" in request.fixturenames and not is_secure())
    return may_be and request.node.get_closest_marker("fresh_database") is None


@pytest.fixture
def database_name(
    request: pytest.FixtureRequest, dropping: Callable[[str], Future[None]], databases: Databases
) -> Iterator[str]:
    """Return a database name for one test on the shared server.

    The database is set up and empty for tests with a stage and in the folders of `_LENT`. For others, and with the mark
    `fresh_database`, it does not exist yet.
    """
    is_lent = _may_be_lent(request)
    name = databases.take() if is_lent else f"test_{uuid.uuid4().hex}"
    yield name
    if is_lent:
        databases.give_back(name)
    else:
        dropping(name)


@pytest.fixture
def mongo(mongo_session_client: Mongo) -> Mongo:
    """Return a connection to the shared server. All tests share it."""
    return mongo_session_client


@pytest.fixture(scope="module")
def replica_set(no_process_is_left: None) -> Iterator[ReplicaSet]:
    """Run a three-node replica set for one module. A test that kills a node must restart it."""
    with temporary(nodes=3, parameters=TEST_COMMANDS) as nodes:
        yield nodes


@pytest.fixture
def single_set(no_process_is_left: None) -> Iterator[ReplicaSet]:
    """Run a one-node replica set for one test. The test may kill, pause and restart it."""
    with temporary(parameters=TEST_COMMANDS) as server:
        yield server


@pytest.fixture
def store(mongo_uri: str, database_name: str) -> Iterator[SyncStore]:
    """Connect to the test's database as the engine does."""
    with open_store(mongo_uri, database_name) as opened:
        yield opened


@pytest.fixture
def client(mongo_uri: str, database_name: str) -> Iterator[Client]:
    """Return a client of the test's database."""
    with Client(mongo_uri, database=database_name) as made:
        yield made
