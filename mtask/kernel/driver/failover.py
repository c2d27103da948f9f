"""Awaits a call of the driver, until the driver knows a new primary.

The call runs in the caller's own asyncio task. An asyncio task for each call would cost several turns of the event
loop, and a time limit within the call (`asyncio.timeout`) always cancels the asyncio task in which it began. Only the
rest of a call to a former primary runs in an asyncio task of its own, because the driver may take long to end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from inspect import iscoroutinefunction
from typing import Any, Generic, Protocol, TypeVar

import pymongo.asynchronous.pool
import pymongo.asynchronous.topology
import pymongo.lock
import pymongo.synchronous.topology
from pymongo.errors import AutoReconnect, NotPrimaryError, OperationFailure
from pymongo.topology_description import TopologyDescription

from mtask.kernel.driver.errors import translated

T = TypeVar("T")
Address = tuple[str, int | None]
#: The interval, in seconds, at which a waiting call checks whether there is a new primary.
_LOOK_FOR_PRIMARY = 0.5
_PRIMARY = "RSPrimary"
#: The callers whose calls are being given up at this moment.
_GIVING_UP: set[asyncio.Task[Any]] = set()


class KnowsServers(Protocol):
    """A client of the driver."""

    @property
    def topology_description(self) -> TopologyDescription:
        """What the client knows about the servers. The object does not change; a later one may differ."""


class WhilePrimary(Generic[T]):
    """Await a call, but only until the driver knows a new primary.

    Raises DatabaseUnavailable if another primary has been elected since the call was sent. A caller that is cancelled
    waits until the call has ended. The call gets this cancellation once, however often the caller is cancelled, so that
    the driver can put its locks and counts in order. A second follows only if the call goes on for `AGAIN` seconds.
    `keep` is given the asyncio task with the rest of a call that was given up because of a new primary.
    """

    __slots__ = (
        "_asked",
        "_awaited",
        "_call",
        "_caller",
        "_cancelled_before",
        "_client",
        "_keep",
        "_known",
        "_present",
        "_received",
        "_timer",
    )

    def __init__(
        self,
        call: Coroutine[Any, Any, T],
        client: KnowsServers,
        keep: Callable[[asyncio.Task[Any]], None],
    ) -> None:
        self._call = call
        self._awaited: Any = None  #: what a call that is cancelled awaits
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
        #: What the cancellation said that has come to the call. None: none has come.
        self._received: tuple[Any, ...] | None = None
        self._look_later()
        try:
            awaited = call.send(None)
            while True:
                try:
                    yield awaited
                except asyncio.CancelledError as error:
                    if self._is_given_up():
                        awaited = call.throw(error)
                    elif self._is_for_primary():
                        return self._give_up(error)
                    else:
                        self._received = error.args
                        awaited = yield from self._go_on(call.throw(error))
                except BaseException as error:
                    awaited = call.throw(error)
                else:
                    awaited = call.send(None)
        except StopIteration as stop:
            result: T = stop.value
            if not self._is_cancelled():
                return result
        except (Exception, asyncio.CancelledError):
            if not self._is_cancelled():
                raise
        finally:
            self._timer.cancel()
            # A cancelled caller holds its error, and so does a future. The error holds this frame.
            self._caller = self._awaited = None
        # Not raised above: a frame that holds its own error waits for the collector of cycles.
        raise asyncio.CancelledError(*(self._received or ()))

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

    def _is_given_up(self) -> bool:
        """Whether a call that this one is a part of is given up now, or was. Its rest has no caller to interrupt."""
        if self._caller in _GIVING_UP:
            self._timer.cancel()
            self._caller = None
        return self._caller is None

    def _is_for_primary(self) -> bool:
        """Whether only `_look` has cancelled the caller. Take its cancellation back."""
        caller = self._caller
        if self._present is None or caller is None:
            return False
        if caller.uncancel() <= self._cancelled_before:
            return True
        self._present = None
        return False

    def _is_cancelled(self) -> bool:
        """Whether a cancellation has come that was for the caller, and not for the call alone.

        For the call alone: something that it awaits was cancelled. Or a time limit within it (`asyncio.timeout`) has
        cancelled the caller's asyncio task, and takes this back when the cancellation has come to it. It may come there
        late, because a wait of the driver first takes its lock again.
        """
        caller = self._caller
        return self._received is not None and caller is not None and caller.cancelling() > self._cancelled_before

    def _go_on(self, awaited: Any) -> Generator[Any, Any, Any]:
        """Go on with a call that was cancelled, and keep further cancellations from it, while the caller is cancelled.

        Returns what the call awaits if the caller is not, or no longer, cancelled.
        """
        self._timer.cancel()
        self._cancel_later()
        self._awaited = awaited
        del awaited
        while self._is_cancelled():
            yield from self._shielded()
            self._awaited = None
            self._awaited = self._call.send(None)
        awaited, self._awaited, self._received = self._awaited, None, None
        self._timer.cancel()
        self._look_later()
        return awaited

    def _shielded(self) -> Generator[Any, Any, None]:
        """Wait for the future that the call awaits. A cancellation ends neither this wait nor the future."""
        if not asyncio.isfuture(self._awaited):  # it is None, by which a call lets others go first
            try:
                yield self._awaited
            except asyncio.CancelledError as error:
                self._received = self._received or error.args
            return
        self._awaited._asyncio_future_blocking = False  # as an asyncio task says of a future that it has taken over
        while not self._awaited.done():
            try:
                yield from asyncio.wait((self._awaited,)).__await__()
            except asyncio.CancelledError as error:
                self._received = self._received or error.args

    def _cancel_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(AGAIN, self._cancel_again)

    def _cancel_again(self) -> None:
        """Cancel what the call awaits. Before Python 3.12, `asyncio.wait_for` may drop a cancellation."""
        if asyncio.isfuture(self._awaited):
            self._awaited.cancel()
        self._cancel_later()

    def _give_up(self, error: asyncio.CancelledError) -> T:
        """Give the call up because of the new primary. Return its answer, if this has come at this moment.

        Raises DatabaseUnavailable.
        """
        caller = self._caller
        assert caller is not None
        _GIVING_UP.add(caller)
        try:
            awaited = self._call.throw(error)
        except StopIteration as stop:
            answer: T = stop.value
            return answer
        except (Exception, asyncio.CancelledError):
            pass  # the call has ended
        else:
            self._keep(asyncio.get_running_loop().create_task(_Rest(self._call, awaited)))
        finally:
            _GIVING_UP.discard(caller)
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


# --- cancelling ------------------------------------------------------------------------------------------

# Ends asyncio tasks that wait for the driver.

#: The time after which a cancellation is repeated, in seconds. The driver closes a connection in less time. What it
#: counts while it does so bears one interruption, but not two.
AGAIN = 1.0


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel an asyncio task, and wait until it has ended.

    One cancellation may not be enough. The driver waits for the network by `asyncio.wait_for`. Before Python 3.12, this
    function drops a cancellation that comes while its wait ends anyway. The operation then goes on to its time limit.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=AGAIN)


# --- mending ---------------------------------------------------------------------------------------------

# Mends how the driver waits. A call that was given up could lock the driver for ever, and a monitor could wait for
# minutes for what has happened already.

_NAME = "_async_cond_wait"


class Condition(Protocol):
    """A condition of asyncio, or the driver's own."""

    async def wait(self) -> bool:
        """Give the lock back, wait until notified, and take the lock again."""

    def notify(self, n: int = 1) -> None:
        """Wake some of those that wait."""


def mend_waits() -> None:
    """Let the driver wait for a server, and for a free connection, by `wait_for_condition`.

    The driver calls `asyncio.wait_for(condition.wait(), timeout)` while it holds the lock of the condition. Before
    Python 3.12, `wait_for` runs `condition.wait()` in another asyncio task. If the caller is cancelled while that task
    takes the lock again, the caller goes on alone. It gives back a lock that it does not hold, and the other task ends
    without giving the lock back. From then on, each call of the client waits for ever, and so do its monitors. From
    Python 3.12 on, the time limit cancels the asyncio task in which the wait began, even if another one ends the call.

    This holds for all asyncio clients of the driver in this process.
    """
    for module in (pymongo.lock, pymongo.asynchronous.pool, pymongo.asynchronous.topology):
        if hasattr(module, _NAME):
            setattr(module, _NAME, wait_for_condition)


_HANDLE = "_handle_error"


def mend_checks() -> None:
    """Let the driver ask a server at once that is no primary any more, as an answer says, in place of waiting for it.

    The driver then knows no primary until its monitor hears of the server again. The monitor waits for a change of the
    topology. It hears of none if the answer came after the change, or if there was none: some answers do not say to
    which state of the topology they belong. With `connect.QUIET`, the monitor waits for two minutes. After an error of
    the network, the driver ends this wait itself.

    This holds for all clients of the driver in this process.
    """
    for module in (pymongo.asynchronous.topology, pymongo.synchronous.topology):
        handle = getattr(module.Topology, _HANDLE, None)
        if handle is not None and handle.__module__ != __name__:
            setattr(module.Topology, _HANDLE, (_async_checking if iscoroutinefunction(handle) else _checking)(handle))


def _async_checking(handle: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    async def handle_and_check(topology: Any, address: Address, context: Any) -> None:
        await handle(topology, address, context)
        _check_at_once(topology, address, context.error)

    return handle_and_check


def _checking(handle: Callable[..., None]) -> Callable[..., None]:
    def handle_and_check(topology: Any, address: Address, context: Any) -> None:
        handle(topology, address, context)
        _check_at_once(topology, address, context.error)

    return handle_and_check


def _check_at_once(topology: Any, address: Address, error: BaseException) -> None:
    server = topology._servers.get(address)
    is_answer = isinstance(error, NotPrimaryError | OperationFailure)
    if is_answer and server is not None and not server.description.is_server_type_known:
        server._monitor.cancel_check()


async def wait_for_condition(condition: Condition, timeout: float | None) -> bool:
    """Wait until the condition is notified, and return True; return False after `timeout`, in seconds.

    The caller holds the lock, and does so again at the end, however the wait ends. None: there is no limit.
    """
    waiting = asyncio.create_task(condition.wait())
    received: tuple[Any, ...] | None = None  #: what a cancellation said. None: none has come.
    try:
        await asyncio.wait((waiting,), timeout=timeout)
    except asyncio.CancelledError as error:
        received = error.args
    waiting.cancel()
    while not waiting.done():
        try:
            await asyncio.wait((waiting,))
        except asyncio.CancelledError as error:
            received = error.args if received is None else received
    is_woken = not waiting.cancelled() and waiting.result()
    if received is None:
        return is_woken
    if is_woken:
        condition.notify()  # another one can use what this one was woken for
    raise asyncio.CancelledError(*received)
