"""What handlers may return or raise, and what raises itself when the worker reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mtask import App, Retry
from mtask.app.middleware import FinishCall


class _ExitsWhenRead(Mapping[str, Any]):
    """A value whose entries cannot be read."""

    def __getitem__(self, key: str) -> Any:
        raise SystemExit(f"no {key}")

    def __iter__(self) -> Iterator[str]:
        raise SystemExit("no entries")

    def __len__(self) -> int:
        return 1


class _ExitsWhenTold(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise SystemExit("no text")


class _NamelessMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__"):
            raise SystemExit("no name")
        return super().__getattribute__(name)


class _Nameless(Exception, metaclass=_NamelessMeta):
    """An exception whose class does not tell its name."""


class _Unspeakable:
    def __repr__(self) -> str:
        raise SystemExit("no representation")


def read() -> Any:
    """Return what cannot be read."""
    return _ExitsWhenRead()


def told() -> None:
    """Raise what has no text."""
    raise _ExitsWhenTold


def named() -> None:
    """Raise what has no name."""
    raise _Nameless("nobody")


def reasoned() -> None:
    """Raise a Retry whose reason cannot be written."""
    error = Retry(delay=3600)
    error.reason = _Unspeakable()  # type: ignore[assignment]
    raise error


#: Each with what its run is to say: its status and the beginning of its reason.
ENDS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "read": (read, "FAIL", "the handler's return value cannot be read: SystemExit: no entries"),
    "told": (told, "FAIL", "_ExitsWhenTold: (its text cannot be read) (hostile.py:"),
    "named": (named, "FAIL", "_Nameless: nobody (hostile.py:"),
    "reasoned": (reasoned, "CANCELED", "(its text cannot be read)"),
}


def exit_before_finishes(app: App) -> None:
    """Let a middleware raise SystemExit before each outcome is written."""

    @app.middleware("finish")
    def exits(call: FinishCall) -> Iterator[None]:
        if call.run_id:
            raise SystemExit("no outcome")
        yield
