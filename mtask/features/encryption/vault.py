"""The key vault: finds data keys, keeps them for a minute, and encrypts and decrypts values with them.

`load` reads the key vault, and may ask a key service: it blocks. With keys that are loaded, all else is computation. So
an event loop lets `load` run in a thread, and does the rest itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import UUID

from bson.binary import UUID_SUBTYPE, Binary
from pymongo.errors import EncryptionError as DriverEncryptionError
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.synchronous.mongo_client import MongoClient
from pymongo.write_concern import WriteConcern

from mtask.errors import DataKeyExists, DataKeyNotFound, EncryptionError, InvalidInput, MtaskError, WrongMasterKey
from mtask.features.encryption.settings import ALT_NAME, Encryption, check_installed, check_key_name
from mtask.kernel.driver import connect
from mtask.kernel.driver.errors import first_line, translated
from mtask.kernel.driver.stores import CODEC

if TYPE_CHECKING:
    from pymongo.synchronous.encryption import ClientEncryption

Document = dict[str, Any]
#: The time for which a data key is used before the key vault is asked again, in seconds: so long, a removed key still
#: encrypts and decrypts in a running process. And the same for the knowledge that there is no key.
LASTS, LASTS_WITHOUT = 60.0, 5.0
_RANDOM, _DETERMINISTIC = (
    "AEAD_AES_256_CBC_HMAC_SHA_512-Random",
    "AEAD_AES_256_CBC_HMAC_SHA_512-Deterministic",
)
#: The most data keys whose names a process knows all. If there are more, it asks for each name.
_MAX_KNOWN = 10_000
#: The field of a removed data key. What is left of it keeps its name taken, so that nothing is stored readable instead.
REMOVED = "mtask_removed"
#: The field that holds the key itself.
_MATERIAL = "keyMaterial"
#: The most data keys under which a search looks a value up.
MAX_LISTED = 200
_TIMEOUT = timedelta(seconds=10)


class Damaged(EncryptionError):
    """An encrypted value is not what was encrypted, or does not belong where it lies: no key makes it readable."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A data key, without the key itself."""

    name: str  #: queue:NAME or tenant:NAME
    key_id: UUID
    provider: str  #: the service that keeps its master key
    create_time: datetime | None
    remove_time: datetime | None  #: None: the key is in use


@dataclass(frozen=True, slots=True)
class _Key:
    """What is known of a data key, or of a name without one."""

    name: str
    key_id: bytes | None
    known_until: float
    #: The driver's object that has loaded the key. None: there is no usable key, for this reason.
    engine: ClientEncryption[Document] | None
    problem: MtaskError | None = None


class Vault:
    """The data keys of one process. Any thread may use it."""

    def __init__(self, encryption: Encryption, connect: Callable[[], MongoClient[Document]], *, owns: bool) -> None:
        """`connect` gives the client for the key vault. `owns`: whether `close` closes it."""
        check_installed()
        self.encryption = encryption
        self._connect = connect
        self._owns = owns
        self._client: MongoClient[Document] | None = None
        self._lock = threading.RLock()
        self._by_name: dict[str, _Key] = {}
        self._by_id: dict[bytes, _Key] = {}
        #: The names of all data keys, as they were read a moment ago. So most names without a key need no query.
        self._all: frozenset[str] = frozenset()
        self._all_until = self._too_many_until = 0.0

    # --- what is loaded -------------------------------------------------------------------------------------

    def lacks(self, names: Iterable[str], key_ids: Iterable[bytes] = ()) -> bool:
        """Whether one of these keys must be loaded, because it is not known, or was for a minute."""
        now = monotonic()
        return any(_is_old(self._known(name, now), now) for name in names) or any(
            _is_old(self._by_id.get(key_id), now) for key_id in key_ids
        )

    def load(self, names: Collection[str], key_ids: Collection[bytes] = ()) -> None:
        """Read these keys from the key vault. This blocks. Raises subclasses of DatabaseError."""
        with self._lock:
            now = monotonic()
            if any(_is_old(self._known(name, now), now) for name in names):
                self._read_names(now)
            wanted = [name for name in names if _is_old(self._known(name, now), now)]
            ids = [key_id for key_id in key_ids if _is_old(self._by_id.get(key_id), now)]
            if not wanted and not ids:
                return
            found = self.find(wanted, ids)
            engine = self._engine() if any(_MATERIAL in document for document in found) else None
            loaded = [self._loaded(document, engine) for document in found]
            there = set()
            for document, key in zip(found, loaded, strict=True):
                self._by_id[key.key_id or b""] = key
                # The remains of a removed key have lost their name once another key has it.
                if document.get("keyAltNames"):
                    self._by_name[key.name] = key
                    there.add(key.name)
            their_ids = {key.key_id for key in loaded}
            for name in wanted:
                if name not in there:
                    self._by_name[name] = self._without(name, now)
            for key_id in ids:
                if key_id not in their_ids:
                    self._by_id[key_id] = _Key("", key_id, now + LASTS_WITHOUT, None)

    def _known(self, name: str, now: float) -> _Key | None:
        """Return what is known of a name; None: nothing."""
        key = self._by_name.get(name)
        if _is_old(key, now) and now < self._all_until and name not in self._all:
            return _Key(name, None, self._all_until, None, DataKeyNotFound(name))
        return key

    def _without(self, name: str, now: float) -> _Key:
        """Return the knowledge that the key vault has no such data key. One that was there a moment ago was removed."""
        former = self._by_name.get(name)
        key_id = None if former is None else former.key_id
        return _Key(name, key_id, now + LASTS_WITHOUT, None, DataKeyNotFound(name, is_removed=key_id is not None))

    def _read_names(self, now: float) -> None:
        if now < max(self._all_until, self._too_many_until):
            return
        ours = {"keyAltNames": {"$regex": f"^{ALT_NAME}"}}
        found = self._ask(lambda: self._collection().find(ours, {"keyAltNames": 1}, limit=_MAX_KNOWN + 1).to_list())
        if len(found) > _MAX_KNOWN:
            self._too_many_until = now + LASTS
        else:
            self._all = frozenset(_name_in(document) for document in found)
            self._all_until = now + LASTS_WITHOUT
            for name in self._by_name.keys() - self._all:
                self._by_name[name] = self._without(name, now)

    def find(self, names: Collection[str], key_ids: Collection[bytes]) -> list[Document]:
        """Return the documents of these data keys. Raises subclasses of DatabaseError."""
        by_name = {"keyAltNames": {"$in": [ALT_NAME + name for name in names]}}
        by_id = {"_id": {"$in": [Binary(key_id, UUID_SUBTYPE) for key_id in key_ids]}}
        found: list[Document] = self._ask(lambda: self._collection().find({"$or": [by_name, by_id]}).to_list())
        return found

    def _loaded(self, document: Mapping[str, Any], engine: ClientEncryption[Document] | None) -> _Key:
        name, key_id = _name_in(document), document["_id"].bytes
        until = monotonic() + LASTS
        if engine is None or _MATERIAL not in document:
            return _Key(name, key_id, until, None, DataKeyNotFound(name, is_removed=True))
        try:
            # This decrypts the data key, once. It shows whether the master key is the right one.
            engine.encrypt("", _RANDOM, key_id=Binary(key_id, UUID_SUBTYPE))
        except DriverEncryptionError as error:
            if isinstance(error.cause, PyMongoError):
                raise translated(error.cause) from error
            return _Key(name, key_id, monotonic() + LASTS_WITHOUT, None, WrongMasterKey(name, first_line(error)))
        return _Key(name, key_id, until, engine)

    def problem_of(self, name: str) -> MtaskError | None:
        """Return what is wrong with a loaded key; None: it can be used."""
        key = self._by_name.get(name)
        return DataKeyNotFound(name) if key is None else key.problem

    def name_of(self, queue: str, key: str) -> str | None:
        """Return the name of the loaded data key that values of a task get; None: they stay readable.

        The keys of such a task must have been loaded before. Raises DataKeyNotFound or WrongMasterKey.
        """
        required, may = self.encryption.wanted(queue, key)
        for name in may:
            known = self._by_name.get(name)
            if known is not None and known.key_id is not None:
                if known.problem is not None:
                    raise known.problem
                return name
        if required is not None and (problem := self.problem_of(required)) is not None:
            raise problem
        return required

    def key_of(self, key_id: bytes) -> tuple[str, MtaskError | None]:
        """Return the name of the loaded data key with this id, and what is wrong with it."""
        key = self._by_id.get(key_id)
        if key is None or not key.name:
            return "", EncryptionError("its data key is not in the key vault: it was removed, or lies in another one")
        return key.name, key.problem

    # --- computing ------------------------------------------------------------------------------------------

    def encrypt(self, name: str, value: Any, *, is_lookup: bool = False) -> Binary:
        """Encrypt a value with a loaded data key. With `is_lookup`, equal texts give equal results."""
        key = self._by_name[name]
        if key.engine is None or key.key_id is None:
            raise key.problem or DataKeyNotFound(name)
        try:
            kind = _DETERMINISTIC if is_lookup else _RANDOM
            return key.engine.encrypt(value, kind, key_id=Binary(key.key_id, UUID_SUBTYPE))
        except DriverEncryptionError as error:
            raise EncryptionError(f"the value cannot be encrypted: {first_line(error)}.") from error

    def decrypt(self, content: bytes) -> Any:
        """Decrypt a value with its loaded data key. Raises Damaged if its bytes were changed."""
        key = self._by_id[content[1:17]]
        if key.engine is None:
            raise key.problem or DataKeyNotFound(key.name)
        try:
            return key.engine.decrypt(Binary(content, 6))
        except DriverEncryptionError as error:
            raise Damaged(f"its bytes are not what was encrypted: {first_line(error)}") from error

    # --- looking after data keys ----------------------------------------------------------------------------

    def create(self, name: str) -> KeyRow:
        """Make a data key. Raises DataKeyExists, InvalidInput or DatabaseError."""
        checked = check_key_name(name)
        collection = self._collection()
        self._ask(
            lambda: collection.create_index(
                "keyAltNames", unique=True, partialFilterExpression={"keyAltNames": {"$exists": True}}
            )
        )
        with self._lock:
            found = self.find([checked], [])
            if any(_MATERIAL in document for document in found):
                raise DataKeyExists(checked)
            # The remains of a removed key give its name away.
            self._ask(
                lambda: collection.update_many(
                    {"keyAltNames": ALT_NAME + checked, _MATERIAL: {"$exists": False}},
                    {"$unset": {"keyAltNames": 1}, "$set": {"mtask_name": ALT_NAME + checked}},
                )
            )
            encryption = self.encryption
            try:
                self._engine().create_data_key(
                    encryption.provider, master_key=encryption.master_key, key_alt_names=[ALT_NAME + checked]
                )
            except DriverEncryptionError as error:
                cause = error.cause
                if "E11000" in str(error):
                    raise DataKeyExists(checked) from error
                if isinstance(cause, PyMongoError):
                    raise translated(cause) from error
                raise EncryptionError(f"the data key cannot be made: {first_line(error)}.") from error
            self._by_name.pop(checked, None)
            self._all_until = 0.0
            return next(row for row in self.every() if row.name == checked and row.remove_time is None)

    def every(self) -> list[KeyRow]:
        """Return all data keys of mtask, also removed ones, sorted by name."""
        ours = {"$regex": f"^{ALT_NAME}"}
        wanted = {"$or": [{"keyAltNames": ours}, {"mtask_name": ours}]}
        found = self._ask(lambda: self._collection().find(wanted, {_MATERIAL: 0}).to_list())
        return sorted((_row(document) for document in found), key=lambda row: (row.name, row.remove_time is not None))

    def names(self) -> list[str]:
        """Return the names of the data keys that a search looks under; raise InvalidInput if there are too many."""
        found = [row.name for row in self.every() if row.remove_time is None]
        if len(found) > MAX_LISTED:
            raise InvalidInput(
                f"there are {len(found)} data keys, and a search looks under {MAX_LISTED} at most: name the queue "
                "and the key.",
                field="lookup",
            )
        return found

    def remove(self, name: str) -> KeyRow:
        """Remove a data key: whatever it encrypted can never be read again. Raises DataKeyNotFound."""
        checked = check_key_name(name)
        with self._lock:
            row = next((row for row in self.every() if row.name == checked and row.remove_time is None), None)
            if row is None:
                raise DataKeyNotFound(checked, is_removed=any(each.name == checked for each in self.every()))
            now = datetime.now(UTC)
            wanted = {"_id": Binary.from_uuid(row.key_id)}
            erased = {"$unset": {_MATERIAL: 1, "masterKey": 1}, "$set": {REMOVED: now}}
            self._ask(lambda: self._collection().update_one(wanted, erased))
            self._by_name.pop(checked, None)
            self._by_id.pop(row.key_id.bytes, None)
            return KeyRow(row.name, row.key_id, row.provider, row.create_time, now)

    # --- connections ----------------------------------------------------------------------------------------

    def _engine(self) -> ClientEncryption[Document]:
        from pymongo.synchronous.encryption import ClientEncryption

        encryption = self.encryption
        try:
            # 0: the object never forgets a key that it has loaded. This vault forgets the object instead.
            engine: ClientEncryption[Document] = ClientEncryption(
                encryption.kms_providers,
                encryption.key_vault,
                self._connected(),
                CODEC,
                kms_tls_options=encryption.kms_tls_options,
                key_expiration_ms=0,
            )
        except (PyMongoError, TypeError, ValueError) as error:
            raise InvalidInput(f"kms_providers cannot be used: {first_line(error)}.", field="encryption") from None
        return engine

    def _connected(self) -> MongoClient[Document]:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _collection(self) -> Any:
        database, _, name = self.encryption.key_vault.partition(".")
        return (
            self._connected()
            .get_database(database)
            .get_collection(
                name, CODEC, write_concern=WriteConcern(w="majority", j=True), read_concern=ReadConcern("majority")
            )
        )

    @staticmethod
    def _ask(call: Callable[[], Any]) -> Any:
        import pymongo

        try:
            with pymongo.timeout(_TIMEOUT.total_seconds()):
                return call()
        except PyMongoError as error:
            raise translated(error) from error

    def close(self) -> None:
        """Close the connection that was made for the key vault, and forget all keys."""
        with self._lock:
            self._by_name.clear()
            self._by_id.clear()
            if self._client is not None and self._owns:
                self._client.close()
            self._client = None


def vault_for(encryption: Encryption, source: Any) -> Vault:
    """Return the key vault of a store whose client is made from `source`: a URI, or the caller's own client.

    It has a connection of its own, unless the caller's own client is a MongoClient or a Motor client. Raises
    InvalidInput.
    """
    if not isinstance(encryption, Encryption):
        raise InvalidInput(f"encryption is an mtask.Encryption, not {type(encryption).__name__}.", field="encryption")
    uri = encryption.uri if encryption.uri is not None else source
    if isinstance(uri, str):
        return Vault(encryption, lambda: connect.sync_store(uri, "admin", "mtask-keys").client, owns=True)
    inner = uri.delegate if connect.is_motor(uri) else uri
    if not isinstance(inner, MongoClient):
        raise InvalidInput(
            "this client cannot read the key vault: name the server of the key vault with Encryption(uri=...).",
            field="encryption",
        )
    shared: MongoClient[Document] = inner
    return Vault(encryption, lambda: shared, owns=False)


def _is_old(key: _Key | None, now: float) -> bool:
    return key is None or key.known_until <= now


def _name_in(document: Mapping[str, Any]) -> str:
    names = [*document.get("keyAltNames", ()), document.get("mtask_name", "")]
    return next((str(name).removeprefix(ALT_NAME) for name in names if str(name).startswith(ALT_NAME)), "")


def _row(document: Mapping[str, Any]) -> KeyRow:
    provider = document.get("masterKey", {}).get("provider", "")
    return KeyRow(_name_in(document), document["_id"], provider, document.get("creationDate"), document.get(REMOVED))
