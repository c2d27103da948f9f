"""Where the demo's documents live: a mongod that leaves nothing behind, one that is kept, or an existing database."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from mtask import Client, local
from mtask.demo.app import app
from mtask.errors import SchemaMismatch
from mtask.store.driver.operation import COLLECTIONS
from mtask.store.driver.stores import TASKS, bounded
from mtask.store.driver.translate import scrubbed

DATABASE = "mtask_demo"
_CALL_TIMEOUT = timedelta(seconds=30)
_REMEDY = "The demo wants a database of its own: name another with --database."


@dataclass(frozen=True, slots=True)
class Place:
    """A database for the demo. `folder` is that of a server that is kept."""

    uri: str = field(repr=False)  # it may hold a password
    database: str
    words: str
    folder: Path | None = None
    is_kept: bool = False

    @property
    def shown_uri(self) -> str:
        """The URI without a password."""
        return scrubbed(self.uri)

    @property
    def is_own(self) -> bool:
        """Whether the server is the demo's own, so that its URI names the database."""
        return f"/{self.database}?" in self.uri

    def mongosh(self, script: str) -> str:
        """Return the line that runs a script on the documents."""
        chosen = script if self.is_own else f"db = db.getSiblingDB({json.dumps(self.database)}); {script}"
        return shlex.join(["mongosh", self.shown_uri, "--quiet", "--eval", chosen])

    def mtask(self, *arguments: str) -> str:
        """Return the line that runs a command of mtask on the documents."""
        database = [] if self.is_own else ["--database", self.database]
        return shlex.join(["mtask", *arguments, "--uri", self.shown_uri, *database])

    @property
    def ending(self) -> list[str]:
        """The lines that remove what is kept."""
        if self.folder is not None:
            folder = shlex.quote(str(self.folder))
            return [f"mtask local stop --folder {folder}", f"rm -r {folder}"]
        return [self.mongosh("db.dropDatabase()")]


@contextmanager
def temporary_place(mongod: Path | None) -> Iterator[Place]:
    """Run a mongod in a folder of its own; nothing is left at the end."""
    with local.temporary(mongod=mongod) as server:
        yield Place(_with_database(server.uri), DATABASE, "in a temporary folder")


@contextmanager
def kept_place(mongod: Path | None) -> Iterator[Place]:
    """Start a mongod that stays, unless the block fails or is interrupted."""
    folder = Path(tempfile.mkdtemp(prefix="mtask-demo-")).resolve()
    try:
        server = local.start(folder, mongod=mongod)
        yield Place(_with_database(server.uri), DATABASE, f"in {folder}", folder, is_kept=True)
    except BaseException:
        local.stop(folder)
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def existing_place(uri: str, database: str | None, *, keep: bool) -> Iterator[Place]:
    """Use a database that holds nothing but what an earlier demo left; raise SchemaMismatch.

    Without `keep` the demo's documents are removed at the end; with it, unless the block fails.
    """
    name = database or DATABASE
    with Client(uri, database=name, check=False) as client:
        client.server_time()
        _refuse_foreign(client)
        _clear(client)
        is_done = False
        try:
            yield Place(uri, name, f"at {scrubbed(uri)}, database {name}", is_kept=keep)
            is_done = True
        finally:
            if not (keep and is_done):
                _clear(client)


def _with_database(uri: str) -> str:
    return uri.replace("/?", f"/{DATABASE}?")


def _refuse_foreign(client: Client) -> None:
    with bounded(_CALL_TIMEOUT):
        collections = set(client.tasks.database.list_collection_names()) - set(COLLECTIONS)
        database = client.tasks.database
        kept = [name for name in COLLECTIONS[2:] if database[name].find_one({}, {"_id": 1}) is not None]
        foreign = client.tasks.find_one({"name": {"$nin": list(app.handlers)}}, {"_id": 1})
    where = f"{client.database_name}.{TASKS}"
    if collections:
        raise SchemaMismatch(where, f"beside it there is the collection {min(collections)!r}", _REMEDY)
    if kept:
        raise SchemaMismatch(where, f"beside it there are documents in {kept[0]!r}", _REMEDY)
    if foreign is not None:
        raise SchemaMismatch(where, f"document {foreign['_id']!r} is not the demo's", _REMEDY)
    present = client.workers()
    if present:
        raise SchemaMismatch(where, f"{present[0].worker_id!r} works on it", "Stop it, or name another --database.")


def _clear(client: Client) -> None:
    """Remove our collections, and so a database that holds nothing else."""
    with bounded(_CALL_TIMEOUT):
        for name in COLLECTIONS:
            client.tasks.database[name].drop()
