"""Everything written in the README is executed."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mtask import Client, TaskOption
from mtask.cli.main import run as mtask
from mtask.kernel.document.options import STORED_NAMES, option_of
from tests.mongo import PATIENCE, eventually

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@dataclass(frozen=True)
class Block:
    """A code block: its language, the file that its first line names, and its text."""

    language: str
    file: str | None
    text: str


def blocks() -> list[Block]:
    found = re.findall(r"^```(\w+)\n((?:# (\S+\.py)\n)?.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [Block(language, file or None, text) for language, text, file in found]


def shell_block(containing: str) -> str:
    return next(block.text for block in blocks() if block.language == "sh" and containing in block.text)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A new user's folder, with the README's files in it; its mongod is stopped at the end."""
    for block in blocks():
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
    yield tmp_path
    run("mtask local stop || true", tmp_path)


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MTASK_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "MTASK_LOCAL_FOLDER": str(folder / "mongod"), "NO_COLOR": "1", **more}


def run(script: str, folder: Path, **more: str) -> str:
    done = subprocess.run(
        ["bash", "-c", f"set -em\n{script}"],
        cwd=folder,
        env=environment(folder, **more),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n--- out\n{done.stdout}\n--- err\n{done.stderr}"
    return done.stdout


@pytest.fixture
def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, mongo_uri: str, database_name: str) -> Callable[[str], str]:
    """Run commands of the README in this process: to start a process for each of them takes most of a second of CPU.

    That the shell finds `mtask`, and passes on what is written, is seen in the first example.
    """
    for name in [name for name in os.environ if name.startswith("MTASK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(folder)

    def run_all(script: str) -> str:
        with redirect_stdout(io.StringIO()) as out:
            for line in script.splitlines():
                words = shlex.split(line, comments=True)
                assert words[0] == "mtask", line
                code = mtask(words[1:])
                assert code == 0 or (code, words) == (7, ["mtask", "doctor"]), f"{line}: {code}\n{out.getvalue()}"
        return out.getvalue()

    return run_all


def test_first_example_runs_as_written(folder: Path) -> None:
    script = shell_block("mtask worker shop:app")
    lines = script.splitlines()
    assert lines[0].startswith("pip install '.[local]'")  # what these tests run on was installed like that
    out = run("\n".join(lines[1:]), folder)
    assert "created=True" in out
    assert "created=False" in out
    assert out.index("created=True") < out.index("created=False")
    assert "SUCCESS" in out


@pytest.mark.parametrize("file", ["flow.py", "ask.py", "follow.py"])
def test_programs_that_need_a_worker_say_how_to_start_it(file: str) -> None:
    before = README.partition(f"```python\n# {file}\n")[0].rstrip()
    told = " ".join(before.split("\n\n")[-1].split())
    assert "`mtask-worker handlers:app &`" in told


def test_two_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)", shell_block("make demo"), re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command


def test_publish_section_runs_as_written(folder: Path, mongo_uri: str, database_name: str) -> None:
    text = next(b.text for b in blocks() if b.language == "python" and b.file is None)
    with Client(mongo_uri, database=database_name) as client:
        settings = {"MTASK_URI": mongo_uri, "MTASK_DATABASE": database_name}
        done = subprocess.run(
            [sys.executable, "-c", text + "\nclient.close()\n"],
            cwd=folder,
            env=environment(folder, **settings),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert client.count(name="send_email") == 1014
        assert client.get("send_email", "order/7").queue == "mail"


def test_handlers_and_worker_commands_run_as_written(
    folder: Path, mongo_uri: str, database_name: str, commands: Callable[[str], str]
) -> None:
    settings = {"MTASK_URI": mongo_uri, "MTASK_DATABASE": database_name}
    written = re.search(r"`(mtask-worker package.module:app [^`]*)`", README)
    assert written is not None
    command = written[1].replace("package.module:app", "handlers:app").replace("a,b", "default").split()
    log = folder / "worker.log"
    with Client(mongo_uri, database=database_name) as client, log.open("w") as out:
        client.tasks.database.client["shop"]["charges"].delete_many({"order": 7001})
        worker = subprocess.Popen(command, cwd=folder, env=environment(folder, **settings), stdout=out, stderr=out)
        try:
            client.publish("import_file", {"path": "x.csv"}, key="good")
            client.publish("import_file", {"path": "x.txt"}, key="bad")
            client.publish("charge", {"order": 7001}, key="7001")
            assert client.wait("import_file", "good", timeout=60).returns == 100
            assert client.wait("import_file", "bad", timeout=60).fail_reason == "only CSV"
            assert client.wait("charge", "7001", timeout=60).status == "SUCCESS"
            assert client.tasks.database.client["shop"]["charges"].count_documents({"order": 7001}) == 1
            eventually(lambda: len(client.workers()) == 4, PATIENCE, f"see {log}")
            asked = run("python ask.py", folder, **settings).splitlines()
            assert [line.split()[0] for line in asked[-5:-2]] == ["7/2", "7/1", "7/0"]
            assert asked[-2] == "100"
            assert asked[-1].count("TaskStatus.SUCCESS") == 3
            assert run("python flow.py", folder, **settings).splitlines() == ["{'SUCCESS': 5}"]
            script = shell_block("mtask set-worker")
            first, *others = [w.worker_id for w in client.workers()]
            commands(script.replace("WORKER_ID", first))
            eventually(lambda: {w.worker_id for w in client.workers()} == set(others), PATIENCE, f"see {log}")
            client.publish("send_email", {}, key="welcome/42")
            client.cancel("send_email", "welcome/42")
            commands(shell_block("mtask doctor"))
            commands(shell_block("mtask limit"))
            held = {control.id: control for control in client.controls()}
            assert not held["queue:reports"].paused
            assert str(held["queue:mail"].key_limit) == "3 starts in 10 s"
            assert (held["queue:mail"].keep_success, held["queue:mail"].keep_fail) == (1_000, 10_000)
        finally:
            worker.terminate()
            assert worker.wait(60) == 0, log.read_text()


def test_schedules_section_runs_as_written(
    folder: Path, mongo_uri: str, database_name: str, commands: Callable[[str], str]
) -> None:
    starts, *script, ends = shell_block("mtask schedule add").splitlines()
    command = re.match(r"(mtask-worker nightly:app) & +#", starts)
    assert command is not None
    assert ends == "kill %1 && wait %1"
    settings = {"MTASK_URI": mongo_uri, "MTASK_DATABASE": database_name}
    log = folder / "worker.log"
    with log.open("w") as out:
        worker = subprocess.Popen(
            command[1].split(), cwd=folder, env=environment(folder, **settings), stdout=out, stderr=out
        )
    try:
        eventually(lambda: "worker started" in log.read_text(), PATIENCE, "the collections are set up")
        succeeded = "mtask list --name report --status SUCCESS --json"
        eventually(lambda: "heartbeat/" in commands(succeeded), message="it has fired")
        told = commands("\n".join(script))
    finally:
        worker.terminate()
        assert worker.wait(60) == 0, log.read_text()
    assert "digest" in told
    assert "Europe/Berlin" in told
    assert "SUCCESS" in told
    with Client(mongo_uri, database=database_name) as client:
        assert {schedule.id: schedule.paused for schedule in client.schedules()} == {
            "digest": True,
            "heartbeat": False,
            "report": False,
        }


def test_events_are_followed_as_written(folder: Path, mongo_uri: str, database_name: str) -> None:
    settings = {"MTASK_URI": mongo_uri, "MTASK_DATABASE": database_name}
    written = re.search(r"`(mtask tail --name import_file)`", README)
    assert written is not None
    with Client(mongo_uri, database=database_name) as client, client.events() as happening:
        begun = happening.open().token
        client.publish("import_file", {"path": "x.csv"}, key="1")
        client.cancel("import_file", "1")
        text = (folder / "follow.py").read_text()
        asked = 'client.events(name="import_file")'
        assert asked in text
        (folder / "follow.py").write_text(text.replace(asked, f'client.events(name="import_file", after="{begun}")'))
        lines = run("python follow.py", folder, **settings).splitlines()
        assert [line.split()[0] for line in lines] == ["published", "canceled", "go"]
        token = lines[-1].split()[-1]
        assert run(f"{written[1]} --after {begun} --count 2 --json | tail -n 1", folder, **settings).count(token) == 1


def test_tests_of_tasks_run_as_written(folder: Path, mongo_uri: str) -> None:
    out = run("python -m pytest -q -p no:cacheprovider test_shop.py", folder, MTASK_TEST_URI=mongo_uri)
    assert "1 passed" in out


def test_query_for_any_client_finds_failed_tasks(mongo_uri: str, database_name: str) -> None:
    query = re.search(r"db\.tasks\.find\((.*)\)", next(b.text for b in blocks() if b.language == "js"))
    assert query is not None
    criteria = json.loads(re.sub(r"(\w+):", r'"\1":', query[1]))
    with Client(mongo_uri, database=database_name) as client:
        client.publish("send_email", {}, key="1")
        assert client.tasks.count_documents(criteria) == 0
        client.tasks.update_one({}, {"$set": {"task_state.status": "FAIL"}})
        assert client.tasks.count_documents(criteria) == 1


def test_table_of_options_names_each_with_its_default() -> None:
    table = dict(re.findall(r"^\| (`\w+`(?:, `\w+`)?) \| ([^|]+) \|", README, re.MULTILINE))
    told: dict[str, Any] = {}
    for names, values in table.items():
        parts = [literal_eval(value.strip()) for value in re.split(r", (?![^\[]*\])", values)]
        if len(parts) == 1:
            parts *= names.count(",") + 1
        told |= dict(zip(re.findall(r"`(\w+)`", names), parts, strict=True))
    assert list(told) == list(STORED_NAMES)
    assert option_of({}, told) == TaskOption()
