"""The registrar of handlers: stores what this worker's handlers declare, and keeps the current versions live.

The time wakes it. It also remembers what handlers of other apps declare, for tasks that handlers here publish by name.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from mtask.arguments.publish import Declarations, Known
from mtask.errors import MtaskError
from mtask.features.registry import operations
from mtask.features.registry.client import logger as client_logger
from mtask.features.registry.rules import declaration_of, declared_by
from mtask.kernel.document.handlers import Handler
from mtask.kernel.operations.workers import Registration
from mtask.kernel.worker.process import runtime
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Part, Service
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import wake_or_wait

#: The time between two looks at the registry, in seconds. It varies, so that workers do not look at once.
INTERVAL = 30.0


class HandlerRegistrar(Part):
    """Registers the handlers of a worker's app."""

    def __init__(
        self, scope: Scope, registration: Registration, handlers: Iterable[Handler], app_version: str | None
    ) -> None:
        self._scope = scope
        self._registration = registration
        self._handlers = list(handlers)
        self._app_version = app_version
        self._declared: Mapping[str, Mapping[str, Any]] = {}
        #: What handlers of other apps declare.
        self.known = Declarations()
        #: The current version of each name, when it was last read.
        self._current: dict[str, str] = {}
        self._stopped = asyncio.Event()
        self._is_stored = False
        self._is_refused = False
        self.look_cnt = 0

    def services(self) -> list[Service]:
        """Look after the registry until the worker stops."""
        return [Service(self.run, self.stop)]

    def stop(self) -> None:
        """End `run`."""
        self._stopped.set()

    async def run(self) -> None:
        """Store what the handlers declare, then look after the registry at each interval until `stop`."""
        self._declared = await runtime.to_thread(self._work_out)  # half a millisecond for each handler
        while not self._stopped.is_set():
            try:
                await self._look()
            except MtaskError as error:
                if not self._is_refused:
                    logger.warning(
                        "handlers not registered, will be tried again: publishing by name knows nothing of them",
                        extra=fields(reason=told(error)),
                    )
                self._is_refused = True
            else:
                self._is_refused = False
                self.look_cnt += 1
            await wake_or_wait(self._stopped, INTERVAL * random.uniform(0.8, 1.2))

    def _work_out(self) -> dict[str, dict[str, Any]]:
        version = {} if self._app_version is None else {"app_version": self._app_version}
        return {handler.name: {**declared_by(handler), **version} for handler in self._handlers}

    async def _look(self) -> None:
        store, me = self._scope.store, self._registration
        if not self._is_stored:
            await store.run(operations.start(me.worker_id, me.incarnation, self._declared))
            self._is_stored = True
        documents = {str(document["_id"]): document for document in await store.run(operations.hashes())}
        own = {name: each["hash"] for name, each in self._declared.items()}
        gone = [name for name, own_hash in own.items() if own_hash not in _hashes_in(documents.get(name, {}))]
        # This also repeats what a worker's document says that was made anew.
        await store.run(operations.start(me.worker_id, me.incarnation, self._declared, gone))
        # Its own versions are live: only another one can have lost its last worker.
        others = [documents[name] for name, own_hash in own.items() if name in documents]
        others = [document for document in others if document.get("current") != own[str(document["_id"])]]
        if others:
            for name in await store.run(operations.succeed(others)):
                logger.info(
                    "another version of the handler is current: no worker has the former one", extra=fields(name=name)
                )
        await self._learn(documents)

    async def _learn(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Read what handlers of other apps declare, where that has changed."""
        current = {name: str(each.get("current")) for name, each in documents.items() if name not in self._declared}
        changed = [name for name, now in current.items() if self._current.get(name) != now]
        entries = {name: entry for name, entry in self.known.entries.items() if name in current}
        for document in await self._scope.store.run(operations.current(changed)) if changed else ():
            name = str(document["_id"])
            try:
                entries[name] = Known(inf, declaration_of(document))
            except ValueError as error:
                entries.pop(name, None)
                client_logger.warning("malformed document %r of `handlers` left out: %s", name, error)
        self.known.entries, self._current = entries, current


def _hashes_in(document: Mapping[str, Any]) -> set[Any]:
    versions = document.get("versions")
    found = versions if isinstance(versions, list) else []
    return {each.get("hash") for each in found if isinstance(each, Mapping)}
