"""Encrypts what is about to be stored. Data keys are loaded at most once a minute each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtask.errors import WorkersTooOld
from mtask.features.encryption.cipher import Cipher
from mtask.features.encryption.settings import QUEUE, TENANT, key_names
from mtask.kernel.driver.codec import Owner
from mtask.kernel.driver.operation import Call, Operation
from mtask.kernel.operations import workers
from mtask.kernel.operations.encode import PARAMS

Document = dict[str, Any]
#: The first revision whose workers know encrypted tasks. An older worker marks one FAIL: its params fit no handler.
REVISION = 7
_EXAMPLES = 5


class Encrypting(Cipher):
    """Encrypts what is about to be stored. `EncryptionCodec` also decrypts."""

    def load(self, owners: Iterable[Owner], *, to_publish: bool = False) -> Operation[None]:
        """Load the data keys of these owners. `to_publish`: raise WorkersTooOld if a live worker knows none."""
        names = set[str]()
        for owner in owners:
            names.update(self.names_for(owner.queue, owner.key))
            if owner.sealed is not None:
                names.add(owner.sealed)
        if not self.vault.lacks(names):
            return
        yield from self.load_keys(sorted(names))
        if to_publish and any(self.vault.problem_of(name) is None for name in names):
            # Workers come seldom, and keys are loaded again after a minute: this need not be asked for each task.
            old = yield from workers.older(REVISION, _EXAMPLES)
            if old:
                raise WorkersTooOld(old, what="encrypted tasks")

    def content(self, owner: Owner, params: Any, lookup: Sequence[Mapping[str, Any]] | None) -> Document:
        """Encrypt params and lookups, if the queue or the tenant has a data key."""
        name = self.vault.name_of(owner.queue, owner.key)
        if name is None:
            return {}
        made = {"params": self.encrypt_params(name, owner, params, lookup), "sealed": name}
        if lookup is not None:
            made["lookup"] = [
                {"k": entry["k"], "v": self.encrypt_lookup(name, entry["k"], entry["v"])} for entry in lookup
            ]
        return made

    def value(self, owner: Owner, field: str, value: Any) -> Any:
        """Encrypt a value, if the queue or the tenant has a data key. An encrypted task stays encrypted in any case."""
        if value is None:  # nothing is to be hidden in it, and most handlers return it
            return None
        name = self.vault.name_of(owner.queue, owner.key)
        if name is None and owner.sealed in key_names([owner.queue], owner.key):
            name = owner.sealed
        return value if name is None else self.encrypt(name, owner, field, value)

    def criteria(self, criteria: Mapping[str, Any], *, encoded_only: bool = False) -> Operation[Document]:
        """Add to looked-up values their encrypted forms, under each data key that a task found may have.

        With `encoded_only`, the encrypted forms stand for the values, if there are any.

        Raises InvalidInput and subclasses of DatabaseError.
        """
        given = dict(criteria)
        if not given.get("lookup"):
            return given
        names = yield from self._names_to_look_under(given)
        found: dict[str, list[Any]] = {}
        for name, values in given["lookup"].items():
            encrypted = [self.encrypt_lookup(key, name, one) for key in names for one in values if _may_be_lookup(one)]
            found[name] = encrypted if encrypted and encoded_only else [*values, *encrypted]
        return {**given, "lookup": found}

    def _names_to_look_under(self, criteria: Mapping[str, Any]) -> Operation[list[str]]:
        tenants = _several(criteria.get("key"))
        if (prefix := criteria.get("key_prefix")) and ":" in prefix:
            tenants.append(prefix)
        several = _several(criteria.get("queue"))
        names: list[str]
        if several and tenants:
            names = [name for queue in several for key in tenants for name in self.names_for(queue, key)]
        else:
            names = yield Call("codec", "names")
        yield from self.load_keys(names)
        return [name for name in dict.fromkeys(names) if self.vault.problem_of(name) is None]

    def stored_criteria(self, bulk_id: str, criteria: Mapping[str, Any]) -> Operation[Document]:
        """Encrypt the params by which a bulk change finds its tasks, as its criteria are stored for days.

        This takes the data key of the tenant or queue that the criteria name, or else any. Without a data key, they
        stay readable.
        """
        given = dict(criteria)
        if not given.get("params"):
            return given
        named = [QUEUE + queue for queue in _several(given.get("queue"))]
        if given.get("tenant") is not None:
            named.insert(0, TENANT + given["tenant"])
        rows = yield Call("codec", "every")
        names = [row.name for row in rows if row.remove_time is None]
        for name in sorted(names, key=lambda name: named.index(name) if name in named else len(named)):
            yield from self.load_keys([name])
            if self.vault.problem_of(name) is None:
                bound = {"v": given["params"], "bulk": bulk_id, "field": PARAMS}
                return {**given, "params": self.vault.encrypt(name, bound)}
        return given


def _several(wanted: Any) -> list[str]:
    return [] if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)


def _may_be_lookup(value: Any) -> bool:
    # Such values cannot be encrypted, so only readable tasks have them.
    return not isinstance(value, bool | float)
