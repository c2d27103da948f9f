"""The jobs in Agenda's collection: they are read, and moved one by one, each in a transaction of its own.

The transaction reads the job, publishes what becomes of it, and disables it. If Agenda changes the job meanwhile, the
server refuses the transaction, and it begins anew with the job as it is then. So no job is run by both, or by neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import pymongo
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from mtask.client.sync import Client
from mtask.contrib.agenda.rules import MOVED
from mtask.errors import InvalidInput, shown
from mtask.kernel.driver.stores import bounded

T = TypeVar("T")
Document = dict[str, Any]
_TIMEOUT = timedelta(seconds=60)
_BATCH = 1_000
#: The pause before another try of a transaction, in seconds: a process that was killed may hold the job for a minute.
_PAUSE = 0.05
#: Agenda keeps what handlers get, and what they returned, in these fields. No decision reads them.
_UNREAD = {"data": 0, "result": 0}
#: The most collections that an error names.
_MOST_NAMED = 10


def _limited(session: Any) -> AbstractContextManager[None]:
    """Limit the time of a call. In a transaction its errors stay as they are: they say whether to begin anew."""
    return bounded(_TIMEOUT) if session is None else pymongo.timeout(_TIMEOUT.total_seconds())


class Jobs:
    """A collection of Agenda, on the server of an mtask client: else no transaction could hold both."""

    def __init__(self, client: Client, place: str) -> None:
        """`place`: DATABASE.COLLECTION. Raises InvalidInput."""
        database, _, collection = place.partition(".")
        if not database or not collection:
            raise InvalidInput(
                f"--from {shown(place)}: give the database and the collection of Agenda, such as shop.agendaJobs.",
                field="from",
            )
        self.place = place
        own = client.tasks
        self._driver = own.database.client
        self._jobs = self._driver[database].get_collection(
            collection, own.codec_options, ReadPreference.PRIMARY, WriteConcern(w="majority", j=True)
        )
        with bounded(_TIMEOUT):
            there = sorted(self._driver[database].list_collection_names())
        if collection not in there:
            named = ", ".join(there[:_MOST_NAMED]) or "none"
            raise InvalidInput(
                f"--from {shown(place)}: there is no such collection; database {database!r} has: {named}.", field="from"
            )

    def names(self) -> set[str]:
        """Return the names of all jobs."""
        with bounded(_TIMEOUT):
            found = [row["_id"] for row in self._jobs.aggregate([{"$group": {"_id": "$name"}}])]
        return {name for name in found if isinstance(name, str)}

    def every(self) -> Iterator[Document]:
        """Yield all jobs, without their data, in the order of their ids."""
        with bounded(None), self._jobs.find({}, _UNREAD, sort=[("_id", 1)], batch_size=_BATCH) as found:
            yield from found

    def job(self, job_id: Any, session: Any = None) -> Document | None:
        """Return a job with its data, or None if it is gone."""
        with _limited(session):
            return self._jobs.find_one({"_id": job_id}, session=session)

    def disable(self, job_id: Any, moved_to: str | None = None, session: Any = None) -> None:
        """Keep Agenda from running a job. `moved_to`: what it became."""
        marked = {} if moved_to is None else {MOVED: moved_to}
        with _limited(session):
            self._jobs.update_one({"_id": job_id}, {"$set": {"disabled": True, **marked}}, session=session)

    def transact(self, move: Callable[[Any], T]) -> T:
        """Call `move` with a session, in a transaction; return what it returned. It is called anew after a conflict."""
        tries = count()

        def moved(session: Any) -> T:
            if next(tries):
                time.sleep(_PAUSE)
            return move(session)

        with bounded(None), self._driver.start_session() as session:
            return session.with_transaction(
                moved,
                read_concern=ReadConcern("snapshot"),
                write_concern=WriteConcern(w="majority", j=True),
                read_preference=ReadPreference.PRIMARY,
            )
