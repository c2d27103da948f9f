"""Handlers: a handler holds the function that runs tasks of one name, and the defaults of these tasks.

A handler also checks params against the type hints of the function.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from mtask.errors import MAX_DELAY, HandlerError, InvalidInput, InvalidLookup, InvalidName, InvalidParams, shown
from mtask.kernel.document.identity import check_name, check_text
from mtask.kernel.document.lookup import MAX_LOOKUPS, check_lookup_name, taken_from
from mtask.kernel.document.options import stored_options
from mtask.kernel.document.task import DEFAULT_QUEUE, MAX_VERSION, describe_validation
from mtask.logs import SureLogger, fields

HANDLER_ATTRIBUTE = "__mtask_handler__"
#: The name of the attribute that marks a class as the type of a handler's context parameter.
CONTEXT_MARK = "__mtask_context__"
OnException = Literal["retry", "fail"]
#: The name of the task as which each task goes on after its success. A mapping holds the name for each kind of flow:
#: the part of the flow's key before the first slash.
NextNames: TypeAlias = str | Mapping[str, str]
#: Where a handler runs: in the worker's process, or in an executor, a process of its own kind.
IsolationKind: TypeAlias = Literal["process", "thread"]
#: What becomes of params that the handler does not have: they are refused, or ignored.
Unknown: TypeAlias = Literal["refuse", "drop"]


class UpcastError(Exception):
    """Params of an earlier version could not be turned into those of the handler's version."""

    def __init__(self, name: str, step: int, reason: str | None) -> None:
        """`reason`: None if the upcast raised an exception, which is the cause of this one."""
        super().__init__(f"the params of {name!r} could not be upcast from version {step} to {step + 1}")
        self.reason = reason


#: The bounds of a breaker, of a handler or of a queue.
MAX_BREAKER_FAILURES, MIN_BREAKER_WAIT_MS, MAX_BREAKER_WAIT_MS = 10_000, 100, 600_000


@dataclass(frozen=True, slots=True)
class Breaker:
    """When failures hold back the tasks of a handler: `failures` in a row, in one worker, for `wait` seconds at first.

    Then one task is tried at a time: its success lets all go on, and its failure doubles the wait, up to ten minutes.
    """

    failures: int = 20
    wait: timedelta | float = 30.0

    @property
    def wait_ms(self) -> int:
        """The first wait in ms."""
        wait = self.wait if isinstance(self.wait, timedelta) else timedelta(seconds=self.wait)
        return wait // timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Handler:
    """A function registered under a task name."""

    name: str
    function: Callable[..., Any]
    queue: str
    #: The options that it declares, as documents have them.
    options: Mapping[str, Any]
    on_exception: OnException
    is_async: bool
    context_parameter: str | None
    arguments: type[BaseModel]
    #: If the function has only one parameter: its name. Params that are not a mapping are the argument of this
    #: parameter.
    sole_parameter: str | None
    fields: Mapping[str, str] = field(default_factory=dict)
    #: The parameters that take arguments by position, in their order. The context is none of them.
    positional: tuple[str, ...] = ()
    #: The parameters whose values are stored as lookups of the task.
    lookup: tuple[str, ...] = ()
    #: What `@app.task(next=...)` says, or None.
    next: NextNames | None = None
    #: Where the handler runs. None: the worker's options decide.
    isolation: IsolationKind | None = None
    #: Whether the function says that it returns None.
    returns_nothing: bool = False
    #: The time after its publish after which a task never starts, in ms. None: it may always start.
    expires_ms: int | None = None
    #: When failures hold back its tasks. None: never.
    breaker: Breaker | None = None
    #: The version of the params. A worker claims no task of a later one.
    version: int = 1
    unknown: Unknown = "refuse"
    #: The functions that turn params of an earlier version into those of the next, by the earlier version.
    upcasts: dict[int, Callable[[Any], Any]] = field(default_factory=dict, init=False, compare=False, repr=False)
    #: What was worked out of the handler before and is wanted again, by its name. Not a part of what it declares.
    known: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def next_name(self, flow_key: str | None) -> str | None:
        """Return the name of the task as which a task goes on; None: it does not. `flow_key`: the key of its flow."""
        if self.next is None or isinstance(self.next, str):
            return self.next
        return None if flow_key is None else self.next.get(flow_key.partition("/")[0])

    def lookup_in(self, params: Any) -> dict[str, Any]:
        """Return the lookups that these params give. A parameter without a value, or with None, gives none."""
        return taken_from(params, self.lookup, self.sole_parameter) if self.lookup else {}

    def arguments_of(self, params: Any, version: int) -> dict[str, Any]:
        """Return the keyword arguments of the function for params that were made for a version.

        Raises InvalidParams, or an UpcastError if a step to this version fails.
        """
        return self.bind(params if version >= self.version else self.upcast(params, version))

    def upcast(self, params: Any, version: int) -> Any:
        """Return params of an earlier version as they are in this one; raise UpcastError.

        Without any upcasts, all versions up to this one have the same params.
        """
        if not self.upcasts:
            return params
        for step in range(version, self.version):
            change = self.upcasts.get(step)
            if change is None:
                reason = f"there is no upcast from version {step}: the first one is from {min(self.upcasts)}"
                raise UpcastError(self.name, step, reason)
            try:
                changed = change(params)
            except BaseException as error:
                raise UpcastError(self.name, step, None) from error
            if changed is None and params is not None:
                raise UpcastError(self.name, step, "it returned None: return the new params")
            params = changed
        return params

    def bind(self, params: Any) -> dict[str, Any]:
        """Return the keyword arguments of the function for these params; raise InvalidParams.

        Params that are a mapping hold the arguments by name. None stands for no arguments. Any other value is the
        argument of the only parameter.
        """
        if params is None and self.sole_parameter is None:
            params = {}
        if not self.fields and type(params) is dict and not params:
            return {}  # nothing is expected, and nothing is given
        if not isinstance(params, Mapping):
            if params is None:
                params = {}
            elif self.sole_parameter is None:
                raise InvalidParams(self.name, f"give a mapping of {self._expected()}, not {type(params).__name__}")
            else:
                params = {self.sole_parameter: params}
        try:
            bound = self.arguments.model_validate(dict(params))
        except ValidationError as error:
            raise InvalidParams(self.name, f"{describe_validation(error)} (expected {self._expected()})") from None
        given = bound.model_fields_set
        arguments = {parameter: getattr(bound, name) for name, parameter in self.fields.items() if name in given}
        return {**arguments, **(bound.model_extra or {})}

    def place_of(self, name: str) -> str | None:
        """Return the parameter that takes an object with this field; None: there is none."""
        return next((parameter for parameter, fields in self._objects().items() if name in fields), None)

    def _objects(self) -> dict[str, list[str]]:
        """Return the fields of the parameters that are pydantic models."""
        hints = {parameter: self.arguments.model_fields[name].annotation for name, parameter in self.fields.items()}
        return {
            parameter: [field.alias or name for name, field in hint.model_fields.items()]
            for parameter, hint in hints.items()
            if inspect.isclass(hint) and issubclass(hint, BaseModel)
        }

    def _expected(self) -> str:
        objects = self._objects()
        names = [
            f"{name}: {{{', '.join(objects[name])}}}" if name in objects else name for name in self.fields.values()
        ]
        return ", ".join(names) if names else "no arguments"


def make_handler(
    function: Callable[..., Any],
    *,
    name: str | None,
    queue: str | None,
    on_exception: OnException,
    options: Mapping[str, Any],
    lookup: Sequence[str] = (),
    next_names: NextNames | None = None,
    isolation: IsolationKind | None = None,
    expires: timedelta | float | None = None,
    breaker: Breaker | None = None,
    version: int = 1,
    unknown: Unknown = "refuse",
) -> Handler:
    """Return the handler for a function; raise HandlerError, InvalidName, InvalidOption or UnknownOption."""
    shown = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise HandlerError(shown, "it is not callable")
    if inspect.isclass(function):
        raise HandlerError(shown, "it is a class: register a function, or an instance with __call__")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise HandlerError(shown, "it is a generator, which would never be run: return a value instead of yielding")
    if name is None and getattr(function, "__name__", "") == "<lambda>":
        raise HandlerError(shown, "a lambda has no name of its own: give one with name=...")
    if on_exception not in ("retry", "fail"):
        raise HandlerError(shown, f'on_exception is "retry" or "fail", not {on_exception!r}')
    if isolation not in (None, "process", "thread"):
        raise HandlerError(shown, f'isolation is "process" or "thread", not {isolation!r}')
    if unknown not in ("refuse", "drop"):
        raise HandlerError(shown, f'unknown is "refuse" or "drop", not {unknown!r}')
    check_version(shown, "version", version)
    declared = stored_options(options)
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(hinted(function), include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        raise HandlerError(shown, f"its type hints cannot be read ({error}); import what they name") from error
    fields: dict[str, str] = {}
    definitions: dict[str, Any] = {}
    positional: list[str] = []
    context_parameter, takes_extra = None, False
    for parameter in signature.parameters.values():
        hint = hints.get(parameter.name, Any)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise HandlerError(shown, f"parameter {parameter.name!r} must be nameable: params come by name")
        if _is_context(hint) or (hint is Any and parameter.name == "context"):
            context_parameter = parameter.name
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_extra = True
            continue
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            positional.append(parameter.name)
        position = f"argument_{len(fields)}"
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[position] = parameter.name
        definitions[position] = (hint, Field(default, alias=parameter.name))
    if takes_extra and unknown == "drop":
        raise HandlerError(shown, 'it takes any params: drop unknown="drop", or the **parameter')
    looked_up = _lookup_names(shown, lookup, None if takes_extra else fields.values())
    settings = ConfigDict(
        extra="allow" if takes_extra else "ignore" if unknown == "drop" else "forbid", arbitrary_types_allowed=False
    )
    try:
        arguments = create_model(f"{shown}.arguments", __config__=settings, **definitions)
    except PydanticUserError as error:
        raise HandlerError(shown, f"its arguments cannot be validated: {str(error).splitlines()[0]}") from error
    return Handler(
        name=check_name(name if name is not None else getattr(function, "__name__", "")),
        function=function,
        queue=check_text("queue", queue if queue is not None else DEFAULT_QUEUE),
        options=declared,
        on_exception=on_exception,
        is_async=inspect.iscoroutinefunction(hinted(function)),
        context_parameter=context_parameter,
        arguments=arguments,
        sole_parameter=next(iter(fields.values())) if len(fields) == 1 and not takes_extra else None,
        fields=fields,
        positional=tuple(positional),
        lookup=looked_up,
        next=_checked_next(shown, next_names),
        isolation=isolation,
        expires_ms=_expires_ms(shown, expires),
        breaker=_checked_breaker(shown, breaker),
        returns_nothing=hints.get("return", Any) is type(None),
        version=version,
        unknown=unknown,
    )


def _checked_breaker(shown: str, breaker: Breaker | None) -> Breaker | None:
    """Check a breaker; raise HandlerError."""
    if breaker is None:
        return None
    if not isinstance(breaker, Breaker):
        raise HandlerError(shown, f"breaker is a Breaker(failures=20, wait=30), not {breaker!r}")
    is_count = isinstance(breaker.failures, int) and not isinstance(breaker.failures, bool)
    try:
        is_right = is_count and 1 <= breaker.failures <= MAX_BREAKER_FAILURES
        is_right = is_right and MIN_BREAKER_WAIT_MS <= breaker.wait_ms <= MAX_BREAKER_WAIT_MS
    except (TypeError, ValueError, OverflowError):
        is_right = False
    if not is_right:
        raise HandlerError(shown, f"{breaker!r}: use 1 to 10,000 failures, and a wait of 0.1 s to ten minutes")
    return breaker


def _expires_ms(shown: str, expires: timedelta | float | None) -> int | None:
    """Check the time in which tasks must start, and return it in ms; raise HandlerError."""
    if expires is None:
        return None
    try:
        if isinstance(expires, bool):
            raise TypeError
        wait = expires if isinstance(expires, timedelta) else timedelta(seconds=expires)
    except (TypeError, ValueError, OverflowError):
        raise HandlerError(shown, f"expires is a timedelta or seconds, not {expires!r}") from None
    if not timedelta(milliseconds=1) <= wait <= MAX_DELAY:
        raise HandlerError(shown, f"expires {wait.total_seconds():g} s lies outside of 1 ms to 10 years")
    return wait // timedelta(milliseconds=1)


def check_version(shown: str, what: str, version: object) -> None:
    """Check the version of a handler's params; raise HandlerError. `what`: the name of the argument that has it."""
    if type(version) is not int or not 1 <= version <= MAX_VERSION:
        raise HandlerError(shown, f"{what} is a whole number from 1 to {MAX_VERSION}, not {version!r}")


def _checked_next(shown: str, given: NextNames | None) -> NextNames | None:
    """Check the names of the tasks as which a task goes on; raise HandlerError."""
    if isinstance(given, Mapping) and all(isinstance(kind, str) and "/" not in kind for kind in given):
        names: list[object] = list(given.values())
        given = dict(given)
    elif given is None or isinstance(given, str):
        names = [] if given is None else [given]
    else:
        advice = 'next is the name of a task, or names by the first part of the flow\'s key: {"import": "store"}'
        raise HandlerError(shown, advice)
    for name in names:
        try:
            check_name(name)
        except InvalidName as error:
            raise HandlerError(shown, f"next: {error}") from None
    return given


def _lookup_names(shown: str, names: Sequence[str], parameters: Collection[str] | None) -> tuple[str, ...]:
    """Check the parameters that are lookups; raise HandlerError. `parameters`: all of them; None: any name is one."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise HandlerError(shown, 'lookup is a list of parameters, such as ["user_id"]')
    checked = tuple(dict.fromkeys(names))
    for name in checked:
        try:
            check_lookup_name(name)
        except InvalidLookup as error:
            raise HandlerError(shown, str(error)) from None
        if parameters is not None and name not in parameters:
            of = f"its parameters are {', '.join(parameters)}" if parameters else "it has none"
            raise HandlerError(shown, f"lookup {name!r} is no parameter of it: {of}")
    if len(checked) > MAX_LOOKUPS:
        raise HandlerError(shown, f"a task has at most {MAX_LOOKUPS} lookups")
    return checked


def hinted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable that has the type hints: the function inside a partial, or the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    call: Callable[..., Any] = getattr(function, "__call__")  # noqa: B004,B009 the object's own method, bound
    return call


def _is_context(hint: Any) -> bool:
    candidates = [hint, *typing.get_args(hint)]
    return any(getattr(candidate, CONTEXT_MARK, False) is True for candidate in candidates)


def handler_of(task: object) -> Handler | None:
    """Return the handler of a registered function, or a given Handler itself. For a name, return None.

    Raises InvalidInput for any other object.
    """
    if isinstance(task, str):
        return None
    found = task if isinstance(task, Handler) else getattr(task, HANDLER_ATTRIBUTE, None)
    if not isinstance(found, Handler):
        raise InvalidInput(
            f"{shown(task)} is no task: give its name, or a function registered with @app.task.", field="task"
        )
    return found


# --- middleware ------------------------------------------------------------------------------------------

# Runs middleware: functions around a step. `mtask.app.middleware` explains how users write middleware.
#
# A middleware is a generator function. Its only argument, the call, describes the step. Before the step, the middleware
# runs up to its only `yield`. After the step, the `yield` returns the step's result or raises the step's exception.
# Then the middleware runs to its end. A middleware cannot change the step's result or exception.

logger = SureLogger("mtask.middleware")

Call = TypeVar("Call")
Begun = list[Generator[None, Any, None]]
Around = Callable[[Call], Generator[None, Any, None]]
AsyncAround = Callable[[Call], AsyncGenerator[None, Any]]


def enter(middleware: Sequence[Around[Call]], call: Call) -> Begun:
    """Run each middleware up to its yield, the outermost first; return the generators that wait for the step.

    A middleware that returns before its yield takes no part in this call.

    If a middleware raises an error, each middleware that already waits gets the error at its yield. Then this function
    raises the error, and the caller must not take the step.
    """
    begun: Begun = []
    try:
        for around in middleware:
            generator = around(call)
            try:
                next(generator)
            except StopIteration:
                continue
            begun.append(generator)
    except BaseException as error:
        leave(begun, None, error)
        raise
    return begun


def watch(middleware: Sequence[Around[Call]], call: Call) -> Begun:
    """Do the same as `enter`, but only log an error of a middleware: the step is taken in any case."""
    begun: Begun = []
    for around in middleware:
        try:
            begun += enter((around,), call)
        except BaseException:  # a SystemExit must end nothing, either
            logger.exception("middleware failed, the step goes on", extra=fields(middleware=name_of(around)))
    return begun


def leave(begun: Begun, result: Any, error: BaseException | None = None) -> None:
    """Give the step's result or error to each waiting middleware, the innermost first.

    If a middleware then raises an error of its own, the error is only logged, because the step is over.
    """
    for generator in reversed(begun):
        try:
            if error is None:
                generator.send(result)
            else:
                generator.throw(error)
        except StopIteration:
            continue
        except BaseException as other:
            if other is not error:
                tell_of_failure(generator, other)
        else:
            generator.close()
            logger.error("middleware yields more than once, it is ended", extra=fields(middleware=name_of(generator)))


class Entered:
    """The generators of the middleware around one run. Each waits at its `yield`. Some may be async."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun: list[Generator[None, Any, None] | AsyncGenerator[None, Any]] = []

    async def enter(self, middleware: Sequence[Around[Call] | AsyncAround[Call]], call: Call) -> None:
        """Run each middleware up to its `yield`, the outermost first.

        The caller must always call `leave` afterwards, even if `enter` raises an exception.
        """
        for around in middleware:
            begun = around(call)
            try:
                if isinstance(begun, Generator):
                    next(begun)
                else:
                    await anext(begun)
            except (StopIteration, StopAsyncIteration):
                continue
            self._begun.append(begun)

    async def leave(self, result: Any, error: BaseException | None) -> None:
        """Give the handler's result or exception to each middleware, the innermost first."""
        for begun in reversed(self._begun):
            if isinstance(begun, Generator):
                leave([begun], result, error)
            else:
                await _leave_async(begun, result, error)


async def _leave_async(begun: AsyncGenerator[None, Any], result: Any, error: BaseException | None) -> None:
    try:
        await (begun.asend(result) if error is None else begun.athrow(error))
    except StopAsyncIteration:
        return
    except BaseException as other:
        if other is not error:
            tell_of_failure(begun, other)
    else:
        await begun.aclose()
        tell_of_failure(begun, RuntimeError("it yields more than once, and is ended"))


def tell_of_failure(middleware: object, error: BaseException) -> None:
    """Log the error that a middleware raised after its yield."""
    logger.error("middleware failed after its yield", extra=fields(middleware=name_of(middleware)), exc_info=error)


def name_of(middleware: object) -> str:
    """Return a middleware's name for a log message."""
    name: str = getattr(middleware, "__qualname__", type(middleware).__qualname__)
    return name
