"""The judge of upgrade runs: a legal history passes, and each wrong one is recognised as what it is."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mtask import Client
from tests.faults.upgrade.judging import judge
from tests.faults.upgrade.rolling import Process
from tests.faults.upgrade.versions import NEW
from tests.mongo import Document

PAUSE = (datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(2026, 1, 1, 13, tzinfo=UTC))


@dataclass
class History:
    """What a run leaves behind: documents, effects and ledgers."""

    client: Client
    folder: Path
    notes: list[Document] = field(default_factory=list)
    published: list[Document] = field(default_factory=list)
    killed: list[Process] = field(default_factory=list)

    def task(self, name: str, *runs: tuple[str, str], status: str = "SUCCESS") -> str:
        """Store a task with these runs: the id and the status of each."""
        task_id = self.client.publish(name, key=str(len(self.published))).task_id
        states = [
            {"run_id": run_id, "worker_id": f"w-{run_id}", "status": ended, "claim_time": PAUSE[1]}
            for run_id, ended in runs
        ]
        changed = {"task_state.status": status, "task_state.worker_states": states}
        database = self.client.tasks.database
        database.command("collMod", "tasks", validationLevel="off")
        self.client.tasks.update_one({"_id": task_id}, {"$set": changed})
        self.published.append({"task_id": task_id, "created": True})
        return task_id

    def ran(self, task_id: str, run_id: str, start: float, end: float | None, pid: int = 1) -> None:
        """Note a handler from `start` to `end`; None: its process died."""
        for event, at in (("start", start), ("end", end)):
            if at is not None:
                self.notes.append(
                    {"event": event, "task_id": task_id, "run_id": run_id, "pid": pid, "at": at, "version": "new"}
                )

    def violations(self) -> list[str]:
        """Judge what was told; the firings of the schedule are left out."""
        for name, lines in (("handlers-1", self.notes), ("publisher-1", self.published)):
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = judge(self.client, self.folder, self.killed, [PAUSE]).violations
        return [violation for violation in found if not violation.startswith("firings: none")]


@pytest.fixture
def history(client: Client, tmp_path: Path) -> History:
    client.add_schedule("tick", "tick", timedelta(hours=1))
    return History(client, tmp_path)


def legal(history: History) -> str:
    task_id = history.task("quick", ("r0", "SUCCESS"))
    history.ran(task_id, "r0", 1.0, 2.0)
    return task_id


def killed_and_run_again(history: History) -> str:
    task_id = history.task("slow", ("r1", "TIMEOUT"), ("r2", "SUCCESS"))
    process = subprocess.Popen(["true"])
    process.wait()
    history.killed.append(Process("w", NEW, process, killed=3.0))
    history.ran(task_id, "r1", 1.0, None, process.pid)
    history.ran(task_id, "r2", 5.0, 6.0)
    return task_id


def died_after_its_commit(history: History) -> None:
    task_id = history.task("deposit", ("r3", "SUCCESS"))
    history.client.tasks.database["effects"].insert_one({"task_id": task_id, "run_id": "r3"})
    history.ran(task_id, "r3", 1.0, None)


def test_legal_history_passes(history: History) -> None:
    legal(history)
    killed_and_run_again(history)
    died_after_its_commit(history)
    assert history.violations() == []


def lost(history: History) -> None:
    history.published.append({"task_id": "quick:gone", "created": True})


def created_twice(history: History) -> None:
    history.published.append({"task_id": legal(history), "created": True})


def not_ended_well(history: History) -> None:
    history.task("quick", ("r4", "FAIL"), status="FAIL")


def succeeded_twice(history: History) -> None:
    task_id = history.task("quick", ("r5", "SUCCESS"), ("r6", "SUCCESS"))
    history.ran(task_id, "r5", 1.0, 2.0)
    history.ran(task_id, "r6", 3.0, 4.0)


def no_handler(history: History) -> None:
    history.task("quick", ("r7", "SUCCESS"))


def two_effects(history: History) -> None:
    died_after_its_commit(history)
    effects = history.client.tasks.database["effects"]
    effects.insert_one({"task_id": next(iter(effects.find()))["task_id"], "run_id": "r3"})


def at_once(history: History) -> None:
    task_id = history.task("quick", ("r8", "FAIL"), ("r9", "SUCCESS"))
    history.ran(task_id, "r8", 1.0, 5.0)
    history.ran(task_id, "r9", 4.0, 6.0)


def unknown_run(history: History) -> None:
    history.ran(legal(history), "nobody", 7.0, 8.0)


def called_twice(history: History) -> None:
    history.ran(legal(history), "r0", 7.0, 8.0)


def beyond_the_limit(history: History) -> None:
    for number in range(3):
        task_id = history.task("narrow", (f"n{number}", "SUCCESS"))
        history.ran(task_id, f"n{number}", 1.0, 2.0)


def claimed_in_a_pause(history: History) -> None:
    task_id = history.task("narrow", ("p", "SUCCESS"))
    history.ran(task_id, "p", 1.0, 2.0)
    path = "task_state.worker_states.0.claim_time"
    history.client.tasks.update_one(
        {"_id": task_id}, {"$set": {path: PAUSE[0] + timedelta(minutes=1), "queue": "narrow"}}
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lost, "was acknowledged and does not exist"),
        (created_twice, "was created 2 times"),
        (not_ended_well, "is FAIL, not SUCCESS"),
        (succeeded_twice, "has successes of"),
        (no_handler, "no handler has returned"),
        (two_effects, "has 2 effects"),
        (at_once, "ran at once"),
        (unknown_run, "is in no document"),
        (called_twice, "has called its handler 2 times"),
        (claimed_in_a_pause, "while its queue was paused"),
        (beyond_the_limit, "3 runs of the queue narrow at once"),
    ],
)
def test_wrong_history_is_recognised(history: History, wrong: Callable[[History], Any], words: str) -> None:
    wrong(history)
    assert any(words in violation for violation in history.violations()), history.violations()
