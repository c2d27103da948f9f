"""Params of every kind against handlers of every kind: a final failure that names what is wrong, or a run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from mtask import App, Client, Context, TaskSpec
from mtask.errors import HandlerError, InvalidParams
from mtask.kernel.document.handlers import Handler, handler_of
from mtask.kernel.document.status import FINAL_STATUSES
from tests.faults import fuzzing
from tests.faults.fuzzing import LIMIT, PATIENCE, Lab, fuzz
from tests.faults.malformed import good
from tests.mongo import Client as Mongo
from tests.mongo import until

pytestmark = pytest.mark.timeout(LIMIT)
app = App()
_numbers = itertools.count()


class Point(BaseModel):
    x: int
    label: str = ""
    below: list[Point] = []


@dataclass
class Place:
    x: int


class Colour(Enum):
    RED = "red"


@app.task
async def none() -> None: ...
@app.task
async def untyped(value) -> Any:  # type: ignore[no-untyped-def]
    return value


@app.task
async def anything(value: Any = None, **more: Any) -> Any:
    return {"value": value, **more}


@app.task
async def number(value: int) -> Any:
    return value


@app.task
def text_plain(value: str) -> Any:
    return value


@app.task
async def moment(value: datetime, other: float = 1.0) -> Any:
    return [value, other]


@app.task
async def points(points: list[Point]) -> Any:
    return points


@app.task
async def optional(value: int | None = None) -> Any:
    return value


@app.task
async def literal(value: Literal["a", 1, None]) -> Any:
    return value


@app.task
async def union(value: int | Point | list[str]) -> Any:
    return value


@app.task
async def typed(value: Place, colour: Colour = Colour.RED) -> Any:
    return [value, colour]


@app.task
async def bytes_and_uuid(value: bytes, uuid: UUID | None = None) -> Any:
    return [value, uuid]


@app.task
async def mapping(context: Context, value: dict[str, int]) -> Any:
    return value


@app.task
async def pair(value: tuple[int, str], flag: bool = False) -> Any:
    return value


@app.task
async def texts_by_name(**texts: str) -> Any:
    return texts


_HANDLERS: dict[str, Handler] = dict(app.handlers)


@pytest.fixture
def lab(mongo_uri: str, database_name: str, mongo: Mongo) -> Iterator[Lab]:
    with Lab(mongo_uri, database_name, mongo, app) as made:
        yield made


_plausible = st.one_of(
    st.integers(-5, 5), st.sampled_from(["a", "1", "red", "2024-01-01T00:00:00Z"]), fuzzing.values,
    st.fixed_dictionaries({"x": st.one_of(st.integers(), fuzzing.values)}),
    st.lists(st.fixed_dictionaries({"x": st.integers()}), max_size=2),
)  # fmt: skip
_argument_names = st.one_of(
    st.sampled_from(["value", "value", "points", "other", "flag", "uuid", "colour", "context", "self", "argument_0"]),
    fuzzing.field_names,
)
_params = st.one_of(
    st.dictionaries(_argument_names, _plausible, max_size=3), st.fixed_dictionaries({"value": _plausible}), _plausible
)


def _is_named(reason: str, handler: Handler, params: Any) -> bool:
    """Whether the reason names an argument, of the handler or given, or says that there is none."""
    given_names = [str(name) for name in params] if isinstance(params, dict) else []
    return any(name in reason for name in [*handler.fields.values(), *given_names, "no arguments", "give a mapping"])


class Calls:
    """Tasks with params, told briefly."""

    def __init__(self, drawn: list[tuple[str, Any]]) -> None:
        self.drawn = drawn

    def __repr__(self) -> str:
        return f"{len(self.drawn)} calls"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))


@fuzz(3, shrink=False)
@given(calls=st.lists(st.tuples(st.sampled_from(sorted(_HANDLERS)), _params), min_size=20, max_size=40).map(Calls))
def test_params_of_any_kind_run_or_fail_for_good_with_the_argument_named(lab: Lab, calls: Calls) -> None:
    async def example() -> None:
        tasks = [(name, params, good(f"p-{next(_numbers)}", name=name, params=params)) for name, params in calls.drawn]
        held = [(name, params, task) for name, params, task in tasks if lab.insert([task])]

        def ended() -> int:
            lab.assert_well()
            ids = [task["_id"] for _, _, task in held]
            return lab.tasks.count_documents({"_id": {"$in": ids}, "task_state.status": {"$in": [*FINAL_STATUSES]}})

        await until(lambda: ended() == len(held), PATIENCE, "every task ended")
        for name, params, task in held:
            found = lab.find(task["_id"])
            assert found is not None
            assert len(found["task_state"]["worker_states"]) == 1, (name, params, found["task_state"])
            (run,) = found["task_state"]["worker_states"]
            if run["status"] == "FAIL":
                reason = run["fail_reason"]
                assert run["final"] is True, (name, params, reason)
                if reason.startswith("the handler's return value cannot be stored as BSON: it is nested"):
                    continue  # the server holds more levels than mtask writes
                assert reason.startswith(f"params of '{name}': "), (name, params, reason)
                assert _is_named(reason, _HANDLERS[name], params), (name, params, reason)
        lab.tasks.delete_many({})

    lab.run(example())


@fuzz(3, shrink=False)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(sorted(_HANDLERS)), st.one_of(_params, fuzzing.anything)), min_size=20
    ).map(Calls)
)
def test_what_publish_accepts_for_a_handler_at_hand_is_run(lab: Lab, calls: Calls) -> None:
    async def example(specs: list[TaskSpec]) -> None:
        with Client(lab.bench.uri, database=lab.bench.database) as client:
            published = client.publish_many(specs)
        ids = [result.task_id for result in published]

        def counts() -> dict[str, int]:
            lab.assert_well()
            found = lab.tasks.find({"_id": {"$in": ids}}, {"task_state.status": 1})
            statuses = [document["task_state"]["status"] for document in found]
            return {status: statuses.count(status) for status in statuses}

        await until(lambda: set(counts()) <= {"SUCCESS", "FAIL"}, PATIENCE, "every task ended")
        failed = lab.tasks.find({"_id": {"$in": ids}, "task_state.status": "FAIL"})
        reasons = [
            (task["_id"], task["params"], task["task_state"]["worker_states"][-1]["fail_reason"]) for task in failed
        ]
        lab.tasks.delete_many({})
        assert not reasons

    accepted = []
    for name, params in calls.drawn:
        spec = TaskSpec(_HANDLERS[name], params)
        try:
            spec.prepare()
        except InvalidParams:
            continue
        else:
            accepted.append(spec)
    lab.run(example(accepted))


def test_params_beyond_what_a_document_holds_are_refused(lab: Lab) -> None:
    with Client(lab.bench.uri, database=lab.bench.database) as client:
        for params in ("x" * (15 * 2**20 + 1), {"a": b"x" * 2**24}, ["x" * 2**20] * 17):
            for request in (
                lambda given: client.publish("untyped", given),
                lambda given: client.publish_many([TaskSpec("untyped", given)]),
            ):
                with pytest.raises(InvalidParams, match=r"params of 'untyped': they exceed 15 MB"):
                    request(params)


def test_handler_whose_arguments_cannot_come_by_name_is_refused() -> None:
    def positional(value: int, /) -> None: ...
    def several(*values: int) -> None: ...

    handlers: list[Callable[..., Any]] = [positional, several]
    for function in handlers:
        with pytest.raises(HandlerError, match=re.escape(function.__name__)):
            App().task(function)
    assert handler_of("name") is None
