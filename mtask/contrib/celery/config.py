"""The settings of an app: `app.conf`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from fnmatch import fnmatchcase
from re import Pattern
from types import MappingProxyType
from typing import Any

from mtask.contrib.celery import words
from mtask.contrib.celery.exceptions import NotMapped

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "accept_content": ("json",),
        "beat_schedule": {},
        "broker_url": None,
        "imports": (),
        "include": (),
        "result_backend": None,
        "result_expires": None,
        "result_serializer": "json",
        "task_always_eager": False,
        "task_default_priority": None,
        "task_default_queue": "default",
        "task_eager_propagates": False,
        "task_routes": None,
        "task_serializer": "json",
        "task_time_limit": None,
        "timezone": "UTC",
    }
)
#: What the handlers of tasks are made with. Once there is one, a change would come too late.
_OF_HANDLERS = frozenset({
    "result_expires", "task_default_priority", "task_default_queue", "task_routes", "task_time_limit",
})  # fmt: skip
_OLD = ("CELERY", "BROKER_")
_DJANGO = "django.conf:settings"


class Config:
    """Settings by their lower-case names, as attributes and as items. A setting that does not map raises NotMapped."""

    def __init__(self) -> None:
        self._become(_values={**DEFAULTS, "beat_schedule": {}}, _unread=[], _is_used=False, is_django=False)

    _values: dict[str, Any]
    _unread: list[Callable[[], Mapping[str, Any]]]
    _is_used: bool
    #: Whether the settings are those of Django.
    is_django: bool

    def _become(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def read_from(self, source: Any, namespace: str | None = None) -> None:
        """Read the settings of an object, or of the module or object of this path, when the first one is needed."""
        if source == _DJANGO:
            self._become(is_django=True)
        self._unread.append(lambda: _settings_of(source, namespace))

    def handlers_are_made(self) -> None:
        """Note that settings of handlers can change no more."""
        self._read()
        self._become(_is_used=True)

    def _read(self) -> dict[str, Any]:
        while self._unread:
            source = self._unread.pop(0)
            try:
                self._set_all(source())
            except BaseException:
                self._unread.insert(0, source)  # each use of the settings tells of the fault
                raise
        return self._values

    def _set_all(self, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        if not is_kept(name, value):
            return
        if self._is_used and name in _OF_HANDLERS and value != self._values[name]:
            when = f"the setting {name!r} after a task was published or `app.mtask` was read"
            raise NotMapped(when, "set it where the app is made")
        self._values[name] = value

    def update(self, settings: Mapping[str, Any] = MappingProxyType({}), /, **more: Any) -> None:
        """Change settings."""
        self._read()
        self._set_all({**settings, **more})

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting."""
        return self._read().get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._read()[name]
        except KeyError:
            raise AttributeError(f"the setting {name!r} is not set") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.update({name: value})

    @property
    def retention(self) -> timedelta | None:
        """How long ended tasks are kept; None: for ever."""
        given = self._read()["result_expires"]
        return timedelta(seconds=given) if isinstance(given, int | float) else given

    def route(self, name: str) -> Mapping[str, Any]:
        """Return the options that `task_routes` gives a task of this name. The first pattern that fits decides."""
        for pattern, options in _routes_of(self._read()["task_routes"]):
            fits = pattern.match(name) if isinstance(pattern, Pattern) else fnmatchcase(name, pattern)
            if fits:
                return {"queue": options} if isinstance(options, str) else options
        return {}


def is_kept(name: str, value: Any) -> bool:
    """Whether a setting has an effect here. Raises NotMapped if it, or its value, has no counterpart."""
    if name in words.IDLE_SETTINGS:
        return False
    if name not in words.SETTINGS:
        raise NotMapped(f"the setting {name!r}", words.REFUSED_SETTINGS.get(name, words.UNKNOWN_SETTING))
    if name == "broker_url" and value is not None and not is_mongodb(value):
        raise NotMapped(f"the broker {scheme_of(value)!r}", words.BROKER)
    if name == "result_backend" and value is not None and not is_mongodb(value):
        raise NotMapped(f"the result backend {scheme_of(value)!r}", words.RESULTS)
    if name in ("task_serializer", "result_serializer") and value != "json":
        raise NotMapped(f"the serializer {value!r}", words.SERIALIZER)
    if name == "accept_content":
        strange = [kind for kind in value if kind not in ("json", "application/json")]
        if strange:
            raise NotMapped(f"the content {strange[0]!r}", words.SERIALIZER)
    if name == "task_routes":
        _routes_of(value)
    return True


def is_mongodb(uri: object) -> bool:
    """Whether it is a URI of MongoDB."""
    return isinstance(uri, str) and uri.startswith(("mongodb://", "mongodb+srv://"))


def scheme_of(uri: object) -> str:
    """Return the beginning of a URI, which holds no password."""
    return f"{str(uri).partition('://')[0]}://" if "://" in str(uri) else str(uri)


def _routes_of(routes: Any) -> list[tuple[str | Pattern[str], Any]]:
    """Return pairs of a pattern and its options; raise NotMapped for functions that route."""
    if routes is None:
        return []
    given = [routes] if isinstance(routes, Mapping) or not isinstance(routes, Iterable) else list(routes)
    found: list[tuple[str | Pattern[str], Any]] = []
    for part in given:
        pairs = list(part.items()) if isinstance(part, Mapping) else [part]
        for pair in pairs:
            if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str | Pattern)):
                raise NotMapped("a router that is a function, or its name", words.ROUTER)
            options = pair[1] if isinstance(pair[1], Mapping) else {"queue": pair[1]}
            for name in options.keys() - {"queue", "priority"}:
                advice = words.REFUSED_CALL_OPTIONS.get(name, words.ROUTER)
                raise NotMapped(f"the option {name!r} of the route {pair[0]!r}", advice)
            found.append((pair[0], dict(options)))
    return found


def _settings_of(source: Any, namespace: str | None) -> dict[str, Any]:
    """Return the settings of an object, by their lower-case names."""
    if isinstance(source, str):
        module, _, attribute = source.partition(":")
        source = importlib.import_module(module)
        source = getattr(source, attribute) if attribute else source
    given = dict(source) if isinstance(source, Mapping) else {name: getattr(source, name, None) for name in dir(source)}
    if namespace is not None:
        prefix = f"{namespace.rstrip('_').upper()}_"
        return {name[len(prefix) :].lower(): value for name, value in given.items() if name.startswith(prefix)}
    for name in given:
        if name.isupper() and name.startswith(_OLD):
            raise NotMapped(f"the setting {name!r}", words.OLD_SETTING)
    known = words.SETTINGS | words.IDLE_SETTINGS | words.REFUSED_SETTINGS.keys()
    return {name: value for name, value in given.items() if name in known}
