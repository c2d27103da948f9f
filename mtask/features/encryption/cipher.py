"""The sealer: encrypts the values of a task before they are sent, and decrypts them after they were read.

What is encrypted is {v, name, key, field}: the value, and where it belongs. Params also hold the lookups of their task.
A reader checks all of it, because who may write to the database can copy an encrypted value to another task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from bson import ObjectId

from mtask.errors import DataKeyNotFound, InvalidLookup, MtaskError
from mtask.features.encryption.settings import key_names
from mtask.features.encryption.vault import Damaged, Vault
from mtask.features.schedules.rules import is_firing_of
from mtask.kernel.document.parts import Sealed

#: The fields of a task, by the name that is encrypted with the value.
PARAMS, RETURNS, REASON, MESSAGE, LOG = "params", "returns", "reason", "message", "log"
#: What encrypted params say of the lookups of their task.
LOOKUP = "lookup"
#: Lookups in their stored form, readable.
Entries = Iterable[Mapping[str, Any]]


class Owner:
    """The task to which a value belongs: its name and key, and the queues that it is or was in.

    Or a schedule: then `schedule` is its id with its tenant, and the key begins like those of its tasks.
    """

    __slots__ = ("key", "name", "queues", "schedule")

    def __init__(self, name: str, key: str, queues: Sequence[str], schedule: str | None = None) -> None:
        self.name = name
        self.key = key
        self.queues = queues
        self.schedule = schedule

    @property
    def task_id(self) -> str:
        """The task's `_id`."""
        return f"{self.name}:{self.key}"

    def names(self) -> list[str]:
        """The names of the data keys that its values may have."""
        return key_names(self.queues, self.key)

    def owns(self, found: Mapping[str, Any]) -> bool:
        """Whether what was encrypted says that it belongs to this task or schedule."""
        schedule = found.get("schedule")
        if self.name != found.get("name"):
            return False
        if self.schedule is not None:
            return bool(schedule == self.schedule)
        if schedule is None:
            return bool(self.key == found.get("key"))
        # A schedule passes its params on as they are.
        return isinstance(schedule, str) and is_firing_of(schedule, self.key)


class Sealer:
    """Encrypts and decrypts with the keys of a vault. Its methods compute only, with keys that are loaded."""

    def __init__(self, vault: Vault) -> None:
        self.vault = vault

    def names_for(self, queue: str, key: str) -> list[str]:
        """Return the names of the data keys to load before values of such a task are encrypted."""
        required, may = self.vault.encryption.wanted(queue, key)
        return [*may, *([] if required is None else [required])]

    def prescribes(self, queue: str, key: str) -> bool:
        """Whether the values of such a task must be encrypted, so that readable ones are refused."""
        return self.vault.encryption.wanted(queue, key)[0] is not None

    # --- encrypting -----------------------------------------------------------------------------------------

    def seal(self, key_name: str, name: str, key: str, field: str, value: Any) -> Any:
        """Encrypt a value of a task."""
        return self.vault.encrypt(key_name, {"v": value, "name": name, "key": key, "field": field})

    def seal_params(self, key_name: str, name: str, key: str, params: Any, lookup: Entries | None) -> Any:
        """Encrypt the params of a task. They say which lookups the task has, so that no copied one is believed."""
        bound = {"name": name, "key": key, "field": PARAMS, LOOKUP: texts_of(lookup)}
        return self.vault.encrypt(key_name, {"v": params, **bound})

    def seal_of_schedule(
        self, key_name: str, name: str, schedule_id: str, params: Any, lookup: Entries | None = None
    ) -> Any:
        """Encrypt the params of a schedule. They are those of each task that the schedule publishes."""
        bound = {"name": name, "schedule": schedule_id, "field": PARAMS, LOOKUP: texts_of(lookup)}
        return self.vault.encrypt(key_name, {"v": params, **bound})

    def seal_lookup(self, key_name: str, entries: Entries) -> list[dict[str, Any]]:
        """Encrypt lookups, so that equal values under one name give equal bytes. Raises InvalidLookup."""
        return [{"k": entry["k"], "v": self.seal_value(key_name, entry["k"], entry["v"])} for entry in entries]

    def seal_value(self, key_name: str, name: str, value: Any) -> Any:
        """Encrypt one value of a lookup."""
        return self.vault.encrypt(key_name, canonical(name, value), is_lookup=True)

    def seal_criteria(self, key_name: str, bulk_id: str, params: Mapping[str, Any]) -> Any:
        """Encrypt the params by which a bulk change finds its tasks."""
        return self.vault.encrypt(key_name, {"v": params, "bulk": bulk_id, "field": PARAMS})

    # --- decrypting -----------------------------------------------------------------------------------------

    def open(self, owner: Owner, field: str, sealed: Sealed, told: list[Any] | None = None) -> Any:
        """Return the value that a Sealed holds, or the same with the reason why it cannot be decrypted.

        `told` takes what params say of the lookups of their task.
        """
        try:
            found = self._opened(owner, field, sealed.content)
        except MtaskError as error:
            return Sealed(sealed.content, _why(error), owner.task_id, field, is_final=isinstance(error, Damaged))
        if told is not None:
            told.append(found.get(LOOKUP))
        return found["v"]

    def _opened(self, owner: Owner, field: str, content: bytes) -> Mapping[str, Any]:
        self._check_key(owner, content)
        found = self.vault.decrypt(content)
        if not isinstance(found, dict) or "v" not in found:
            raise Damaged("what was encrypted is no value of mtask")
        if not owner.owns(found) or field != found.get("field"):
            raise Damaged("it was encrypted for another task or field, and copied here")
        return found

    def open_criteria(self, bulk_id: str, sealed: Sealed) -> Any:
        """Return the params by which a bulk change finds its tasks, or the same Sealed with the reason why not."""
        try:
            _, problem = self.vault.key_of(sealed.content[1:17])
            if problem is not None:
                raise problem
            found = self.vault.decrypt(sealed.content)
            if not isinstance(found, dict) or (found.get("bulk"), found.get("field")) != (bulk_id, PARAMS):
                raise Damaged("they were encrypted for another bulk change, and copied here")
        except MtaskError as error:
            return Sealed(sealed.content, _why(error), field=sealed.field)
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
            is_final = isinstance(error, Damaged)
            return Sealed(sealed.content, _why(error), owner.task_id, f"lookup {name}", is_final=is_final)


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


def texts_of(lookup: Entries | None) -> list[str]:
    """Return lookups as the texts that are encrypted, in an order of their own."""
    return sorted(canonical(entry["k"], entry["v"]) for entry in lookup or ())


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
