"""Awaits a call of the driver, until the driver knows a new primary.

The call runs in the caller's own asyncio task. An asyncio task for each call would cost several turns of the event
loop. Only the rest of a call that is given up runs in an asyncio task of its own, because the driver may take long to
end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, TypeVar

from pymongo.errors import AutoReconnect
from pymongo.topology_description import TopologyDescription

from mtask.store.driver.cancelling import wait_for_end
from mtask.store.driver.translate import translated

T = TypeVar("T")
Address = tuple[str, int | None]
#: The interval, in seconds, at which a waiting call checks whether there is a new primary.
_LOOK_FOR_PRIMARY = 0.5
_PRIMARY = "RSPrimary"
#: Tells that a call has been given up, and awaits nothing more. None would not tell it: `asyncio.sleep(0)` awaits None.
_NOTHING = object()


class KnowsServers(Protocol):
    """A client of the driver."""

    @property
    def topology_description(self) -> TopologyDescription:
        """What the client knows about the servers. The object does not change; a later one may differ."""


class WhilePrimary(Generic[T]):
    """Await a call, but only until the driver knows a new primary.

    Raises DatabaseUnavailable if another primary has been elected since the call was sent. A caller that is cancelled
    waits until the call has ended. `keep` is given the asyncio task with the rest of a call that was given up.
    """

    __slots__ = ("_asked", "_call", "_caller", "_cancelled_before", "_client", "_keep", "_known", "_present", "_timer")

    def __init__(
        self,
        call: Coroutine[Any, Any, T],
        client: KnowsServers,
        keep: Callable[[asyncio.Task[Any]], None],
    ) -> None:
        self._call = call
        self._caller: asyncio.Task[Any] | None = None
        self._client = client
        self._keep = keep

    def __await__(self) -> Generator[Any, Any, T]:
        call, self._caller = self._call, asyncio.current_task()
        if self._caller is None:  # what drives this coroutine is no asyncio task, so nothing here could interrupt it
            return (yield from call.__await__())
        self._cancelled_before = self._caller.cancelling()
        self._known: TopologyDescription = self._client.topology_description  #: when the call was sent
        self._asked: Address | None = None  #: the primary then, or the first one that the driver knew
        #: The new primary. It is set when the caller is interrupted because of it.
        self._present: Address | None = None
        self._look_later()
        try:
            awaited = call.send(None)
            while True:
                try:
                    yield awaited
                except asyncio.CancelledError as error:
                    awaited, answer = yield from self._cancel(error)
                    if answer is not None:
                        return answer[0]
                    if awaited is _NOTHING:
                        raise
                except BaseException as error:
                    awaited = call.throw(error)
                else:
                    awaited = call.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            self._timer.cancel()
            self._caller = None  # a cancelled caller holds its error, and the error holds this frame

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_FOR_PRIMARY, self._look)

    def _look(self) -> None:
        """Interrupt the caller if the driver knows another primary than the one that was asked."""
        known = self._client.topology_description
        present = _primary_of(known)
        if self._asked is None:
            self._asked = _primary_of(self._known) or present
        if present is not None and present != self._asked:
            self._present = present
            if self._caller is not None:
                self._caller.cancel()
        else:
            self._look_later()

    def _is_for_primary(self) -> bool:
        """Whether only `_look` has cancelled the caller. Take this cancellation back."""
        caller = self._caller
        return self._present is not None and caller is not None and caller.uncancel() <= self._cancelled_before

    def _is_for_call(self) -> bool:
        """Whether the call was cancelled, and not its caller.

        Something that the call awaits was cancelled. Or a time limit within the call (`asyncio.timeout`) has cancelled
        the caller's asyncio task, and has taken this back when the cancellation came to it.
        """
        return self._caller is None or self._caller.cancelling() <= self._cancelled_before

    def _cancel(self, error: asyncio.CancelledError) -> Generator[Any, Any, tuple[Any, tuple[T] | None]]:
        """Pass a cancellation on to the call, and give the call up unless the cancellation was for the call alone.

        Returns what the call awaits next, if it goes on, and its answer, if this has come at this moment. If there is
        neither, the caller must end. Raises the call's error, and DatabaseUnavailable.
        """
        is_for_primary = self._is_for_primary()
        try:
            awaited = self._call.throw(error)
        except StopIteration as stop:
            if is_for_primary or self._is_for_call():
                return _NOTHING, (stop.value,)
        except BaseException:
            if not is_for_primary and self._is_for_call():
                raise
        else:
            if not is_for_primary and self._is_for_call():
                return awaited, None
            self._timer.cancel()
            rest = asyncio.get_running_loop().create_task(_Rest(self._call, awaited))
            self._keep(rest)
            if not is_for_primary:
                yield from wait_for_end(rest).__await__()
        if not is_for_primary:
            return _NOTHING, None  # not raised here: a frame that holds its own error waits for the collector of cycles
        former, present = (":".join(map(str, found or ())) for found in (self._asked, self._present))
        raise translated(AutoReconnect(f"{former} has not answered, and {present} is primary now")) from None


class _Rest(Coroutine[Any, Any, T]):
    """The rest of a coroutine that another asyncio task has begun, and that waits for `awaited`.

    It is no coroutine function, because an asyncio task that is cancelled before its first step would not run it, and
    then nothing would end the coroutine.
    """

    def __init__(self, begun: Coroutine[Any, Any, T], awaited: Any) -> None:
        self._begun = begun
        self._awaited: list[Any] = [awaited]

    def send(self, value: Any) -> Any:
        return self._awaited.pop() if self._awaited else self._begun.send(value)

    def throw(self, *error: Any) -> Any:
        self._awaited.clear()
        return self._begun.throw(*error)

    def close(self) -> None:
        self._begun.close()

    def __await__(self) -> Generator[Any, Any, T]:
        # The base class demands this method. An asyncio task does not call it: it drives a coroutine by `send`.
        raise NotImplementedError


def _primary_of(known: TopologyDescription) -> Address | None:
    """Return the address of the primary, or None if there is none, or no replica set."""
    servers = known.server_descriptions().items()
    return next((address for address, server in servers if server.server_type_name == _PRIMARY), None)
