"""The demo: the main job on real files, a worker killed on the way, and nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtask.demo.app import SourceFile, count_file, find_files
from mtask.demo.display import Summary
from mtask.demo.play import Plan, Play
from mtask.demo.watch import Scene
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, eventually
from tests.mongo import Client as Mongo
from tests.processes import marked

#: A real folder, of some 30 files.
FOLDER = Path(sysconfig.get_path("stdlib"), "asyncio")
MARK = "MTASK_TEST_DEMO"


@dataclass
class Machine:
    """Runs the command line with a temporary folder of its own, and sees what it leaves behind."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MTASK_")}
        return clean | {MARK: self.mark, "TMPDIR": str(self.folder), "MTASK_URI": "mongodb://127.0.0.1:9/?no-such"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "mtask.cli.main", *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        out, err = process.communicate()
        assert process.returncode == code, f"{out}\n{err}"
        return out if code == 0 else err

    def processes(self) -> list[str]:
        return [f"{pid} {command}" for pid, command in marked(MARK, self.mark).items()]

    def check_nothing_is_left(self, patience: float = PATIENCE) -> None:
        eventually(lambda: not self.processes(), patience, f"no process left: {self.processes()}")
        assert list(self.folder.iterdir()) == []


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    made = Machine(folder)
    yield made
    made.check_nothing_is_left()


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def play(plan: Plan, *, when: str = "", then: Any = None) -> Summary:
    """Play in this process; call `then` when a step that begins with `when` is done."""
    scene = Scene("a test", len(plan.files), plan.kill)
    pending = [then] if then else []

    def notify() -> None:
        if pending and any(step.startswith(when) for step in scene.done):
            pending.pop()()

    return Play(plan, scene, notify).run()


def test_demo_counts_a_real_folder_though_a_worker_is_killed_and_its_tasks_are_preempted(
    machine: Machine, report: Report
) -> None:
    summary = json.loads(machine.run("demo", str(FOLDER), "--keep", "--json"))

    files = files_of(FOLDER)
    hashes = {str(path.relative_to(FOLDER)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    listing = "".join(f"{hashes[key]}  {key}\n" for key in sorted(hashes))
    names: Counter[str] = Counter()
    for path in files:
        names.update(count_file(path)["identifiers"])
    totals = summary["totals"]
    assert summary["equal"]
    assert summary["differences"] == summary["failures"] == []
    assert (totals["files"], totals["failed"]) == (len(files), 0)
    assert totals["bytes"] == sum(path.stat().st_size for path in files)
    assert totals["lines"] == sum(path.read_bytes().count(b"\n") for path in files)
    assert totals["words"] == sum(len(path.read_bytes().split()) for path in files)
    assert totals["digest"] == hashlib.sha256(listing.encode()).hexdigest()
    assert {entry["identifier"]: entry["count"] for entry in totals["identifiers"]} == dict(
        sorted(names.items(), key=lambda item: (-item[1], item[0]))[:10]
    )
    published = summary["published"]
    assert [published[name] for name in ("created", "kept")] == [len(files), 0]
    assert [published[name] for name in ("created_again", "kept_again")] == [0, len(files)]
    victim, rescued = summary["killed"]["worker_id"], summary["rescued"]
    assert [worker["status"] for worker in summary["workers"] if worker["worker_id"] != victim] == ["stopped"] * 2
    assert rescued
    for task in rescued:
        assert task["status"] == "SUCCESS"
        assert task["preempted_by"] != victim
        killed, lapsed, preempted = (
            datetime.fromisoformat(instant)
            for instant in (summary["killed"]["time"], task["lapse_time"], task["preempt_time"])
        )
        assert killed < lapsed <= preempted
    report("rescued tasks", len(rescued))
    report("rescue after the lapse, ms", summary["figures"]["rescue_delay_ms"])

    # The documents were kept: the lines that it shows look into them and remove them.
    show, stats, mongosh = summary["look_into"]
    stop, remove = summary["remove"]
    assert rescued[0]["task_id"] in machine.run(*shlex.split(show)[1:])
    assert "SUCCESS" in machine.run(*shlex.split(stats)[1:])
    assert shlex.split(mongosh)[:2] == ["mongosh", summary["uri"]]
    machine.run(*shlex.split(stop)[1:])
    subprocess.run(shlex.split(remove), check=True)
    machine.check_nothing_is_left()


def test_demo_without_a_terminal_tells_in_lines_and_leaves_nothing_behind(machine: Machine) -> None:
    said = machine.run("demo", str(FOLDER), "--workers", "2")
    count = len(files_of(FOLDER))
    assert re.search(rf"^published {count} tasks in [\d.]+ s: {count} created, 0 kept$", said, re.MULTILINE)
    assert f"published them once more: 0 created, {count} kept" in said
    assert "killed with SIGKILL at" in said
    assert "equal: every file was counted, none was counted twice" in said
    assert "DIFFERENT" not in said
    assert "Nothing is left behind." in said


@pytest.mark.long
def test_demo_kills_nobody_when_asked_not_to_and_stops_at_the_limit(machine: Machine) -> None:
    summary = json.loads(machine.run("demo", str(FOLDER), "--json", "--no-kill", "--limit", "5", "--workers", "1"))
    assert (summary["equal"], summary["totals"]["files"]) == (True, 5)
    assert (summary["killed"], summary["rescued"], summary["figures"]["runs"]) == (None, [], 5)
    assert [worker["finished"] for worker in summary["workers"]] == [5]


@pytest.mark.parametrize(
    ("number", "keep"), [(signal.SIGINT, ["--keep"]), pytest.param(signal.SIGTERM, [], marks=pytest.mark.long)]
)
def test_interrupted_demo_leaves_nothing_behind(machine: Machine, number: signal.Signals, keep: list[str]) -> None:
    with machine.start("demo", str(FOLDER), "--workers", "1", "--no-kill", *keep) as process:
        assert process.stdout is not None
        assert any(line.startswith("published") for line in process.stdout)
        process.send_signal(number)
        out, err = process.communicate()
        assert process.returncode == 130, f"{out}\n{err}"
    machine.check_nothing_is_left()


def test_killed_demo_leaves_neither_workers_nor_a_mongod_behind(machine: Machine) -> None:
    with machine.start("demo", str(FOLDER), "--workers", "1") as process:
        assert process.stdout is not None
        assert any(line.startswith("published") for line in process.stdout)
        process.kill()
    machine.check_nothing_is_left()


@pytest.mark.long
def test_demo_uses_an_existing_database_and_removes_its_documents(
    machine: Machine, mongo: Mongo, mongo_uri: str, database_name: str
) -> None:
    where = ["--uri", mongo_uri, "--database", database_name, "--no-kill", "--workers", "1", "--limit", "3", "--json"]
    for _ in range(2):
        kept = json.loads(machine.run("demo", str(FOLDER), "--keep", *where))
        assert kept["published"]["created"] == 3
        assert mongo[database_name]["tasks"].count_documents({"task_state.status": "SUCCESS"}) == 3
    machine.run("demo", str(FOLDER), *where)
    assert mongo[database_name].list_collection_names() == []


@pytest.mark.parametrize("collection", ["tasks", pytest.param("orders", marks=pytest.mark.long)])
def test_demo_refuses_a_database_that_holds_foreign_documents_and_leaves_them_alone(
    machine: Machine, mongo: Mongo, mongo_uri: str, database_name: str, collection: str
) -> None:
    mongo[database_name][collection].insert_one({"_id": "theirs", "name": "send_email"})
    said = machine.run("demo", str(FOLDER), "--uri", mongo_uri, "--database", database_name, code=3)
    assert "a database of its own" in said
    assert mongo[database_name].list_collection_names() == [collection]
    assert mongo[database_name][collection].count_documents({}) == 1


def test_demo_refuses_a_folder_without_files_before_it_starts_anything(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no file" in machine.run("demo", str(tmp_path / "empty"), code=2)


@pytest.fixture
def plan(tmp_path: Path, mongo_uri: str, database_name: str) -> Plan:
    """Plan a play without a kill on odd files, on the shared server."""
    folder = tmp_path / "odd"
    names = [b"plain.py", b"caf\xe9.txt", b"empty", b"library.so", b"x" * 200 + b".txt"]
    for name in names:
        path = folder / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x7fELF\0" if name == b"library.so" else b"" if name == b"empty" else b"name = other\n")
    deep = folder / ("d" * 200) / ("e" * 200) / ("f" * 200)
    deep.mkdir(parents=True)
    (deep / "g.py").write_text("deep = 1\n")
    return Plan(folder, find_files(folder), workers=1, kill=False, uri=mongo_uri, database=database_name)


def test_binary_files_and_names_that_are_long_or_no_text_are_counted_like_all_others(plan: Plan) -> None:
    summary = play(plan)
    assert summary.differences == []
    assert len(summary.tasks.hashes) == 6
    assert summary.tasks.identifiers == Counter({"name": 3, "other": 3, "deep": 1})


def test_file_that_cannot_be_read_becomes_a_task_that_fails_with_the_reason_and_counts_alike(plan: Plan) -> None:
    vanished = SourceFile("gone/vanished.py", plan.folder / "vanished.py")
    summary = play(replace(plan, files=[*plan.files, vanished]))
    assert summary.is_equal
    assert summary.tasks.failures == {"gone/vanished.py": "cannot be read: No such file or directory"}
    assert summary.document()["failures"] == [
        {"key": "gone/vanished.py", "reason": "cannot be read: No such file or directory"}
    ]
    assert summary.runs == len(plan.files) + 1  # a final failure: not tried again


def test_totals_that_differ_are_found_and_named(plan: Plan) -> None:
    changed = plan.folder / "plain.py"
    summary = play(plan, when="counted directly", then=lambda: changed.write_text("name = another\n"))
    assert not summary.is_equal
    assert summary.document()["equal"] is False
    assert any(line.startswith("plain.py: SHA-256") for line in summary.differences)


def test_demo_shows_its_database_in_the_web_page(machine: Machine) -> None:
    """Without a terminal, the page ends with the demo."""
    process = machine.start("demo", str(FOLDER), "--web", "--no-kill", "--workers", "1", "--plain")
    assert process.stdout is not None
    line = next(line for line in process.stdout if "the web page" in line)
    link = re.search(r"http://127\.0\.0\.1:\d+/login\?token=[\w-]+", line)
    assert link is not None, line
    with httpx.Client(trust_env=False, follow_redirects=True) as http:
        assert "Open the page" in http.get(link[0]).text
        url, _, token = link[0].partition("/login?token=")
        page = http.post(f"{url}/login", data={"token": token}, headers={"Origin": url})
    assert (page.status_code, "mtask_demo" in page.text, "token=" in str(page.url)) == (200, True, False)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, f"{out}\n{err}"
    with pytest.raises(httpx.ConnectError):
        httpx.get(link[0], trust_env=False)
