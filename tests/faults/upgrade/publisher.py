"""A publisher of either version: publishes until SIGTERM, and notes each publish before and after it.

`python -m tests.faults.upgrade.publisher NAME URI DATABASE FOLDER RATE SEED`. Tasks under `shared/` are published by
both publishers, so each of them exists once whoever comes first.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from mtask import Client
from mtask.errors import MtaskError
from tests.faults.upgrade.app import NARROW, QUEUE

#: Leases are short, so that the tasks of a killed worker are taken up soon. The former version knows these names alone.
PATIENT = {"ping_interval_ms": 1_000, "worker_timeout_ms": 5_000, "max_unexpected_retries": 20}
KINDS = ("quick", "quick", "quick", "plain", "plain", "slow", "flaky", "doomed", "team", "deposit", "narrow")


def task(number: int, seed: int, database: str) -> tuple[str, Any, dict[str, Any]]:
    """Return name, params and options of a task. The same number and seed give the same task."""
    chance = random.Random(f"{seed}/{number}")
    name = chance.choice(KINDS)
    options: dict[str, Any] = {**PATIENT, "queue": NARROW if name == "narrow" else QUEUE}
    params: Any = {}
    if name in ("quick", "plain"):
        params = {"value": number}
        options |= {"priority": chance.choice((0, 0, 5))}
        options |= {"delay": round(chance.random() * 2, 2)} if chance.random() < 0.2 else {}
    elif name in ("slow", "narrow"):
        params = {"seconds": round(0.05 + chance.random() * (1.0 if name == "slow" else 0.2), 2)}
    elif name == "flaky":
        options |= {"unexpected_retry_delay_ms": 200}
    elif name == "team":
        options |= {"concurrent_worker_cnt": 2}
    elif name == "deposit":
        params = {"database": database}
    return name, params, options


def main(name: str, uri: str, database: str, folder: str, rate: str, seed: str) -> None:
    """Publish until SIGTERM."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    notes = os.open(Path(folder) / f"publisher-{name}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Client(uri, database=database) as client:
        for number in itertools.count():
            if stopped.wait(1 / float(rate)):
                return
            key = f"shared/{number}" if number % 3 == 0 else f"{name}/{os.getpid()}/{number}"
            kind, params, options = task(number, int(seed), database)
            note: dict[str, Any] = {"task_id": f"{kind}:{key}", "created": None}
            try:
                note["created"] = client.publish(kind, params, key=key, **options).created
            except MtaskError as error:
                note["error"] = str(error)
            os.write(notes, json.dumps(note).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
