"""Access control and TLS of an embedded replica set, for tests with users who have few rights."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

#: The number of random bytes in the key. The key is written in hex, and MongoDB accepts 6 to 1024 characters.
_KEY_BYTES = 48


@dataclass(frozen=True, slots=True)
class Security:
    """The protection of a replica set.

    Users have passwords. When the set is started, an administrator is made as its first user. The members authenticate
    with `key_file`. If this file is missing, it is made. With `certificate`, every connection uses TLS. `certificate`
    is a PEM file with a private key and the certificate for it. The certificate is for 127.0.0.1, and valid for servers
    and clients. `ca` is the PEM file of the authority that signed the certificate.
    """

    key_file: Path
    certificate: Path | None = None
    ca: Path | None = None
    user: str = "admin"
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    def prepare(self) -> None:
        """Make the key file if it is missing. MongoDB demands that no other user can read it."""
        if not self.key_file.exists():
            self.key_file.touch(mode=0o600)
            self.key_file.write_text(secrets.token_hex(_KEY_BYTES))

    def arguments(self) -> list[str]:
        """Return mongod's arguments as --name=value. They contain no secret."""
        given = ["--auth", f"--keyFile={self.key_file}"]
        if self.certificate is not None:
            given += ["--tlsMode=requireTLS", f"--tlsCertificateKeyFile={self.certificate}"]
            given += ["--tlsAllowConnectionsWithoutCertificates", *([f"--tlsCAFile={self.ca}"] if self.ca else [])]
        return given

    def options(self) -> dict[str, str]:
        """Return the options of a connection string for these servers, without a user."""
        if self.certificate is None:
            return {}
        return {"tls": "true", **({"tlsCAFile": str(self.ca)} if self.ca else {})}

    def credentials(self) -> dict[str, str]:
        """Return the driver's arguments to connect as the administrator."""
        return {"username": self.user, "password": self.password, "authSource": "admin"}


def uri_of(
    addresses: str, replica_set: str, security: Security | None, user: str | None = None, password: str | None = None
) -> str:
    """Return the connection string of a replica set. With security, it is for `user`, by default the administrator."""
    if security is None:
        return f"mongodb://{addresses}/?replicaSet={replica_set}"
    name, word = (security.user, security.password) if user is None else (user, password or "")
    options = {"replicaSet": replica_set, "authSource": "admin", **security.options()}
    return f"mongodb://{quote(name, safe='')}:{quote(word, safe='')}@{addresses}/?{urlencode(options, safe='/')}"


def driver_options(security: Security | None, *, as_admin: bool) -> Mapping[str, Any]:
    """Return the driver's options to connect to one node."""
    if security is None:
        return {}
    options: dict[str, Any] = {**security.options(), **(security.credentials() if as_admin else {})}
    return {**options, "tls": True} if "tls" in options else options
