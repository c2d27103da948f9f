"""`mtask web` as a process, with tokens and a database user whose secrets nobody else has, and what it shows."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pymongo import MongoClient

from mtask import Client, Flow
from mtask.errors import InvalidInput
from mtask.web.tokens import digest_of
from tests.faults.web.texts import TEXTS
from tests.mongo import PATIENCE, eventually
from tests.workers import WorkerProcess

ROOT = Path(__file__).parents[3]
APP = "tests.faults.web.app:app"
DATABASE = "web_fuzz"
#: The tokens by name: role and tenant.
CALLERS: Mapping[str, tuple[str, str | None]] = {
    "read": ("read", None),
    "publish": ("publish", None),
    "operate": ("operate", None),
    "acme": ("operate", "acme"),
}


@dataclass(slots=True)
class Target:
    """A running server that hostile requests are sent to."""

    port: int
    tokens: Mapping[str, str]
    password: str = field(repr=False)
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def secrets(self) -> list[str]:
        """What no answer and no line of the log may hold."""
        return [*self.tokens.values(), *(digest_of(token) for token in self.tokens.values()), self.password]

    @property
    def log(self) -> str:
        """What the server has printed."""
        return "".join((self.folder / name).read_text(errors="replace") for name in ("out", "err"))

    def stop(self) -> int:
        """End the server; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@contextmanager
def target(uri: str, folder: Path, database: str = DATABASE, texts: Sequence[str] = TEXTS) -> Iterator[Target]:
    """Serve a database with these texts in it during the block, with one worker."""
    password = f"pw-{secrets.token_hex(12)}"
    with_user = _with_user(uri, password)
    tokens = {name: f"token-of-{name}-{secrets.token_hex(16)}" for name in CALLERS}
    listed = [
        {"name": name, "role": role, "sha256": digest_of(tokens[name]), **({"tenant": tenant} if tenant else {})}
        for name, (role, tenant) in CALLERS.items()
    ]
    (folder / "tokens.json").write_text(json.dumps(listed))
    (folder / "tokens.json").chmod(0o600)
    worker = WorkerProcess(uri, database, "fuzz-worker", folder=folder, app=APP)
    try:
        fill(uri, database, texts)
        flags = ["web", "--port", "0", "--json", "--token-file", str(folder / "tokens.json")]
        environment = {**os.environ, "MTASK_URI": with_user, "MTASK_DATABASE": database, "PYTHONPATH": str(ROOT)}
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            command = [sys.executable, "-m", "tests.faults.web.verbose", *flags]
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
        try:
            printed = eventually(lambda: _json_in(folder / "out"), PATIENCE, "it serves")
            yield Target(int(printed["url"].rpartition(":")[2]), tokens, password, folder, process)
        finally:
            process.kill()
            process.wait(PATIENCE)
    finally:
        worker.reap()


def _with_user(uri: str, password: str) -> str:
    """Make a user of the database; return the URI with its name and password."""
    with MongoClient[dict[str, Any]](uri) as mongo:
        if not mongo.admin.command("usersInfo", "fuzz")["users"]:
            mongo.admin.command("createUser", "fuzz", pwd=password, roles=["root"])
        else:
            mongo.admin.command("updateUser", "fuzz", pwd=password)
    joined = "&" if "?" in uri else "/?"
    return f"{uri.replace('://', f'://fuzz:{quote(password)}@')}{joined}authSource=admin"


def _json_in(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def fill(uri: str, database: str, texts: Sequence[str]) -> None:
    """Publish tasks, flows, schedules and controls with hostile texts wherever a text may stand."""
    with Client(uri, database=database, registry=False) as client:  # params that no handler takes, too
        client.init()
        for index, text in enumerate(texts):
            _fill_one(client, index, text)
        for index in range(30):
            client.publish("echo", {"n": index}, key=f"k{index}", lookup={"user_id": index % 3})
            client.publish("echo", {"n": index}, key=f"later{index}", delay=timedelta(hours=3))
            client.publish("echo", {"n": index}, key=f"acme:k{index}")
        client.wait_all([("echo", f"k{index}") for index in range(30)], timeout=30)
        client.pause(queue="paused")
        client.limit("mail", concurrency=100)
        client.publish("echo", key="waits", queue="paused")
        client.publish("echo", key="unserved", queue="mail")
        client.cancel("echo", "later1")
    _leave_malformed(uri, database, texts)


def _fill_one(client: Client, index: int, text: str) -> None:
    """Store one text in each place that takes it."""
    params = {"text": text, "list": [text]}
    _unless_invalid(lambda: client.publish("echo", params, key=text))
    _unless_invalid(lambda: client.publish("echo", params, key=f"acme:{text}"))
    _unless_invalid(lambda: client.publish("echo", {text: text}, key=f"named{index}"))
    _unless_invalid(lambda: client.publish("refuse", {"text": text}, key=text))
    _unless_invalid(lambda: client.publish("echo", {"value": text}, key=f"lookup{index}", lookup={"text": text}))
    _unless_invalid(lambda: client.publish("echo", text, key=f"queue{index}", queue=text))
    _unless_invalid(lambda: client.publish("echo", text, key=f"limit{index}", limit_key=text))
    _unless_invalid(lambda: client.publish("echo", text, key=f"worker{index}", specific_worker_ids=[text]))
    _unless_invalid(lambda: client.add_schedule(text, "echo", timedelta(hours=1), {"text": text}, queue=text))
    _unless_invalid(lambda: client.pause(queue=text))

    def flow() -> None:
        made = Flow(text)
        first = made.add(text.replace("/", "|"), "echo", text)
        made.add("failing", "refuse", {"text": text}, after=[first])
        made.add("then", "echo", text, after=["failing"], on_failed="fail")
        client.publish_flow(made)

    _unless_invalid(flow)


def _unless_invalid(act: Callable[[], object]) -> None:
    with suppress(InvalidInput):
        act()


def _leave_malformed(uri: str, database: str, texts: Sequence[str]) -> None:
    """Write documents that are no tasks, past the validator."""
    with MongoClient[dict[str, Any]](uri) as mongo:
        tasks = mongo[database]["tasks"]
        good = tasks.find_one({"_id": "echo:k1"})
        assert good is not None
        for index, text in enumerate(texts):
            key = f"bad{index}{text}"
            broken = {**good, "_id": f"echo:{key}", "key": key, "task_option": text, "queue": text}
            tasks.insert_one(broken, bypass_document_validation=True)
