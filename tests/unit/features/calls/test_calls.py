"""Calls: what they store, what they refuse, where they are taken, and as what a stored result is returned."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from bson import ObjectId
from pydantic import BaseModel, Field

from mtask import App, Call, Child, Context, Flow, Next, TaskSpec, call
from mtask.arguments import publish as publication
from mtask.errors import InvalidInput, InvalidParams, ResultMismatch
from mtask.features.schedules.client import ScheduleSpec
from mtask.kernel.document.values import storable

app = App()


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


class Line(BaseModel):
    name: str
    cents: int = Field(alias="amountInCents")


@dataclass
class Order:
    number: int
    lines: list[Line]


class Point(NamedTuple):
    x: int
    y: int


@app.task(queue="mail")
async def send_email(context: Context, to: str, subject: str = "hi") -> str:
    return f"{to}{subject}"


@app.task
def import_file(path: str, *, limit: int = 100) -> int:
    return limit


@app.task
def context_comes_last(to: str, context: Context) -> None: ...


@app.task
def odd_names(self: int, handler: int, args: int) -> None: ...


@app.task
def more(name: str, **values: int) -> None: ...


@app.task
def of_model(order: Order) -> None: ...


@app.task
def one(payload: dict[str, int]) -> None: ...


@app.task
def digest(calls: list[dict[str, Any]]) -> None: ...


# --- what a call stores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "params"),
    [
        (call(send_email)(to="a", subject="b"), {"to": "a", "subject": "b"}),
        (call(send_email)("a", "b"), {"to": "a", "subject": "b"}),
        (call(send_email)("a", subject="b"), {"to": "a", "subject": "b"}),
        (call(send_email)("a"), {"to": "a"}),
        (call(import_file)("a.csv", limit=3), {"path": "a.csv", "limit": 3}),
        (call(context_comes_last)("a"), {"to": "a"}),  # type: ignore[call-arg]  # a type checker asks for the context
        (call(odd_names)(self=1, handler=2, args=3), {"self": 1, "handler": 2, "args": 3}),
        (call(more)("a", b=1), {"name": "a", "b": 1}),
        (call(one)({"a": 1}), {"payload": {"a": 1}}),
    ],
    ids=lambda given: repr(given.params) if isinstance(given, Call) else None,
)
def test_arguments_are_stored_by_name(made: Call[Any], params: dict[str, Any]) -> None:
    assert made.params == params
    new = TaskSpec(made, key="k").prepare()
    assert new.params == params
    assert new == TaskSpec(made.task, params, key="k").prepare()


def test_a_call_has_what_its_handler_declares_and_runs_nothing() -> None:
    made = call(send_email)("a")
    assert made.task is send_email
    assert TaskSpec(made, key="k").prepare().queue == "mail"
    assert repr(made) == "Call(send_email)", "params may be secret"
    assert call(app.handlers["send_email"])("a").params == {"to": "a"}  # type: ignore[call-overload]


def test_models_are_stored_as_by_handler() -> None:
    lines = [Line.model_validate({"name": "pen", "amountInCents": 7})]
    with pytest.raises(InvalidParams, match="amountInCents"):
        TaskSpec(of_model, {"order": Order(1, lines)}).prepare()
    with pytest.raises(InvalidParams, match="amountInCents"):
        TaskSpec(call(of_model)(Order(1, lines))).prepare()
    assert TaskSpec(call(of_model)(Order(1, []))).prepare().params == {"order": {"number": 1, "lines": []}}


# --- what is refused ----------------------------------------------------------------------------------------------


def plain(to: str) -> None: ...


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("send_email", r"'send_email' is a name: call takes a function .* publish\('send_email', \{\.\.\.\}\)"),
        (plain, "is no task: give its name, or a function registered with @app.task"),
        (None, "None is no task"),
        (call(send_email)("a"), r"Call\(send_email\) is a call already: publish it"),
    ],
)
def test_only_a_registered_function_can_be_called(task: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call(task)


@pytest.mark.parametrize(
    ("task", "positional", "named", "words"),
    [
        (send_email, ("a", "b", "c"), {}, "'send_email': 3 arguments are given by position, and only to, subject can"),
        (import_file, ("a", 3), {}, "2 arguments are given by position, and only path can be"),
        (more, ("b",), {"name": "a"}, "name is given by position and by name: give it once"),
        (send_email, (None,), {"to": "a"}, "to is given by position and by name"),
        (send_email, (), {"context": None, "to": "a"}, "the worker gives 'context', so leave it out"),
        (context_comes_last, ("a",), {"context": None}, "the worker gives 'context'.* annotated Context"),
    ],
)
def test_arguments_without_a_name_or_with_two_values_are_refused_at_the_call(
    task: Callable[..., Any], positional: tuple[Any, ...], named: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidParams, match=words):
        call(task)(*positional, **named)


@pytest.mark.parametrize(
    "made",
    [call(send_email)(to=1), call(send_email)(), call(send_email)(to="a", sbuject="b")],  # type: ignore[call-arg,arg-type]
    ids=["type", "missing", "unknown"],
)
def test_arguments_that_do_not_fit_are_refused_where_params_are(made: Call[Any]) -> None:
    with pytest.raises(InvalidParams) as by_call:
        TaskSpec(made).prepare()
    with pytest.raises(InvalidParams) as by_handler:
        TaskSpec(send_email, made.params).prepare()
    assert str(by_call.value) == str(by_handler.value)


def _next(task: Any, params: Any) -> Any:
    return Next(task, params)


@pytest.mark.parametrize(
    "give",
    [
        TaskSpec,
        _next,
        lambda task, params: Child("a", task, params),
        lambda task, params: Flow("f").add("a", task, params),
        lambda task, params: ScheduleSpec("a", task, timedelta(hours=1), params).prepare(),
        lambda task, params: publication.published_by(task, params, {}),
    ],
    ids=["spec", "next", "child", "flow", "schedule", "publish"],
)
def test_params_beside_a_call_are_refused_everywhere(give: Callable[[Any, Any], Any]) -> None:
    give(call(send_email)("a"), None)
    with pytest.raises(
        InvalidInput, match=r"'send_email' are given twice: call\(send_email\)\(\.\.\.\) has them"
    ) as told:
        give(call(send_email)("a"), {"to": "b"})
    assert told.value.field == "params"


def test_a_caller_without_its_arguments_says_so() -> None:
    with pytest.raises(InvalidInput, match=r"call\(send_email\) without its arguments is no task"):
        TaskSpec(call(send_email)).prepare()


def test_a_call_is_not_collected() -> None:
    collect = publication.policy(collect=True)
    TaskSpec(digest, {"by": "ada"}, key="k").prepare(collect)
    with pytest.raises(InvalidInput, match="publish the handler with the params of one"):
        TaskSpec(call(digest)([{"by": "ada"}]), key="k").prepare(collect)


# --- where a call is taken ----------------------------------------------------------------------------------------


def test_a_call_is_taken_wherever_a_handler_and_params_are() -> None:
    made, params = call(send_email)("a"), {"to": "a"}
    flow = Flow("f")
    flow.add("a", made, priority=3)
    following = Next(made, returns=1)
    definition = ScheduleSpec("hourly", made, timedelta(hours=1)).prepare()
    assert [(spec.task, spec.params) for spec in (*flow.specs, Child("a", made).spec)] == [(send_email, params)] * 2
    assert (following.task, following.params) == (send_email, params)
    assert (definition.fields["name"], definition.fields["params"]) == ("send_email", params)


def test_one_call_can_be_published_under_many_keys() -> None:
    made = call(send_email)("a")
    assert [TaskSpec(made, key=key).prepare().task_id for key in "ab"] == ["send_email:a", "send_email:b"]


# --- what comes back ----------------------------------------------------------------------------------------------


def returning(hint: Any) -> Call[Any]:
    def handler() -> Any: ...

    handler.__annotations__["return"] = hint
    App().task(handler)
    return call(handler)()


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (str, "a"),
        (None, None),
        (int | None, 3),
        (Any, {"a": 1}),
        (dict[str, Any], {"a": [1]}),
        (Size, Size.LARGE),
        (Point, Point(1, 2)),
        (tuple[int, str], (1, "a")),
        (set[int], {1, 2}),
        (Order, Order(1, [Line.model_validate({"name": "pen", "amountInCents": 7})])),
        (list[Line], [Line.model_validate({"name": "pen", "amountInCents": 7})]),
        (ObjectId, ObjectId()),
        (list[ObjectId], [ObjectId()]),
    ],
    ids=str,
)
def test_a_stored_result_comes_back_as_the_type_hint_says(hint: Any, value: Any) -> None:
    stored = storable(value)
    found = returning(hint).returned("a:k", stored)
    assert (found, type(found)) == (value, type(value))


def test_a_result_without_a_type_hint_or_of_a_next_task_stays_as_it_is() -> None:
    def bare() -> Any: ...

    del bare.__annotations__["return"]
    App().task(bare)
    for made in (call(bare)(), returning(Next), returning(str | Next), returning(Next | None)):
        assert made.returned("a:k", [1, {"a": 2}]) == [1, {"a": 2}]


def test_a_result_of_another_type_is_told_of() -> None:
    with pytest.raises(ResultMismatch, match=r"a:k ended as SUCCESS, but .* handle\.task\(\)\.returns") as told:
        returning(int).returned("a:k", "many")
    assert told.value.task_id == "a:k"
    assert "integer" in told.value.reason
    with pytest.raises(ResultMismatch, match="number"):
        returning(Order).returned("a:k", {"lines": []})
