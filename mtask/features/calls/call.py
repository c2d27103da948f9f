"""A typed call: a handler and its arguments by name, with the type that the handler returns."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from mtask.errors import InvalidInput, InvalidParams, ResultMismatch, shown
from mtask.kernel.document.handlers import Handler, handler_of, hinted
from mtask.kernel.document.task import describe_validation

#: The name of the attribute that marks a class as what a handler returns to go on as another task.
NEXT_MARK = "__mtask_next__"
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Call(Generic[R_co]):
    """A handler and its arguments: `call(handler)(...)` makes it. `Call[str]` is that of a handler that returns text.

    A call stands for a handler and its params: in `publish`, `add_schedule`, `TaskSpec`, `Flow.add`, `Child`,
    `add_child` and `Next`. It can be published any number of times.
    """

    __slots__ = ("handler", "params")

    def __init__(self, handler: Handler, params: dict[str, Any]) -> None:
        self.handler = handler
        #: The arguments, by the names of the parameters.
        self.params = params

    def __repr__(self) -> str:
        return f"Call({self.handler.name})"

    @property
    def task(self) -> Callable[..., Any]:
        """The function that is called."""
        return self.handler.function

    def parts(self, params: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the function and its params. Raise InvalidInput if there are other `params` beside this call."""
        if params is not None:
            name = self.handler.name
            raise InvalidInput(f"the params of {name!r} are given twice: call({name})(...) has them.", field="params")
        return self.handler.function, self.params

    def returned(self, task_id: str, value: Any) -> R_co:
        """Return a stored result as what the handler's type hint says, such as a model; raise ResultMismatch.

        A result that a type hint does not describe, or that comes from `Next`, is returned as it is stored.
        """
        hint = typing.get_type_hints(hinted(self.handler.function), include_extras=True).get("return", Any)
        if any(getattr(part, NEXT_MARK, False) is True for part in (hint, *typing.get_args(hint))):
            return value  # type: ignore[no-any-return]
        try:
            adapter: TypeAdapter[R_co] = TypeAdapter(hint)
        except (PydanticUserError, PydanticUndefinedAnnotation):
            # A type that pydantic does not know, such as ObjectId: it is stored as it is.
            return value  # type: ignore[no-any-return]
        try:
            return adapter.validate_python(value, **_by_name())
        except ValidationError as error:
            raise ResultMismatch(task_id, describe_validation(error)) from None


def _by_name() -> dict[str, Any]:
    """Let a model be read by the names of its fields, as it is stored, and not by aliases. pydantic 2.10 cannot."""
    return {"by_name": True} if "by_name" in inspect.signature(TypeAdapter.validate_python).parameters else {}


def caller_of(task: object) -> Caller[..., Any]:
    """Return what makes the calls of a registered function; raise InvalidInput."""
    if isinstance(task, str):
        raise InvalidInput(
            f"{shown(task)} is a name: call takes a function registered with @app.task. "
            f"Publish a task by its name with publish({shown(task)}, {{...}}).",
            field="task",
        )
    if isinstance(task, Call):
        raise InvalidInput(f"{task!r} is a call already: publish it.", field="task")
    handler = handler_of(task)
    assert handler is not None  # only a name has none
    return Caller(handler)


class Caller(Generic[P, R_co]):
    """Makes calls of a handler. Whoever publishes a call checks its arguments against the handler's type hints.

    It is a class, and no function, for mypy's sake: where `Any` in a handler's signature lets several overloads of
    `call` match, mypy then takes any arguments. Else it would report each such call as one of an untyped function.
    """

    __slots__ = ("_handler",)

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __repr__(self) -> str:
        return f"call({self._handler.name}) without its arguments"

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R_co]:
        """Return the call with these arguments; raise InvalidParams."""
        handler = self._handler
        named: dict[str, Any] = kwargs
        if handler.context_parameter in named:
            given = f"the worker gives {handler.context_parameter!r}, so leave it out"
            raise InvalidParams(handler.name, f"{given}: type checkers agree if it comes first, annotated Context")
        if args:
            named = {**_by_position(handler, args, named), **named}
        return Call(handler, named)


def _by_position(handler: Handler, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are given by position, by name; raise InvalidParams."""
    names = handler.positional
    if len(given) > len(names):
        taken = f"only {', '.join(names)} can be" if names else "none can be"
        raise InvalidParams(handler.name, f"{len(given)} arguments are given by position, and {taken}")
    found = dict(zip(names, given, strict=False))
    twice = [name for name in found if name in named]
    if twice:
        raise InvalidParams(handler.name, f"{', '.join(twice)} is given by position and by name: give it once")
    return found
