"""The client for asyncio. The sync client is generated from it: run `make generate` after a change."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from mtask.arguments import pointers as pointing
from mtask.arguments import publish as publication
from mtask.arguments.criteria import (
    CountCriteria,
    FindCriteria,
    PageArguments,
    PageCriteria,
    PlaceArguments,
    TaskCriteria,
)
from mtask.arguments.criteria import checked as checked_criteria
from mtask.arguments.publish import UNCHANGED, Call, PublishArguments, PublishManyArguments, TaskSpec
from mtask.client import requests
from mtask.client.connection_aio import AsyncConnection
from mtask.client.handles_aio import AsyncTaskHandle
from mtask.defaults import CONFIRMATION, OVERDUE
from mtask.errors import (
    AccessDenied,
    DatabaseError,
    MtaskError,
    OperationFailed,
    TaskError,
    UnknownTaskName,
    WaitTimeout,
)
from mtask.features.audit_log.client import DONE, Intent
from mtask.features.encryption.settings import name_of_key
from mtask.kernel.document.identity import stored_key
from mtask.kernel.document.options import in_documents, with_new_names
from mtask.kernel.driver import codec
from mtask.kernel.driver.operation import for_everybody
from mtask.lazy import LazyModule
from mtask.says import check_names, split

if TYPE_CHECKING:
    from mtask.arguments.pointers import TaskPointer
    from mtask.arguments.publish import TaskRef
    from mtask.client import flow_handles_aio, versions, views
    from mtask.client.flow_handles_aio import AsyncFlowHandle
    from mtask.doctor import backlog, explain, position
    from mtask.doctor import checks as doctor
    from mtask.doctor import operations as diagnosis
    from mtask.doctor.checks import Finding
    from mtask.doctor.position import Position
    from mtask.features.audit_log import client as action_requests
    from mtask.features.audit_log.client import Action
    from mtask.features.breaker import client as breaker_requests
    from mtask.features.bulk import client as bulk_requests
    from mtask.features.bulk.client import Bulk, BulkPlan
    from mtask.features.controls import client as control_requests
    from mtask.features.controls.client import Control
    from mtask.features.encryption.vault import KeyRow
    from mtask.features.events import completed as several
    from mtask.features.events import events_aio
    from mtask.features.events import following as event_requests
    from mtask.features.events.events_aio import AsyncCompleted, AsyncEvents
    from mtask.features.flows import client as flows
    from mtask.features.flows import requests as flow_requests
    from mtask.features.flows.change import ChangedFlow
    from mtask.features.flows.client import Flow
    from mtask.features.flows.views import FlowRow, FlowState
    from mtask.features.limits import doctor as limits
    from mtask.features.limits.doctor import PermitUse
    from mtask.features.logs import client as run_log_requests
    from mtask.features.logs.client import RunLog
    from mtask.features.metrics import client as metric_requests
    from mtask.features.metrics.client import FleetMetrics
    from mtask.features.registry import client as registry
    from mtask.features.registry.client import RegisteredHandler
    from mtask.features.schedules import client as scheduling
    from mtask.features.schedules.client import Schedule, ScheduleArguments, When
    from mtask.kernel.document.options import TaskOptions
    from mtask.kernel.document.task import Task, WorkerDocument
    from mtask.kernel.driver.operation import Operation, T
    from mtask.kernel.operations.publish import IfExists, Published
    from mtask.search import by_queue, pages
    from mtask.search import counts as counting
    from mtask.search.by_queue import QueueCounts
    from mtask.search.counts import Count
    from mtask.search.pages import TaskPage
    from mtask.search.partial import FoundTasks, TaskFields
else:
    # A service that publishes needs none of these.
    flow_handles_aio = LazyModule("mtask.client.flow_handles_aio")
    flow_requests = LazyModule("mtask.features.flows.requests")
    flows = LazyModule("mtask.features.flows.client")
    several = LazyModule("mtask.features.events.completed")
    backlog = LazyModule("mtask.doctor.backlog")
    doctor = LazyModule("mtask.doctor.checks")
    explain = LazyModule("mtask.doctor.explain")
    limits = LazyModule("mtask.features.limits.doctor")
    position = LazyModule("mtask.doctor.position")
    action_requests = LazyModule("mtask.features.audit_log.client")
    bulk_requests = LazyModule("mtask.features.bulk.client")
    breaker_requests = LazyModule("mtask.features.breaker.client")
    control_requests = LazyModule("mtask.features.controls.client")
    scheduling = LazyModule("mtask.features.schedules.client")
    events_aio = LazyModule("mtask.features.events.events_aio")
    pages = LazyModule("mtask.search.pages")
    versions = LazyModule("mtask.client.versions")
    views = LazyModule("mtask.client.views")
    event_requests = LazyModule("mtask.features.events.following")
    metric_requests = LazyModule("mtask.features.metrics.client")
    registry = LazyModule("mtask.features.registry.client")
    run_log_requests = LazyModule("mtask.features.logs.client")
    diagnosis = LazyModule("mtask.doctor.operations")
    by_queue = LazyModule("mtask.search.by_queue")
    counting = LazyModule("mtask.search.counts")

R = TypeVar("R")


class AsyncClient(AsyncConnection):
    """Publish, query, cancel and retry tasks, from asyncio.

    `source` is a MongoDB URI, or the service's own client, which the service closes itself:
    a `pymongo.AsyncMongoClient`, or a Motor client.
    Without `source`, MTASK_URI names the server, and MTASK_DATABASE the database. The default of `database` is the
    URI's database, or "mtask" if the URI names none. The first call makes missing collections. With `check=False`, it
    does not: use this for a client that only reads. `timeout` limits each round trip (default: 10 s). `server_timeout`
    limits the search for a server at the first call. `middleware` runs around each publish: give `app.around.publish`,
    see `mtask.app.middleware`. `actor` names this client in the action log (default: the user of the operating system).
    A service that changes very many tasks by itself can leave its actions out of the log with `log_actions=False`.
    `tenant` is whose tasks this client publishes and finds: see `for_tenant` and docs/tenants.md.
    `encryption` holds the keys of encrypted tasks: see `Encryption`.
    A publish by name takes what the handler declares from the registry (docs/registry.md). Of a name without a handler
    it warns, once (UnknownTaskName). With unknown_names="reject" it raises UnknownTask. With `registry=False`, the
    client neither asks the registry nor stores in tasks which version of a handler it knows.
    """

    @overload
    async def publish(
        self, task: Call[R], *, session: Any = None, **arguments: Unpack[PublishArguments]
    ) -> AsyncTaskHandle[R]: ...

    @overload
    async def publish(
        self,
        task: TaskRef,
        params: Any = None,
        *,
        session: Any = None,
        **arguments: Unpack[PublishArguments],
    ) -> AsyncTaskHandle[Any]: ...

    async def publish(
        self,
        task: TaskRef | Call[Any],
        params: Any = None,
        *,
        session: Any = None,
        **arguments: Unpack[PublishArguments],
    ) -> AsyncTaskHandle[Any]:
        """Publish a task. A second publish with the same name and key, from any process, adds no second task.

        `task` is a registered handler or its name, or `call(handler)(...)`, whose arguments type checkers check. By the
        name, the task gets the queue, the options and the lookups that the handler declares, as its workers have stored
        them (docs/registry.md). The returned handle says whether the task is new, and waits for its result. `key` is
        the idempotency key. Without `key`, the task gets a fresh key. Fresh keys sort by time. `delay` (a timedelta or
        seconds) is counted on the server's clock. `lookup` holds values by name, such as {"user_id": 7, "tags": ["a",
        "b"]}, by which `find` finds the task. If the task exists, `if_exists` decides: "keep" leaves it untouched;
        "update" gives it the new queue, params, task_option, lookup and start_time; "reject" raises TaskExists.
        `clean_failed` drops the failed runs of an existing task, and `clean_success` drops its successful runs, so that
        the task runs again. With `not_update_running`, TaskRunning is raised while a live run holds the task.

        `callback` tells an address of the task's end: {"url": "https://...", "on": ["SUCCESS", "FAIL"], "secret":
        NAME}. Without `on`, it tells each end, also a CANCELED. A worker with --callbacks sends the message, until it
        is taken (docs/callbacks.md). With if_exists="update", the callback is replaced, too.

        `tenant` is whose task it is (default: that of the client). The stored key then begins with the tenant and a
        colon, so the keys of two tenants never meet (docs/tenants.md).

        Calls under one key can gather (docs/gathering.md). `debounce` (a timedelta or seconds) lets the task start that
        long after the newest call, but at most `max_wait` after the first. The params of the newest call win, and the
        task runs again if it has ended. With `collect`, the handler gets the params of all calls as the list `calls`.
        With if_running="again", the task runs at once or, if a live run holds it, once more afterwards. A call that is
        sent again with the same `call_id` counts once. `window`: a task that has succeeded is published anew only after
        this time; a task that ended otherwise is published anew at once.

        If the caller has begun a transaction and gives its session, the task is published with this
        `session`: inside that transaction
        (an AsyncClientSession, or Motor's).

        Raises subclasses of InvalidInput and of DatabaseError, TaskExists, TaskRunning, GatherFull, GatherConflict and
        WorkersTooOld.
        """
        spec, policy = publication.published_by(task, params, arguments)
        around, tenant, is_in_session = self._middleware, self._tenant, session is not None
        request = publication.publish(spec, policy, around, in_session=is_in_session, tenant=tenant, known=self._known)
        published = await self._run(request, session)
        handle: AsyncTaskHandle[Any] = AsyncTaskHandle(
            published.task_id, published.created, published.updated, published.create_time
        )
        for name, value in (("_client", self), ("_call", spec.call)):
            object.__setattr__(handle, name, value)  # a published task is frozen
        return handle

    async def publish_many(
        self,
        specs: Iterable[TaskSpec],
        *,
        session: Any = None,
        **arguments: Unpack[PublishManyArguments],
    ) -> list[Published | TaskError]:
        """Publish many tasks; return their results in order. A result may be a TaskError, such as TaskExists.

        A wrong spec raises an error before any task is published. The arguments mean the same as in `publish`.
        """
        check_names(PublishManyArguments, arguments)
        policy = publication.policy(**arguments)
        request = publication.publish_many(
            specs,
            policy,
            self._middleware,
            in_session=session is not None,
            tenant=self._tenant,
            known=self._known,
        )
        return await self._run(request, session)

    async def publish_flow(self, flow: Flow, *, session: Any = None) -> AsyncFlowHandle:
        """Publish all tasks of a flow, or none, once for each key of a flow.

        If a flow of this key exists, nothing changes: `created` is False, and `differs` says whether that flow has
        other steps or dependencies. The returned handle has the handles of the steps. With the `session` of a
        transaction that the caller has begun, the flow is published inside that transaction. Raises InvalidFlow and
        other subclasses of InvalidInput, FlowConflict, WorkersTooOld, and subclasses of DatabaseError.
        """
        with flows.FlowPublication(flow, self._middleware, self._tenant, self._known) as publication:
            await self._completed(publication.preparation)
            published = publication.done(await self._transact(publication.operation, session))
        return flow_handles_aio.AsyncFlowHandle(published, flow, self)

    async def get(self, task: TaskRef, key: str, *, session: Any = None) -> Task:
        """Return a task; raise TaskNotFound or MalformedTask. In the transaction of `session`, if it is given."""
        return await self._run(requests.get(pointing.identify(task, key, self._tenant)), session)

    @overload
    async def get_many(self, tasks: Iterable[TaskPointer], *, fields: None = None) -> FoundTasks[Task]: ...

    @overload
    async def get_many(self, tasks: Iterable[TaskPointer], *, fields: Sequence[str]) -> FoundTasks[TaskFields]: ...

    async def get_many(self, tasks: Iterable[TaskPointer], *, fields: Sequence[str] | None = None) -> Any:
        """Return several tasks by id, and the ids under which there is no task.

        A task is its id NAME:KEY, a pair of name and key, or a result of `publish`, `get` or `find`. `fields` means the
        same as in `find`. Raises InvalidInput.
        """
        if fields is None:
            return await self._run(requests.get_many(tasks, self._tenant))
        return await self._run(requests.get_many_fields(tasks, fields, self._tenant))

    @overload
    async def find(
        self,
        *,
        fields: None = None,
        limit: int = 100,
        after: TaskPointer | None = None,
        **criteria: Unpack[FindCriteria],
    ) -> list[Task]: ...

    @overload
    async def find(
        self,
        *,
        fields: Sequence[str],
        limit: int = 100,
        after: TaskPointer | None = None,
        **criteria: Unpack[FindCriteria],
    ) -> list[TaskFields]: ...

    async def find(
        self,
        *,
        fields: Sequence[str] | None = None,
        limit: int = 100,
        after: TaskPointer | None = None,
        **criteria: Unpack[FindCriteria],
    ) -> Any:
        """Return the tasks that match, newest first: at most `limit` tasks, or all if `limit` is 0.

        A criterion with several values matches tasks with any of them. `lookup` holds values by name: a task must have
        one of the values under each name. An index finds these tasks. `after` is the last task of the former page, or
        its id: the search continues with the next task.

        With `fields`, only these fields are sent: "status", "returns", "fail_reason", "runs", or paths in the document,
        such as "params.user_id". The result is then a list of TaskFields. Raises InvalidInput, and TaskNotFound if
        there is no task under the id in `after`.
        """
        wanted = self._wanted(FindCriteria, criteria)
        if fields is None:
            return await self._run(requests.find(wanted, limit, after, self._tenant))
        return await self._run(requests.find_fields(wanted, limit, fields, after, self._tenant))

    @overload
    async def find_page(
        self,
        *,
        fields: None = None,
        limit: int = 100,
        **arguments: Unpack[PageArguments],
    ) -> TaskPage[Task]: ...

    @overload
    async def find_page(
        self,
        *,
        fields: Sequence[str],
        limit: int = 100,
        **arguments: Unpack[PageArguments],
    ) -> TaskPage[TaskFields]: ...

    async def find_page(
        self,
        *,
        fields: Sequence[str] | None = None,
        limit: int = 100,
        **arguments: Unpack[PageArguments],
    ) -> Any:
        """Return a page of a list of tasks, and the cursor of the next page. It is fast in a database of any size.

        Without `status`, the newest task comes first. With final statuses only, the last finished task comes first.
        With open statuses only (INIT, RUNNING), the task that is due first comes first. `since` and `until` bound the
        instant by which the list is sorted. With `lookup`, the newest task comes first, whatever the status.
        `key_prefix` is the beginning of the keys. `params` holds wanted values by their paths in the params. The other
        criteria mean the same as in `find`.

        Where no index meets the criteria, at most 2,000 tasks are examined for a page. The page then may hold fewer
        tasks than `limit`, or none. `looked_to` is the instant up to which the search has come, and `next_cursor` goes
        on from there. `cursor` is the `next_cursor` of the page before, with the same criteria. Raises InvalidInput.
        """
        place, criteria = split(PlaceArguments, arguments)
        return await self._run(pages.page(self._wanted(PageCriteria, criteria), limit, fields, place))

    async def count(self, **criteria: Unpack[CountCriteria]) -> int:
        """Return the number of tasks that match, however long that takes. `count_up_to` stops at a bound."""
        return await self._run(requests.count(self._wanted(CountCriteria, criteria)))

    async def count_up_to(self, *, most: int = counting.MOST, **criteria: Unpack[PageCriteria]) -> Count:
        """Count the tasks that match, at most `most`, and say whether there may be more.

        Where no index meets the criteria, at most 2,000 tasks are examined. The criteria mean the same as in
        `find_page`. Raises InvalidInput.
        """
        return await self._run(pages.count_up_to(self._wanted(PageCriteria, criteria), most))

    async def position(self, task: TaskRef, key: str) -> Position:
        """Return the place of a task among the due tasks of its queue, and the time at which it probably starts.

        Interrupted tasks go before it, then those of a higher priority, then those that have been due for longer, then
        those with a lower `_id`. Only tasks that the same workers may take are counted, up to nearly 10,000. Where the
        tenants of the queue take turns, only the tasks of its tenant are counted, and `tenants_ahead` tells the turn.
        Tasks of lower priorities that were handed back are looked for among the first ones only.
        Raises TaskNotFound or MalformedTask.
        """
        return await self._run(position.find(pointing.identify(task, key, self._tenant), self._owner))

    async def wait(self, task: TaskRef, key: str, *, timeout: timedelta | float | None = None) -> Task:
        """Wait until a task is SUCCESS, FAIL or CANCELED; return the task. `timeout`: a timedelta or seconds.

        If a handler goes on after `context.transaction()`, the task is SUCCESS before the handler has returned its
        value. Then wait for that value, too, or until it is known to be lost (`returns_lost` of the task says why).

        Raises WaitTimeout after `timeout`. Raises TaskNotFound if the task does not exist, or if it is removed or
        expires during the wait. The wait does not go on with a later task of the same key.
        """
        waiting = requests.wait_policy(pointing.identify(task, key, self._tenant), timeout)
        began = time.monotonic()
        happening: AsyncEvents | None = None
        try:
            while True:
                found = waiting.same(await self._run(requests.get(waiting.task_id)))
                if found.is_complete:
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
                        happening = events_aio.AsyncEvents(self._store, wanted, self._make_ready)
                        await happening.open()
                    else:
                        waiting.note(await happening.poll(patience))
                except (AccessDenied, OperationFailed):
                    waiting.can_follow = False  # the user lacks the right to open a change stream
        finally:
            if happening is not None:
                await happening.close()

    async def result(self, task: TaskRef, key: str, *, timeout: timedelta | float | None = None) -> Any:
        """Wait until a task has ended; return what its handler returned. `timeout`: a timedelta or seconds.

        Raises TaskFailed with the reason, TaskCanceled, WaitTimeout or TaskNotFound. Raises ResultLost if the worker
        died after `context.transaction()` had committed, before the handler's value was stored.
        """
        return requests.result_of(await self.wait(task, key, timeout=timeout))

    def as_completed(self, tasks: Iterable[TaskPointer], *, timeout: timedelta | float | None = None) -> AsyncCompleted:
        """Return an iterator over tasks in the order in which they end. Use it in an `async with` block.

        A task is its id NAME:KEY, a pair of name and key, or a result of `publish`, `get` or `find`. One stream of
        events serves all tasks. The iteration raises WaitTimeout after `timeout` (a timedelta or seconds), or
        TaskNotFound if a task does not exist, or is removed or expires during the wait.
        """
        return events_aio.AsyncCompleted(self, several.wait_for_many(tasks, timeout, self._tenant))

    async def wait_all(self, tasks: Iterable[TaskPointer], *, timeout: timedelta | float | None = None) -> list[Task]:
        """Wait until all tasks have ended; return them in the given order. See `as_completed`."""
        waiting = several.wait_for_many(tasks, timeout, self._tenant)
        async with events_aio.AsyncCompleted(self, waiting) as completed:
            found = {task.id: task async for task in completed}
        return [found[task_id] for task_id in waiting.task_ids]

    async def wait_any(self, tasks: Iterable[TaskPointer], *, timeout: timedelta | float | None = None) -> Task:
        """Wait until one of the tasks has ended; return this task. See `as_completed`."""
        async with events_aio.AsyncCompleted(self, several.wait_for_any(tasks, timeout, self._tenant)) as completed:
            return await completed.__anext__()

    def events(
        self,
        *,
        name: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
        key: str | Sequence[str] | None = None,
        after: str | None = None,
        since: datetime | None = None,
    ) -> AsyncEvents:
        """Return an iterator over the events of tasks as they occur. Use it in an `async with` block.

        The kinds of events: published, released, claimed, progress, succeeded, failed, timed_out, canceled, reopened,
        removed.
        Each event comes once, and the events of a task come in order. `after` is the `token` of an event: the iteration
        continues with the next event. `since` is the instant at which the iteration begins. If the oplog no longer
        reaches back to the beginning, the iteration raises EventsLost. `queue` selects events by the task's queue at
        the time of the event. With `queue`, an event is left out if its task was removed or replaced before the event
        was read. Raises InvalidInput.
        """
        asked = event_requests.follow(name, queue, key, after, since, self._tenant)
        return events_aio.AsyncEvents(self._store, asked, self._make_ready)

    @staticmethod
    def etag(task: Task) -> str:
        """Return the tag of the version of a task that was read: of its params, options, queue, status and last run.

        A change with this tag as `if_match` is made only if the task still is of this version. Pings do not change it.
        """
        return versions.etag(task)

    async def cancel(self, task: TaskRef, key: str, *, if_match: str | None = None) -> Task:
        """Cancel a task, or ask the worker that runs the task to stop; return the task.

        A finished task is not changed. With `if_match`, the tag of a version (see `etag`), the call raises
        PreconditionFailed if the task has changed since.
        """
        task_id = pointing.identify(task, key, self._tenant)
        return await self._act("cancel", f"task:{task_id}", requests.cancel(task_id, if_match))

    async def retry(self, task: TaskRef, key: str, *, params: Any = UNCHANGED, if_match: str | None = None) -> Task:
        """Let a FAIL or CANCELED task run again; return the task. Its earlier failures no longer count.

        With `params`, it runs with these params. The task keeps its former params in `former_params`: the newest five,
        of at most 1 MiB in all. Its lookups stay. `if_match` means the same as in `cancel`. Raises TaskNotFound,
        TaskNotFinished, InvalidParams or PreconditionFailed.
        """
        task_id = pointing.identify(task, key, self._tenant)
        again = requests.run_again(task, task_id, everything=False, params=params, if_match=if_match, known=self._known)
        return await self._act("retry", f"task:{task_id}", again)

    async def rerun(self, task: TaskRef, key: str, *, if_match: str | None = None) -> Task:
        """Let a finished task run again from the start, even if it succeeded; return the task.

        `if_match` means the same as in `cancel`. Raises TaskNotFound, TaskNotFinished or PreconditionFailed.
        """
        task_id = pointing.identify(task, key, self._tenant)
        again = requests.run_again(task, task_id, everything=True, if_match=if_match)
        return await self._act("rerun", f"task:{task_id}", again)

    async def update_option(
        self, task: TaskRef, key: str, *, if_match: str | None = None, **options: Unpack[TaskOptions]
    ) -> Task:
        """Change some of a task's options; return the task.

        ping_interval takes effect at the next ping. The other options take effect at the next claim. If
        specific_worker_ids no longer admits the worker of a run, that run ends at once. `if_match` means the same as in
        `cancel`.
        """
        task_id, changes = pointing.identify(task, key, self._tenant), with_new_names(options)
        said = action_requests.said(in_documents(changes))
        change = requests.update_option(task_id, changes, if_match)
        return await self._act("update", f"task:{task_id}", change, said)

    async def remove(self, task: TaskRef, key: str, *, if_match: str | None = None) -> bool:
        """Remove a task, whatever its status; return whether the task existed. If the task runs, the run ends.

        `if_match` means the same as in `cancel`; with it, a task that does not exist raises TaskNotFound.
        """
        task_id = pointing.identify(task, key, self._tenant)
        return await self._act("remove", f"task:{task_id}", requests.remove(task_id, if_match))

    async def purge(
        self,
        *,
        older_than: timedelta | float | None = None,
        limit: int = 0,
        dry_run: bool = False,
        **criteria: Unpack[TaskCriteria],
    ) -> int:
        """Remove finished tasks, at most `limit` (0: all); return their number. With `dry_run`, only count them.

        `status`: SUCCESS, FAIL or CANCELED (default: all three), or INIT for tasks that wait. `older_than` (a timedelta
        or seconds): the least time since the task finished. For a task that waits, it is the time since the task was
        created. The purge removes tasks in batches. It pauses for half of the time, so that others can use the
        database. Raises InvalidInput.
        """
        purging = control_requests.prepare(criteria, older_than, limit, self._tenant)
        if dry_run:
            return await self._run(purging.count())
        log = self._actions
        action_id = await self._run(log.begin("purge", "tasks", purging.said))
        try:
            while purging.has_more:
                begun = time.monotonic()
                await self._run(purging.batch())
                await self._sleep(purging.pause(time.monotonic() - begun))
        except MtaskError as error:
            await self._run(log.end(action_id, f"{type(error).__name__}: {purging.removed} removed"))
            raise
        await self._run(log.end(action_id, f"{DONE}: {purging.removed} removed"))
        return purging.removed

    async def plan_bulk(
        self,
        action: str,
        *,
        within: str | None = None,
        **criteria: Unpack[PageCriteria],
    ) -> BulkPlan:
        """Plan to "cancel", "retry" or "remove" all tasks that match; return their number and a plan for `run_bulk`.

        This changes nothing. The number is exact up to 10,000. The plan can be run for ten minutes. It takes the tasks
        that ended before now, or that were created before now if their status is open. "retry" takes FAIL and CANCELED,
        "cancel" takes open tasks. At least one criterion must be given. The criteria mean the same as in `find_page`.
        `within` restricts the change to keys with this beginning; running the plan takes the same `within`. Raises
        InvalidInput.
        """
        restricted = bulk_requests.within_of(self._tenant, within)
        wanted = checked_criteria(PageCriteria, criteria)
        return await self._run(bulk_requests.plan(action, wanted, restricted, self._owner))

    async def begin_bulk(self, plan: str, *, within: str | None = None, action: str | None = None) -> Bulk:
        """Store the bulk change of a plan, once, and change no task yet; `carry_bulk` does.

        Raises InvalidInput, also if the plan is for another `action`.
        """
        begun = await self._run(bulk_requests.begin(plan, bulk_requests.within_of(self._tenant, within), action))
        intent, detail = bulk_requests.logged_as(begun)
        await self._run(self._actions.begin(intent, "tasks", detail, begun.bulk_id))
        return begun

    async def carry_bulk(self, bulk_id: str) -> Bulk:
        """Carry out a bulk change, and return it once all its tasks are changed.

        If another process carries it out, wait for its end, and go on in its place if it dies. The change is made in
        batches, with a pause after each, so that others can use the database. Raises BulkNotFound.
        """
        carrying = bulk_requests.Carrying(bulk_id)
        while True:
            begun = time.monotonic()
            found = await self._run(carrying.step())
            if found.is_over:
                await self._run(self._actions.end(bulk_id, f"{DONE}: {found.done_cnt} changed"))
                return found
            await self._sleep(carrying.pause(time.monotonic() - begun))

    async def run_bulk(self, plan: str, *, within: str | None = None) -> Bulk:
        """Carry out the bulk change of a plan, and return it once all its tasks are changed.

        It is `begin_bulk` and `carry_bulk`: a plan that is run twice is carried out once. Raises InvalidInput.
        """
        return await self.carry_bulk((await self.begin_bulk(plan, within=within)).bulk_id)

    async def bulk(self, bulk_id: str) -> Bulk:
        """Return a bulk change and how far it has come; raise BulkNotFound."""
        return await self._run(bulk_requests.get(bulk_id))

    async def bulks(self, *, limit: int = 100, within: str | None = None) -> list[Bulk]:
        """Return the newest bulk changes, at most `limit`. They are kept for seven days.

        With `within`, return only those that were restricted to keys with this beginning.
        """
        restricted = bulk_requests.within_of(self._tenant, within)
        return await self._run(bulk_requests.every(views.check_limit(limit), restricted))

    async def stats(self, *, most: int | None = None) -> list[views.StatRow]:
        """Return the number of tasks by queue, name and status, and the reasons why no worker can take due tasks.

        This reads every task. With `most`, it reads at most that number of each status, and says in `is_more` whether
        a count is incomplete. A client of a tenant always reads all tasks of its tenant.
        """
        return await self._run(backlog.stats(None if most is None else pages.check_most(most), self._owner))

    async def queues(self, *, most: int = counting.MOST) -> list[QueueCounts]:
        """Return the tasks of each queue by status, counted up to `most`, and when the oldest of its tasks is due."""
        return await self._run(for_everybody(by_queue.queues(pages.check_most(most))))

    async def workers(self, *, live_only: bool = True) -> list[WorkerDocument]:
        """Return the live workers. With `live_only=False`, return all workers on record."""
        return await self._run(requests.list_workers(live_only=live_only))

    async def metrics(self) -> FleetMetrics:
        """Return what metrics tell of all workers and queues.

        Workers store what they counted every 10 s. The counts of tasks are shared by all who ask, and counted anew
        after a pause of 300 times the time that the counting took, 2 s at least.
        """
        return await self._run(metric_requests.read())

    async def stop_worker(self, worker_id: str) -> WorkerDocument:
        """Ask a worker to stop gracefully; raise WorkerNotFound."""
        order = requests.control_worker(worker_id, {"stop": True})
        return await self._act("stop worker", f"worker:{worker_id}", order)

    async def set_worker(self, worker_id: str, *, concurrency: int | None) -> WorkerDocument:
        """Change the number of handlers that a worker may run at once.

        0 pauses the worker. None restores the number with which the worker started. Raises WorkerNotFound or
        InvalidInput.
        """
        order = requests.control_worker(worker_id, {"concurrency": concurrency})
        return await self._act("set worker", f"worker:{worker_id}", order, f"concurrency={concurrency}")

    # --- flows ----------------------------------------------------------------------------------------------

    async def flow(self, key: str) -> FlowState:
        """Return a flow with all its steps, their statuses and times; raise FlowNotFound.

        Params and returns are not read: use `get` or `find` for these.
        """
        return await self._run(flow_requests.state(self._key(key)))

    async def flows(self, *, prefix: str | None = None, limit: int = 100) -> list[FlowRow]:
        """Return flows with the numbers of their steps by status, the newest first: at most `limit`, or all if it is 0.

        `prefix` is the beginning of the flows' keys. A flow whose first step was removed is left out.
        """
        return await self._run(flow_requests.every(prefix, limit, self._tenant))

    async def wait_flow(self, key: str, *, timeout: timedelta | float | None = None) -> FlowState:
        """Wait until a flow has ended; return the flow. `timeout`: a timedelta or seconds.

        A flow ends even if steps fail: see `FlowState.failed`. Raises FlowWaitTimeout or FlowNotFound.
        """
        flow_key = self._key(key)
        waiting = flow_requests.wait(flow_key, timeout)
        began = time.monotonic()
        happening: AsyncEvents | None = None
        try:
            while True:
                elapsed = time.monotonic() - began
                if waiting.is_to_look and await self._run(waiting.look(elapsed)):
                    break
                pause = waiting.timing.next_pause(elapsed)
                if pause is None:
                    raise waiting.give_up()
                patience = waiting.patience(elapsed)
                if patience is None:
                    await self._sleep(pause)
                    waiting.look_again()
                    continue
                try:
                    if happening is None:
                        # The client looks once more after the stream is open, so that no end is missed.
                        wanted = event_requests.follow_flow(flow_key)
                        happening = events_aio.AsyncEvents(self._store, wanted, self._make_ready)
                        await happening.open()
                        waiting.look_again()
                    else:
                        waiting.note(await happening.poll(patience), elapsed)
                except (AccessDenied, OperationFailed):
                    waiting.timing.can_follow = False  # the user lacks the right to open a change stream
        finally:
            if happening is not None:
                await happening.close()
        return await self.flow(key)

    async def cancel_flow(self, key: str, *, everything: bool = False) -> ChangedFlow:
        """Cancel the open steps of a flow, and ask the workers of its running steps to stop; raise FlowNotFound.

        The clean-up stays: steps with on_failed="run" that depend on others run when their dependencies have ended.
        With `everything`, they are canceled, too. A retry of another step does not open a canceled step again;
        `retry_flow` does.
        """
        flow_key = self._key(key)
        change = flow_requests.cancel(flow_key, everything=everything)
        return await self._act("cancel flow", f"flow:{flow_key}", change, "everything" if everything else "")

    async def retry_flow(self, key: str) -> ChangedFlow:
        """Let all FAIL and CANCELED steps of a flow run again; raise FlowNotFound.

        Each of them waits for its dependencies as before. Steps that succeeded stay as they are.
        """
        flow_key = self._key(key)
        return await self._act("retry flow", f"flow:{flow_key}", flow_requests.retry(flow_key))

    # --- queues and task names ------------------------------------------------------------------------------

    async def pause(
        self,
        *,
        queue: str | None = None,
        name: str | None = None,
        tenant: str | None = None,
        until: datetime | timedelta | float | None = None,
        timeout: timedelta | float | None = CONFIRMATION,
    ) -> Control:
        """Stop workers from claiming tasks of this queue, name or tenant until `resume`. Current runs continue.

        With `until`, an instant or so long from now (a timedelta or seconds), the pause ends then by itself, by the
        server's clock. Raises WorkersTooOld if live workers do not know such pauses.

        The call returns once every live worker that serves the queue or name has confirmed the pause. By then, all
        claims under way have ended, and no more claims follow. If a worker has not confirmed within `timeout` (a
        timedelta or seconds; None: no limit), the call raises ControlUnconfirmed. The pause stays in force.
        """
        asked = control_requests.pause(queue, name, tenant, paused=True, timeout=timeout, until=until)
        return await self._put_control(asked)

    async def resume(
        self,
        *,
        queue: str | None = None,
        name: str | None = None,
        tenant: str | None = None,
        timeout: timedelta | float | None = CONFIRMATION,
    ) -> Control:
        """Let workers claim tasks of this queue, name or tenant again. Raises ControlUnconfirmed as `pause` does.

        What a RateLimited of a handler holds back may start at once, too.
        """
        return await self._put_control(control_requests.pause(queue, name, tenant, paused=False, timeout=timeout))

    async def limit(
        self,
        queue: str | None = None,
        *,
        tenant: str | None = None,
        concurrency: int | None = None,
        rate: control_requests.Rate | None = None,
        key_concurrency: int | None = None,
        key_rate: control_requests.Rate | None = None,
        tenant_concurrency: int | None = None,
        tenant_rate: control_requests.Rate | None = None,
        timeout: timedelta | float | None = CONFIRMATION,
    ) -> Control:
        """Limit the runs of a queue's tasks, or of a tenant's tasks in all queues, counted over all workers.

        The call replaces all limits of the queue or of the tenant: a limit that is not given is removed.
        `concurrency`: the most runs at once. `rate`: a pair (starts, window), the most starts in any window of that
        length (a timedelta or seconds). `key_concurrency` and `key_rate`: the same limits for the tasks of each
        limit_key in the queue. `tenant_concurrency` and `tenant_rate`: the same for the tasks of each tenant in the
        queue. Runs that began before the call are not counted. The call returns once every live worker has confirmed.
        Raises ControlUnconfirmed as `pause` does, InvalidInput, or WorkersTooOld.
        """
        bounds = control_requests.limit(
            queue,
            concurrency,
            rate,
            key_concurrency,
            key_rate,
            timeout,
            tenant_concurrency=tenant_concurrency,
            tenant_rate=tenant_rate,
            tenant=tenant,
        )
        return await self._put_control(bounds)

    async def set_fair(
        self,
        queue: str,
        fair: bool = True,
        *,
        timeout: timedelta | float | None = CONFIRMATION,
    ) -> Control:
        """Let the tenants of a queue take turns, or let them no longer.

        With fair turns, a tenant with very many waiting tasks gets no more starts than each of the others, as long as
        those have tasks. Priorities order the tasks within one tenant only. The tasks of no tenant have their turn
        like those of one more tenant. The call returns once every live worker that serves the queue has confirmed.
        Raises ControlUnconfirmed as `pause` does, InvalidInput, or WorkersTooOld.
        """
        return await self._put_control(control_requests.fair(queue, is_fair=fair, timeout=timeout))

    async def keep(
        self,
        queue: str,
        *,
        success: int | None = None,
        fail: int | None = None,
        timeout: timedelta | float | None = CONFIRMATION,
    ) -> Control:
        """Keep only the newest finished tasks of a queue.

        `success` is the number of SUCCESS tasks to keep. `fail` is the number of FAIL and CANCELED tasks to keep,
        counted together. 0 keeps none, None keeps all. Workers remove the older tasks within about a minute.
        Independently of these numbers, the options retain_success and retain_fail also remove tasks. The call
        returns once every live worker has confirmed. From then on, no worker removes tasks by the earlier numbers.
        Raises ControlUnconfirmed as `pause` does, or InvalidInput.
        """
        return await self._put_control(control_requests.keep(queue, success, fail, timeout))

    async def set_breaker(
        self,
        queue: str,
        failures: int | None,
        *,
        wait: timedelta | float = 30.0,
        timeout: timedelta | float | None = CONFIRMATION,
    ) -> Control:
        """Hold back a queue after this number of failures in a row, in one worker. None removes the breaker.

        After `wait` (a timedelta or seconds), one task is tried: its success lets all go on, its failure doubles the
        wait, up to ten minutes. `resume` lets all go on at once. A `Fail` and wrong params are no failures here. Raises
        ControlUnconfirmed as `pause` does, or InvalidInput.
        """
        return await self._put_control(breaker_requests.breaker(queue, failures, wait, timeout))

    async def controls(self) -> list[Control]:
        """Return all controls of queues, task names and tenants, sorted by id, even if they are no longer in force."""
        return await self._run(control_requests.every())

    async def permits(self, queue: str) -> list[PermitUse]:
        """Return how many permits of each limit of a queue are in use, and who waits for one.

        The limit of the queue comes first, then those of its limit_keys and tenants: at most 20 of these that are in
        use, beginning with those for which most tasks wait. The limit of a tenant in all queues is not of the queue.
        Raises InvalidInput.
        """
        return await self._run(limits.in_use(queue))

    async def _put_control(self, asked: control_requests.Change) -> Control:
        begun = time.monotonic()
        # The entry says what was stored: whether all workers confirm it, is known up to a minute later.
        control = await self._act(asked.intent, f"{asked.kind}:{asked.target}", asked.write(), asked.said)
        while unconfirmed := await self._run(asked.unconfirmed(control)):
            pause = asked.waiting.next_pause(time.monotonic() - begun)
            if pause is None:
                raise asked.give_up(control, unconfirmed)
            await self._sleep(pause)
        return control

    # --- handlers -------------------------------------------------------------------------------------------

    async def handlers(self) -> list[RegisteredHandler]:
        """Return the handlers that workers have registered, by name: their versions, and which live workers have them.

        Malformed documents are left out, and the log warns of them.
        """
        return await self._run(registry.every())

    async def get_handler(self, name: str) -> RegisteredHandler | None:
        """Return what is registered under this name; None: nothing is. Raises InvalidName."""
        return await self._run(registry.get(name))

    async def look_up(self, names: Iterable[str]) -> publication.Declarations | None:
        """Find out what the handlers of these names declare, as a publish by name does; return all that is known.

        None: the client has registry=False. Raises subclasses of DatabaseError.
        """
        known = self._known
        if known is not None and (lacking := known.lacking(publication.TaskSpec(name) for name in names)):
            await self._run(known.learn(lacking))
        return known

    def unknown_name(self, name: str) -> UnknownTaskName | None:
        """Return the warning about a name that was just published; None: a handler has it, or nobody can tell."""
        return None if self._known is None else self._known.warning_of(name)

    # --- schedules ------------------------------------------------------------------------------------------

    @overload
    async def add_schedule(
        self,
        schedule_id: str,
        task: Call[Any],
        when: When,
        *,
        if_exists: IfExists = "update",
        session: Any = None,
        **given: Unpack[ScheduleArguments],
    ) -> Schedule: ...

    @overload
    async def add_schedule(
        self,
        schedule_id: str,
        task: TaskRef,
        when: When,
        params: Any = None,
        *,
        if_exists: IfExists = "update",
        session: Any = None,
        **given: Unpack[ScheduleArguments],
    ) -> Schedule: ...

    async def add_schedule(
        self,
        schedule_id: str,
        task: TaskRef | Call[Any],
        when: When,
        params: Any = None,
        *,
        if_exists: IfExists = "update",
        session: Any = None,
        **given: Unpack[ScheduleArguments],
    ) -> Schedule:
        """Store a schedule, with which workers publish a task again and again; return the stored schedule.

        `when` gives the times of the firings: a crontab of five fields ("*/5 * * * *"), an interval (a timedelta), a
        single time (an aware datetime), or `Cron(...)`. `timezone` is the time zone of a crontab (default: UTC). No
        firing comes before `start_time` or after `end_time`. `jitter` (timedelta or seconds) delays each task by a
        random time of at most that length. `catch_up` decides which firings are made up if some were missed while no
        scheduler ran: "none", only the "last" one, or "all" (but only the newest `catch_up_limit`). overlap="skip"
        skips a firing while the task of the last firing has not finished. With `paused`, the schedule does not fire
        until it is resumed. `queue` and the options are those of the tasks. `if_exists` decides about an existing
        schedule: "update" changes it, "keep" leaves it as it is, "reject" raises ScheduleExists. An update that does
        not change the times keeps the next firing. No update changes the tenant: a schedule of another tenant, or of
        none, raises ScheduleExists, and a client of all that names no `tenant` keeps the stored one. With the `session`
        of a transaction that the caller has begun, the schedule is stored inside that transaction. The action log tells
        of it also if the transaction is aborted.

        Raises subclasses of InvalidInput, ScheduleExists, or SchemaMismatch if the stored schedule is malformed.
        """
        spec = scheduling.ScheduleSpec(schedule_id, task, when, params, **given)
        preparation = publication.Preparation(partial(spec.prepare, self._tenant), [spec], self._known)
        definition = await self._completed(preparation)
        change = scheduling.put(definition, if_exists)
        return await self._act("add schedule", f"schedule:{schedule_id}", change, definition.said, session)

    async def get_schedule(self, schedule_id: str) -> Schedule:
        """Return a schedule; raise ScheduleNotFound, or SchemaMismatch if it is malformed."""
        return await self._run(scheduling.get(schedule_id))

    async def schedules(self) -> list[Schedule]:
        """Return all schedules, sorted by id. Malformed schedules are left out, and the log warns of them."""
        return await self._run(scheduling.every())

    async def pause_schedule(self, schedule_id: str) -> Schedule:
        """Stop firing a schedule until it is resumed. Raises ScheduleNotFound."""
        change = scheduling.set_paused(schedule_id, paused=True)
        return await self._act("pause schedule", f"schedule:{schedule_id}", change)

    async def resume_schedule(self, schedule_id: str) -> Schedule:
        """Let a schedule fire again; raise ScheduleNotFound. Firings missed during the pause are not made up."""
        change = scheduling.set_paused(schedule_id, paused=False)
        return await self._act("resume schedule", f"schedule:{schedule_id}", change)

    async def remove_schedule(self, schedule_id: str) -> bool:
        """Remove a schedule; return whether it existed. The tasks that the schedule has published stay."""
        return await self._act("remove schedule", f"schedule:{schedule_id}", scheduling.remove(schedule_id))

    async def next_firings(self, schedule_id: str, count: int = 5) -> list[datetime]:
        """Return the next firings of a schedule, in UTC; raise ScheduleNotFound.

        A schedule that is paused or over has no next firings.
        """
        scheduling.check_count(count)
        schedule = await self._run(scheduling.get(schedule_id))
        return await self._compute(scheduling.firings_of, schedule, count)

    # --- the logs of runs -----------------------------------------------------------------------------------

    async def logs(self, task: TaskRef, key: str, *, run_id: str | None = None) -> list[RunLog]:
        """Return the log lines of a task's newest 20 runs, or of one run, the first run first.

        Workers with --keep-logs keep the last lines of each run for some days, also after the task is removed. A line
        is there when its run has ended, or a few seconds after it was written (docs/logs.md). Raises InvalidInput, and
        TaskNotFound if there is neither a log nor a task.
        """
        task_id = pointing.identify(task, key, self._tenant)
        return await self._run(run_log_requests.of_task(task_id, run_id, self._owner))

    # --- data keys ------------------------------------------------------------------------------------------

    async def create_data_key(self, *, queue: str | None = None, tenant: str | None = None) -> KeyRow:
        """Make the data key of a queue or of a tenant, in the key vault. Tasks are encrypted with it from now on.

        Clients and workers that run already notice the new key within a few seconds. Raises DataKeyExists,
        InvalidInput and subclasses of DatabaseError.
        """
        name = name_of_key(queue, tenant)
        made: KeyRow = await self._act("create data key", f"key:{name}", codec.ask("create", name))
        return made

    async def data_keys(self) -> list[KeyRow]:
        """Return the data keys, also removed ones, sorted by name. The keys themselves stay in the key vault."""
        found: list[KeyRow] = await self._run(codec.ask("every"))
        return found

    async def remove_data_key(self, *, queue: str | None = None, tenant: str | None = None) -> KeyRow:
        """Remove the data key of a queue or of a tenant: nobody can read again what it has encrypted.

        Running processes still use the key for up to a minute. Backups of the key vault still hold it. Raises
        DataKeyNotFound, InvalidInput and subclasses of DatabaseError.
        """
        name = name_of_key(queue, tenant)
        removed: KeyRow = await self._act("remove data key", f"key:{name}", codec.ask("remove", name))
        return removed

    # --- the action log -------------------------------------------------------------------------------------

    async def actions(
        self,
        *,
        actor: str | Sequence[str] | None = None,
        intent: str | Sequence[str] | None = None,
        target: str | Sequence[str] | None = None,
        since: datetime | None = None,
        limit: int = 100,
        after: Action | str | None = None,
    ) -> list[Action]:
        """Return what was changed by whom, the newest first: at most `limit` actions, or all if it is 0.

        Clients, the command line and the web server write down what they change, for 90 days; publishing and the work
        of workers are not in this log. `target` is "task:NAME:KEY" or "queue:mail", for example. `since` is the instant
        of the oldest action. `after` is the last action of the former page, or its id. Raises InvalidInput.
        """
        return await self._run(
            action_requests.find(actor=actor, intent=intent, target=target, since=since, limit=limit, after=after)
        )

    async def _act(
        self, intent: Intent, target: str, operation: Operation[T], detail: str = "", session: Any = None
    ) -> T:
        """Run an operation, and write it down in the action log."""
        return await self._run(self._actions.around(intent, target, operation, detail), session)

    def _wanted(self, declared: type, criteria: Mapping[str, Any]) -> dict[str, Any]:
        return checked_criteria(declared, criteria, self._tenant, self._owner)

    def _key(self, key: str) -> str:
        return stored_key(self._tenant, key)

    async def server_time(self) -> datetime:
        """Return the current time of the server's clock."""
        return await self._run(diagnosis.server_time())

    async def inspect(self, task_id: str) -> explain.Inspected:
        """Return a task with the reasons why it waits, or a malformed document with its fault; raise TaskNotFound."""
        return await self._run(explain.inspect(task_id, self._owner))

    async def diagnose(self, *, patience: timedelta = OVERDUE) -> list[Finding]:
        """Examine the server, the collections, the workers and the tasks; return the findings. This changes nothing.

        A problem is returned as a finding and raises no error. Due tasks that no worker can take are a WARN. They are a
        FAIL if one of them has waited for longer than `patience`.
        """
        try:
            await self._reach()
        except DatabaseError as error:
            return [doctor.unreachable(error)]
        return await self._execute(doctor.examine(self.database_name, patience))
