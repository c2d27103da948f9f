"""Each word of Celery is mapped, needs nothing, or is refused with what to write instead; crontabs mean the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask.contrib import celery
from mtask.contrib.celery import Celery, NotMapped, crontab, words
from mtask.contrib.celery.options import publish_arguments
from mtask.contrib.celery.schedules import schedule
from mtask.errors import HandlerError


def test_each_word_is_of_one_table() -> None:
    for mapped, idle, refused in (
        (words.TASK_OPTIONS, words.IDLE_TASK_OPTIONS, words.REFUSED_TASK_OPTIONS),
        (words.CALL_OPTIONS, words.IDLE_CALL_OPTIONS, words.REFUSED_CALL_OPTIONS),
        (words.SETTINGS, words.IDLE_SETTINGS, words.REFUSED_SETTINGS),
    ):
        assert not mapped & idle
        assert not (mapped | idle) & refused.keys()
        assert mapped
        assert idle


@pytest.mark.parametrize("option", sorted(words.REFUSED_TASK_OPTIONS))
def test_option_of_a_task_that_does_not_map_is_refused_at_the_declaration(option: str) -> None:
    app = Celery("proj")
    with pytest.raises(NotMapped) as caught:
        app.task(**{option: "x"})(lambda: None)
    expected = f"the option {option!r} of task {__name__}.<lambda>: {words.REFUSED_TASK_OPTIONS[option]}"
    assert str(caught.value) == f"mtask.contrib.celery does not map {expected}"
    assert app.tasks.keys().isdisjoint({f"{__name__}.<lambda>"})


def test_options_of_calls_that_do_not_map_are_refused() -> None:
    app = Celery("proj")

    @app.task
    def add(x: int) -> None: ...

    for option, instead in words.REFUSED_CALL_OPTIONS.items():
        given: dict[str, Any] = {option: "x"}
        calls: list[Callable[..., Any]] = [add.s(1).apply_async, add.s(1).set, add.s(1).apply]
        for call in calls:
            with pytest.raises(NotMapped) as caught:
                call(**given)
            assert caught.value.instead == instead
    with pytest.raises(NotMapped, match=r"'colour' of a call of task .*: neither Celery nor mtask"):
        add.apply_async((1,), colour="red")
    with pytest.raises(NotMapped, match="the serializer 'pickle'"):
        add.apply_async((1,), serializer="pickle")
    with pytest.raises(NotMapped, match="name the queue by a text"):
        add.apply_async((1,), queue=object())


def test_expiry_is_handed_on_as_a_time_or_an_instant() -> None:
    instant = datetime(2030, 1, 1, tzinfo=UTC)
    for given, expected in ((90, timedelta(seconds=90)), (instant, instant), ("2030-01-01T01:00:00+01:00", instant)):
        assert publish_arguments("add", {"expires": given}, "UTC") == {"expires": expected}
    app = Celery("proj", include=["nowhere.tasks"])
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="nowhere"):
            _ = app.mtask


def test_settings_that_do_not_map_are_refused() -> None:
    for name, instead in words.REFUSED_SETTINGS.items():
        with pytest.raises(NotMapped) as caught:
            Celery("proj").conf.update({name: "x"})
        assert caught.value.instead == instead
    for settings, match in (
        ({"broker": "redis://user:secret@host/0"}, "the broker 'redis://': the broker is MongoDB"),
        ({"backend": "rpc://"}, "the result backend 'rpc://'"),
        ({"task_serializer": "pickle"}, "the serializer 'pickle'"),
        ({"accept_content": ["json", "pickle"]}, "the content 'pickle'"),
        ({"task_routes": lambda name: "mail"}, "a router that is a function"),
        ({"task_routes": {"a": {"exchange": "x"}}}, "the option 'exchange' of the route 'a'"),
        ({"my_own": 1}, "the setting 'my_own'"),
    ):
        with pytest.raises(NotMapped, match=match):
            Celery("proj", **settings)
    for name in words.IDLE_SETTINGS:
        Celery("proj").conf.update({name: True})


def test_settings_are_read_from_objects_when_the_first_is_needed() -> None:
    class Settings:
        CELERY_TASK_DEFAULT_QUEUE = "shop"
        CELERY_TASK_ACKS_LATE = True
        OTHER = 1

    app = Celery("proj")
    app.config_from_object(Settings, namespace="CELERY")
    app.config_from_object({"task_routes": [("a.*", "first"), ("a.b", "second")], "unknown": 1})
    assert (app.conf.task_default_queue, app.conf["timezone"], app.conf.get("task_time_limit")) == ("shop", "UTC", None)
    assert [app.conf.route(name) for name in ("a.b", "b")] == [{"queue": "first"}, {}]
    app.config_from_object({"CELERY_ROUTES": {}})
    for _ in range(2):
        with pytest.raises(NotMapped, match="'CELERY_ROUTES': it is a name from before Celery 4"):
            _ = app.conf.timezone


@pytest.mark.parametrize("module", ["", ".exceptions", ".result", ".schedules", ".canvas"])
def test_names_that_do_not_map_tell_what_to_write(module: str) -> None:
    found = importlib.import_module(celery.__name__ + module)
    for name in words.NAMES:
        if name in vars(found):
            continue
        with pytest.raises(NotMapped, match=name):
            getattr(found, name)
    with pytest.raises(ImportError):
        exec(f"from {found.__name__} import nothing_of_this_name")


def test_attributes_that_do_not_map_tell_what_to_write() -> None:
    app = Celery("proj")

    @app.task
    def add(x: int) -> None: ...

    for thing, table in (
        (app, words.OF_APP),
        (app.control, words.OF_CONTROL),
        (add, words.OF_TASK),
        (add.s(1), words.OF_SIGNATURE),
        (app.AsyncResult("add:1"), words.OF_RESULT),
    ):
        for name in table:
            with pytest.raises(NotMapped):
                getattr(thing, name)
        with pytest.raises(AttributeError):
            _ = thing.nothing_of_this_name
    with pytest.raises(NotMapped, match="NAME:KEY"):
        app.AsyncResult("d7a1")
    with pytest.raises(NotMapped, match="the class Own of tasks"):
        type("Own", (celery.Task,), {})


def test_functions_that_no_params_by_name_can_call_are_refused() -> None:
    app = Celery("proj")

    async def sends() -> None: ...

    def many(*numbers: int) -> None: ...

    def yields() -> Any:
        yield 1

    for function, match in ((sends, "no async functions"), (many, "'numbers'"), (yields, "generator")):
        with pytest.raises(NotMapped, match=match):
            app.task(function)
    app.task(name="one")(lambda: None)
    with pytest.raises(HandlerError, match="two functions have this name"):
        app.task(name="one")(many_named)


def many_named() -> None: ...


def test_crontab_names_the_times_that_celery_takes() -> None:
    made = crontab(
        minute="*/20,5", hour="22-1", day_of_week="sun,Monday,3-4", day_of_month="2-10/4", month_of_year=[1, 12]
    )
    assert str(made.cron("Europe/Berlin")) == ("0,5,20,40 0,1,22,23 2,6,10 1,12 sun,mon,wed,thu Europe/Berlin")
    assert str(crontab().cron("UTC")) == "* * * * * UTC"
    assert crontab(hour=3) == crontab(hour="3")
    assert crontab(hour=3) != crontab(hour=4)
    assert schedule(30) == schedule(run_every=schedule(30).run_every)
    for wrong in (
        {"minute": 60},
        {"hour": "x"},
        {"day_of_week": 7},
        {"day_of_month": 0},
        {"minute": "*/0"},
        {"minute": "5/2"},
    ):
        with pytest.raises(ValueError, match=r"crontab|use \d"):
            crontab(**wrong)
    with pytest.raises(NotMapped, match="timezone"):
        crontab(nowfunc=lambda: datetime.now(UTC))
    with pytest.raises(NotMapped, match="relative"):
        schedule(30, relative=True)
