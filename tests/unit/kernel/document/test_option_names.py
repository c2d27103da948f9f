"""The names of options: in code, in flags, in documents, and those of former versions."""

from __future__ import annotations

import math
import pickle
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mtask import App, Flow, Next, TaskSpec
from mtask.arguments.publish import policy
from mtask.cli.values import flag_of
from mtask.errors import InvalidInput, InvalidOption, UnknownOption
from mtask.features.flows.handler import Child
from mtask.features.schedules.client import ScheduleSpec
from mtask.kernel.document.options import (
    CODE_NAMES,
    DEFAULT_OPTION,
    DURATIONS,
    MAX_DURATION_MS,
    OLD_NAMES,
    OPTION_NAMES,
    STORED_NAMES,
    AsStored,
    as_keywords,
    build_option,
    in_documents,
    option_of,
)

PAGE = Path(__file__).parents[4] / "docs/reference/options.md"
POSITIVE = ["ping_interval", "worker_timeout", "run_timeout"]
#: A value of each old name, and beside which option it is valid.
OLD: dict[str, Any] = {
    "ping_interval_ms": 1500,
    "worker_timeout_ms": timedelta(minutes=3),
    "max_unexpected_retries": 7,
    "unexpected_retry_delay_ms": 0,
    "retry_max_delay_ms": None,
    "run_timeout_ms": 250.0,
    "retain_success_ms": 86_400_000,
    "retain_fail_ms": timedelta(days=2),
}


def stored(**options: Any) -> dict[str, Any]:
    return dict(TaskSpec("task", **options).prepare().task_option)


def test_an_option_in_code_has_no_unit_in_its_name() -> None:
    assert not [name for name in STORED_NAMES if name.endswith("_ms") or "unexpected" in name]
    assert set(OLD) == set(OLD_NAMES) == {name for name, code in CODE_NAMES.items() if name != code}
    assert {f"{name}_ms" for name in DURATIONS} - set(OPTION_NAMES) == {"retry_delay_ms"}


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_warns_once_where_it_is_given_and_means_the_same(old: str) -> None:
    with pytest.warns(DeprecationWarning, match="goes with mtask 1.0") as caught:
        option = stored(**{old: OLD[old]})
    assert [str(each.message).partition(" is called ")[0] for each in caught] == [f"the option {old}"]
    assert f"is called {CODE_NAMES[old]} now" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert option == build_option({old: OLD[old]}).stored()


def _declared(**options: Any) -> Any:
    app = App()
    app.task(name="task", **options)(lambda: None)
    return app.handlers["task"].options


def _in_flow(**options: Any) -> Any:
    return Flow("f", **options).add("a", "task") and None


GIVEN: list[Callable[..., Any]] = [
    _declared,
    _in_flow,
    lambda **options: Flow("f").add("a", "task", **options),
    lambda **options: Child("a", "task", **options),
    lambda **options: Next("task", **options),
    lambda **options: ScheduleSpec("s", "task", "* * * * *", **options),
    lambda **options: App().schedule("* * * * *", **options),
    in_documents,
]


@pytest.mark.parametrize("give", GIVEN[:-1])
def test_each_call_that_takes_options_warns_of_an_old_name_once(give: Callable[..., Any]) -> None:
    with pytest.warns(DeprecationWarning, match="goes with mtask 1.0") as caught:
        give(run_timeout_ms=1500)
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize("give", [*GIVEN[:-1], TaskSpec.__init__])
def test_both_names_at_once_are_refused(give: Callable[..., Any]) -> None:
    first = (TaskSpec("task"), "task") if give is TaskSpec.__init__ else ()
    with pytest.raises(InvalidOption, match="option run_timeout: it is given as run_timeout_ms, its old name, too"):
        give(*first, run_timeout_ms=1500, run_timeout=3)


def test_an_option_of_a_step_goes_before_that_of_its_flow_whatever_their_names() -> None:
    with pytest.warns(DeprecationWarning, match="goes with mtask 1.0"):
        flow = Flow("f", run_timeout_ms=1500)  # type: ignore[call-arg]  # the type has the new names alone
    flow.add("a", "task", run_timeout=3)
    flow.add("b", "task")
    assert [spec.prepare().task_option["run_timeout_ms"] for spec in flow.specs] == [3000, 1500]


def test_new_names_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = stored(max_retries=2, retry_delay=1, retry_max_delay=None, run_timeout=0.25, ping_interval=0.1)
    assert made["max_unexpected_retries"] == 2
    assert (made["unexpected_retry_delay_ms"], made["run_timeout_ms"], made["ping_interval_ms"]) == (1000, 250, 100)


@pytest.mark.parametrize(
    ("given", "milliseconds"),
    [
        (2, 2000),
        (0.25, 250),
        (0.0014, 1),
        (1.0006, 1001),
        (timedelta(minutes=2), 120_000),
        (timedelta(microseconds=1600), 2),
        (MAX_DURATION_MS / 1000, MAX_DURATION_MS),
    ],
)
@pytest.mark.parametrize("name", sorted(DURATIONS - {"ping_interval", "worker_timeout"}))
def test_seconds_and_timedeltas_are_stored_as_milliseconds(name: str, given: Any, milliseconds: int) -> None:
    found = stored(**{name: given})[STORED_NAMES[name]]
    assert (found, type(found)) == (milliseconds, int)


@pytest.mark.parametrize(
    "value", [-1, -0.001, timedelta(seconds=-1), 315_360_001, 1e300, 10**400, math.inf, math.nan, timedelta.max,
              True, "5", b"5", [5], {}, object]
)  # fmt: skip
@pytest.mark.parametrize("name", sorted(DURATIONS))
def test_what_is_no_length_of_time_is_an_error_that_names_the_option_in_code(name: str, value: Any) -> None:
    with pytest.raises(
        InvalidOption, match=rf"option {name}: use (1 ms|0 s) to 10 years, as a timedelta or in sec"
    ) as e:
        stored(**{name: value})
    assert (e.value.option, e.value.value) == (name, value) or math.isnan(value)


@pytest.mark.parametrize("name", POSITIVE)
def test_less_than_a_millisecond_is_none_at_all(name: str) -> None:
    with pytest.raises(InvalidOption, match=rf"option {name}: use 1 ms to 10 years"):
        stored(**{name: 0.0004})


def test_rules_between_options_are_told_in_the_words_of_those_who_gave_them() -> None:
    with pytest.raises(
        InvalidOption, match=r"option worker_timeout: worker_timeout \(20 s\) must exceed ping_interval"
    ):
        stored(worker_timeout=20)
    in_json = r"option worker_timeout_ms: worker_timeout_ms \(20000\) must exceed ping_interval_ms \(30000\)"
    with pytest.raises(InvalidOption, match=in_json):
        stored(**as_keywords({"worker_timeout_ms": 20_000}))
    with pytest.raises(InvalidOption, match=r"option ping_interval: use at least 0.1 s \(got 0.05 s\)"):
        stored(ping_interval=0.05)
    with pytest.raises(InvalidOption, match=r"option max_retries: .* greater than or equal to -1 \(got -2\)"):
        stored(max_retries=-2)
    with pytest.raises(InvalidOption, match="option max_unexpected_retries: "):
        stored(**as_keywords({"max_unexpected_retries": -2}))
    many = {"retry_scope": "worker", "specific_worker_ids": ["a", "b"]}
    with pytest.raises(InvalidOption, match="option max_retries: with retry_scope"):
        option_of(many, {"max_retries": 600})


def test_options_of_json_are_taken_as_they_are_stored() -> None:
    given = {"run_timeout_ms": 250, "max_unexpected_retries": 1, "priority": 3.0, "retain_fail_ms": None}
    assert stored(**as_keywords(given)) == build_option(given).stored()
    assert pickle.loads(pickle.dumps(AsStored(5))) == AsStored(5)


@pytest.mark.parametrize(
    ("name", "in_code", "in_json"),
    [
        ("retry_delays", "retry_delay", "unexpected_retry_delay_ms"),
        ("retry_delay_ms", "retry_delay", "unexpected_retry_delay_ms"),
        ("time_limit", "run_timeout", "run_timeout_ms"),
        ("timeout", "run_timeout", "run_timeout_ms"),
        ("ttl", "retain_success", "retain_success_ms"),
        ("retries", "max_retries", "max_unexpected_retries"),
        ("Retries", "max_retries", "max_unexpected_retries"),
        ("max_attempts", "max_retries", "max_unexpected_retries"),
        ("countdown", "delay", "delay"),
        ("eta", "start_time", "start_time"),
        ("prioritty", "priority", "priority"),
        ("heartbeat", "ping_interval", "ping_interval_ms"),
        ("zzz", None, None),
    ],
)
def test_a_wrong_name_gets_the_one_that_is_meant(name: str, in_code: str | None, in_json: str | None) -> None:
    with pytest.raises(UnknownOption) as caught:
        stored(**{name: 1})
    assert (caught.value.nearest, caught.value.known) == (in_code, tuple(STORED_NAMES))
    with pytest.raises(UnknownOption) as caught:
        as_keywords({name: 1})
    assert (caught.value.nearest, caught.value.known) == (in_json, OPTION_NAMES)
    beside = ", which a publish takes beside its options?" in str(caught.value)
    assert beside is (in_json in ("delay", "start_time"))


@pytest.mark.parametrize(("code", "name"), [(code, name) for name, code in CODE_NAMES.items() if code != name])
def test_a_name_of_code_is_none_in_json_and_its_own_is_suggested(code: str, name: str) -> None:
    with pytest.raises(UnknownOption, match=f"did you mean '{name}'"):
        as_keywords({code: 1})


def test_window_and_retention_are_told_in_the_words_of_those_who_gave_them() -> None:
    week = policy(window=5)
    with pytest.raises(InvalidInput, match=r"^retain_success is shorter than window"):
        TaskSpec("task", key="k", retain_success=4).prepare(week)
    with pytest.raises(InvalidInput, match=r"^retain_success_ms is shorter than window"):
        TaskSpec("task", key="k", **as_keywords({"retain_success_ms": 4000})).prepare(week)


def test_the_page_has_each_option_with_its_names_unit_and_default() -> None:
    def shown(name: str) -> str:
        value = getattr(DEFAULT_OPTION, name)
        if CODE_NAMES[name] in DURATIONS and value is not None:
            value /= 1000
            return f"{value:g}"
        return f'"{value}"' if isinstance(value, str) else str(value)

    rows = re.findall(r"^\| `(\w+)` \| `(\S+)` \| `(\w+)` \| ([^|]*) \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [
        (code, flag_of(code), name, "s; ms" if code in DURATIONS else "", shown(name))
        for name, code in CODE_NAMES.items()
    ]
