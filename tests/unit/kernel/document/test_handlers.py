from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from pydantic import BaseModel, Field

from mtask import App, Context
from mtask.errors import HandlerError, InvalidInput, InvalidName, InvalidOption, InvalidParams, UnknownOption
from mtask.kernel.document.handlers import Handler, handler_of, make_handler

if TYPE_CHECKING:
    from decimal import Decimal


class Address(BaseModel):
    town: str
    zip_code: int = 0


def made(function: Callable[..., Any], **given: Any) -> Handler:
    settings: dict[str, Any] = {"name": "task", "queue": None, "on_exception": "retry", "options": {}}
    return make_handler(function, **(settings | given))


def mail(context: Context, to: str, subject: str = "hi") -> None: ...


def nothing() -> None: ...


def sole(number: int) -> None: ...


def sole_or_none(number: int | None = None) -> None: ...


def with_model(address: Address) -> None: ...


def anything(**params: Any) -> None: ...


def some_and_anything(first: int, **rest: Any) -> None: ...


def untyped(a, b=2):  # type: ignore[no-untyped-def]
    ...


def dated(at: datetime, day: date) -> None: ...


def limited(share: Annotated[float, Field(ge=0, le=1)]) -> None: ...


def awkward(model_config: int, _private: int, copy: int, schema: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "params", "arguments"),
    [
        (mail, {"to": "a@b.c"}, {"to": "a@b.c"}),
        (mail, {"to": "a@b.c", "subject": "x"}, {"to": "a@b.c", "subject": "x"}),
        (nothing, None, {}),
        (nothing, {}, {}),
        (sole, 5, {"number": 5}),
        (sole, {"number": 5}, {"number": 5}),
        (sole, "5", {"number": 5}),
        (sole_or_none, None, {}),
        (with_model, {"address": {"town": "Bern"}}, {"address": Address(town="Bern")}),
        (with_model, {"address": Address(town="Bern")}, {"address": Address(town="Bern")}),
        (with_model, Address(town="Bern"), {"address": Address(town="Bern")}),
        (anything, {"a": 1, "argument_0": 2}, {"a": 1, "argument_0": 2}),
        (some_and_anything, {"first": "1", "other": [2]}, {"first": 1, "other": [2]}),
        (untyped, {"a": object}, {"a": object}),
        (limited, 0.5, {"share": 0.5}),
        (
            dated,
            {"at": "2026-01-01T00:00:00Z", "day": "2026-01-02"},
            {"at": datetime(2026, 1, 1, tzinfo=UTC), "day": date(2026, 1, 2)},
        ),
        (
            awkward,
            {"model_config": 1, "_private": 2, "copy": 3, "schema": 4},
            {"model_config": 1, "_private": 2, "copy": 3, "schema": 4},
        ),
    ],
)
def test_params_become_the_arguments_that_the_type_hints_say(
    function: Callable[..., Any], params: Any, arguments: dict[str, Any]
) -> None:
    assert made(function).bind(params) == arguments


@pytest.mark.parametrize(
    ("function", "params", "words"),
    [
        (mail, {}, "to: Field required"),
        (mail, None, "to: Field required"),
        (mail, {"to": 1}, "to: Input should be a valid string"),
        (mail, {"to": "a", "too": "b"}, "too: Extra inputs are not permitted"),
        (mail, {"to": "a", "context": 1}, "context: Extra inputs are not permitted"),
        (mail, {"to": "a", "argument_0": "b"}, "argument_0: Extra inputs are not permitted"),
        (mail, "a@b.c", "give a mapping of to, subject, not str"),
        (mail, ["a@b.c"], "give a mapping of to, subject, not list"),
        (nothing, 1, "give a mapping of no arguments, not int"),
        (nothing, {"a": 1}, "a: Extra inputs are not permitted"),
        (sole, "five", "number: Input should be a valid integer"),
        (sole, {"a": 1}, "number: Field required"),
        (sole, None, "number: Field required"),
        (with_model, {"town": "Bern"}, "address: Field required"),
        (with_model, {"address": {}}, "address.town: Field required"),
        (anything, [1], "give a mapping of no arguments, not list"),
        (limited, 2, "share: Input should be less than or equal to 1"),
        (anything, {1: 2}, "Keys should be strings"),
    ],
)
def test_params_that_do_not_fit_are_told_field_by_field(function: Callable[..., Any], params: Any, words: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        made(function).bind(params)
    assert words in str(caught.value)
    assert "'task'" in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_error_in_params_does_not_show_their_values() -> None:
    with pytest.raises(InvalidParams) as caught:
        made(sole).bind("my password")
    assert "my password" not in str(caught.value)


def test_defaults_are_left_to_the_function() -> None:
    assert "subject" not in made(mail).bind({"to": "a"})


def by_hint(anything_at_all: Context) -> None: ...


def by_optional_hint(run: Context | None = None) -> None: ...


def by_annotated_hint(run: Annotated[Context, "the run"]) -> None: ...


def by_name(context) -> None:  # type: ignore[no-untyped-def]
    ...


def by_name_but_hinted(context: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "parameter"),
    [
        (by_hint, "anything_at_all"),
        (by_optional_hint, "run"),
        (by_annotated_hint, "run"),
        (by_name, "context"),
        (by_name_but_hinted, None),
        (nothing, None),
    ],
)
def test_the_context_goes_to_the_parameter_of_its_type_or_name(
    function: Callable[..., Any], parameter: str | None
) -> None:
    handler = made(function)
    assert handler.context_parameter == parameter
    if parameter is not None:
        assert handler.bind(None) == {}


def positional(a: int, /) -> None: ...


def star(*args: int) -> None: ...


def unresolved(a: Decimal) -> None: ...


class Opaque:
    pass


def opaque(a: Opaque) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (positional, "parameter 'a' must be nameable"),
        (star, "parameter 'args' must be nameable"),
        (unresolved, "its type hints cannot be read"),
        (opaque, "its arguments cannot be validated"),
        ("text", "not callable"),
    ],
)
def test_a_function_that_cannot_be_a_handler_is_refused_when_it_is_registered(function: Any, words: str) -> None:
    with pytest.raises(HandlerError, match=words):
        made(function)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"name": "a:b"}, InvalidName),
        ({"name": ""}, InvalidName),
        ({"queue": ""}, InvalidInput),
        ({"on_exception": "explode"}, HandlerError),
        ({"options": {"prioritty": 1}}, UnknownOption),
        ({"options": {"priority": "high"}}, InvalidOption),
    ],
)
def test_wrong_settings_are_refused_when_it_is_registered(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        made(nothing, **settings)


class Callables:
    async def method(self) -> None: ...

    async def __call__(self, number: int) -> None: ...


async def asynchronous() -> None: ...


@pytest.mark.parametrize(
    ("function", "is_async"),
    [
        (nothing, False),
        (asynchronous, True),
        (Callables().method, True),
        (Callables(), True),
        (functools.partial(asynchronous), True),
        (functools.partial(nothing), False),
    ],
)
def test_async_handlers_are_told_from_plain_ones(function: Any, is_async: bool) -> None:
    assert made(function).is_async is is_async


def test_an_app_registers_under_the_functions_name_and_leaves_it_callable() -> None:
    app = App()

    @app.task
    def double(number: int) -> int:
        return 2 * number

    assert double(4) == 8
    assert app.handlers["double"].function is double
    assert handler_of(double) is app.handlers["double"]


def test_an_app_refuses_a_name_twice() -> None:
    app = App()
    app.task(nothing)
    with pytest.raises(HandlerError, match="registered already"):
        app.task(name="nothing")(sole)


def test_a_name_stands_for_no_handler_and_other_things_for_no_task() -> None:
    assert handler_of("mail") is None
    with pytest.raises(InvalidInput, match=r"@app\.task"):
        handler_of(len)


def test_what_a_handler_needs_to_be_published_is_its_queue_and_options() -> None:
    app = App()

    @app.task(name="mail/send", queue="mail", priority=3, max_retries=5)
    def send(to: str) -> None: ...

    handler = app.handlers["mail/send"]
    assert (handler.queue, dict(handler.options)) == ("mail", {"priority": 3, "max_unexpected_retries": 5})
    assert app.queues == ["default", "mail"]


def _generator(context: Context) -> Any:
    yield 1


async def _async_generator(context: Context) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (_generator, "return a value instead of yielding"),
        (_async_generator, "return a value instead of yielding"),
        (dict, "it is a class"),
        (lambda: 1, "give one with name="),
    ],
)
def test_what_could_never_run_is_refused_when_it_is_registered(function: Any, advice: str) -> None:
    with pytest.raises(HandlerError, match=advice):
        App().task(function)


@pytest.mark.parametrize(
    ("given", "flow_key", "expected"),
    [
        (None, "import/1", None),
        ("store", None, "store"),
        ("store", "import/1", "store"),
        ({"import": "store", "fast": "skip"}, "import/1/2", "store"),
        ({"import": "store", "fast": "skip"}, "fast", "skip"),
        ({"import": "store"}, "other/import", None),
        ({"import": "store"}, None, None),
    ],
)
def test_next_task_is_named_by_the_first_part_of_the_flows_key(
    given: Any, flow_key: str | None, expected: str | None
) -> None:
    assert made(nothing, next_names=given).next_name(flow_key) == expected


@pytest.mark.parametrize(
    "given", ["no name", "", {"import": "no name"}, {"a/b": "store"}, {1: "store"}, ["store"], nothing]
)
def test_what_names_no_next_task_is_refused(given: Any) -> None:
    with pytest.raises(HandlerError, match="next"):
        made(nothing, next_names=given)
