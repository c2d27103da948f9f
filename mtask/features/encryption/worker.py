"""The keys: whether this worker can decrypt tasks, and which tasks it leaves to other workers.

An encrypted task names its data key. A worker that cannot use this key claims no such task, because it would end the
task as a failure. It asks for the key again after a while: the key may have been made since, or the key vault mended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from mtask.errors import DatabaseError, MtaskError
from mtask.features.encryption import decrypt as unsealing
from mtask.features.encryption import encrypt as sealing
from mtask.features.encryption.cipher import Sealer
from mtask.kernel.document.parts import Sealed, is_encrypted
from mtask.kernel.document.task import StoredTask
from mtask.kernel.statements.filters import Filter
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Part
from mtask.kernel.worker.process.state import Scope

#: The time for which a worker claims no tasks of a data key that it could not use, in seconds.
LEFT_ALONE = 30.0
#: The most data keys that a claim excludes by name. If there are more, it claims no encrypted tasks for a while.
_MAX_EXCLUDED = 200


class Unreadable(Exception):
    """A claimed task cannot be decrypted here. Another worker may be able to."""


class Keys(Part):
    """Decrypts the tasks that this worker has claimed, and knows which data keys it cannot use."""

    def __init__(self, scope: Scope) -> None:
        self._store = scope.store
        self.sealer: Sealer | None = scope.store.sealer
        #: The names of the data keys that this worker cannot use. "*": it has no keys at all.
        self._unusable = {"*"} if self.sealer is None else set()
        #: The time until which tasks of a data key are not claimed (monotonic seconds), by the name of the data key.
        self._left_alone: dict[str, float] = {}
        self._logged: set[str] = set()

    def beat(self) -> Mapping[str, Any]:
        """Tell which data keys this worker cannot use."""
        return {"unusable_keys": sorted(self._unusable)}

    def skips(self, document: Mapping[str, Any]) -> bool:
        """Whether this worker must not claim a task now, because of the data key that its document names."""
        sealed = document.get("sealed")
        if sealed is None:
            return False
        if self.sealer is None:
            self._log_once(str(sealed), "this worker has no keys: give it --encryption-key-file")
            return True
        until = self._left_alone.get(sealed) if isinstance(sealed, str) else None
        return until is not None and until > monotonic()

    def guard(self) -> list[Filter]:
        """Return the guard that keeps the tasks out of claims and scans that this worker must not claim now."""
        if self.sealer is None:
            return [{"sealed": None}]
        if not self._left_alone:
            return []
        now = monotonic()
        for name in [name for name, until in self._left_alone.items() if until <= now]:
            del self._left_alone[name]
            self._unusable.discard(name)  # it is tried again
        names = list(self._left_alone)
        if len(names) > _MAX_EXCLUDED:
            return [{"sealed": None}]
        return [{"sealed": {"$nin": names}}] if names else []

    def are_needed(self, documents: Sequence[dict[str, Any]]) -> bool:
        """Whether one of these claimed tasks must be decrypted, or what its run writes must be encrypted."""
        return self.sealer is not None or any(
            "sealed" in document or is_encrypted(document.get("params")) for document in documents
        )

    async def load(self, tasks: Sequence[StoredTask]) -> None:
        """Load the data keys that the runs of these claimed tasks need. After an error, `open` says what is missing."""
        using = self.sealer
        if using is None:
            return
        names = {name for task in tasks for name in using.names_for(task.queue, task.key)}
        names |= {task.sealed for task in tasks if task.sealed is not None}
        key_ids = {place.sealed.content[1:17] for task in tasks for place in unsealing.places_in(task)}
        if not using.vault.lacks(names, key_ids):
            return
        try:
            await self._store.run(sealing.load(using, sorted(names), sorted(key_ids)))
        except DatabaseError as error:
            logger.warning("data keys not loaded", extra=fields(keys=len(names), reason=told(error)))

    def open(self, task: StoredTask) -> None:
        """Decrypt a claimed task in place.

        Raises Unreadable, or DecryptionFailed if what it holds is not its own, or is readable and must not be.
        """
        if self.sealer is None:
            if task.sealed is not None or any(isinstance(each, Sealed) for each in _params_in(task)):
                self._refuse(task, "this worker has no keys: give it --encryption-key-file")
            return
        try:
            # What the run returns must be encrypted, too, even if somebody has published the task readable.
            self.sealer.vault.name_of(task.queue, task.key)
        except MtaskError as error:
            self._refuse(task, str(error))
        unsealing.open_task(self.sealer, task)
        for value in _params_in(task):
            if isinstance(value, Sealed):
                if value.is_final:
                    raise value.error
                self._refuse(task, value.why)
        for entry in task.lookup or ():
            if isinstance(entry.v, Sealed) and entry.v.is_final:
                raise entry.v.error

    def _refuse(self, task: StoredTask, reason: str) -> None:
        name = task.sealed or ""
        if name:
            self._left_alone[name] = monotonic() + LEFT_ALONE
            if len(self._unusable) < _MAX_EXCLUDED:
                self._unusable.add(name)
        self._log_once(name or task.id, reason)
        raise Unreadable(reason)

    def _log_once(self, name: str, reason: str) -> None:
        if name not in self._logged and len(self._logged) < _MAX_EXCLUDED:
            self._logged.add(name)
            logger.error("encrypted tasks are left to other workers", extra=fields(key=name, reason=reason))


def _params_in(task: StoredTask) -> list[Any]:
    """Return the params of a task, or of each call that it has collected."""
    calls = task.params.get("calls") if type(task.params) is dict else None
    return calls if isinstance(calls, list) else [task.params]
