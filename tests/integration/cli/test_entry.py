"""The real entry point: configuration, exit codes, errors, pipes and signals; and `mtask local`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtask import local
from mtask.version import __version__
from tests.integration.cli.commands import Commands

SECRET = "s3cr3t"


def test_the_module_runs_as_the_entry_point_does(mtask: Commands) -> None:
    assert mtask("--version").out == f"mtask {__version__}\n"
    assert mtask.entry("publish", "send", "-k", "k1").out == "created  send:k1\n"
    assert mtask("list", "--json").json[0]["_id"] == "send:k1"
    missing = mtask.entry("show", "send", "none", "--json")
    assert (missing.code, missing.error["exit_code"], missing.out) == (4, 4, "")
    alone = mtask()
    assert (alone.code, "Usage" in alone.out) == (0, True)


def test_flags_win_over_the_environment_and_that_over_env_files(
    mtask: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text(f"MTASK_DATABASE={mtask.database}_file\nMTASK_URI=mongodb://127.0.0.1:1/\n")

    def database(*flags: str) -> str:
        shown = mtask.ok(*flags, "doctor", "--json").json["database"]
        assert isinstance(shown, str)
        return shown.removeprefix(mtask.database)

    assert database() == ""
    assert database("--database", f"{mtask.database}_flag") == "_flag"
    monkeypatch.delenv("MTASK_DATABASE")
    assert database() == "_file"


def test_shared_flags_go_before_or_after_the_command(mtask: Commands) -> None:
    before = mtask.ok("--json", "--database", f"{mtask.database}_x", "list")
    after = mtask.ok("list", "--database", f"{mtask.database}_x", "--json")
    assert before.json == after.json == []
    later_wins = mtask.ok("--database", "other", "doctor", "--database", mtask.database, "--json")
    assert later_wins.json["database"] == mtask.database


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["frobnicate"], "No such command"),
        (["lst"], "list"),
        (["list", "--frob"], "No such option"),
        (["list", "--limit", "many"], "--limit"),
        (["list", "--limit", "-1"], "--limit"),
        (["show"], "NAME"),
        (["set-worker", "w1"], "concurrency"),
        (["list", "extra"], "extra"),
    ],
)
def test_wrong_usage_ends_with_2_and_points_to_the_help(mtask: Commands, arguments: list[str], expected: str) -> None:
    ended = mtask(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert expected in ended.err
    assert "--help` shows how to use it" in ended.err
    assert mtask(*arguments, "--json").error["exit_code"] == 2


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "http://127.0.0.1",
        f"mongodb://user:{SECRET}@127.0.0.1:port/",
        f"mongodb://user:{SECRET}@127.0.0.1:1/?nonsense=1",
        f"mongodb://user:{SECRET}/x@127.0.0.1:1/",
        f"mongodb://user:{SECRET}@x@127.0.0.1:1/",
    ],
)
def test_a_wrong_uri_is_bad_input_and_its_password_stays_hidden(mtask: Commands, uri: str) -> None:
    for flags in ([], ["--debug"], ["--json"]):
        ended = mtask("list", "--uri", uri, *flags)
        assert ended.code == 2
        assert SECRET not in ended.out + ended.err, flags


def test_a_password_in_the_wrong_place_stays_hidden(mtask: Commands) -> None:
    ended = mtask("list", f"mongodb://user:{SECRET}@127.0.0.1/")
    assert ended.code == 2
    assert SECRET not in ended.out + ended.err


def test_without_a_server_commands_end_in_bounded_time(mtask: Commands) -> None:
    for command in (["list"], ["publish", "send"], ["init"]):
        began = time.monotonic()
        ended = mtask(*command, "--uri", f"mongodb://user:{SECRET}@127.0.0.1:1/", "--json")
        assert time.monotonic() - began < 20
        assert (ended.code, ended.out, ended.error["error"]) == (3, "", "DatabaseUnavailable")
        assert SECRET not in ended.err


@pytest.mark.parametrize("name", ["a b", "a/b", "x" * 64, "$x"])
def test_a_wrong_database_name_is_bad_input(mtask: Commands, name: str) -> None:
    ended = mtask("list", "--database", name, "--json")
    assert (ended.code, ended.error["field"]) == (2, "database")


def test_a_wrong_variable_in_the_environment_is_named(mtask: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTASK_CONCURRENCY", "many")
    ended = mtask("list")
    assert ended.code == 2
    assert "MTASK_CONCURRENCY" in ended.err


def test_a_traceback_comes_only_when_asked_for(mtask: Commands) -> None:
    assert "Traceback" not in mtask("show", "a", "b").err
    assert "Traceback" in mtask("show", "a", "b", "--debug").err


def test_a_mistake_of_ours_is_told_without_a_traceback(mtask: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("mtask.cli.database.setup.Cli.json", broken)
    ended = mtask("schema")
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert "--debug" in ended.err


def test_a_reader_who_leaves_is_no_error(mtask: Commands) -> None:
    for command in ("schema", "--help"):
        shell = f"{sys.executable} -m mtask.cli.main {command} | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
        assert (done.stdout.strip(), done.stderr) == ("0", ""), command


def test_ctrl_c_ends_with_130(mtask: Commands) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    # As in a terminal: a shell starts its background jobs, and so perhaps these tests, with SIGINT ignored.
    heeding = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    run_it = heeding + "runpy.run_module('mtask.cli.main', run_name='__main__')"
    command = [sys.executable, "-c", run_it, "wait", "send", "k1", "--verbose"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "waiting until it ends" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out, "Traceback" in err) == (130, "", False)


def test_colours_are_for_terminals_only(mtask: Commands) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    assert "\x1b" not in mtask.ok("list").out


def test_a_terminal_without_unicode_gets_what_it_can_show(mtask: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    mtask.ok("publish", "send", "-k", "日本語")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ended = mtask.entry("list")
    assert ended.code == 0
    assert r"\u65e5" in ended.out


def test_local_is_started_shared_and_stopped(mtask: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "embedded"
    monkeypatch.setenv("MTASK_LOCAL_FOLDER", str(folder))
    try:
        assert mtask("local", "status").code == 4
        assert mtask("local", "status", "--json").json == {"running": False}
        assert mtask.ok("local", "stop", "--json").json == {"stopped": False}
        # `--uri local` starts it, and says so beside the answer.
        published = mtask("publish", "send", "-k", "k1", "--uri", "local", "--json")
        assert (published.code, published.json["created"]) == (0, True)
        assert "mtask local stop" in published.err
        server = mtask.ok("local", "status", "--json").json
        assert server["running"] is True
        assert server["folder"] == str(folder)
        assert mtask.ok("local", "start", "--json").json["pid"] == server["pid"]
        again = mtask("publish", "send", "-k", "k1", "--uri", "local", "--json")
        assert (again.json["created"], again.err) == (False, "")
        assert mtask.ok("--uri", server["uri"], "list", "--json").json[0]["_id"] == "send:k1"
        assert server["uri"] in mtask.ok("local", "status").out
        assert mtask.ok("local", "stop").out == "stopped\n"
        assert mtask("local", "status").code == 4
    finally:
        local.stop(folder)


def test_local_without_a_mongod_says_what_to_install(
    mtask: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTASK_LOCAL_FOLDER", str(tmp_path / "embedded"))
    monkeypatch.setenv("MTASK_MONGOD", str(tmp_path / "missing"))
    for command in (["list", "--uri", "local"], ["local", "start"]):
        ended = mtask(*command, "--json")
        assert ended.code == 3
        assert ended.error["error"] in ("MongodNotFound", "MongodFailed")
    assert not (tmp_path / "embedded").exists()


def test_json_errors_are_one_document(mtask: Commands) -> None:
    ended = mtask("show", "a", "b", "--json")
    document = json.loads(ended.err)
    assert (document["error"], document["exit_code"], ended.code) == ("TaskNotFound", 4, 4)
    assert os.linesep in ended.err


@pytest.mark.parametrize(
    ("streams", "code", "told"),
    [
        (">/dev/full", 1, "error: stdout cannot be written: No space left on device. {}created  send:k1\n"),
        (">&-", 1, "error: stdout cannot be written: Bad file descriptor. {}created  send:k1\n"),
        (">/dev/full 2>/dev/full", 1, ""),
        ("2>&-", 0, ""),
    ],
)
def test_a_publish_that_cannot_be_printed_is_stored_and_says_so(
    mtask: Commands, streams: str, code: int, told: str
) -> None:
    script = f"{sys.executable} -m mtask.cli.main publish send -k k1 {streams}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, told.format("The command has done its work: "))
    assert [task["_id"] for task in mtask("list", "--json").json] == ["send:k1"]


@pytest.mark.parametrize("command", [["--version"], ["list", "--json"], ["show", "--help"]])
def test_an_answer_that_cannot_be_printed_is_no_bug_of_mtask(mtask: Commands, command: list[str]) -> None:
    script = f"{sys.executable} -m mtask.cli.main {' '.join(command)} >/dev/full"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "stdout cannot be written: No space left on device." in done.stderr
    assert "bug" not in done.stderr
