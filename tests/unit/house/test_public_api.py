"""The public API is what `public_api.txt` says: names, parameters, defaults, annotations, attributes.

Where a change is meant: `python -m tests.unit.house.test_public_api` writes the file anew, and its diff is read in
review.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import mtask
import mtask.otel
import mtask.testing
from mtask.app.context import Transaction
from mtask.app.middleware import FinishCall, RunCall
from mtask.features.events.events_aio import AsyncCompleted, AsyncEvents
from mtask.features.events.events_sync import Completed, Events
from mtask.features.events.task_events import EventKind, TaskEvent
from mtask.features.flows.handler import Adding, Results
from mtask.features.limits.doctor import PermitHolder, PermitUse, PermitWaiter
from mtask.features.logs.rules import LogLine, RunLog
from mtask.features.metrics.client import FleetMetrics, QueueMetrics, WorkerMetrics
from mtask.features.schedules.client import ScheduleArguments
from mtask.kernel.document.lookup import LookupEntry
from mtask.kernel.document.options import TaskOptions
from mtask.says import Says
from mtask.search.findings import Reason

SNAPSHOT = Path(__file__).with_name("public_api.txt")
REMEDY = "if this is meant, run `python -m tests.unit.house.test_public_api` and read the diff of the file"

#: What is public without a name in an `__all__`: what the public calls return, and the types of their keywords.
_REACHED = (
    Events,
    AsyncEvents,
    Completed,
    AsyncCompleted,
    Reason,
    LookupEntry,
    TaskEvent,
    EventKind,
    Transaction,
    Adding,
    Results,
    TaskOptions,
    ScheduleArguments,
    RunCall,
    FinishCall,
    FleetMetrics,
    QueueMetrics,
    WorkerMetrics,
    RunLog,
    LogLine,
    PermitUse,
    PermitHolder,
    PermitWaiter,
)
#: Users get these from a call or as an argument, and do not make them.
_MADE_BY_US = (
    mtask.Call,
    mtask.Context,
    Transaction,
    Adding,
    Results,
    Events,
    AsyncEvents,
    Completed,
    AsyncCompleted,
    mtask.TaskFields,
    RunCall,
    FinishCall,
    FleetMetrics,
    QueueMetrics,
    WorkerMetrics,
)
_PROTOCOLS = ("__enter__", "__exit__", "__aenter__", "__aexit__", "__iter__", "__next__", "__aiter__", "__anext__")
_NOTHING, _KEYWORDS = inspect.Parameter.empty, inspect.Parameter.VAR_KEYWORD


def described() -> list[str]:
    """Return the public API as lines."""
    lines: list[str] = []
    for title, names, home in (
        ("mtask", mtask.__all__, mtask),
        ("mtask.testing", mtask.testing.__all__, mtask.testing),
        ("mtask.otel", mtask.otel.__all__, mtask.otel),
    ):
        for name in sorted(names):
            lines += [*_described(f"{title}.{name}", getattr(home, name)), ""]
    for reached in _REACHED:
        lines += [*_described(reached.__name__, reached), ""]
    return lines[:-1]


def _described(title: str, value: Any) -> Iterator[str]:
    if typing.is_typeddict(value):
        yield f"{title}: keyword arguments"
        yield from _indented(f"{name}: {_type(told)}" for name, told in value.__annotations__.items())
    elif isinstance(value, type):
        yield f"{title}: {_kind(value)}"
        yield from _indented(_members(value))
    elif callable(value):
        yield f"{title}: function"
        yield from _indented(_with_overloads(value.__name__, value))
    else:
        yield f"{title}: {type(value).__name__}"


def _kind(cls: type) -> str:
    if issubclass(cls, BaseException):
        return "error, also " + ", ".join(base.__name__ for base in cls.__mro__[1:-1])
    if issubclass(cls, enum.Enum):
        return "enum of text" if issubclass(cls, str) else "enum"
    if issubclass(cls, BaseModel):
        return "model"
    return "dataclass" if dataclasses.is_dataclass(cls) else "class"


def _members(cls: type) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in cls)
    elif issubclass(cls, BaseModel):
        yield from _fields_of_model(cls)
    elif dataclasses.is_dataclass(cls):
        yield from (f"{field.name}: {_text(field.type)}{_default_of(field)}" for field in dataclasses.fields(cls))
    elif cls not in _MADE_BY_US and "__init__" in _own_names(cls):
        yield from _with_overloads("__init__", inspect.getattr_static(cls, "__init__"))
    if not issubclass(cls, BaseModel | enum.Enum) and not dataclasses.is_dataclass(cls):
        yield from sorted({f"attribute {name}" for name in _attributes(cls)})
    for name in sorted(_own_names(cls)):
        if name.startswith("_") and name not in _PROTOCOLS:
            continue
        yield from _member(name, inspect.getattr_static(cls, name))


def _ours(cls: type) -> list[type]:
    """Return the class and its bases, as far as they are this package's: a method may move between them."""
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] in ("mtask", "tests")]


def _own_names(cls: type) -> set[str]:
    return {name for base in _ours(cls) for name in vars(base)}


def _member(name: str, member: Any) -> Iterator[str]:
    if isinstance(member, property):
        told = inspect.signature(typing.cast("Callable[..., Any]", member.fget)).return_annotation
        yield f"property {name}: {_text(told)}{' (can be set)' if member.fset else ''}"
    elif isinstance(member, classmethod | staticmethod):
        yield f"{type(member).__name__} {_signature(name, member.__func__)}"
    elif inspect.isfunction(member):
        yield from _with_overloads(name, member)


def _with_overloads(name: str, function: Callable[..., Any]) -> Iterator[str]:
    for overload in typing.get_overloads(function):
        yield f"overload {_signature(name, overload)}"
    yield _signature(name, function)


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parts: list[str] = []
    former: Any = None
    for parameter in signature.parameters.values():
        kind = parameter.kind
        if former is inspect.Parameter.POSITIONAL_ONLY and kind is not former:
            parts.append("/")
        if kind is inspect.Parameter.KEYWORD_ONLY and former not in (kind, inspect.Parameter.VAR_POSITIONAL):
            parts.append("*")
        if declared := _declared(function, parameter):
            parts += [*([] if former is inspect.Parameter.KEYWORD_ONLY else ["*"]), *declared]
            continue
        stars = "*" if kind is parameter.VAR_POSITIONAL else "**" if kind is parameter.VAR_KEYWORD else ""
        annotation = "" if parameter.annotation is _NOTHING else f": {_text(parameter.annotation)}"
        default = "" if parameter.default is _NOTHING else f" = {_default(parameter.default)}"
        parts.append(f"{stars}{parameter.name}{annotation}{default}")
        former = kind
    if former is inspect.Parameter.POSITIONAL_ONLY:
        parts.append("/")
    word = "async def" if inspect.iscoroutinefunction(function) else "def"
    returned = "" if signature.return_annotation is _NOTHING else f" -> {_text(signature.return_annotation)}"
    flat = f"{word} {name}({', '.join(parts)}){returned}"
    if len(flat) <= 100:
        return flat
    return "\n".join([f"{word} {name}(", *(f"    {part}," for part in parts), f"){returned}"])


def _declared(function: Callable[..., Any], parameter: inspect.Parameter) -> list[str]:
    """Return the keywords of `**arguments: Unpack[Declared]`, but of a class that the file describes by itself."""
    named = re.fullmatch(r"Unpack\[(\w+)\]", _text(parameter.annotation)) if parameter.kind is _KEYWORDS else None
    cls: Any = getattr(inspect.getmodule(function), named[1], None) if named else None
    if cls is None or cls in _REACHED:
        return []
    hints, told = typing.get_type_hints(cls, include_extras=True), dict(cls.__annotations__)
    options = [told.pop(name) for name in TaskOptions.__annotations__ if name in told]
    named_ones = [f"{name}: {_type(text)} = {_said(hints[name]).default!r}" for name, text in told.items()]
    return [*named_ones, *(["**options: Unpack[TaskOptions]"] if options else [])]


def _said(hint: Any) -> Says:
    [said] = [said for said in hint.__metadata__ if isinstance(said, Says)]
    return said


def _fields_of_model(model: type[BaseModel]) -> Iterator[str]:
    told = {name: text for base in reversed(_ours(model)) for name, text in _annotations(base).items()}
    for name, field in model.model_fields.items():
        default = ""
        if field.default_factory is not None:
            default = f" = {_default(field.default_factory)}()"
        elif not field.is_required():
            default = f" = {_default(field.default)}"
        yield f"{name}: {_text(told[name])}{default}"


def _annotations(cls: type) -> dict[str, Any]:
    told: dict[str, Any] = vars(cls).get("__annotations__", {})
    return told


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f" = {_default(field.default_factory)}()"
    return "" if field.default is dataclasses.MISSING else f" = {_default(field.default)}"


def _default(value: Any) -> str:
    return value.__qualname__ if inspect.isroutine(value) or isinstance(value, type) else repr(value)


def _text(annotation: Any) -> str:
    """Return an annotation as it stands in the source: what a version of Python makes of it is left out."""
    text = annotation.__forward_arg__ if isinstance(annotation, typing.ForwardRef) else annotation
    assert isinstance(text, str), f"{annotation!r}: its module lacks `from __future__ import annotations`"
    return text


def _type(annotation: Any) -> str:
    """Return the type of a declared argument: what the argument says of itself is help."""
    text = _text(annotation)
    parsed = ast.parse(text, mode="eval").body
    if isinstance(parsed, ast.Subscript) and ast.unparse(parsed.value) == "Annotated":
        assert isinstance(parsed.slice, ast.Tuple)
        return ast.unparse(parsed.slice.elts[0])
    return text


def _attributes(cls: type) -> Iterator[str]:
    """Yield the public attributes that the class has, or that its constructor sets."""
    for base in _ours(cls):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for part in tree.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                yield from _public(f"{part.target.id}: {ast.unparse(part.annotation)}")
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                for node in ast.walk(part):
                    if isinstance(node, ast.Assign | ast.AnnAssign):
                        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                        for target in targets:
                            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                                yield from _public(target.attr)


def _public(name: str) -> Iterator[str]:
    if not name.startswith("_"):
        yield name


def _indented(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield textwrap.indent(line, "    ")


def _snapshot() -> str:
    return "\n".join(described()) + "\n"


def test_public_api_is_as_recorded() -> None:
    recorded, found = SNAPSHOT.read_text(), _snapshot()
    changes = difflib.unified_diff(recorded.splitlines(), found.splitlines(), "recorded", "found", lineterm="", n=2)
    assert recorded == found, f"the public API has changed; {REMEDY}:\n" + "\n".join(changes)


class _Base:
    def __init__(self, place: str) -> None:
        self.place = place
        self._hidden = 1

    def moved(self, first: int, /, *, second: str = "a") -> None: ...


class _Example(_Base):
    @property
    def found(self) -> int:
        return 1

    async def awaited(self, *many: int, **named: str) -> list[int]:
        return []

    def _private(self) -> None: ...


def test_whatever_a_caller_can_rely_on_is_described() -> None:
    assert list(_members(_Example)) == [
        "def __init__(self, place: str) -> None",
        "attribute place",
        "async def awaited(self, *many: int, **named: str) -> list[int]",
        "property found: int",
        "def moved(self, first: int, /, *, second: str = 'a') -> None",
    ]


if __name__ == "__main__":
    SNAPSHOT.write_text(_snapshot())
