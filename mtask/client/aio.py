"""The client for asyncio. The sync client is generated from it: run `make generate` after a change."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Unpack

from mtask.client.asking import publication, requests
from mtask.client.asking.publication import TaskRef, TaskSpec
from mtask.client.connection_aio import AsyncConnection
from mtask.client.diagnosis import backlog, doctor, explain
from mtask.client.operating import controls as control_requests
from mtask.client.operating import purging as purging_requests
from mtask.client.operating import scheduling
from mtask.client.operating.scheduling import ScheduleArguments, ScheduleSpec, When
from mtask.client.reading import following as event_requests
from mtask.client.reading import views
from mtask.client.reading.events_aio import AsyncEvents
from mtask.errors import AccessDenied, DatabaseError, OperationFailed, TaskError, WaitTimeout
from mtask.model.controls import Control
from mtask.model.documents import Task, WorkerDocument
from mtask.model.options import TaskOptions
from mtask.model.schedules import Schedule
from mtask.store import diagnosis
from mtask.store.tasks import queries
from mtask.store.tasks.publishing import IfExists, Published


class AsyncClient(AsyncConnection):
    """Publish, query, cancel and retry tasks, from asyncio.

    `source` is a MongoDB URI, or a client that the service has already and closes itself:
    a `pymongo.AsyncMongoClient`, or a Motor client.
    Without `source`, MTASK_URI and MTASK_DATABASE apply. `database` defaults to the URI's, else "mtask". The first call
    makes collections that are missing. `check=False` omits that step, for a client that only reads. `timeout` limits
    each round trip (default: 10 s), `server_timeout` the search for a server at the first call. `middleware` runs
    around each publish: give `app.around.publish`, see `mtask.app.middleware`.
    """

    async def publish(
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
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> Published:
        """Publish a task once, from any process and any number of times.

        `task` is a registered handler or its name. `key` is the idempotency key; without it, the task gets a fresh
        key, ordered by time. `delay` is a timedelta or seconds, counted on the server's clock. If the task exists,
        `if_exists` decides: "keep" leaves it untouched; "update" gives it the new queue, params, task_option and
        start_time; "reject" raises TaskExists. `clean_failed` drops the task's failed runs and
        `clean_success` its successes, so that the task runs again. `not_update_running` raises TaskRunning while a live
        run holds the task.
        `session`: inside that transaction
        (an AsyncClientSession, or Motor's).

        Raises subclasses of InvalidInput and of DatabaseError, TaskExists and TaskRunning.
        """
        spec = TaskSpec(task, params, key=key, queue=queue, start_time=start_time, delay=delay, **options)
        policy = publication.policy(
            if_exists,
            clean_failed=clean_failed,
            clean_success=clean_success,
            not_update_running=not_update_running,
        )
        return await self._run(requests.publish(spec, policy, self._middleware), session)

    async def publish_many(
        self,
        specs: Iterable[TaskSpec],
        *,
        if_exists: IfExists = "keep",
        clean_failed: bool = False,
        clean_success: bool = False,
        not_update_running: bool = False,
        session: Any = None,
    ) -> list[Published | TaskError]:
        """Publish many tasks; return for each task, in order, its result, a TaskExists or a TaskRunning.

        A wrong spec raises an error before anything is published. The options are those of `publish`.
        """
        policy = publication.policy(
            if_exists,
            clean_failed=clean_failed,
            clean_success=clean_success,
            not_update_running=not_update_running,
        )
        is_in_session = session is not None
        request = requests.publish_many(specs, policy, self._middleware, in_session=is_in_session)
        return await self._run(request, session)

    async def get(self, task: TaskRef, key: str) -> Task:
        """Return a task; raise TaskNotFound or MalformedTask."""
        return await self._run(requests.get(requests.identify(task, key)))

    async def find(
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
        return await self._run(requests.find(criteria, limit))

    async def count(
        self,
        *,
        status: str | Sequence[str] | None = None,
        name: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
    ) -> int:
        """Return the number of tasks that match."""
        criteria = views.criteria(status=status, name=name, queue=queue, key=None, worker_id=None)
        return await self._run(queries.count(criteria))

    async def wait(self, task: TaskRef, key: str, *, timeout: timedelta | float | None = None) -> Task:
        """Wait until a task is SUCCESS, FAIL or CANCELED and return it. `timeout`: a timedelta or seconds.

        Raises WaitTimeout. Raises TaskNotFound if the task does not exist, or if the task was removed or expired
        during the wait, even if another task was published under its key since.
        """
        waiting = requests.wait_policy(requests.identify(task, key), timeout)
        began = time.monotonic()
        happening: AsyncEvents | None = None
        try:
            while True:
                found = waiting.same(await self._run(requests.get(waiting.task_id)))
                if found.status.is_final:
                    return found
                elapsed = time.monotonic() - began
                pause = waiting.next_pause(elapsed)
                if pause is None:
                    raise WaitTimeout(waiting.task_id, found.status, waiting.timeout or timedelta(0))
                patience = waiting.patience(elapsed)
                if patience is None:
                    await self._sleep(pause)
                    continue
                try:
                    if happening is None:
                        wanted = event_requests.follow_task(waiting.task_id)
                        happening = AsyncEvents(self._store, wanted, self._make_ready)
                        await happening.open()
                    else:
                        waiting.note(await happening.poll(patience))
                except (AccessDenied, OperationFailed):
                    waiting.can_follow = False  # this user may not open a change stream
        finally:
            if happening is not None:
                await happening.close()

    def events(
        self,
        *,
        name: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
        key: str | Sequence[str] | None = None,
        after: str | None = None,
        since: datetime | None = None,
    ) -> AsyncEvents:
        """Return the events of tasks as they occur, to iterate over in an `async with` block.

        The kinds of events: published, claimed, progress, succeeded, failed, timed_out, canceled, reopened, removed.
        Each event comes once, and the events of a task come in order. `after` is the `token` of an event: the iteration
        continues with the next one. `since` is an instant. Both may reach back as far as the oplog; beyond it, the
        iteration raises EventsLost. `queue` selects events by the task's queue at the time of the event; an event is
        left out if its task was removed or replaced before the event was read. Raises InvalidInput.
        """
        asked = event_requests.follow(name, queue, key, after, since)
        return AsyncEvents(self._store, asked, self._make_ready)

    async def cancel(self, task: TaskRef, key: str) -> Task:
        """Cancel a task, or ask the worker that runs it to stop; return it. A finished task stays as it is."""
        return await self._run(requests.cancel(requests.identify(task, key)))

    async def retry(self, task: TaskRef, key: str) -> Task:
        """Let a FAIL or CANCELED task run again; return the task. Its failures no longer count.

        Raises TaskNotFound or TaskNotFinished.
        """
        return await self._run(requests.run_again(requests.identify(task, key), everything=False))

    async def rerun(self, task: TaskRef, key: str) -> Task:
        """Let a finished task run again from the start, even if it succeeded; return the task.

        Raises TaskNotFound or TaskNotFinished.
        """
        return await self._run(requests.run_again(requests.identify(task, key), everything=True))

    async def update_option(self, task: TaskRef, key: str, **options: Unpack[TaskOptions]) -> Task:
        """Change some of a task's options; return it. ping_interval_ms takes effect at the next ping, the other
        options at the next claim. If specific_worker_ids no longer admits the worker of a run, the run ends at once."""
        return await self._run(requests.update_option(requests.identify(task, key), dict(options)))

    async def remove(self, task: TaskRef, key: str) -> bool:
        """Remove a task, whatever its status; return whether it existed. A live run ends."""
        return await self._run(queries.remove(requests.identify(task, key)))

    async def purge(
        self,
        *,
        status: str | Sequence[str] | None = None,
        name: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
        older_than: timedelta | float | None = None,
        limit: int = 0,
        dry_run: bool = False,
    ) -> int:
        """Remove finished tasks, at most `limit` (0: all); return their number. `dry_run` only counts them.

        `status`: SUCCESS, FAIL or CANCELED (default: all three), or INIT for tasks that wait. `older_than` (a timedelta
        or seconds): the least time since the task finished, or else since it was created. The purge works in batches
        and pauses for half of the time, so that others can use the database. Raises InvalidInput.
        """
        purging = purging_requests.prepare(status, name, queue, older_than, limit)
        if dry_run:
            return await self._run(purging.count())
        while purging.has_more:
            begun = time.monotonic()
            await self._run(purging.batch())
            await self._sleep(purging.pause(time.monotonic() - begun))
        return purging.removed

    async def stats(self) -> list[views.StatRow]:
        """Return the number of tasks per queue, name and status, and why no worker can take due tasks."""
        return await self._run(backlog.stats())

    async def workers(self, *, live_only: bool = True) -> list[WorkerDocument]:
        """Return the live workers, or all workers on record."""
        return await self._run(requests.list_workers(live_only=live_only))

    async def stop_worker(self, worker_id: str) -> WorkerDocument:
        """Ask a worker to stop gracefully; raise WorkerNotFound."""
        return await self._run(requests.control_worker(worker_id, {"stop": True}))

    async def set_worker(self, worker_id: str, *, concurrency: int | None) -> WorkerDocument:
        """Change how many handlers a worker runs at once: 0 pauses it, None restores the number that it started with.

        Raises WorkerNotFound or InvalidInput.
        """
        return await self._run(requests.control_worker(worker_id, {"concurrency": concurrency}))

    # --- queues and task names ------------------------------------------------------------------------------

    async def pause(
        self,
        *,
        queue: str | None = None,
        name: str | None = None,
        timeout: timedelta | float | None = control_requests.PATIENCE,
    ) -> Control:
        """Stop workers claiming this queue or name until `resume`; current runs continue.

        Returns once every live worker that serves it has confirmed. By then the claims that were under way have ended,
        and no more claims follow. Raises ControlUnconfirmed if a worker has not confirmed within `timeout` (a timedelta
        or seconds; None: no limit); the pause stays in force.
        """
        return await self._put_control(control_requests.pause(queue, name, paused=True, timeout=timeout))

    async def resume(
        self,
        *,
        queue: str | None = None,
        name: str | None = None,
        timeout: timedelta | float | None = control_requests.PATIENCE,
    ) -> Control:
        """Let workers claim a queue or a task name again. Raises ControlUnconfirmed as `pause` does."""
        return await self._put_control(control_requests.pause(queue, name, paused=False, timeout=timeout))

    async def limit(
        self,
        queue: str,
        *,
        concurrency: int | None = None,
        rate: control_requests.Rate | None = None,
        key_concurrency: int | None = None,
        key_rate: control_requests.Rate | None = None,
        timeout: timedelta | float | None = control_requests.PATIENCE,
    ) -> Control:
        """Limit the runs of a queue over all workers.

        These limits replace the former ones: a limit that is not given is removed. `concurrency`: the most runs at
        once. `rate`: (starts, window), the most starts in any window of that length (a timedelta or seconds).
        `key_concurrency` and `key_rate`: the same for the tasks of each limit_key in the queue. Runs that have begun
        before are not counted. Returns once every live worker has confirmed. Raises ControlUnconfirmed as `pause` does,
        or InvalidInput.
        """
        bounds = control_requests.limit(queue, concurrency, rate, key_concurrency, key_rate, timeout)
        return await self._put_control(bounds)

    async def keep(
        self,
        queue: str,
        *,
        success: int | None = None,
        fail: int | None = None,
        timeout: timedelta | float | None = control_requests.PATIENCE,
    ) -> Control:
        """Keep only the newest finished tasks of a queue.

        `success` is the number of SUCCESS tasks to keep. `fail` is the number of FAIL and CANCELED tasks together. 0
        keeps none, None keeps all. Workers remove the older tasks within about a minute. The options retain_success_ms
        and retain_fail_ms remove tasks, too. Returns once every live worker has confirmed: from then on, no worker
        removes tasks by the earlier values of `success` and `fail`. Raises ControlUnconfirmed as `pause` does, or
        InvalidInput.
        """
        return await self._put_control(control_requests.keep(queue, success, fail, timeout))

    async def controls(self) -> list[Control]:
        """Return the controls of queues and task names, by id, including controls no longer in force."""
        return await self._run(control_requests.every())

    async def _put_control(self, asked: control_requests.Change) -> Control:
        begun = time.monotonic()
        control = await self._run(asked.write())
        while unconfirmed := await self._run(asked.unconfirmed(control)):
            pause = asked.waiting.next_pause(time.monotonic() - begun)
            if pause is None:
                raise asked.give_up(control, unconfirmed)
            await self._sleep(pause)
        return control

    # --- schedules ------------------------------------------------------------------------------------------

    async def add_schedule(
        self,
        schedule_id: str,
        task: TaskRef,
        when: When,
        params: Any = None,
        *,
        if_exists: IfExists = "update",
        **given: Unpack[ScheduleArguments],
    ) -> Schedule:
        """Let the workers' schedulers publish a task again and again; return the stored schedule.

        `when` is a crontab's five fields ("*/5 * * * *", in `timezone`, else UTC), a timedelta, an aware datetime, or
        `Cron(...)`. No firing comes before `start_time` or after `end_time`. `jitter` (timedelta or
        seconds) delays each task by a random time of at most that length. `catch_up` decides about firings that were
        missed while no scheduler ran: "none", the "last" of them, or "all" (the newest `catch_up_limit`).
        overlap="skip" skips a firing while the last firing's task has not finished. With `paused`, the schedule does
        not fire until it is resumed. `queue` and the options are those of the tasks. if_exists="update" changes an
        existing schedule. Its next firing stays unless its times change. "keep" leaves the schedule as it is; "reject"
        raises ScheduleExists.

        Raises subclasses of InvalidInput, or SchemaMismatch if the stored schedule is malformed.
        """
        spec = ScheduleSpec(schedule_id, task, when, params, **given)
        return await self._run(scheduling.put(spec.prepare(), if_exists))

    async def get_schedule(self, schedule_id: str) -> Schedule:
        """Return a schedule; raise ScheduleNotFound, or SchemaMismatch if it is malformed."""
        return await self._run(scheduling.get(schedule_id))

    async def schedules(self) -> list[Schedule]:
        """Return all schedules, by id. Malformed ones are left out, with a warning in the log."""
        return await self._run(scheduling.every())

    async def pause_schedule(self, schedule_id: str) -> Schedule:
        """Stop firing a schedule until it is resumed. Raises ScheduleNotFound."""
        return await self._run(scheduling.set_paused(schedule_id, paused=True))

    async def resume_schedule(self, schedule_id: str) -> Schedule:
        """Fire a schedule again. Firings that it missed while paused are not made up. Raises ScheduleNotFound."""
        return await self._run(scheduling.set_paused(schedule_id, paused=False))

    async def remove_schedule(self, schedule_id: str) -> bool:
        """Remove a schedule; return whether it existed. The tasks that it has published stay."""
        return await self._run(scheduling.remove(schedule_id))

    async def next_firings(self, schedule_id: str, count: int = 5) -> list[datetime]:
        """Return the next firings of a schedule, in UTC; none if it is paused or over. Raises ScheduleNotFound."""
        scheduling.check_count(count)
        schedule = await self._run(scheduling.get(schedule_id))
        return await self._compute(scheduling.firings_of, schedule, count)

    async def server_time(self) -> datetime:
        """Return the server's clock."""
        return await self._run(diagnosis.server_time())

    async def inspect(self, task_id: str) -> explain.Inspected:
        """Return a task, or its malformed document, and what it waits for; raise TaskNotFound."""
        return await self._run(explain.inspect(task_id))

    async def diagnose(self, *, patience: timedelta = doctor.PATIENCE) -> list[doctor.Finding]:
        """Examine server, collections, workers and tasks. Nothing is changed; problems are returned, not raised.

        A due task that waits longer than `patience` is a FAIL, not a WARN.
        """
        try:
            await self._reach()
        except DatabaseError as error:
            return [doctor.unreachable(error)]
        return await self._execute(doctor.examine(self.database_name, patience))
