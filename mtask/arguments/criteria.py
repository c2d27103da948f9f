"""The criteria by which callers find tasks: declared once, and checked before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, TypedDict

from mtask.errors import InvalidInput, shown
from mtask.kernel.document.identity import check_key, check_name, is_text, prefix_of
from mtask.kernel.document.lookup import Lookup, values_by_name
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.bson import is_scalar
from mtask.says import Says, check_names

_TEXTS = ("status", "name", "queue", "key", "worker_id")
#: The most parts of a path in a document.
_MAX_PARTS = 100


class StatusCriteria(TypedDict, total=False):
    """The criterion of a task's status."""

    status: Annotated[
        str | Sequence[str] | None, Says(f"{', '.join(TaskStatus)}; repeatable.", "STATUS", flag="--status -s")
    ]


class NameCriteria(TypedDict, total=False):
    """The criteria of what a worker serves."""

    name: Annotated[str | Sequence[str] | None, Says("Only tasks of this name; repeatable.", "NAME", flag="--name -n")]
    queue: Annotated[str | Sequence[str] | None, Says("Only tasks of this queue; repeatable.", "QUEUE")]


class TaskCriteria(StatusCriteria, NameCriteria, total=False):
    """The criteria of `purge`."""


class LookupCriteria(TypedDict, total=False):
    """Values by which a task is found: a publish gives them, and a search names them."""

    lookup: Annotated[
        Lookup | None, Says("A value to find the task by: user_id=7. JSON or text; repeatable.", "NAME=VALUE")
    ]


class CountCriteria(TaskCriteria, LookupCriteria, total=False):
    """The criteria of `count`."""


class FindCriteria(CountCriteria, total=False):
    """The criteria of `find`."""

    key: Annotated[str | Sequence[str] | None, Says("Key of the task.", flag="")]
    worker_id: Annotated[
        str | Sequence[str] | None, Says("Tasks with a run of this worker; repeatable.", "ID", flag="--worker")
    ]


class PageCriteria(FindCriteria, total=False):
    """The criteria of `find_page`, `count_up_to` and `plan_bulk`."""

    key_prefix: Annotated[str | None, Says("The beginning of the keys.", "TEXT")]
    params: Annotated[Mapping[str, Any] | None, Says("A value in the params: user.id=7.", "PATH=VALUE", flag="--param")]


class PlaceArguments(TypedDict, total=False):
    """Which part of a list a page is."""

    since: Annotated[datetime | None, Says("Only from this time on, by the order of the list.", "TIME")]
    until: Annotated[datetime | None, Says("Only before this time, by the order of the list.", "TIME", flag="--before")]
    cursor: Annotated[str | None, Says("Continue a list that ended with this cursor.", "TEXT")]


class PageArguments(PageCriteria, PlaceArguments, total=False):
    """The keyword arguments of `find_page`, beside its `fields` and its `limit`."""


def checked(
    declared: Any, given: Mapping[str, Any], tenant: str | None = None, owner: str | None = None
) -> dict[str, Any]:
    """Check the criteria of a search and return them; raise InvalidInput, or InvalidKey for what is no key.

    `declared` is one of the classes above. With a `tenant`, the keys are those that the tenant gave. With an `owner`,
    only its tasks match.
    """
    check_names(declared, given)
    checked: dict[str, Any] = {}
    for field in _TEXTS:
        wanted = given.get(field)
        if not isinstance(wanted, str | Iterable | None):
            raise InvalidInput(f"{field} is text or a list of texts, not {type(wanted).__name__}.", field=field)
        several = [wanted] if isinstance(wanted, str) else list(wanted or ())
        for value in several:
            if not isinstance(value, str):
                raise InvalidInput(f"{field} is text, not {type(value).__name__}.", field=field)
            if not is_text(value):
                raise InvalidInput(f"{field} {shown(value)} holds a lone surrogate, which is not text.", field=field)
            if field == "status" and str(value) not in TaskStatus.__members__:
                known = ", ".join(TaskStatus.__members__)
                raise InvalidInput(f"{shown(value)} is no status: use {known}.", field="status")
            if field == "key":
                check_key(value)
            if field == "name":
                check_name(value)  # else its colon would move the beginning of the key, and so a tenant's border
        texts = [str(value) for value in several]
        checked[field] = None if wanted is None else texts[0] if isinstance(wanted, str) else texts
    lookup, key_prefix, params = (given.get(field) for field in ("lookup", "key_prefix", "params"))
    if lookup is not None:
        checked["lookup"] = values_by_name(lookup, is_scalar) or None
    if key_prefix is not None:
        checked["key_prefix"] = check_key(key_prefix)
    if tenant is not None:
        checked |= _of_tenant(tenant, checked)
    elif owner is not None:
        checked["tenant"] = owner
        if checked.get("key_prefix") == prefix_of(owner):  # all its keys begin so, and an index leads to its tasks
            del checked["key_prefix"]
    if params is not None:
        checked["params"] = _params(params) or None
    return checked


def _of_tenant(tenant: str, checked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the criteria of a tenant's search: the tenant, and the stored form of its keys."""
    made: dict[str, Any] = {"tenant": tenant}
    keys = checked["key"]
    if keys is not None:
        several = [keys] if isinstance(keys, str) else keys
        made["key"] = [prefix_of(tenant) + key for key in several]
    if checked.get("key_prefix") is not None:
        made["key_prefix"] = prefix_of(tenant) + checked["key_prefix"]
    return made


def _params(params: object) -> dict[str, Any]:
    """Return the wanted values of params, by path; raise InvalidInput."""
    if not isinstance(params, Mapping):
        raise InvalidInput("params is a mapping from paths in the params to values.", field="params")
    for path in params:
        if not isinstance(path, str) or not is_text(path) or "\0" in path:
            raise InvalidInput(f"params: {shown(path)} is no path, such as user.id.", field="params")
        parts = path.split(".")
        if len(parts) > _MAX_PARTS or any(not part or part.startswith("$") for part in parts):
            raise InvalidInput(f"params: {shown(path)} is no path, such as user.id.", field="params")
    return dict(params)
