"""Encrypts and decrypts single values, together with the place where each belongs.

What is encrypted is {v, name, key, field}: the value, and where it belongs. Params also hold the lookups of their task.
A reader checks all of it, because who may write to the database can copy an encrypted value to another task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from bson import ObjectId

from mtask.errors import DataKeyNotFound, InvalidLookup, MtaskError
from mtask.features.encryption.settings import key_names
from mtask.features.encryption.vault import Damaged, Vault
from mtask.kernel.document.identity import is_firing_of
from mtask.kernel.document.parts import Sealed
from mtask.kernel.driver.codec import Codec, Owner
from mtask.kernel.driver.operation import Call, Operation
from mtask.kernel.operations.encode import PARAMS

#: What encrypted params say of the lookups of their task.
LOOKUP = "lookup"
#: Lookups in their stored form, readable.
Entries = Iterable[Mapping[str, Any]]


class Cipher(Codec):
    """Encrypts and decrypts with the keys of a vault. Its methods compute only, with keys that are loaded."""

    is_plain = False
    refusal = "what the run returned or raised cannot be encrypted, and is not stored"

    def __init__(self, vault: Vault) -> None:
        self.vault = vault

    def ask(self, method: str, *args: Any) -> Any:
        """Ask the key vault. This blocks."""
        return getattr(self.vault, method)(*args)

    def close(self) -> None:
        """Close the connection of the key vault, and forget all keys."""
        self.vault.close()

    def load_keys(self, names: Iterable[str], key_ids: Iterable[bytes] = ()) -> Operation[None]:
        """Load data keys that are not loaded, or were loaded too long ago: at most once a minute each."""
        wanted, ids = list(dict.fromkeys(names)), list(dict.fromkeys(key_ids))
        if self.vault.lacks(wanted, ids):
            yield Call("codec", "load", (wanted, ids))

    def names_for(self, queue: str, key: str) -> list[str]:
        """Return the names of the data keys to load before values of such a task are encrypted."""
        required, may = self.vault.encryption.wanted(queue, key)
        return [*may, *([] if required is None else [required])]

    def is_readable_refused(self, owner: Owner) -> bool:
        """Whether readable values are refused: the document says that it is encrypted, or it must be."""
        return owner.sealed is not None or self.prescribes(owner.queue, owner.key)

    def prescribes(self, queue: str, key: str) -> bool:
        """Whether the values of such a task must be encrypted, so that readable ones are refused."""
        return self.vault.encryption.wanted(queue, key)[0] is not None

    # --- encrypting -----------------------------------------------------------------------------------------

    def encrypt(self, key_name: str, owner: Owner, field: str, value: Any) -> Any:
        """Encrypt a value of a task."""
        return self.vault.encrypt(key_name, {"v": value, "name": owner.name, "key": owner.key, "field": field})

    def encrypt_params(self, key_name: str, owner: Owner, params: Any, lookup: Entries | None) -> Any:
        """Encrypt the params of a task. They say which lookups the task has, so that no copied one is believed.

        The params of a schedule are those of each task that the schedule publishes.
        """
        whose = {"key": owner.key} if owner.schedule is None else {"schedule": owner.schedule}
        bound = {"name": owner.name, **whose, "field": PARAMS, LOOKUP: texts_of(lookup)}
        return self.vault.encrypt(key_name, {"v": params, **bound})

    def encrypt_lookup(self, key_name: str, name: str, value: Any) -> Any:
        """Encrypt a value of a lookup, so that equal values under one name give equal bytes. Raises InvalidLookup."""
        return self.vault.encrypt(key_name, canonical(name, value), is_lookup=True)

    # --- decrypting -----------------------------------------------------------------------------------------

    def decrypt(self, owner: Owner, field: str, sealed: Sealed, told: list[Any] | None = None) -> Any:
        """Return the value that a Sealed holds, or the same with the reason why it cannot be decrypted.

        `told` takes what params say of the lookups of their task.
        """
        try:
            found = self._decrypted(owner, field, sealed.content)
        except MtaskError as error:
            return Sealed(sealed.content, why_in(error), owner.task_id, field, is_final=isinstance(error, Damaged))
        if told is not None:
            told.append(found.get(LOOKUP))
        return found["v"]

    def _decrypted(self, owner: Owner, field: str, content: bytes) -> Mapping[str, Any]:
        self._check_key(owner, content)
        found = self.vault.decrypt(content)
        if not isinstance(found, dict) or "v" not in found:
            raise Damaged("what was encrypted is no value of mtask")
        if not _owns(owner, found) or field != found.get("field"):
            raise Damaged("it was encrypted for another task or field, and copied here")
        return found

    def _check_key(self, owner: Owner, content: bytes) -> None:
        name, problem = self.vault.key_of(content[1:17])
        if problem is not None:
            raise problem
        if name not in key_names(owner.queues, owner.key):
            raise Damaged(f"its data key is {name!r}, and not that of the task's queue or tenant")

    def decrypt_lookup(self, owner: Owner, name: str, sealed: Sealed) -> Any:
        """Return the value of a lookup, or the same Sealed with the reason why it cannot be decrypted."""
        try:
            self._check_key(owner, sealed.content)
            return parsed(name, self.vault.decrypt(sealed.content))
        except MtaskError as error:
            is_final = isinstance(error, Damaged)
            return Sealed(sealed.content, why_in(error), owner.task_id, f"lookup {name}", is_final=is_final)


def _owns(owner: Owner, found: Mapping[str, Any]) -> bool:
    """Whether what was encrypted says that it belongs to this task or schedule."""
    schedule = found.get("schedule")
    if owner.name != found.get("name"):
        return False
    if owner.schedule is not None:
        return bool(schedule == owner.schedule)
    if schedule is None:
        return bool(owner.key == found.get("key"))
    # A schedule passes its params on as they are.
    return isinstance(schedule, str) and is_firing_of(schedule, owner.key)


def why_in(error: MtaskError) -> str:
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
