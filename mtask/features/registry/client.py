"""What a client knows of the registry: a cache of declarations, and the list of handlers."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any, Literal

from mtask.arguments.publish import Declarations, Known
from mtask.errors import AccessDenied, InvalidInput, UnknownTaskName, shown
from mtask.features.registry import operations
from mtask.features.registry.rules import Declaration, HandlerDocument, declaration_of, label, nearest_of
from mtask.kernel.document.identity import check_name
from mtask.kernel.driver.operation import Operation

UnknownNames = Literal["warn", "reject"]
#: The time for which a client believes what it knows of a name, and that a name has no handler, in seconds.
LASTS, UNKNOWN_LASTS = 30.0, 5.0
#: The time for which others believe what was known of a name while one asks anew, in seconds.
READING = 2.0
#: The most names that a client remembers.
MAX_ENTRIES = 10_000
logger = logging.getLogger("mtask.client")


class Registry(Declarations):
    """A client's cache of what handlers declare. Threads may share it."""

    def __init__(self, unknown_names: UnknownNames = "warn") -> None:
        if unknown_names not in ("warn", "reject"):
            message = f'unknown_names is "warn" or "reject", not {shown(unknown_names)}.'
            raise InvalidInput(message, field="unknown_names")
        super().__init__()
        self.rejects = unknown_names == "reject"
        self._lock = threading.Lock()
        #: The time until which the registry is known to be empty, or to be denied to this client.
        self._nothing_until = 0.0
        self._told: set[str] = set()
        self._is_denied = False

    def learn(self, names: Sequence[str]) -> Operation[None]:
        """Find out about these names; warn of those under which no handler is registered.

        Raises a DatabaseError, but not an AccessDenied: what cannot be read is not used.
        """
        wanted, now = list(names), monotonic()
        self._believe_on(wanted, now + READING)
        if self._nothing_until > now:
            self._remember(dict.fromkeys(wanted, Known(self._nothing_until, None)))
            if not self.rejects or self._is_denied:
                return
        try:
            found = yield from operations.current(wanted)
            made = {str(document["_id"]): _known(document, now) for document in found}
            unknown = [name for name in wanted if name not in made]
            if unknown:
                made |= yield from self._unknown(unknown, now)
        except AccessDenied as error:
            made = dict.fromkeys(wanted, Known(now + LASTS, None))
            self._nothing_until = now + LASTS
            if not self._is_denied:
                self._is_denied = True
                logger.warning(
                    "tasks are published by name without what their handlers declare, as this user may not read it: "
                    "%s. Run `mtask roles`, or use Client(registry=False)",
                    error,
                )
        else:
            self._is_denied = False
        self._remember(made)
        for name in made:
            self._tell(name)

    def _unknown(self, unknown: Sequence[str], now: float) -> Operation[dict[str, Known]]:
        """Return what is known of names that are not registered."""
        until = now + UNKNOWN_LASTS
        registered = yield from operations.names()
        if not registered:
            self._nothing_until = until  # nothing tells a wrong name from one whose worker has not started yet
            if not self.rejects:
                return dict.fromkeys(unknown, Known(until, None))
        served = yield from operations.served(unknown)  # a worker of an older mtask registers nothing
        return {
            name: Known(until, None, None if name in served else UnknownTaskName(name, nearest_of(name, registered)))
            for name in unknown
        }

    def _believe_on(self, wanted: Sequence[str], until: float) -> None:
        """Let others go on with what was known while one asks anew: else all that publish at this moment ask."""
        with self._lock:
            self.entries.update(
                (name, known._replace(until=max(known.until, until)))
                for name in wanted
                if (known := self.entries.get(name)) is not None
            )

    def _remember(self, made: Mapping[str, Known]) -> None:
        with self._lock:
            if len(self.entries) + len(made) > MAX_ENTRIES:
                self.entries = {}  # a thread that reads the former ones goes on with those
            self.entries.update(made)

    def _tell(self, name: str) -> None:
        """Warn of an unknown name, once."""
        entry = self.entries.get(name)
        if entry is None or entry.unknown is None or self.rejects:
            return
        with self._lock:
            is_new = name not in self._told and len(self._told) < MAX_ENTRIES
            if is_new:
                self._told.add(name)
        if is_new:
            warnings.warn(entry.unknown, stacklevel=2)

    def warning_of(self, name: str) -> UnknownTaskName | None:
        """Return the warning about a name that was just published; None: there is nothing to warn of."""
        entry = self.entries.get(name)
        return None if entry is None else entry.unknown


def registry_of(unknown_names: UnknownNames, *, is_on: bool) -> Registry | None:
    """Return the cache of a client; None: it asks the registry nothing. Raises InvalidInput."""
    made = Registry(unknown_names)
    if made.rejects and not is_on:
        raise InvalidInput(
            'unknown_names="reject" asks the registry which names there are: drop registry=False.',
            field="unknown_names",
        )
    return made if is_on else None


def _known(document: Mapping[str, Any], now: float) -> Known:
    try:
        return Known(now + LASTS, declaration_of(document))
    except ValueError as error:
        logger.warning("malformed document %r of `handlers` left out: %s", document.get("_id"), error)
        return Known(now + LASTS, None)


# --- the list --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """One version of a handler, and the live workers that have it."""

    hash: str
    is_current: bool
    app_version: str | None
    since: datetime | None  #: when a worker started it, and no live worker had it
    queue: str
    options: Mapping[str, Any]
    workers: Sequence[str]
    version: int = 1  #: of the params, as `@app.task(version=...)` says it


@dataclass(frozen=True, slots=True)
class RegisteredHandler:
    """The handlers of one name: the versions, the last started one first, and the live workers that serve the name."""

    name: str
    versions: Sequence[RegisteredVersion]
    #: Also workers of an mtask that registers no versions.
    workers: Sequence[str]
    #: What the current version declares. None: the document is malformed.
    declaration: Declaration | None

    @property
    def current(self) -> RegisteredVersion | None:
        """The version whose declaration counts."""
        return next((version for version in self.versions if version.is_current), None)


def every() -> Operation[list[RegisteredHandler]]:
    """Return the registered handlers, in the order of their names. Malformed documents are left out."""
    documents = yield from operations.every()
    workers = yield from operations.live_workers()
    found = []
    for document in documents:
        try:
            found.append(_handler(document, workers))
        except ValueError as error:
            logger.warning("malformed document %r of `handlers` left out: %s", document.get("_id"), error)
    return found


def get(name: str) -> Operation[RegisteredHandler | None]:
    """Return the handlers of a name; None: none is registered."""
    document = yield from operations.one(check_name(name))
    return None if document is None else _handler(document, (yield from operations.live_workers()))


def _handler(document: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> RegisteredHandler:
    read = HandlerDocument.model_validate(document)
    versions = [
        RegisteredVersion(
            version.hash,
            version.hash == read.current,
            version.app_version,
            version.since,
            version.queue,
            version.options,
            [str(worker["_id"]) for worker in workers if label(read.id, version.hash) in _texts(worker, "handlers")],
            version.version,
        )
        for version in reversed(read.versions)
    ]
    serving = [str(worker["_id"]) for worker in workers if read.id in _texts(worker, "names")]
    try:
        declaration = declaration_of(document)
    except ValueError:
        declaration = None
    return RegisteredHandler(read.id, versions, serving, declaration)


def _texts(worker: Mapping[str, Any], field: str) -> Sequence[Any]:
    value = worker.get(field)
    return value if isinstance(value, list) else ()
