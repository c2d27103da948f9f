"""A MongoDB that asks for passwords, over TLS, and a user for each of mtask's roles on a database of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import trustme
from pymongo import MongoClient

from mtask import Client
from mtask.kernel.driver.roles import ROLES, role_name
from mtask.local import ReplicaSet, Security, temporary
from tests.mongo import TEST_COMMANDS, Document
from tests.mongo import Client as Mongo

#: With the value "1", the shared server asks for passwords, over TLS, and stages connect as users with mtask's roles.
SECURE_VARIABLE = "MTASK_TEST_SECURE"
#: A password. No process list, log, error or document may show it. Some of its characters must be escaped in a URI.
PASSWORD = "hunter2@:/%hunter2"
SHOWN = ("hunter2", PASSWORD, quote(PASSWORD, safe=""))
#: The collection in which handlers of tests write. mtask's roles give no right to it.
HANDLERS_OWN = ("effects", "counters")


def is_secure() -> bool:
    """Whether the shared server asks for passwords."""
    return os.environ.get(SECURE_VARIABLE) == "1"


def security(folder: Path) -> Security:
    """Make an authority and certificates in the folder."""
    authority = trustme.CA()
    ca, certificate = folder / "ca.pem", folder / "server.pem"
    authority.cert_pem.write_to_path(str(ca))
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_and_cert_chain_pem.write_to_path(str(certificate))
    certificate.chmod(0o600)
    return Security(folder / "key", certificate, ca, password=PASSWORD)


@contextmanager
def secure_server(folder: Path, nodes: int = 1) -> Iterator[ReplicaSet]:
    """Run a replica set with access control and TLS."""
    with temporary(nodes, parameters=TEST_COMMANDS, security=security(folder)) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Accounts:
    """The connection strings of a database's users. Each has one role, but `service` publishes and operates."""

    publisher: str
    worker: str
    operator: str
    deployer: str
    service: str
    nobody: str

    def of(self, role: str) -> str:
        """Return the connection string of a role's user."""
        uri: str = getattr(self, role)
        return uri


def accounts(server: ReplicaSet, database: str, *, set_up: bool = True) -> Accounts:
    """Make the roles and users of a database. With `set_up`, also make its collections."""
    with Client(server.uri, database=database) as admin:
        if set_up:
            admin.init(roles=True)
    mongo: Mongo = MongoClient(server.uri)
    with mongo:
        own = f"handlers_of_{database}"
        rights = [
            {"resource": {"db": database, "collection": name}, "actions": ["find", "insert", "update"]}
            for name in HANDLERS_OWN
        ]
        mongo.admin.command("createRole", own, privileges=rights, roles=[])
        granted: dict[str, list[Document]] = {role: [_granted(database, role)] if set_up else [] for role in ROLES}
        granted |= {"nobody": [], "service": [*granted["publisher"], *granted["operator"]]}
        granted["worker"] = [*granted["worker"], {"role": own, "db": "admin"}]
        made = {}
        for user, roles in granted.items():
            name = f"{user}_of_{database}"
            mongo.admin.command("createUser", name, pwd=PASSWORD, roles=roles)
            made[user] = server.uri_as(name, PASSWORD)
    return Accounts(**made)


def _granted(database: str, role: str) -> Document:
    return {"role": role_name(database, role), "db": "admin"}  # type: ignore[arg-type]
