"""The codec of a store, made from what a client, a worker or an executor is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtask.features.encryption.settings import Encryption
from mtask.kernel.driver.codec import Codec


def codec_of(encryption: Encryption | None, source: Any) -> Codec:
    """Return the codec of a store whose client is made from `source`: a URI, or the caller's own client.

    Raises InvalidInput.
    """
    if encryption is None:
        return Codec()
    # Few processes encrypt.
    from mtask.features.encryption.codec import EncryptionCodec
    from mtask.features.encryption.vault import vault_for

    return EncryptionCodec(vault_for(encryption, source))


def codec_in(document: Mapping[str, Any] | None, uri: str) -> Codec:
    """Return the codec of an executor, from the document that its worker has sent."""
    return codec_of(None if document is None else Encryption(**document), uri)
