"""What a list or a count of tasks is to hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.kernel.document.identity import prefix_of
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.statements import filters
from mtask.kernel.statements.filters import Filter
from mtask.search.order import Order, order_of

STATUS = "task_state.status"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a list is to hold. The criteria are those of `filters.search`."""

    criteria: Mapping[str, Any]
    #: The list holds the tasks from `since` on and before `until`, by the instant of the order.
    since: datetime | None = None
    until: datetime | None = None
    #: The order, if it is not the usual one of these criteria.
    by: Order | None = None

    @property
    def statuses(self) -> list[TaskStatus]:
        """The statuses that were asked for."""
        return [TaskStatus(status) for status in self.several("status")]

    @property
    def order(self) -> Order:
        """The order of the list."""
        if self.by is not None:
            return self.by
        return Order.CREATED if self.criteria.get("lookup") is not None else order_of(self.statuses)

    @property
    def is_of_tenant(self) -> bool:
        """Whether a tenant is given, and nothing that leads to fewer tasks than the tenant has."""
        narrower = [self.criteria.get(name) for name in ("key", "key_prefix", "lookup")]
        return self.criteria.get("tenant") is not None and narrower == [None, None, None]

    @property
    def is_walk_of_tenant(self) -> bool:
        """Whether the list walks along the index of tenants, by the time of creation."""
        return self.is_of_tenant and self.order is Order.CREATED

    @property
    def is_discreet(self) -> bool:
        """Whether the reader may see the tasks of a tenant, or with a prefix, alone."""
        return self.prefix is not None

    @property
    def prefix(self) -> str | None:
        """The beginning of the keys of all tasks, by the prefix that was given, or by the tenant."""
        prefix, tenant = self.criteria.get("key_prefix"), self.criteria.get("tenant")
        return prefix if prefix is not None or tenant is None else prefix_of(tenant)

    @property
    def of_statuses(self) -> Filter | None:
        """The tasks that `mtask_status` can count, though it does not have the order of the list; None: there are none.

        They are those of some statuses, and of some names if all statuses are final: in this index, the instants of
        open tasks come before their names.
        """
        statuses, names = self.several("status"), self.several("name")
        if statuses and self.order is Order.CREATED:
            return {STATUS: filters.any_of(statuses)}
        if names and self.order is Order.FINISHED:
            return {STATUS: filters.any_of(statuses), "name": filters.any_of(names)}
        return None

    @property
    def is_led(self) -> bool:
        """Whether a criterion is given that mostly leads to few tasks."""
        return any(self.criteria.get(name) is not None for name in ("key", "key_prefix", "lookup", "tenant"))

    def several(self, name: str) -> list[str]:
        """Return the values of a criterion."""
        wanted = self.criteria.get(name)
        return [] if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)

    def rest(self, *used: str) -> Filter:
        """Return the filter of the criteria that no index meets."""
        left = {name: wanted for name, wanted in self.criteria.items() if name not in used}
        return filters.search(left)

    def tested(self, *used: str) -> Filter:
        """Return the same filter for a walk along an index with `_id`, which tells the name: no document is read."""
        names, queues = self.several("name"), self.several("queue")
        matched: Filter = {}
        if names:
            matched |= filters.has_key_prefix(self.criteria.get("key_prefix") or "", names)
            used = (*used, "name", "key_prefix")
        if queues and "queue" not in used:
            matched |= filters.is_of_queues(queues)
            used = (*used, "queue")
        return {**self.rest(*used), **matched}
