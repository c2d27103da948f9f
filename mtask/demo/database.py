"""The demo's database. It is on a temporary mongod, on a mongod that is kept, or on an existing server."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from mtask import Client, local
from mtask.client import AsyncClient
from mtask.demo.app import app
from mtask.errors import InvalidInput, SchemaMismatch
from mtask.kernel.driver.errors import scrubbed
from mtask.kernel.driver.operation import COLLECTIONS
from mtask.kernel.driver.stores import TASKS, bounded
from mtask.kernel.driver.types import SyncCollection
from mtask.kernel.statements.filters import RUNS

DATABASE = "mtask_demo"
_REMEDY = "The demo needs a database of its own: name another with --database."


@dataclass(frozen=True, slots=True)
class DemoDatabase:
    """A database for the demo. `folder`: the data folder of the demo's own mongod, if it is kept."""

    uri: str = field(repr=False)  # the URI may hold a password
    name: str
    words: str
    folder: Path | None = None
    is_kept: bool = False

    @property
    def shown_uri(self) -> str:
        """The URI without a password."""
        return scrubbed(self.uri)

    @property
    def is_own(self) -> bool:
        """Whether the demo started the server. The URI of such a server names the database."""
        return f"/{self.name}?" in self.uri

    def mongosh(self, script: str) -> str:
        """Return the command line that runs a script in the database."""
        chosen = script if self.is_own else f"db = db.getSiblingDB({json.dumps(self.name)}); {script}"
        return shlex.join(["mongosh", self.shown_uri, "--quiet", "--eval", chosen])

    def mtask(self, *arguments: str) -> str:
        """Return the command line that runs a command of mtask on the database."""
        database = [] if self.is_own else ["--database", self.name]
        return shlex.join(["mtask", *arguments, "--uri", self.shown_uri, *database])

    @property
    def ending(self) -> list[str]:
        """The command lines with which the user removes a kept database."""
        if self.folder is not None:
            folder = shlex.quote(str(self.folder))
            return [f"mtask local stop --folder {folder}", f"rm -r {folder}"]
        return [self.mongosh("db.dropDatabase()")]


@contextmanager
def temporary_database(mongod: Path | None) -> Iterator[DemoDatabase]:
    """Run a mongod in a temporary folder, which is removed at the end."""
    with local.temporary(mongod=mongod) as server:
        yield DemoDatabase(_with_database(server.uri), DATABASE, "in a temporary folder")


@contextmanager
def kept_database(mongod: Path | None) -> Iterator[DemoDatabase]:
    """Start a mongod that continues to run, unless the block fails or is interrupted."""
    folder = Path(tempfile.mkdtemp(prefix="mtask-demo-")).resolve()
    try:
        server = local.start(folder, mongod=mongod)
        yield DemoDatabase(_with_database(server.uri), DATABASE, f"in {folder}", folder, is_kept=True)
    except BaseException:
        local.stop(folder)
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def existing_database(uri: str, database: str | None, *, keep: bool) -> Iterator[DemoDatabase]:
    """Use a database that is empty or holds only documents of an earlier demo.

    Raises SchemaMismatch for any other database, and if a worker uses the database. The demo's documents are removed at
    the end. With `keep`, they are removed only if the block fails.
    """
    name = database or DATABASE
    with Client(uri, database=name, check=False) as client:
        client.server_time()
        _refuse_foreign(client)
        clear(client.tasks)
        is_done = False
        try:
            yield DemoDatabase(uri, name, f"at {scrubbed(uri)}, database {name}", is_kept=keep)
            is_done = True
        finally:
            if not (keep and is_done):
                clear(client.tasks)


def _with_database(uri: str) -> str:
    return uri.replace("/?", f"/{DATABASE}?")


def _refuse_foreign(client: Client) -> None:
    """Raise SchemaMismatch if the database holds anything but workers and tasks of the demo."""
    tasks, where = client.tasks, f"{client.database_name}.{TASKS}"
    with bounded(_TIMEOUT):
        foreign = set(tasks.database.list_collection_names()) - set(COLLECTIONS)
        kept = [name for name in COLLECTIONS[2:] if tasks.database[name].find_one({}, {"_id": 1}) is not None]
        task = tasks.find_one({"name": {"$nin": list(app.handlers)}}, {"_id": 1})
    if foreign:
        raise SchemaMismatch(where, f"the database also holds the collection {min(foreign)!r}", _REMEDY)
    if kept:
        raise SchemaMismatch(where, f"the database also holds documents in {kept[0]!r}", _REMEDY)
    if task is not None:
        raise SchemaMismatch(where, f"document {task['_id']!r} is not the demo's", _REMEDY)
    present = client.workers()
    if present:
        raise SchemaMismatch(
            where, f"{present[0].worker_id!r} uses this database", "Stop it, or name another --database."
        )


# --- survey ----------------------------------------------------------------------------------------------

# Operations for demonstrations: clear the database, and read the tasks of one name.

Document = dict[str, Any]
#: Time limit of a request for single documents, and of a request that may read all tasks.
_TIMEOUT, _LONG_TIMEOUT = timedelta(seconds=30), timedelta(seconds=60)


def clear(tasks: SyncCollection) -> None:
    """Remove mtask's collections. If the database holds nothing else, it disappears, too."""
    with bounded(_TIMEOUT):
        for name in COLLECTIONS:
            tasks.database[name].drop()


def server_version(tasks: SyncCollection) -> str:
    """Return MongoDB's version."""
    with bounded(_LONG_TIMEOUT):
        return str(tasks.database.command("buildInfo")["version"])


def runs_by_worker(tasks: SyncCollection, name: str) -> dict[tuple[str, str], int]:
    """Return the number of runs in the tasks of this name, by worker_id and by the status of the run."""
    group = {"worker_id": f"${RUNS}.worker_id", "status": f"${RUNS}.status"}
    pipeline: list[Document] = [
        {"$match": {"name": name}},
        {"$project": {f"{RUNS}.worker_id": 1, f"{RUNS}.status": 1}},
        {"$unwind": f"${RUNS}"},
        {"$group": {"_id": group, "count": {"$sum": 1}}},
    ]
    with bounded(_LONG_TIMEOUT):
        return {(row["_id"]["worker_id"], row["_id"]["status"]): row["count"] for row in tasks.aggregate(pipeline)}


def leased_beyond(tasks: SyncCollection, name: str, worker_id: str, instant: datetime) -> list[Document]:
    """Return the tasks of this name that have a matching run of the worker.

    A run matches if its lease ends after `instant` and it has no SUCCESS.
    """
    held = {"worker_id": worker_id, "ping_expire_time": {"$gt": instant}, "success_time": None}
    with bounded(_LONG_TIMEOUT):
        return list(tasks.find({"name": name, RUNS: {"$elemMatch": held}}))


def documents(tasks: SyncCollection, name: str) -> Iterator[Document]:
    """Yield the documents of all tasks of this name, as they are stored."""
    with bounded(None):
        yield from tasks.find({"name": name})


# --- page ------------------------------------------------------------------------------------------------

# Opens the demo's database in the web page while the demo runs.

#: The port at which the page is served if it is free, as that of `mtask web`.
_PORT = 8787


@contextmanager
def served_page(database: DemoDatabase) -> Iterator[str]:
    """Serve the page of the demo's database during the block; give the link. Raises InvalidInput."""
    try:
        from mtask.web import server
        from mtask.web.access import Caller, Role
        from mtask.web.settings import WebSettings
        from mtask.web.tokens import Token, Tokens, digest_of, fresh_token
    except ImportError as error:
        raise InvalidInput(
            f"--web needs the extra `web` ({error.name} is missing): pip install 'mtask[web]'.", field="web"
        ) from None
    token = fresh_token()
    tokens = Tokens([Token(Caller("the demo's visitor", Role.OPERATE), digest_of(token))])
    settings = WebSettings(port=_PORT)
    try:
        server.listen(settings).close()
    except InvalidInput:  # another server has it
        settings = WebSettings(port=0)
    with server.served(lambda: AsyncClient(database.uri, database=database.name), settings, tokens) as port:
        yield f"http://{settings.host}:{port}/login?token={token}"
