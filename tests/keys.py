"""Data keys for tests of encryption: each database of a test has a key vault of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from mtask import Encryption
from mtask.features.encryption.vault import Vault, vault_for

MASTER_KEY = secrets.token_bytes(96)
#: A text that is nowhere to be found where it is encrypted.
MARKER = "PLAINTEXT-MARKER"


def encryption_of(database: str, **given: Any) -> Encryption:
    """Return the keys for a database of a test."""
    master_key = given.pop("key", MASTER_KEY)
    return Encryption({"local": {"key": master_key}}, key_vault=f"{database}.vault", **given)


@contextmanager
def vault_of(uri: str, database: str, **given: Any) -> Iterator[Vault]:
    """Open the key vault of a database of a test."""
    vault = vault_for(encryption_of(database, **given), uri)
    try:
        yield vault
    finally:
        vault.close()


def make_keys(uri: str, database: str, *names: str) -> None:
    """Make data keys, such as queue:mail."""
    with vault_of(uri, database) as vault:
        for name in names:
            vault.create(name)


def everything_in(mongo: MongoClient[dict[str, Any]], database: str) -> bytes:
    """Return all documents of a database, and all that the oplog says of them, as the bytes that are stored."""
    raw: Any = CodecOptions(document_class=RawBSONDocument)
    names = mongo[database].list_collection_names()
    collections: list[Any] = [mongo[database].get_collection(name, raw) for name in names]
    found = b"".join(each.raw for collection in collections for each in collection.find())
    of_database = {"$regex": f"^{database}\\."}
    entries: Any = mongo["local"].get_collection("oplog.rs", raw)
    # The database may have been lent to another test before. This test begins by making its data keys.
    first_key = mongo[database]["vault"].find_one(sort=[("creationDate", 1)], projection={"_id": 1})
    assert first_key is not None
    made = mongo["local"]["oplog.rs"].find_one({"ns": f"{database}.vault", "op": "i", "o._id": first_key["_id"]})
    assert made is not None
    written = entries.find({"ts": {"$gte": made["ts"]}, "$or": [{"ns": of_database}, {"o.applyOps.ns": of_database}]})
    return found + b"".join(each.raw for each in written)
