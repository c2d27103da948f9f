"""Who may do what: the roles, and the caller of a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mtask.client import AsyncClient
from mtask.features.events.task_events import TaskEvent
from mtask.kernel.document.identity import own_key, prefix_of, stored_key


class Role(StrEnum):
    """The role of a token. Each role may do what the roles before it may do."""

    READ = "read"  #: see everything
    PUBLISH = "publish"  #: publish tasks and flows
    OPERATE = "operate"  #: change and remove tasks; control queues, workers and schedules

    @property
    def rank(self) -> int:
        """The place of the role among all roles."""
        return list(Role).index(self)


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    The tasks of a tenant have stored keys that begin with the tenant's name and a colon. The tenant sees its keys
    without this beginning. A caller without a tenant sees the stored keys of all tenants.
    """

    name: str
    role: Role
    tenant: str | None = None

    def may(self, role: Role) -> bool:
        """Whether the caller may do what takes this role."""
        return self.role.rank >= role.rank

    def stored_key(self, key: str) -> str:
        """Return the stored form of a key that the caller gave; raise InvalidKey."""
        return key if self.tenant is None else stored_key(self.tenant, key)

    def stored_prefix(self, prefix: str | None) -> str | None:
        """Return the beginning of the stored keys that the caller may see. `prefix`: what the caller asked for."""
        return prefix if self.tenant is None else prefix_of(self.tenant) + (prefix or "")

    def owns(self, event: TaskEvent) -> bool:
        """Whether the caller may see an event."""
        return self.tenant is None or event.is_of(self.tenant)

    def shown_key(self, key: str) -> str:
        """Return a stored key of a task or a flow in the form that the caller sees."""
        return own_key(self.tenant, key)

    def shown_id(self, task_id: str) -> str:
        """Return a task's id in the form that the caller sees."""
        if self.tenant is None:
            return task_id
        name, colon, key = task_id.partition(":")
        return f"{name}{colon}{self.shown_key(key)}"

    def shown_text(self, text: str) -> str:
        """Return a message of mtask in the form that the caller sees: without the tenant's name in keys and ids."""
        return text if self.tenant is None else text.replace(f":{self.tenant}:", ":").replace(f"'{self.tenant}:", "'")


def client_of(client: AsyncClient, caller: Caller) -> AsyncClient:
    """Return the client with which a caller reads and changes its tasks, and no others. It takes stored keys."""
    return client if caller.tenant is None else client.bound_to(caller.tenant)


#: The caller of a server that asks for no token.
ANYBODY = Caller("anybody", Role.OPERATE)
