"""The context of a command: its flags, its consoles for stdout and stderr, and its database client."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.text import Text

from mtask.cli.flags import Flags
from mtask.cli.output import NotPrinted, clean, console, write_json
from mtask.client.sync import Client
from mtask.defaults import DEFAULT_DATABASE, DEFAULT_URI
from mtask.errors import UnknownTaskName
from mtask.features.audit_log.client import acting_as, system_user
from mtask.features.encryption.settings import Encryption, read_encryption
from mtask.kernel.document.identity import check_tenant, stored_key, task_id_of
from mtask.kernel.driver import connect
from mtask.settings import Settings, read_settings

#: Time limit of a command's search for a MongoDB server.
SERVER_TIMEOUT = timedelta(seconds=5)
#: Time limit of one request to the database. It is long, because a request for statistics or for a new index reads
#: every task.
CALL_TIMEOUT = timedelta(seconds=60)
LOCAL_URI = "local"


class Cli:
    """One call of a command. At its end, this context manager closes the clients that it opened."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self.out: Console = console(sys.stdout, no_color=bool(flags.no_color))
        self.err: Console = console(sys.stderr, no_color=bool(flags.no_color))
        self._clients: list[Client] = []
        self._acting = ExitStack()
        self._settings: Settings | None = None
        self._logging: tuple[list[logging.Handler], bool, int] = ([], True, logging.NOTSET)

    def __enter__(self) -> Self:
        # Commands tell of unknown names in their own words.
        self._acting.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UnknownTaskName)
        logger = logging.getLogger("mtask")
        self._logging = (logger.handlers, logger.propagate, logger.level)
        logger.handlers, logger.propagate = [_Notices(self)], False
        logger.setLevel(logging.DEBUG if self.flags.verbose else logging.ERROR if self.flags.quiet else logging.WARNING)
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self._acting.close()
        logger = logging.getLogger("mtask")
        logger.handlers, logger.propagate, level = self._logging
        logger.setLevel(level)

    @property
    def is_json(self) -> bool:
        """Whether to print JSON: the flag --json was given."""
        return bool(self.flags.json)

    @property
    def settings(self) -> Settings:
        """The settings from the environment and `.env`."""
        if self._settings is None:
            self._settings = read_settings()
        return self._settings

    def uri(self) -> str:
        """Return the URI to connect to. For 'local', start the embedded mongod if it does not run."""
        uri = self.flags.uri if self.flags.uri is not None else self.settings.uri
        if uri.strip() != LOCAL_URI:
            return uri
        from mtask import local  # few commands need it

        folder = self.settings.local_folder
        server = local.status(folder)
        if server is None:
            server = local.start(folder, mongod=self.settings.mongod)
            self.notice(f"started the embedded mongod in {server.folder}; `mtask local stop` ends it")
        return server.uri

    def database(self) -> str:
        """Return the name of the database that a client would use. This needs no server."""
        given = self.flags.database if self.flags.database is not None else self.settings.database
        uri = self.flags.uri if self.flags.uri is not None else self.settings.uri
        return connect.database_of(DEFAULT_URI if uri.strip() == LOCAL_URI else uri, given, DEFAULT_DATABASE)

    def client(self, *, reads_only: bool = False) -> Client:
        """Return a new client. With `reads_only`, the client does not make missing collections."""
        database = self.flags.database if self.flags.database is not None else self.settings.database
        if not self._clients:
            self._acting.enter_context(acting_as(self._actor(), "command line"))
        client = Client(
            self.uri(),
            database=database,
            check=not reads_only,
            timeout=CALL_TIMEOUT,
            server_timeout=SERVER_TIMEOUT,
            tenant=self.flags.tenant,
            encryption=self.encryption(),
        )
        self._clients.append(client)
        return client

    def task_id(self, name: str, key: str) -> str:
        """Return the id of the task that a name and a key mean here."""
        tenant = self.flags.tenant
        return task_id_of(name, stored_key(None if tenant is None else check_tenant(tenant), key))

    def encryption(self) -> Encryption | None:
        """Return the keys of encrypted tasks; None: no key file is given."""
        settings, flag = self.settings, self.flags.encryption_key_file
        given = settings.encryption_key_file if flag is None else flag
        return read_encryption(
            given, settings.encryption_key_vault, settings.encryption_queues, settings.encryption_tenants
        )

    def _actor(self) -> str:
        given = self.flags.actor if self.flags.actor is not None else self.settings.actor
        return system_user() if given is None else given

    def json(self, document: Any) -> None:
        """Print the answer as JSON, for scripts."""
        write_json(document)

    def say(self, *lines: RenderableType) -> None:
        """Print the answer as lines, for people."""
        for line in lines:
            self.out.print(line, soft_wrap=True)

    def notice(self, message: str, style: str = "bright_black") -> None:
        """Print a remark on stderr, unless --quiet is given."""
        if not self.flags.quiet:
            with suppress(OSError):  # a remark that nobody can read is no reason to end
                self.err.print(Text(clean(message), style=style), soft_wrap=True)

    def answer(self, document: Any, *lines: RenderableType) -> None:
        """Print the document if --json was given, or the lines if it was not; raise NotPrinted."""
        try:
            if self.is_json:
                self.json(document)
            else:
                self.say(*lines)
            sys.stdout.flush()
        except BrokenPipeError:
            raise  # who reads has read enough
        except OSError as error:
            raise NotPrinted(error, "; ".join(str(line) for line in lines), document) from error


class _Notices(logging.Handler):
    """A log handler that prints the library's log records on stderr."""

    def __init__(self, cli: Cli) -> None:
        super().__init__()
        self._cli = cli

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        level = record.levelname.lower()
        self._cli.err.print(Text(f"{level}: {clean(record.getMessage())}", style="yellow"), soft_wrap=True)
        if record.exc_info is not None and record.exc_info[0] is not None:
            # Only a mistake of mtask is logged with its traceback: whoever reports the mistake needs it.
            for line in "".join(traceback.format_exception(*record.exc_info)).splitlines():
                self._cli.err.print(Text(clean(line), style="bright_black"), soft_wrap=True)


def spaced(parts: Sequence[str], separator: str = " · ") -> str:
    """Join the parts that are not empty, with the separator between them."""
    return separator.join(part for part in parts if part)
