# Generated from mtask/client/aio.py: edit that one, then run `make generate`.
"""The client for sync code."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Unpack

from mtask.client.asking import publication, requests
from mtask.client.asking.publication import TaskRef, TaskSpec
from mtask.client.connection_sync import SyncConnection
from mtask.client.diagnosis import backlog, doctor, explain
from mtask.client.operating import controls as control_requests
from mtask.client.operating import purging as purging_requests
from mtask.client.operating import scheduling
from mtask.client.operating.scheduling import ScheduleArguments, ScheduleSpec, When
from mtask.client.reading import following as event_requests
from mtask.client.reading import views
from mtask.client.reading.events_sync import Events
from mtask.errors import AccessDenied, DatabaseError, OperationFailed, TaskError, WaitTimeout
from mtask.model.controls import Control
from mtask.model.documents import Task, WorkerDocument
from mtask.model.options import TaskOptions
from mtask.model.schedules import Schedule
from mtask.store import diagnosis
from mtask.store.driver.types import SyncSession
from mtask.store.tasks import queries
from mtask.store.tasks.publishing import IfExists, Published


class Client(SyncConnection):
    """Publish, query, cancel and retry tasks, from sync code.

    `source` is a MongoDB URI, or a client that the service has already, and that stays the caller's to close:
    a `pymongo.MongoClient`. This client is safe to share between threads.
    Without it, MTASK_URI and MTASK_DATABASE count. `database` defaults to the URI's, else "mtask". The first call makes
    sure of the collections; `check=False` leaves that out, for a reader. `timeout` bounds each round trip, 10 s by
    default; `server_timeout` the first one, where the server may not be there at all. `middleware` is composed around
    each publish: `app.around.publish`, see `mtask.app.middleware`.
    """

    def publish(
        self,
        task: TaskRef,
        params: Any = None,
        *,
        key: str | None = None,
        queue: str | None = None,
        start_time: datetime | None = None,
        delay: timedelta | float | None = None,
        if_exists: IfExists = "keep",
        clean_failed: bool = False,
        clean_success: bool = False,
        not_update_running: bool = False,
        session: SyncSession | None = None,
        **options: Unpack[TaskOptions],
    ) -> Published:
        """Publish a task once, whoever calls and however often.

        `task` is a registered handler or its name; `key` the idempotency key (none: a fresh time-ordered one);
        `delay` a timedelta or seconds, counted on the server's clock. An existing task is kept untouched, or
        with if_exists="update" gets the new queue, params, task_option and start_time; "reject" raises
        TaskExists. `clean_failed` and `clean_success` drop those workers' closed states, so that it runs again.
        `not_update_running` raises TaskRunning while a live run holds it. `session`: inside that transaction.

        Raises InvalidInput in its kinds, TaskExists, TaskRunning, DatabaseError in its kinds.
        """
        spec = TaskSpec(task, params, key=key, queue=queue, start_time=start_time, delay=delay, **options)
        policy = publication.policy(
            if_exists,
            clean_failed=clean_failed,
            clean_success=clean_success,
            not_update_running=not_update_running,
        )
        return self._run(requests.publish(spec, policy, self._middleware), session)

    def publish_many(
        self,
        specs: Iterable[TaskSpec],
        *,
        if_exists: IfExists = "keep",
        clean_failed: bool = False,
        clean_success: bool = False,
        not_update_running: bool = False,
        session: SyncSession | None = None,
    ) -> list[Published | TaskError]:
        """Publish many tasks; return for each, in order, what happened: a result, or TaskExists or TaskRunning.

        A spec that is wrong raises before anything is published. Options as in `publish`.
        """
        policy = publication.policy(
            if_exists,
            clean_failed=clean_failed,
            clean_success=clean_success,
            not_update_running=not_update_running,
        )
        is_in_session = session is not None
        request = requests.publish_many(specs, policy, self._middleware, in_session=is_in_session)
        return self._run(request, session)

    def get(self, task: TaskRef, key: str) -> Task:
        """Return a task; raise TaskNotFound or MalformedTask."""
        return self._run(requests.get(requests.identify(task, key)))

    def find(
        self,
        *,
        status: str | Sequence[str] | None = None,
        name: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
        key: str | Sequence[str] | None = None,
        worker_id: str | Sequence[str] | None = None,
        limit: int = 100,
    ) -> list[Task]:
        """Return tasks, newest first, at most `limit` (0: all)."""
        criteria = views.criteria(status=status, name=name, queue=queue, key=key, worker_id=worker_id)
        return self._run(requests.find(criteria, limit))

    def count(
        self,
        *,
        status: str | Sequence[str] | None = None,
        name: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
    ) -> int:
        """Return how many tasks match."""
        criteria = views.criteria(status=status, name=name, queue=queue, key=None, worker_id=None)
        return self._run(queries.count(criteria))

    def wait(self, task: TaskRef, key: str, *, timeout: timedelta | float | None = None) -> Task:
        """Wait until a task is SUCCESS, FAIL or CANCELED and return it; `timeout` in seconds.

        Raises WaitTimeout; TaskNotFound where there is no such task, or it was removed or expired meanwhile, even if
        another was published under its key since.
        """
        waiting = requests.waiting(requests.identify(task, key), timeout)
        began = time.monotonic()
        happening: Events | None = None
        try:
            while True:
                found = waiting.same(self._run(requests.get(waiting.task_id)))
                if found.status.is_final:
                    return found
                elapsed = time.monotonic() - began
                pause = waiting.next_pause(elapsed)
                if pause is None:
                    raise WaitTimeout(waiting.task_id, found.status, waiting.timeout or timedelta(0))
                patience = waiting.patience(elapsed)
                if patience is None:
                    self._sleep(pause)
                    continue
                try:
                    if happening is None:
                        wanted = event_requests.follow_task(waiting.task_id)
                        happening = Events(self._store, wanted, self._make_ready)
                        happening.open()
                    else:
                        waiting.follow(happening.poll(patience))
                except (AccessDenied, OperationFailed):
                    waiting.can_follow = False  # not everyone may open a change stream
        finally:
            if happening is not None:
                happening.close()

    def events(
        self,
        *,
        name: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
        key: str | Sequence[str] | None = None,
        after: str | None = None,
        since: datetime | None = None,
    ) -> Events:
        """Return what happens to tasks, as it happens, to iterate over in a `with` block.

        Published, claimed, progress, succeeded, failed, timed_out, canceled, reopened, removed: each once, and in order
        for each task. `after` is an event's `token`: it goes on right behind that, whatever happened meanwhile; or
        `since` an instant. As far back as the oplog reaches: else EventsLost. With `queue`, what happened in it; of
        tasks that are gone by then, or are others, it is left out. Raises InvalidInput.
        """
        asked = event_requests.follow(name, queue, key, after, since)
        return Events(self._store, asked, self._make_ready).open()

    def cancel(self, task: TaskRef, key: str) -> Task:
        """Cancel a task, or ask the worker that runs it to stop; return it. A finished one stays as it is."""
        return self._run(requests.cancel(requests.identify(task, key)))

    def retry(self, task: TaskRef, key: str) -> Task:
        """Let a FAIL or CANCELED task run again, its failures no longer counted; return it.

        Raises TaskNotFound or TaskNotFinished.
        """
        return self._run(requests.run_again(requests.identify(task, key), everything=False))

    def rerun(self, task: TaskRef, key: str) -> Task:
        """Let a finished task run again from the start, successes included; return it.

        Raises TaskNotFound or TaskNotFinished.
        """
        return self._run(requests.run_again(requests.identify(task, key), everything=True))

    def update_option(self, task: TaskRef, key: str, **options: Unpack[TaskOptions]) -> Task:
        """Change some of a task's options; return it. ping_interval_ms counts from the next ping, the rest
        from the next claim; a worker that specific_worker_ids no longer admits is stopped at once."""
        return self._run(requests.update_option(requests.identify(task, key), dict(options)))

    def remove(self, task: TaskRef, key: str) -> bool:
        """Remove a task, whatever its status; return whether it was there. A live run is ended."""
        return self._run(queries.remove(requests.identify(task, key)))

    def purge(
        self,
        *,
        status: str | Sequence[str] | None = None,
        name: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
        older_than: timedelta | float | None = None,
        limit: int = 0,
        dry_run: bool = False,
    ) -> int:
        """Remove finished tasks, at most `limit` (0: all); return how many, with `dry_run` how many it would be.

        `status`: SUCCESS, FAIL, CANCELED, all three by default, or INIT for tasks that wait. `older_than` (a timedelta
        or seconds): finished, or created, so long ago. It goes in batches, and leaves the database half of the time
        to others. Raises InvalidInput.
        """
        purging = purging_requests.prepare(status, name, queue, older_than, limit)
        if dry_run:
            return self._run(purging.count())
        while purging.has_more:
            begun = time.monotonic()
            self._run(purging.batch())
            self._sleep(purging.pause(time.monotonic() - begun))
        return purging.removed

    def stats(self) -> list[views.StatRow]:
        """Return counts per queue, name and status, and why due tasks wait that no worker can take."""
        return self._run(backlog.stats())

    def workers(self, *, live_only: bool = True) -> list[WorkerDocument]:
        """Return the workers that are there, or all on record."""
        return self._run(requests.list_workers(live_only=live_only))

    def stop_worker(self, worker_id: str) -> WorkerDocument:
        """Ask a worker to stop gracefully; raise WorkerNotFound."""
        return self._run(requests.control_worker(worker_id, {"stop": True}))

    def set_worker(self, worker_id: str, *, concurrency: int | None) -> WorkerDocument:
        """Change how many handlers a worker runs at once: 0 pauses it, None restores what it started with.

        Raises WorkerNotFound or InvalidInput.
        """
        return self._run(requests.control_worker(worker_id, {"concurrency": concurrency}))

    # --- queues and task names ------------------------------------------------------------------------------

    def pause(
        self,
        *,
        queue: str | None = None,
        name: str | None = None,
        timeout: timedelta | float | None = control_requests.PATIENCE,
    ) -> Control:
        """Have no worker claim from a queue, or a task name, any more; what runs goes on. It stays so until `resume`.

        Returns when every live worker that it concerns has let the claims that were under way land and goes by it:
        nothing is claimed from then on. Raises ControlUnconfirmed where one has not within `timeout` (a timedelta or
        seconds; None waits without end): the pause stands all the same.
        """
        return self._put_control(control_requests.pause(queue, name, paused=True, timeout=timeout))

    def resume(
        self,
        *,
        queue: str | None = None,
        name: str | None = None,
        timeout: timedelta | float | None = control_requests.PATIENCE,
    ) -> Control:
        """Let workers claim from a queue, or a task name, again. Raises ControlUnconfirmed as `pause` does."""
        return self._put_control(control_requests.pause(queue, name, paused=False, timeout=timeout))

    def limit(
        self,
        queue: str,
        *,
        concurrency: int | None = None,
        rate: control_requests.Rate | None = None,
        key_concurrency: int | None = None,
        key_rate: control_requests.Rate | None = None,
        timeout: timedelta | float | None = control_requests.PATIENCE,
    ) -> Control:
        """Bound what all workers together run of a queue; what is not given is not bounded.

        `concurrency`: runs at once. `rate`: (starts, window), in any window of that length (a timedelta or seconds).
        `key_concurrency` and `key_rate`: the same for the tasks of each limit_key in the queue. What runs already is
        not counted. Returns when every live worker goes by it; raises ControlUnconfirmed as `pause` does, or
        InvalidInput.
        """
        bounds = control_requests.limit(queue, concurrency, rate, key_concurrency, key_rate, timeout)
        return self._put_control(bounds)

    def keep(
        self,
        queue: str,
        *,
        success: int | None = None,
        fail: int | None = None,
        timeout: timedelta | float | None = control_requests.PATIENCE,
    ) -> Control:
        """Keep only the newest so many finished tasks of a queue, 0: none, None: all.

        `success` is for those that ended as SUCCESS, `fail` for FAIL and CANCELED together. Workers remove the others
        within a minute or so, beside what retain_success_ms and retain_fail_ms remove. Returns when every live worker
        goes by it: what was called off removes nothing from then on. Raises ControlUnconfirmed as `pause` does, or
        InvalidInput.
        """
        return self._put_control(control_requests.keep(queue, success, fail, timeout))

    def controls(self) -> list[Control]:
        """Return what holds for queues and task names, by id: those that were paused or limited once."""
        return self._run(control_requests.every())

    def _put_control(self, asked: control_requests.Change) -> Control:
        begun = time.monotonic()
        control = self._run(asked.write())
        while unconfirmed := self._run(asked.unconfirmed(control)):
            pause = asked.waiting.next_pause(time.monotonic() - begun)
            if pause is None:
                raise asked.give_up(control, unconfirmed)
            self._sleep(pause)
        return control

    # --- schedules ------------------------------------------------------------------------------------------

    def add_schedule(
        self,
        schedule_id: str,
        task: TaskRef,
        when: When,
        params: Any = None,
        *,
        if_exists: IfExists = "update",
        **given: Unpack[ScheduleArguments],
    ) -> Schedule:
        """Have a task published again and again, by the workers' schedulers; return the schedule as it is stored.

        `when` is a crontab's five fields ("*/5 * * * *", in `timezone`, else UTC), a timedelta, an aware datetime, or
        `Cron(...)`. Other arguments: `start_time` and `end_time` bound it; `jitter` (timedelta or seconds): each task
        starts up to so much later; `catch_up`: what becomes of firings that were missed while nothing ran: "none", the
        "last" of them, or "all", the newest `catch_up_limit`; overlap="skip": not while the last one's task has not
        finished; `paused`; `queue` and the options of the tasks. if_exists="update" changes one that exists, and what
        was to fire next still is, unless its times change; "keep" leaves it, "reject" raises ScheduleExists.

        Raises InvalidInput in its kinds, or SchemaMismatch where the stored one is malformed.
        """
        spec = ScheduleSpec(schedule_id, task, when, params, **given)
        return self._run(scheduling.put(spec.prepare(), if_exists))

    def get_schedule(self, schedule_id: str) -> Schedule:
        """Return a schedule; raise ScheduleNotFound, or SchemaMismatch where it is malformed."""
        return self._run(scheduling.get(schedule_id))

    def schedules(self) -> list[Schedule]:
        """Return all schedules, by id; malformed ones are left out, with a warning in the log."""
        return self._run(scheduling.every())

    def pause_schedule(self, schedule_id: str) -> Schedule:
        """Fire it no more until it is resumed. Raises ScheduleNotFound."""
        return self._run(scheduling.set_paused(schedule_id, paused=True))

    def resume_schedule(self, schedule_id: str) -> Schedule:
        """Fire it again; what would have fired meanwhile is not made up for. Raises ScheduleNotFound."""
        return self._run(scheduling.set_paused(schedule_id, paused=False))

    def remove_schedule(self, schedule_id: str) -> bool:
        """Remove a schedule; return whether it was there. The tasks that it has published stay."""
        return self._run(scheduling.remove(schedule_id))

    def next_firings(self, schedule_id: str, count: int = 5) -> list[datetime]:
        """Return when a schedule fires next, in UTC; none where it is paused or over. Raises ScheduleNotFound."""
        scheduling.check_count(count)
        schedule = self._run(scheduling.get(schedule_id))
        return self._compute(scheduling.firings_of, schedule, count)

    def server_time(self) -> datetime:
        """Return the server's clock."""
        return self._run(diagnosis.server_time())

    def inspect(self, task_id: str) -> explain.Inspected:
        """Return a task, or its malformed document, and what it waits for; raise TaskNotFound."""
        return self._run(explain.inspect(task_id))

    def diagnose(self, *, patience: timedelta = doctor.PATIENCE) -> list[doctor.Finding]:
        """Examine server, collections, workers and tasks; nothing is changed, and no problem raises.

        A due task that waits longer than `patience` is a problem, not a worry.
        """
        try:
            self._reach()
        except DatabaseError as error:
            return [doctor.unreachable(error)]
        return self._execute(doctor.examine(self.database_name, patience))
