"""System checks: what is wrong with the settings of a backend, before a task is enqueued."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.db import connections, router

from mtask.contrib.django.targets import NAMES, Targeted, backends
from mtask.kernel.driver.operation import COLLECTIONS


def check(backend: Targeted) -> Iterator[CheckMessage]:
    """Yield an error for each mistake in the settings of a backend."""
    where = f"TASKS[{backend.alias!r}]"
    if not apps.is_installed("mtask.contrib.django"):
        hint = "Its command starts the workers, and `migrate` makes the collections of its tasks."
        yield _error(1, f'{where}: "mtask.contrib.django" is not in INSTALLED_APPS.', hint)
    yield from _check_names(backend, where)
    if backend.target.alias is not None:
        yield from _check_database(backend, where, backend.target.alias)
    yield from _check_queues(backend, where)


def _check_names(backend: Targeted, where: str) -> Iterator[CheckMessage]:
    for name in backend.options:
        if name not in NAMES:
            nearest = difflib.get_close_matches(str(name).upper(), NAMES, n=1, cutoff=0.5)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else f"The names are {', '.join(NAMES)}."
            yield _error(2, f"{where}: OPTIONS has no {name!r}.", hint)
    if backend.options.get("URI") and "DATABASE" in backend.options:
        hint = "A DATABASE takes part in its transactions; a URI needs no MongoDB in DATABASES."
        yield _error(2, f"{where}: OPTIONS has a DATABASE and a URI: give one of them.", hint)
    if "NAME" in backend.options and not backend.options.get("URI"):
        hint = "The tasks of a DATABASE are in the database that it names."
        yield _error(2, f"{where}: OPTIONS has a NAME without a URI.", hint)


def _check_database(backend: Targeted, where: str, alias: str) -> Iterator[CheckMessage]:
    if alias not in settings.DATABASES:
        hint = f"DATABASES has {', '.join(map(repr, settings.DATABASES)) or 'none'}."
        yield _error(3, f"{where}: there is no DATABASES[{alias!r}].", hint)
        return
    connection = connections[alias]
    if connection.vendor != "mongodb":
        hint = 'Name a database of django_mongodb_backend as OPTIONS["DATABASE"], or give OPTIONS["URI"].'
        yield _error(4, f"{where}: DATABASES[{alias!r}] is {connection.display_name}, not MongoDB.", hint)
        return
    for model in apps.get_models():
        is_taken = model._meta.managed and model._meta.db_table in COLLECTIONS
        if is_taken and router.db_for_write(model) == alias:
            label = model._meta.label
            hint = f"Give {label} another db_table, or the backend a URI with another database."
            table = model._meta.db_table
            yield _error(5, f"{where}: {label} uses the collection {table!r}, which is mtask's.", hint, model)


def _check_queues(backend: Targeted, where: str) -> Iterator[CheckMessage]:
    for other in backends():
        if other.alias == backend.alias:
            return  # of two backends, the later one tells
        shared = backend.queues & other.queues
        if backend.target == other.target and shared:
            names = ", ".join(map(repr, sorted(shared)))
            hint = "Give each its own QUEUES, or its own database: a worker serves all tasks of its queues."
            yield _error(6, f"{where} and TASKS[{other.alias!r}] share the queue {names}.", hint)


def _error(number: int, message: str, hint: str, about: object = None) -> CheckMessage:
    return Error(message, hint=hint, obj=about, id=f"mtask.E{number:03}")
