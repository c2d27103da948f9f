"""Run enqueued tasks in the tests of a Django project."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.conf import settings
from django.test.utils import override_settings

from mtask.contrib.django.connections import client_of, uri_of
from mtask.contrib.django.declaring import worker_app
from mtask.contrib.django.targets import DEFAULT, backends
from mtask.testing import Bench, bench
from mtask.testing.bench import server_uri


class DjangoBench(Bench):
    """A bench on the test database of Django. Its database stays at the end, without the tasks."""

    def clear(self) -> None:
        """Remove all tasks."""
        for task in self.client.find(limit=0):
            self.client.remove(task.name, task.key)

    def close(self) -> None:
        """Remove all tasks, and close the client."""
        self.clear()
        self.client.close()


@contextmanager
def mtask_tasks(backend: str = DEFAULT) -> Iterator[Bench]:
    """Make a bench for the tasks of a backend: `run()` runs those that were enqueued, as a worker does.

    With a DATABASE, it is on Django's test database. With a URI, the tasks of the block go into a new database: on the
    server that MTASK_TEST_URI names, or on the embedded one.

    Tasks run in other threads, so they see what is committed: use TransactionTestCase, or `transactional_db` of pytest.
    """
    target = next(made.target for made in backends() if made.alias == backend)
    app = worker_app(backend)
    if target.alias is not None:
        made = DjangoBench(app, uri_of(target), client_of(target).database_name)
        made.clear()
        try:
            yield made
        finally:
            made.close()
        return
    with bench(app, uri=server_uri()) as own:
        mine = settings.TASKS[backend]
        moved = {**mine, "OPTIONS": {**mine["OPTIONS"], "URI": own.uri, "NAME": own.database}}
        with override_settings(TASKS={**settings.TASKS, backend: moved}):
            yield own
