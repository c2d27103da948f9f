"""What a process that may read and write encrypted values is given, and which data key a task has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mtask.errors import InvalidInput, shown
from mtask.kernel.document.identity import check_key, check_text

#: The usual collection of the data keys. It has a database of its own, as workers may read their whole database.
KEY_VAULT = "mtask_keys.keys"
#: The length of a local master key, in bytes.
MASTER_KEY_BYTES = 96
#: The first part of the names of data keys in the key vault, which other programs may use, too.
ALT_NAME = "mtask/"
QUEUE, TENANT = "queue:", "tenant:"
All = Literal["*"]


def tenant_of(key: str) -> str | None:
    """Return the tenant of a task: the text before the first colon of its key; None: the key names no tenant."""
    tenant, colon, _ = key.partition(":")
    return tenant if colon and tenant else None


def key_names(queues: Collection[str], key: str) -> list[str]:
    """Return the names of the data keys that values of a task of these queues may have, the tenant's first."""
    tenant = tenant_of(key)
    return [*([] if tenant is None else [f"{TENANT}{tenant}"]), *(f"{QUEUE}{queue}" for queue in queues)]


def check_key_name(name: object) -> str:
    """Return the name of a data key, such as queue:mail or tenant:acme; raise InvalidInput."""
    if isinstance(name, str):
        if name.startswith(QUEUE):
            return QUEUE + check_text("queue", name.removeprefix(QUEUE))
        if name.startswith(TENANT) and ":" not in name.removeprefix(TENANT):
            return TENANT + check_key(name.removeprefix(TENANT))
    raise InvalidInput(f"{shown(name)} names no data key: use queue:NAME or tenant:NAME.", field="name")


def name_of_key(queue: str | None, tenant: str | None) -> str:
    """Return the name of the data key of a queue or of a tenant; raise InvalidInput unless one of the two is given."""
    if (queue is None) == (tenant is None):
        raise InvalidInput("name the queue or the tenant whose data key it is.", field="queue")
    return check_key_name(f"{TENANT}{tenant}" if queue is None else f"{QUEUE}{queue}")


def check_installed() -> None:
    """Raise InvalidInput if the packages of the extra `encryption` are missing."""
    if find_spec("pymongocrypt") is None:
        raise InvalidInput("encryption needs more packages: pip install 'mtask[encryption]'", field="encryption")


@dataclass(frozen=True, slots=True)
class Encryption:
    """The keys with which a client or a worker encrypts and decrypts: give it as `encryption=` to `Client` or `App`.

    `kms_providers` holds the master keys or the services that keep them, as the driver's ClientEncryption takes them:
    {"local": {"key": 96 bytes}}, for example. `key_vault` is the collection of the data keys, "database.collection".

    `queues` and `tenants` name the queues and tenants whose tasks must be encrypted: publishing raises DataKeyNotFound
    if one of them has no data key. "*", the default, encrypts the tasks of all queues and tenants that have a data key,
    and no other tasks. The tenant of a task is the text before the first colon of its key. A tenant's data key goes
    before that of the queue. Readable values of tasks that must be encrypted are refused.

    `uri` is the server of the key vault (default: that of the client), and `master_key` the key in a remote service
    with which new data keys are encrypted. Raises InvalidInput.
    """

    kms_providers: Mapping[str, Mapping[str, Any]] = field(repr=False)
    key_vault: str = KEY_VAULT
    queues: Collection[str] | All = "*"
    tenants: Collection[str] | All = "*"
    uri: str | None = field(default=None, repr=False)
    master_key: Mapping[str, Any] | None = field(default=None, repr=False)
    kms_tls_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.kms_providers, Mapping) or not self.kms_providers:
            raise InvalidInput('kms_providers is a mapping, such as {"local": {"key": 96 bytes}}.', field="encryption")
        local = self.kms_providers.get("local")
        if local is not None:
            key = local.get("key") if isinstance(local, Mapping) else None
            if not isinstance(key, bytes | str) or (isinstance(key, bytes) and len(key) != MASTER_KEY_BYTES):
                size = f"of {len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"
                raise InvalidInput(f"a local master key has {MASTER_KEY_BYTES} bytes, and this is {size}.", field="key")
        database, dot, collection = str(self.key_vault).partition(".")
        if not (database and dot and collection) or not isinstance(self.key_vault, str):
            raise InvalidInput(f"key_vault {shown(self.key_vault)}: write database.collection.", field="key_vault")
        for name in ("queues", "tenants"):
            given = getattr(self, name)
            if isinstance(given, str) and given != "*":
                raise InvalidInput(f'{name} is a list of names, or "*" for all that have a data key.', field=name)
            if given != "*":
                checked = frozenset(given)
                prefix = QUEUE if name == "queues" else TENANT
                for one in checked:
                    check_key_name(f"{prefix}{one}")
                object.__setattr__(self, name, checked)

    @property
    def provider(self) -> str:
        """The service that keeps the master key of new data keys."""
        return next(iter(self.kms_providers))

    def document(self) -> dict[str, Any]:
        """Return the arguments of this object, for another process of the same worker."""
        made = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, frozenset) else value for name, value in made.items()}

    def wanted(self, queue: str, key: str) -> tuple[str | None, list[str]]:
        """Return the data key that a task must have, if one is prescribed, and else those that it may have."""
        tenant = tenant_of(key)
        may: list[str] = []
        if tenant is not None:
            if self.tenants == "*":
                may.append(f"{TENANT}{tenant}")
            elif tenant in self.tenants:
                return f"{TENANT}{tenant}", []
        if self.queues == "*":
            may.append(f"{QUEUE}{queue}")
        elif queue in self.queues:
            if not may:
                return f"{QUEUE}{queue}", []
            return f"{QUEUE}{queue}", may
        return None, may


def read_key_file(path: Path) -> bytes:
    """Return the local master key in a file: 96 bytes, or their base64. Raise InvalidInput, without showing the key."""
    import base64
    import binascii

    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InvalidInput(f"encryption key file {path}: {reason}.", field="encryption_key_file") from None
    if len(content) == MASTER_KEY_BYTES:
        return content
    try:
        key = base64.b64decode(content.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != MASTER_KEY_BYTES:
        raise InvalidInput(
            f"encryption key file {path}: it holds {len(content)} bytes, and a master key has {MASTER_KEY_BYTES}, or "
            f"128 characters of base64. Make one with: openssl rand -base64 {MASTER_KEY_BYTES} | tr -d '\\n'",
            field="encryption_key_file",
        )
    return key


def read_encryption(
    key_file: Path | None, key_vault: str | None, queues: str | None, tenants: str | None
) -> Encryption | None:
    """Return the encryption that settings and flags name; None: no key file is given. Raises InvalidInput."""
    if key_file is None:
        if queues or tenants:  # what must be encrypted must not be stored readable
            raise InvalidInput("some tasks must be encrypted: give --encryption-key-file.", field="encryption_key_file")
        return None
    return Encryption(
        {"local": {"key": read_key_file(key_file)}},
        key_vault=KEY_VAULT if key_vault is None else key_vault,
        queues=_named(queues),
        tenants=_named(tenants),
    )


def _named(text: str | None) -> Collection[str] | All:
    return "*" if text is None or text.strip() == "*" else [part.strip() for part in text.split(",") if part.strip()]
