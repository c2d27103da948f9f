"""The keys: whether this worker can decrypt tasks, and which tasks it leaves to other workers.

An encrypted task names its data key. A worker that cannot use this key claims no such task, because it would end the
task as a failure. It asks for the key again after a while: the key may have been made since, or the key vault mended.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from mtask.kernel.document.task import StoredTask
from mtask.kernel.statements.filters import Filter
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.process.part import Part
from mtask.kernel.worker.process.state import Scope

#: The time for which a worker claims no tasks of a data key that it could not use, in seconds.
LEFT_ALONE = 30.0
#: The most data keys that a claim excludes by name. If there are more, it claims no encrypted tasks for a while.
_MAX_EXCLUDED = 200
_KEYLESS = "this worker has no keys: give it --encryption-key-file"


class Keys(Part):
    """Knows which data keys this worker cannot use."""

    def __init__(self, scope: Scope) -> None:
        self._codec = scope.store.codec
        self._codec.on_unreadable = self._leave_alone
        #: The names of the data keys that this worker cannot use. "*": it has no keys at all.
        self._unusable = {"*"} if self._codec.is_plain else set()
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
        if self._codec.is_plain:
            self._log_once(str(sealed), _KEYLESS)
            return True
        until = self._left_alone.get(sealed) if isinstance(sealed, str) else None
        return until is not None and until > monotonic()

    def guard(self) -> list[Filter]:
        """Return the guard that keeps the tasks out of claims and scans that this worker must not claim now."""
        if self._codec.is_plain:
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

    def _leave_alone(self, task: StoredTask, reason: str) -> None:
        """Leave a claimed task that cannot be decrypted here, and others of its data key, to other workers."""
        name = task.sealed or ""
        if name:
            self._left_alone[name] = monotonic() + LEFT_ALONE
            if len(self._unusable) < _MAX_EXCLUDED:
                self._unusable.add(name)
        self._log_once(name or task.id, _KEYLESS if self._codec.is_plain else reason)

    def _log_once(self, name: str, reason: str) -> None:
        if name not in self._logged and len(self._logged) < _MAX_EXCLUDED:
            self._logged.add(name)
            logger.error("encrypted tasks are left to other workers", extra=fields(key=name, reason=reason))
