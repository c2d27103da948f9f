"""The route of the log lines that workers have kept of a task's runs."""

from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel

from mtask.features.logs.rules import RunLog
from mtask.web import views
from mtask.web.access import Caller
from mtask.web.bodies import about
from mtask.web.paths import TaskKey, TaskName
from mtask.web.routes.common import TheCaller, TheClient, router
from mtask.web.schemas import says

routes = router("tasks")

RunId = Annotated[str, says("The id of a run.", minLength=1)]


class LogLineEntry(BaseModel):
    """A line of the log of a run. exception: the traceback."""

    time: str
    level: str
    logger: str
    message: str
    exception: str | None = None


class RunLogEntry(BaseModel):
    """The last lines of a run. first: the number of earlier lines that are not kept."""

    run_id: str
    task_id: str
    worker_id: str
    attempt: int
    first: int
    lines: list[LogLineEntry]
    is_over: bool
    trace_id: str | None = None
    begin_time: str
    update_time: str
    expire_time: str


class TaskLogs(BaseModel):
    """The log lines of a task's runs, the first run first."""

    runs: list[RunLogEntry]


@routes.get("/v1/tasks/{name}/{key}/logs", response_model=TaskLogs, openapi_extra=about())
async def logs(
    name: TaskName, key: TaskKey, client: TheClient, caller: TheCaller, run_id: Annotated[RunId | None, Query()] = None
) -> Any:
    """Return the log lines of a task's newest 20 runs, or of one run: the last lines that its worker has kept."""
    found = await client.logs(name, caller.stored_key(key), run_id=run_id)
    return views.answer({"runs": [_run_log(log, caller) for log in found]})


def _run_log(found: RunLog, caller: Caller) -> Any:
    """Return the kept lines of a run."""
    made = views.plain(found.model_dump(exclude={"id", "line_cnt", "schema_version", "lines"}))
    made["task_id"] = caller.shown_id(found.task_id)
    lines = [views.plain(line.model_dump(exclude_none=True)) for line in found.lines]
    for line in lines:
        line |= {name: caller.shown_text(line[name]) for name in ("message", "exception") if name in line}
    return {"run_id": found.run_id, **made, "lines": lines}
