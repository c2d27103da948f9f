"""The sealer: encrypts the values of a task before they are sent, and decrypts them after they were read.

What is encrypted is {v, name, key, field}: the value, and where it belongs. A reader checks all of it, because who may
write to the database can copy an encrypted value to another task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from bson import ObjectId

from mtask.errors import DataKeyNotFound, InvalidLookup, MtaskError
from mtask.model.encryption.encryption import key_names
from mtask.model.encryption.sealed import Sealed
from mtask.store.encryption.vault import Damaged, Vault

#: The fields of a task, by the name that is encrypted with the value.
PARAMS, RETURNS, REASON, MESSAGE, LOG = "params", "returns", "reason", "message", "log"


class Owner:
    """The task to which a value belongs: its name and key, and the queues that it is or was in."""

    __slots__ = ("key", "name", "queues")

    def __init__(self, name: str, key: str, queues: Sequence[str]) -> None:
        self.name = name
        self.key = key
        self.queues = queues

    @property
    def task_id(self) -> str:
        """The task's `_id`."""
        return f"{self.name}:{self.key}"

    def names(self) -> list[str]:
        """The names of the data keys that its values may have."""
        return key_names(self.queues, self.key)


class Sealer:
    """Encrypts and decrypts with the keys of a vault. Its methods compute only, with keys that are loaded."""

    def __init__(self, vault: Vault) -> None:
        self.vault = vault

    def names_for(self, queue: str, key: str) -> list[str]:
        """Return the names of the data keys to load before values of such a task are encrypted."""
        required, may = self.vault.encryption.wanted(queue, key)
        return [*may, *([] if required is None else [required])]

    # --- encrypting -----------------------------------------------------------------------------------------

    def seal(self, key_name: str, name: str, key: str, field: str, value: Any) -> Any:
        """Encrypt a value of a task."""
        return self.vault.encrypt(key_name, {"v": value, "name": name, "key": key, "field": field})

    def seal_of_schedule(self, key_name: str, name: str, schedule_id: str, value: Any) -> Any:
        """Encrypt the params of a schedule. They are those of each task that the schedule publishes."""
        return self.vault.encrypt(key_name, {"v": value, "name": name, "schedule": schedule_id, "field": PARAMS})

    def seal_text(self, queue: str, name: str, key: str, field: str, text: str | None) -> Any:
        """Encrypt a text of a task, such as a reason or a line of its log, if its queue or tenant has a data key.

        Return the text as it is if there is no such key, or if there is no text.
        """
        if text is None:
            return None
        key_name = self.vault.name_of(queue, key)
        return text if key_name is None else self.seal(key_name, name, key, field, text)

    def seal_lookup(self, key_name: str, entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Encrypt lookups, so that equal values under one name give equal bytes. Raises InvalidLookup."""
        return [{"k": entry["k"], "v": self.seal_value(key_name, entry["k"], entry["v"])} for entry in entries]

    def seal_value(self, key_name: str, name: str, value: Any) -> Any:
        """Encrypt one value of a lookup."""
        return self.vault.encrypt(key_name, canonical(name, value), is_lookup=True)

    # --- decrypting -----------------------------------------------------------------------------------------

    def open_text(self, owner: Owner, field: str, stored: Any) -> Any:
        """Decrypt a text of a task, if it is encrypted. Return Sealed if it cannot be decrypted."""
        return self.open(owner, field, stored) if isinstance(stored, Sealed) else stored

    def open(self, owner: Owner, field: str, sealed: Sealed) -> Any:
        """Return the value that a Sealed holds, or the same with the reason why it cannot be decrypted."""
        try:
            return self._opened(owner, field, sealed.content)
        except MtaskError as error:
            return Sealed(sealed.content, _why(error), owner.task_id, field, is_final=isinstance(error, Damaged))

    def _opened(self, owner: Owner, field: str, content: bytes) -> Any:
        self._check_key(owner, content)
        found = self.vault.decrypt(content)
        if not isinstance(found, dict) or "v" not in found:
            raise Damaged("what was encrypted is no value of mtask")
        schedule_id = found.get("schedule")
        is_here = (
            owner.key == found.get("key")
            if schedule_id is None
            else isinstance(schedule_id, str) and owner.key.startswith(f"{schedule_id}/")
        )
        if not is_here or owner.name != found.get("name") or field != found.get("field"):
            raise Damaged("it was encrypted for another task or field, and copied here")
        return found["v"]

    def _check_key(self, owner: Owner, content: bytes) -> None:
        name, problem = self.vault.key_of(content[1:17])
        if problem is not None:
            raise problem
        if name not in owner.names():
            raise Damaged(f"its data key is {name!r}, and not that of the task's queue or tenant")

    def open_lookup(self, owner: Owner, name: str, sealed: Sealed) -> Any:
        """Return the value of a lookup, or the same Sealed with the reason why it cannot be decrypted."""
        try:
            self._check_key(owner, sealed.content)
            return parsed(name, self.vault.decrypt(sealed.content))
        except MtaskError as error:
            return Sealed(sealed.content, _why(error), owner.task_id, f"lookup {name}")


def _why(error: MtaskError) -> str:
    """Return the reason in an error, as a part of a sentence."""
    return error.what if isinstance(error, DataKeyNotFound) else str(error).removesuffix(".")


_TAGS: Mapping[str, Callable[[str], Any]] = {
    "$date": datetime.fromisoformat,
    "$uuid": UUID,
    "$oid": ObjectId,
}


def canonical(name: str, value: Any) -> str:
    """Return a lookup as the text that is encrypted. Equal values give equal texts, whatever their BSON type."""
    if type(value) is str or type(value) is int:
        tagged: Any = value
    elif isinstance(value, datetime):
        # BSON keeps milliseconds.
        whole = value.astimezone(UTC).replace(microsecond=value.microsecond // 1000 * 1000)
        tagged = {"$date": whole.isoformat(timespec="milliseconds")}
    elif isinstance(value, UUID):
        tagged = {"$uuid": str(value)}
    elif isinstance(value, ObjectId):
        tagged = {"$oid": str(value)}
    elif isinstance(value, bool | float):
        raise InvalidLookup(
            name,
            f"is {type(value).__name__}, which cannot be looked up encrypted: give text or a whole number",
        )
    elif isinstance(value, int):
        tagged = int(value)
    elif isinstance(value, str):
        tagged = str(value)
    else:
        raise InvalidLookup(name, f"is {type(value).__name__}, which cannot be looked up encrypted: give it as text")
    return json.dumps([name, tagged], ensure_ascii=True, separators=(",", ":"))


def parsed(name: str, text: Any) -> Any:
    """Return the value of a lookup from the text that was encrypted."""
    try:
        of, value = json.loads(text)
        if of != name:
            raise Damaged("it was encrypted for another lookup, and copied here")
        if isinstance(value, dict):
            ((tag, inner),) = value.items()
            return _TAGS[tag](inner)
    except (TypeError, ValueError, KeyError):
        raise Damaged("what was encrypted is no lookup of mtask") from None
    return value
