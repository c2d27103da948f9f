"""The rules of callbacks: what a task owes when its status becomes final, and the message that tells it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from mtask.errors import InvalidInput, shown
from mtask.kernel.document.parts import MAX_URL, SECRET_PATTERN, TOLD, Callback, OwedCallback

#: The name of the tasks that deliver callbacks, and their queue.
DELIVERY, DELIVERY_QUEUE = "mtask/callback", "mtask/callbacks"
#: The lookup by which the deliveries of a task are found. Its value is the task's id.
LOOKUP_OF_TASK = "callback_of"
#: The secret that signs a callback without the name of one.
DEFAULT_SECRET = "default"
_PLAIN_SECRET = re.compile(r"\A[A-Za-z0-9_.-]{1,64}\Z")
_SECRET = re.compile(SECRET_PATTERN.replace("^", r"\A").replace("$", r"\Z"))
_FIELDS = frozenset({"url", "on", "secret"})


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """The part of a task that names it for good: a task that is removed and published again has another one."""

    task_id: str
    name: str
    key: str
    create_time: datetime


def webhook_id(task: TaskIdentity, number: int) -> str:
    """Return the id of one end of a task: the same at each try to tell it, and never that of another end.

    Without the create_time, a task that is published again after its removal would have the ids of the former one.
    """
    created = round(task.create_time.timestamp() * 1000)
    digest = hashlib.sha256(f"{task.task_id}\0{created}\0{number}".encode()).hexdigest()
    return f"msg_{digest[:32]}"


def event(task: TaskIdentity, owed: OwedCallback) -> dict[str, Any]:
    """Return the message about one end of a task: ids, status and times, and neither params nor returns."""
    key = task.key if owed.tenant is None else task.key.removeprefix(f"{owed.tenant}:")
    return {
        "type": f"task.{owed.status.lower()}",
        "timestamp": _iso(owed.time),
        "data": {
            "task_id": f"{task.name}:{key}",
            "name": task.name,
            "key": key,
            "status": owed.status,
            "create_time": _iso(task.create_time),
            "finish_time": _iso(owed.time),
            "number": owed.number,
        },
    }


def _iso(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


#: A callback as callers give it: its `url`, `on` and `secret`; or one that was checked before.
CallbackRef: TypeAlias = Mapping[str, Any] | Callback


def stored_callback(given: CallbackRef, tenant: str | None = None) -> dict[str, Any]:
    """Return a callback in its stored form; raise InvalidInput. `tenant`: whose task it is of."""
    return given.model_dump(exclude_none=True) if isinstance(given, Callback) else check_callback(given, tenant)


def check_callback(given: object, tenant: str | None = None) -> dict[str, Any]:
    """Return a callback in its stored form; raise InvalidInput.

    `given` has `url`, and may have `on` (default: each end) and `secret`, the name of a secret. A tenant's secrets are
    its own.
    """
    if not isinstance(given, Mapping):
        raise _refused("write {'url': 'https://...'}, and if wanted 'on': ['FAIL'] and 'secret': NAME")
    unknown = [name for name in given if name not in _FIELDS]
    if unknown:
        raise _refused(f"there is no {shown(unknown[0])}: use url, on and secret")
    made: dict[str, Any] = {"url": check_url(given.get("url")), "on": _check_on(given.get("on"))}
    secret = given.get("secret")
    if secret is not None and not (isinstance(secret, str) and _SECRET.match(secret)):
        raise _refused(f"secret {shown(secret, 40)}: give the name of a secret, 1 to 64 letters, digits, '_', '.', '-'")
    if tenant is not None:
        if secret is not None and not _PLAIN_SECRET.match(secret):
            raise _refused("secret: the name of a secret has no slash")
        made |= {"secret": f"{tenant}/{secret or DEFAULT_SECRET}", "tenant": tenant}
    elif secret is not None:
        made["secret"] = secret
    return made


def check_url(url: object) -> str:
    """Return the address of a receiver if it is one that workers can call; raise InvalidInput."""
    if not isinstance(url, str) or not url.startswith(("https://", "http://")):
        raise _refused(f"url {shown(url)}: give an address that begins with https://")
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise _refused(f"url {shown(url)}: use at most {MAX_URL} printable ASCII characters, without spaces")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _refused(f"url {shown(url)}: its host or port cannot be read") from None
    if not host or port == 0:
        raise _refused(f"url {shown(url)}: it names no host")
    if "@" in parts.netloc:
        raise _refused("url: put no user and no password into it; the signature says who calls")
    if parts.fragment or "#" in url:
        raise _refused(f"url {shown(url)}: leave out what follows '#', no request holds it")
    return str(url)


def _check_on(on: object) -> list[str]:
    if on is None:
        return list(TOLD)
    several = [on] if isinstance(on, str) else on
    if not isinstance(several, list | tuple | set | frozenset) or not several or not set(several) <= set(TOLD):
        raise _refused(f"on {shown(on)}: give some of {', '.join(TOLD)}")
    return [status for status in TOLD if status in several]


def _refused(reason: str) -> InvalidInput:
    return InvalidInput(f"callback: {reason}.", field="callback")
