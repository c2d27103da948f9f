"""A service publishes through `mtask web`, which is killed in the middle. What it repeats is there once."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, eventually, fail_command, until
from tests.mongo import Client as Mongo
from tests.processes import kill_marked

ROOT = Path(__file__).parents[2]
_MARK = "MTASK_TEST_WEB"
#: Keys, those of them that two requests have, and the tasks of the batch.
KEYS, TWICE, BATCH = 380, 20, 200
#: The number of answers after which the server is killed.
ANSWERED = 120


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    path: str
    key: str
    body: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

    status: int
    document: Any


@contextmanager
def serving(uri: str, database: str, folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `mtask web` during the block; give the process and its port."""
    arguments = [sys.executable, "-m", "mtask.cli.main", "web", "--port", str(port), "--no-token", "--json"]
    variables = {"MTASK_URI": uri, "MTASK_DATABASE": database, "PYTHONPATH": str(ROOT), _MARK: database}
    printed = folder / f"web-{port}"
    with printed.open("wb") as out, (folder / "errors").open("ab") as errors:
        process = subprocess.Popen(
            arguments, cwd=folder, env={**os.environ, **variables}, stdout=out, stderr=errors, start_new_session=True
        )
    try:
        found = eventually(lambda: _port_in(printed), PATIENCE, "mtask web serves")
        assert found is not None
        yield process, found
    finally:
        process.kill()
        process.wait(PATIENCE)
        kill_marked(_MARK, database)


def _port_in(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_text())["url"].rpartition(":")[2])
    except ValueError:
        return None


async def send(port: int, ask: Ask) -> Answer | None:
    """Send a request on a connection of its own. None: there was no whole answer."""
    body = json.dumps(ask.body)
    head = [
        f"POST {ask.path} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Connection: close",
        "Content-Type: application/json",
        f"Idempotency-Key: {ask.key}",
        f"Content-Length: {len(body)}",
    ]
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write("\r\n".join([*head, "", body]).encode())
            received = await reader.read(-1)
        finally:
            writer.close()
        first, _, content = received.partition(b"\r\n\r\n")
        return Answer(int(first.split()[1]), json.loads(content))
    except (OSError, ValueError, IndexError):
        return None


def asks() -> list[Ask]:
    """Return the requests: 400 single ones, and a batch. Some keys occur twice."""
    rows = [*range(KEYS), *range(TWICE)]
    made = [Ask("/v1/tasks", f"order/{row}", {"name": "charge", "params": {"order": row}}) for row in rows]
    tasks = [{"name": "ship", "params": {"part": part}} for part in range(BATCH)]
    return [Ask("/v1/tasks:batch", "parcel/7", {"tasks": tasks}), *made]


def outcomes(answers: Sequence[tuple[Ask, Answer | None]]) -> Counter[tuple[str, bool, bool | None]]:
    """Count what the answers tell of each task: its id, whether it was created, and whether its params differ."""
    told: Counter[tuple[str, bool, bool | None]] = Counter()
    for _, answer in answers:
        if answer is not None:
            assert answer.status in (200, 201), answer.document
            for row in answer.document.get("tasks", [answer.document]):
                assert "problem" not in row
                told[row["task_id"], row["created"], row.get("params_differ")] += 1
                assert "tasks" in answer.document or (answer.status == 201) == row["created"]
    return told


def stored(mongo: Mongo, database: str) -> dict[str, Any]:
    """Return all tasks by id."""
    return {task["_id"]: task for task in mongo[database]["tasks"].find()}


def test_requests_that_a_killed_server_left_unanswered_are_repeated_and_published_once(
    mongo_uri: str, database_name: str, mongo: Mongo, tmp_path: Path, report: Report
) -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < 4_096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4_096, most), most))
    tasks = mongo[database_name]["tasks"]

    async def killed_in_the_middle(process: subprocess.Popen[bytes], port: int) -> list[tuple[Ask, Answer | None]]:
        first = await send(port, Ask("/v1/tasks", "parcel/7/0", {"name": "ship", "params": {"part": 0}}))
        assert first is not None
        assert first.status == 201
        batch, *single = asks()
        early = await asyncio.gather(*(send(port, ask) for ask in single[: ANSWERED - 1]))
        # The server reads tasks that exist already. While these reads are held up, the answer to the batch does not
        # come, though its tasks are stored. It is held for an instant only: the server gives up a long read with 503.
        with fail_command(mongo, "find", block_ms=60_000, app_name="mtask", namespace=tasks.full_name):
            late = [batch, *single[ANSWERED - 1 :]]
            sent = [asyncio.create_task(send(port, batch))]
            await until(_is_stored, PATIENCE, "the batch is stored")
            sent += [asyncio.create_task(send(port, ask)) for ask in late[1:]]
            await until(lambda: any(one.done() for one in sent), PATIENCE, "it is in the middle")
            process.kill()
            of_server = {"appName": "mtask", "command.find": tasks.name, "command.$db": database_name}
            for held in mongo.admin.aggregate([{"$currentOp": {}}, {"$match": of_server}]):
                mongo.admin.command("killOp", op=held["opid"])
            answers = [*early, *await asyncio.gather(*sent)]
            return list(zip([*single[: ANSWERED - 1], *late], answers, strict=True))

    def _is_stored() -> bool:
        return tasks.count_documents({"name": "ship"}) == BATCH

    async def answered(port: int, ask: Ask) -> Answer | None:
        """Send a request until the answer is not 503, which says: send the request again."""
        end, answer = monotonic() + PATIENCE, await send(port, ask)
        while answer is not None and answer.status == 503 and monotonic() < end:
            await asyncio.sleep(0.1)
            answer = await send(port, ask)
        return answer

    async def repeated(port: int, left: Sequence[Ask]) -> list[tuple[Ask, Answer | None]]:
        return list(zip(left, await asyncio.gather(*(answered(port, ask) for ask in left)), strict=True))

    with serving(mongo_uri, database_name, tmp_path) as (process, port):
        answers = asyncio.run(killed_in_the_middle(process, port))
    unanswered = [ask for ask, answer in answers if answer is None]
    before, told_before = stored(mongo, database_name), outcomes(answers)
    answered_ids = {task_id for task_id, _, _ in told_before}
    in_between = before.keys() - answered_ids
    report("answered before the kill", len(answers) - len(unanswered))
    report("stored and not answered", len(in_between))
    assert ANSWERED <= len(answers) - len(unanswered) < len(answers)
    assert unanswered[0].key == "parcel/7"
    assert answered_ids <= before.keys(), "what was answered is stored"
    assert set(told_before.values()) <= {1}, "nothing was told to be created twice"

    with serving(mongo_uri, database_name, tmp_path, port) as (_, same):
        again = asyncio.run(repeated(same, unanswered))
    assert all(answer is not None for _, answer in again)
    told = outcomes(again)
    after = stored(mongo, database_name)
    wanted = {f"charge:order/{row}": {"order": row} for row in range(KEYS)}
    wanted |= {f"ship:parcel/7/{part}": {"part": part} for part in range(BATCH)}
    assert {task_id: task["params"] for task_id, task in after.items()} == wanted
    assert {task_id: after[task_id] for task_id in before} == before, "a repeat changes nothing"
    created = Counter(task_id for task_id, is_created, _ in (told_before + told).elements() if is_created)
    assert set(created.values()) == {1}
    existed = {task_id for task_id, is_created, _ in told if not is_created}
    assert wanted.keys() == created.keys() | existed, "what nobody was told to be created was there at the repeat"
    for task_id in in_between - {"ship:parcel/7/0"}:
        assert told[task_id, True, None] == 0
        assert task_id in existed
    assert all(is_created or differs is False for _, is_created, differs in told)
    assert (tmp_path / "errors").read_text() == ""
