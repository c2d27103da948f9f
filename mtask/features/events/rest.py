"""The route of events: every transition of every task as server-sent events (SSE)."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Header, Query
from fastapi.responses import StreamingResponse

from mtask.errors import EventsLost
from mtask.features.events import following
from mtask.features.events.hub import BEHIND, LOST, Selects, place_of
from mtask.features.events.task_events import EventKind, TaskEvent, as_told_to
from mtask.web import views
from mtask.web.access import Caller
from mtask.web.bodies import about
from mtask.web.problems import Busy
from mtask.web.routes.common import TheCaller, TheHub, TheRooms, router
from mtask.web.schemas import Key, Name

routes = router("events")

#: The time between two comments on a quiet stream, in seconds. They keep proxies from closing it.
_QUIET = 15.0
#: The length of the instant in a resume token (a marker byte and the oplog time), and what follows it in the token of
#: the beginning of that instant. It sorts before those of all changes.
_INSTANT, _BEGINNING = 18, "2B0229296E04"
Keys = Annotated[list[Key] | None, Query(description="May be given several times.")]
Names = Annotated[list[Name] | None, Query(description="May be given several times.")]
Several = Annotated[list[str] | None, Query(description="May be given several times.")]


@routes.get(
    "/v1/events",
    response_class=StreamingResponse,
    responses={200: {"description": "Server-sent events.", "content": {"text/event-stream": {}}}},
    openapi_extra=about(),
)
async def events(
    caller: TheCaller,
    hub: TheHub,
    rooms: TheRooms,
    name: Names = None,
    queue: Several = None,
    key: Keys = None,
    kind: Annotated[list[EventKind] | None, Query(description="May be given several times.")] = None,
    after: Annotated[str | None, Query(description="Like Last-Event-ID.")] = None,
    last_event_id: Annotated[str | None, Header(description="Go on after this event.")] = None,
) -> Any:
    """Follow the events of tasks. The first event, `ready`, carries an id from which a later request can go on.

    `lost` tells that earlier events are lost. `behind` tells that the reader was too slow: it should connect again with
    the Last-Event-ID. `closing` tells that the server ends.
    """
    begin = last_event_id if last_event_id is not None else after
    following.follow(name, queue, key, begin, None)  # raises InvalidInput for what is no token
    if hub.is_closing:
        raise Busy("The server ends. Try again in a second.")
    selects = _selects(caller, name, queue, key, kind)
    stack = AsyncExitStack()
    stack.enter_context(rooms.streams.taken(caller))
    try:
        viewer = await stack.enter_async_context(hub.view(selects))
        reading = await stack.enter_async_context(AsyncExitStack())
        old, is_lost = None, False
        if begin is not None and place_of(begin) < place_of(viewer.begins_at):
            try:
                reading.enter_context(rooms.catch_ups.taken(caller))
                old = await reading.enter_async_context(hub.catch_up(begin, viewer.begins_at))
            except EventsLost:
                is_lost = True
    except BaseException:
        await stack.aclose()
        raise

    here = _told_place(viewer.begins_at, caller)

    async def written() -> AsyncIterator[str]:
        yield _written("ready", {}, begin if begin is not None and not is_lost else here)
        if is_lost:
            yield _written("lost", {}, here)
        if old is not None:
            async for line in _old(old, selects, caller, here):
                yield line
        await reading.aclose()  # it has caught up, so another stream may
        while not hub.is_closing:
            found = await viewer.next(_QUIET)
            if found is None:
                yield ": quiet\n\n"
            elif isinstance(found, TaskEvent):
                yield _event(found, caller)
            elif found is LOST:
                yield _written("lost", {}, None)
            elif found is BEHIND:
                yield _written("behind", {}, None)
                return
        yield _written("closing", {}, None)

    return views.EventStream(written(), stack)


async def _old(old: AsyncIterator[TaskEvent], selects: Selects, caller: Caller, here: str | None) -> AsyncIterator[str]:
    try:
        async for found in old:
            if selects(found):
                yield _event(found, caller)
    except EventsLost:
        yield _written("lost", {}, here)


def _told_place(token: str | None, caller: Caller) -> str | None:
    """Return the token of the hub's place, without the id of the last change, which may be that of any tenant.

    A tenant gets the beginning of that change's instant, in the form in which the server itself writes a place between
    changes. So no event is left out, and those of this instant may come twice.
    """
    return token if token is None or caller.tenant is None else token[:_INSTANT] + _BEGINNING


def _event(found: TaskEvent, caller: Caller) -> str:
    return _written(found.kind.value, _document(found, caller), found.token)


def _written(kind: str, document: dict[str, Any], token: str | None) -> str:
    at = "" if token is None else f"id: {token}\n"
    return f"{at}event: {kind}\ndata: {json.dumps(document, ensure_ascii=True)}\n\n"


def _selects(
    caller: Caller,
    name: list[str] | None,
    queue: list[str] | None,
    key: list[str] | None,
    kind: list[EventKind] | None,
) -> Selects:
    keys = None if key is None else frozenset(caller.stored_key(one) for one in key)
    names, queues, kinds = (None if given is None else frozenset(given) for given in (name, queue, kind))

    def is_wanted(found: TaskEvent) -> bool:
        return (
            caller.owns(found)
            and (names is None or found.name in names)
            and (keys is None or found.key in keys)
            and (queues is None or found.queue in queues)
            and (kinds is None or found.kind in kinds)
        )

    return is_wanted


def _document(found: TaskEvent, caller: Caller) -> dict[str, Any]:
    """Return an event."""
    made: dict[str, Any] = asdict(found if caller.tenant is None else as_told_to(found, caller.tenant))
    made["task_id"], made["key"] = caller.shown_id(found.task_id), caller.shown_key(found.key)
    made["name"], made["kind"] = found.name, found.kind.value
    made["task_status"] = None if found.task_status is None else found.task_status.value
    if made["reason"] is not None:
        made["reason"] = caller.shown_text(made["reason"])
    if caller.tenant is not None:
        del made["tenant"]
    return {name: value for name, value in views.plain(made).items() if value is not None}
