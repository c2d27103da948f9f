"""Pages of lists: the request for a page, checked, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from mtask.arguments.criteria import PlaceArguments
from mtask.client import views
from mtask.errors import InvalidInput, shown
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import encode
from mtask.search import counts as counting
from mtask.search import lists as listing
from mtask.search.counts import Count
from mtask.search.lists import Found
from mtask.search.order import Place, cursor_of, place_of
from mtask.search.partial import check_fields, read_fields
from mtask.search.walks import Asked

T = TypeVar("T")
#: The most tasks of one page.
MAX_PAGE = 10_000


@dataclass(frozen=True, slots=True)
class TaskPage(Generic[T]):
    """A page of a list of tasks."""

    tasks: list[T]
    #: The text with which the next page begins. None: the list has ended.
    next_cursor: str | None
    #: The instant up to which the search has come, if it stopped before the page was full: then `next_cursor` goes on
    #: from there. None: the page is full, or the list has ended.
    looked_to: datetime | None = None


def page(
    criteria: Mapping[str, Any], limit: int, fields: Sequence[str] | None, place: PlaceArguments
) -> Operation[TaskPage[Any]]:
    """Check the arguments of a page, and return the operation that reads it; raise InvalidInput."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_PAGE:
        raise InvalidInput(f"limit {shown(limit)}: use a whole number from 1 to {MAX_PAGE}.", field="limit")
    since, until, cursor = place.get("since"), place.get("until"), place.get("cursor")
    for name, instant in (("since", since), ("until", until)):
        if instant is not None and (not isinstance(instant, datetime) or instant.utcoffset() is None):
            raise InvalidInput(f"{name} {shown(instant)}: use a datetime with a time zone.", field=name)
    asked = Asked(criteria, since, until)
    order = asked.order
    after: Place | None = None if cursor is None else place_of(cursor, order)
    wanted = None if fields is None else check_fields(fields)

    def operation() -> Operation[TaskPage[Any]]:
        look_for = yield from encode.criteria(criteria)
        pages: list[Found] = []

        def read(names: list[str] | None) -> Operation[list[dict[str, Any]]]:
            pages.append((yield from listing.page(Asked(look_for, since, until), limit, after, names)))
            return pages[0].documents

        tasks: list[Any]
        if wanted is None:
            tasks = list(views.tasks_of((yield from read(None))))
        else:
            tasks = list((yield from read_fields(read, wanted)))
        found = pages[0]
        return TaskPage(tasks, None if found.next is None else cursor_of(order, found.next), found.looked_to)

    return operation()


def count_up_to(criteria: Mapping[str, Any], most: int) -> Operation[Count]:
    """Check the arguments of a count, and return the operation that counts; raise InvalidInput."""
    return _counted(criteria, check_most(most))


def _counted(criteria: Mapping[str, Any], most: int) -> Operation[Count]:
    return (yield from counting.count((yield from encode.criteria(criteria)), most))


def check_most(most: int) -> int:
    """Return the bound of a count; raise InvalidInput."""
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= 1_000_000:
        raise InvalidInput(f"most {shown(most)}: use a whole number from 1 to 1000000.", field="most")
    return most
