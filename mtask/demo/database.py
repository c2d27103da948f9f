"""The demo's database. It is on a temporary mongod, on a mongod that is kept, or on an existing server."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mtask import Client, local
from mtask.demo import survey
from mtask.demo.app import app
from mtask.errors import SchemaMismatch
from mtask.kernel.driver.errors import scrubbed
from mtask.kernel.driver.stores import TASKS

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
        survey.clear(client.tasks)
        is_done = False
        try:
            yield DemoDatabase(uri, name, f"at {scrubbed(uri)}, database {name}", is_kept=keep)
            is_done = True
        finally:
            if not (keep and is_done):
                survey.clear(client.tasks)


def _with_database(uri: str) -> str:
    return uri.replace("/?", f"/{DATABASE}?")


def _refuse_foreign(client: Client) -> None:
    others = survey.others(client.tasks, list(app.handlers))
    where = f"{client.database_name}.{TASKS}"
    if others.collection is not None:
        raise SchemaMismatch(where, f"the database also holds the collection {others.collection!r}", _REMEDY)
    if others.kept is not None:
        raise SchemaMismatch(where, f"the database also holds documents in {others.kept!r}", _REMEDY)
    if others.task is not None:
        raise SchemaMismatch(where, f"document {others.task['_id']!r} is not the demo's", _REMEDY)
    present = client.workers()
    if present:
        raise SchemaMismatch(
            where, f"{present[0].worker_id!r} uses this database", "Stop it, or name another --database."
        )
