"""Signs messages, and checks signatures, as Standard Webhooks has it (https://www.standardwebhooks.com).

A message has the headers webhook-id, webhook-timestamp (seconds since 1970) and webhook-signature: `v1,` and the base64
form of the HMAC-SHA256 over id, timestamp and body, with dots between them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping

from mtask.errors import InvalidInput

PREFIX = "whsec_"
ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
#: The lengths of a secret in bytes, as Standard Webhooks has them.
_MIN_BYTES, _MAX_BYTES = 24, 64
#: The greatest age of a message that a receiver takes, and how far it may lie ahead, in seconds.
TOLERANCE = 300


def read_secret(text: str, name: str = "secret") -> bytes:
    """Return the bytes of a secret in the form whsec_BASE64; raise InvalidInput, which never quotes it."""
    try:
        if not text.startswith(PREFIX):
            raise ValueError
        secret = base64.b64decode(text.removeprefix(PREFIX).encode("ascii"), validate=True)
        if not _MIN_BYTES <= len(secret) <= _MAX_BYTES:
            raise ValueError
    except (ValueError, binascii.Error):
        reason = f"use {PREFIX} and {_MIN_BYTES} to {_MAX_BYTES} random bytes in base64"
        raise InvalidInput(f"the secret {name}: {reason}.", field="callback_secrets") from None
    return secret


def write_secret(secret: bytes) -> str:
    """Return the form whsec_BASE64 of a secret."""
    return PREFIX + base64.b64encode(secret).decode("ascii")


def signature(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the signature of a message."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode("ascii")


def headers_of(secret: bytes, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a message."""
    return {ID: message_id, TIMESTAMP: str(timestamp), SIGNATURE: signature(secret, message_id, timestamp, body)}


def is_genuine(secret: bytes, headers: Mapping[str, str], body: bytes, now: float) -> bool:
    """Whether a message was signed with this secret, and lately. `headers` has names in lower case."""
    try:
        timestamp = int(headers[TIMESTAMP])
        expected = signature(secret, headers[ID], timestamp, body)
        given = headers[SIGNATURE].split(" ")
    except (KeyError, ValueError):
        return False
    is_signed = False
    for one in given:
        is_signed |= hmac.compare_digest(one.encode(), expected.encode())
    return is_signed and abs(now - timestamp) <= TOLERANCE
