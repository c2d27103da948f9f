"""The codec that encrypts and decrypts, and how it is made from the `Encryption` that a process is given."""

from __future__ import annotations

from typing import Any

from pymongo.synchronous.mongo_client import MongoClient

from mtask.errors import InvalidInput
from mtask.features.encryption.decrypt import Decrypting
from mtask.features.encryption.encrypt import Encrypting
from mtask.features.encryption.settings import Encryption
from mtask.features.encryption.vault import Vault
from mtask.kernel.driver import connect


class EncryptionCodec(Encrypting, Decrypting):
    """Encrypts what is stored, and decrypts what was read."""


def codec_for(encryption: Encryption, source: Any) -> EncryptionCodec:
    """Return the codec of a store whose client was made from `source`: a URI, or the caller's own client.

    The key vault has a connection of its own, unless the caller's own client is a MongoClient or a Motor client.
    Raises InvalidInput.
    """
    if not isinstance(encryption, Encryption):
        raise InvalidInput(f"encryption is an mtask.Encryption, not {type(encryption).__name__}.", field="encryption")
    uri = encryption.uri if encryption.uri is not None else source
    if isinstance(uri, str):
        return EncryptionCodec(
            Vault(encryption, lambda: connect.sync_store(uri, "admin", "mtask-keys").client, owns=True)
        )
    inner = uri.delegate if connect.is_motor(uri) else uri
    if not isinstance(inner, MongoClient):
        raise InvalidInput(
            "this client cannot read the key vault: name the server of the key vault with Encryption(uri=...).",
            field="encryption",
        )
    shared: MongoClient[dict[str, Any]] = inner
    return EncryptionCodec(Vault(encryption, lambda: shared, owns=False))
