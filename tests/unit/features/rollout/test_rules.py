"""Which misfits are handed on, whose versions a worker has, and the steps of upcasts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from mtask import App
from mtask.errors import HandlerError, InvalidParams
from mtask.features.registry.rules import declared_by
from mtask.features.rollout.rules import PATIENCE, is_known_version, may_fit_others, misfit_since, waits_in_vain
from mtask.kernel.document.handlers import UpcastError
from mtask.kernel.document.task import Task
from tests import build


@pytest.mark.parametrize(
    ("declared", "own", "started", "is_handed_on"),
    [
        (None, "a", ["a", "b"], False),
        ("a", "a", ["a", "b"], False),
        ("b", "a", ["a", "b"], True),
        ("a", "b", ["a", "b"], False),
        ("c", "a", ["a", "b"], True),
        ("c", "a", [], True),
        ("a", "new", ["a", "b"], False),
    ],
    ids=["nothing known", "mine", "a later one", "a former one", "not there yet", "no registry", "this is the newest"],
)
def test_misfit_of_a_later_version_is_handed_on(
    declared: str | None, own: str, started: list[str], is_handed_on: bool
) -> None:
    assert may_fit_others(declared, own, started) is is_handed_on


def test_misfit_waits_for_an_hour_from_the_first_one_of_this_round() -> None:
    def task(*times: float, is_past: bool = False) -> Task:
        runs = [
            build.run("CANCELED", build.PAST + timedelta(hours=hours), misfit_since=build.PAST, past=is_past)
            for hours in times[:-1]
        ]
        last = build.run("RUNNING", build.PAST + timedelta(hours=times[-1]), run_id="last")
        return Task.model_validate(build.task("task:k", *runs, last))

    assert timedelta(hours=1) == PATIENCE
    assert misfit_since(task(0.5), "last") == build.PAST + timedelta(hours=0.5)
    assert misfit_since(task(0.1, 0.2, 0.9), "last") == build.PAST
    assert not waits_in_vain(task(0.2, 0.99), "last")
    assert waits_in_vain(task(0.2, 1.0), "last")
    assert not waits_in_vain(task(0.2, 5.0, is_past=True), "last"), "a retry begins anew"


def test_malformed_version_is_claimed_and_so_found() -> None:
    versions = {"bill": 3}
    cases: list[tuple[Any, str, bool]] = [
        (None, "bill", True), (1, "bill", True), (3, "bill", True), (4, "bill", False), (2, "send", False),
        (1, "send", True), ("9", "send", True), (True, "send", True), (2.0, "send", False),
    ]  # fmt: skip
    for version, name, is_known in cases:
        document = {"name": name} | ({} if version is None else {"version": version})
        assert is_known_version(document, versions) is is_known, document


# --- upcasts ---------------------------------------------------------------------------------------------


def _setting(cents: int) -> Callable[[Any], Any]:
    return lambda params: {**params, "cents": cents}


def app_with(version: int, *steps: int, change: Callable[[Any], Any] | None = None) -> App:
    app = App()

    @app.task(version=version)
    async def bill(cents: int, currency: str = "EUR") -> None: ...

    for step in steps:
        app.upcast(bill, from_version=step)(change or _setting(step))
    return app


def test_params_of_a_former_version_take_each_step() -> None:
    app = App()

    @app.task(version=3)
    async def bill(cents: int, currency: str) -> None: ...

    @app.upcast("bill", from_version=1)
    def to_2(params: dict[str, Any]) -> dict[str, Any]:
        return {"cents": 100 * params["euros"]}

    @app.upcast(bill, from_version=2)
    def to_3(params: dict[str, Any]) -> dict[str, Any]:
        return {**params, "currency": "EUR"}

    app.complete()
    handler = app.handlers["bill"]
    assert handler.arguments_of({"euros": 7}, 1) == {"cents": 700, "currency": "EUR"}
    assert handler.arguments_of({"cents": 5}, 2) == {"cents": 5, "currency": "EUR"}
    assert handler.arguments_of({"cents": 5, "currency": "CHF"}, 3) == {"cents": 5, "currency": "CHF"}
    with pytest.raises(InvalidParams):
        handler.arguments_of({"cents": 5}, 3)


def test_without_upcasts_all_versions_have_the_same_params() -> None:
    app = app_with(3)
    app.complete()
    assert app.handlers["bill"].arguments_of({"cents": 1}, 1) == {"cents": 1}


def test_version_before_the_first_step_is_refused() -> None:
    app = app_with(3, 2)
    app.complete()
    with pytest.raises(UpcastError) as caught:
        app.handlers["bill"].arguments_of({"cents": 1}, 1)
    assert caught.value.reason == "there is no upcast from version 1: the first one is from 2"


def test_upcast_that_returns_nothing_is_refused() -> None:
    app = app_with(2, 1, change=lambda params: None)
    app.complete()
    with pytest.raises(UpcastError) as caught:
        app.handlers["bill"].arguments_of({"cents": 1}, 1)
    assert caught.value.reason == "it returned None: return the new params"


@pytest.mark.parametrize(
    ("version", "steps", "said"),
    [
        (4, (1, 3), "the upcast from version 2 to 3 is missing"),
        (4, (1, 2), "the upcast from version 3 to 4 is missing"),
        (2, (1, 2), "it has an upcast from version 2, and @app.task says version=2: raise the version"),
    ],
)
def test_missing_step_is_an_error_at_the_start(version: int, steps: tuple[int, ...], said: str) -> None:
    with pytest.raises(HandlerError) as caught:
        app_with(version, *steps).complete()
    assert said in str(caught.value)


def test_wrong_upcasts_are_refused_where_they_are_registered() -> None:
    app = app_with(3, 1)

    async def later(params: Any) -> Any: ...

    def change(params: Any) -> Any: ...

    with pytest.raises(HandlerError, match="two upcasts from version 1"):
        app.upcast("bill", from_version=1)(change)
    with pytest.raises(HandlerError, match="use a plain function"):
        app.upcast("bill", from_version=2)(later)
    with pytest.raises(HandlerError, match="from_version is a whole number from 1"):
        app.upcast("bill", from_version=0)(change)
    with pytest.raises(HandlerError, match="is no task"):
        app.upcast(change, from_version=2)(change)
    app = App()
    app.upcast("nobody", from_version=1)(change)
    with pytest.raises(HandlerError, match="it has an upcast and is no task"):
        app.complete()


def test_included_app_brings_its_upcasts() -> None:
    app = App()
    app.include(app_with(2, 1))
    app.complete()
    assert app.handlers["bill"].arguments_of({}, 1) == {"cents": 1}
    other = app_with(2)
    other.upcast("bill", from_version=1)(lambda params: params)
    both = App()
    both.include(other)
    third = App()
    third.upcast("bill", from_version=1)(lambda params: params)
    with pytest.raises(HandlerError, match="both apps have an upcast from version 1"):
        both.include(third)


# --- what a handler declares -----------------------------------------------------------------------------


def test_wrong_versions_and_unknown_are_refused() -> None:
    app = App()
    for version in (0, -1, True, 1.5, "2", 10**7):
        with pytest.raises(HandlerError, match="version is a whole number from 1"):
            app.task(version=version)(sending)  # type: ignore[arg-type]
    with pytest.raises(HandlerError, match='unknown is "refuse" or "drop"'):

        @app.task(unknown="keep")  # type: ignore[call-overload, untyped-decorator]
        async def send() -> None: ...

    with pytest.raises(HandlerError, match="it takes any params"):

        @app.task(unknown="drop")
        async def send_any(**rest: Any) -> None: ...


def test_unknown_params_are_dropped_or_refused() -> None:
    app = App()

    @app.task(unknown="drop")
    async def lenient(to: str) -> None: ...

    @app.task(unknown="drop")
    async def nothing() -> None: ...

    @app.task
    async def strict(to: str) -> None: ...

    handlers = app.handlers
    assert handlers["lenient"].bind({"to": "a", "subject": "s"}) == {"to": "a"}
    assert handlers["nothing"].bind({"to": "a"}) == {}
    with pytest.raises(InvalidParams, match="subject: Extra inputs are not permitted"):
        handlers["strict"].bind({"to": "a", "subject": "s"})
    with pytest.raises(InvalidParams, match="to: Field required"):
        handlers["lenient"].bind({"subject": "s"})


def test_version_is_a_part_of_what_a_handler_declares_if_it_says_one() -> None:
    hashes, stored = [], []
    for given in ({}, {"version": 1}, {"version": 2}, {"unknown": "refuse"}, {"unknown": "drop"}):
        app = App()
        app.task(name="send", **given)(sending)
        declared = declared_by(app.handlers["send"])
        hashes.append(declared["hash"])
        stored.append({name: declared[name] for name in ("version", "unknown") if name in declared})
    assert stored == [{}, {}, {"version": 2}, {}, {"unknown": "drop"}]
    assert hashes[0] == hashes[1] == hashes[3]
    assert len(set(hashes)) == 3


async def sending(to: str) -> None: ...
