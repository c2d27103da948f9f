"""The route of metrics, in the text format of Prometheus."""

import re
from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response

from mtask.client import AsyncClient
from mtask.model.documents import WorkerDocument
from mtask.web.bodies import about
from mtask.web.counts import Counts
from mtask.web.routes.common import TheHub, router

routes = router("metrics")
_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPED = re.compile(r'[\\"\n]')
_ESCAPES = {"\\": r"\\", '"': r"\"", "\n": r"\n"}


class Metrics:
    """What the metrics tell of, read at once."""

    def __init__(self, client: AsyncClient, counts: Counts) -> None:
        self._client = client
        self._counts = counts

    async def read(self) -> list[str]:
        """Return the lines of the metrics."""
        queues = (await self._counts.queues.get()).queues
        workers = await self._client.workers()
        now = await self._client.server_time()
        lines = [
            "# HELP mtask_tasks Tasks by queue and status, counted up to a bound.",
            "# TYPE mtask_tasks gauge",
            *(
                _line("mtask_tasks", n.count, queue=q.queue, status=s.value)
                for q in queues
                for s, n in q.counts.items()
            ),
            "# HELP mtask_tasks_is_bounded Whether there may be more tasks than mtask_tasks says.",
            "# TYPE mtask_tasks_is_bounded gauge",
            *(
                _line("mtask_tasks_is_bounded", int(n.is_more), queue=q.queue, status=s.value)
                for q in queues
                for s, n in q.counts.items()
            ),
            "# HELP mtask_oldest_due_seconds The time since the oldest due task was due; 0: none is due.",
            "# TYPE mtask_oldest_due_seconds gauge",
        ]
        for found in queues:
            oldest = found.oldest_preempt_time
            late = 0.0 if oldest is None else max(0.0, (now - oldest).total_seconds())
            lines.append(_line("mtask_oldest_due_seconds", late, queue=found.queue))
        return [*lines, *_of_workers(workers)]


def _of_workers(workers: list[WorkerDocument]) -> Iterator[str]:
    yield "# HELP mtask_workers Live workers by status."
    yield "# TYPE mtask_workers gauge"
    for status in sorted({worker.status for worker in workers}):
        yield _line("mtask_workers", sum(worker.status == status for worker in workers), status=str(status.value))
    yield "# HELP mtask_worker_slots Runs that all live workers can hold at once."
    yield "# TYPE mtask_worker_slots gauge"
    yield _line("mtask_worker_slots", sum(worker.concurrency for worker in workers))
    yield "# HELP mtask_worker_runs Runs that all live workers hold, as they said last."
    yield "# TYPE mtask_worker_runs gauge"
    yield _line("mtask_worker_runs", sum(worker.running_cnt for worker in workers))


def _line(metric: str, value: float, **labels: str) -> str:
    escaped = {name: _ESCAPED.sub(lambda found: _ESCAPES[found[0]], text) for name, text in labels.items()}
    named = ",".join(f'{name}="{text}"' for name, text in escaped.items())
    return f"{metric}{{{named}}} {value:g}" if named else f"{metric} {value:g}"


@routes.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}},
    openapi_extra=about(of_database=True),
)
async def metrics(request: Request, hub: TheHub) -> Any:
    """Return the metrics of the database, in the text format of Prometheus. They may be a few seconds old."""
    lines = [
        *(await request.app.state.metrics.get()),
        "# HELP mtask_web_streams Open streams of events and waits of this server.",
        "# TYPE mtask_web_streams gauge",
        _line("mtask_web_streams", hub.viewer_cnt),
    ]
    return Response("\n".join([*lines, ""]), headers={"Cache-Control": "no-store"}, media_type=_MEDIA_TYPE)
