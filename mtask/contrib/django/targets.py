"""The settings of a backend in `TASKS`: where its tasks are stored, and what its workers import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mtask.contrib.django.api import task_backends

#: The backend that Django uses if none is named.
DEFAULT = "default"
#: The names that OPTIONS may have.
NAMES = ("DATABASE", "URI", "NAME", "MODULES", "WEB_URL")


@dataclass(frozen=True, slots=True)
class Target:
    """Where the tasks of a backend are stored: in a database of `DATABASES`, or in one that has a URI."""

    alias: str | None = None  #: the name in `DATABASES`
    uri: str | None = None
    name: str | None = None  #: the database at the URI; None: the one that the URI names, or "mtask"

    def __repr__(self) -> str:
        return f"Target({'a URI' if self.alias is None else self.alias!r})"  # a URI may hold a password


class Targeted:
    """What mtask's backend has beside what Django's backends have."""

    alias: str
    queues: set[str]
    options: dict[str, Any]

    @property
    def target(self) -> Target:
        """Where its tasks are stored. The checks tell what is wrong with the options."""
        if self.options.get("URI"):
            return Target(uri=str(self.options["URI"]), name=self.options.get("NAME"))
        return Target(alias=self.options.get("DATABASE", "default"))

    @property
    def modules(self) -> list[str]:
        """The modules that workers import beside those named `tasks`."""
        given = self.options.get("MODULES", ())
        return [given] if isinstance(given, str) else [*given]

    @property
    def web_url(self) -> str | None:
        """The address of mtask's page, to which the admin links. None: it has no link."""
        return self.options.get("WEB_URL")


def backends() -> Iterator[Targeted]:
    """Yield the backends of `TASKS` that are mtask's."""
    for alias in task_backends.settings:
        backend: object = task_backends[alias]
        if isinstance(backend, Targeted):
            yield backend
