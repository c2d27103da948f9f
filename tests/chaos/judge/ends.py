"""Judges how it all ended: whether every task that was promised has come to its end, once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from mtask.kernel.document.status import FINAL_STATUSES
from tests.chaos.judge.record.asked import PROMISES, TOLERANCE, Asked, Request
from tests.chaos.judge.record.logs import Document, Life, TaskLog
from tests.chaos.judge.record.verdict import Verdict
from tests.chaos.load.release import GROWN, PRICED
from tests.chaos.load.tasks import ABORTING, FORKING

_FINAL = {status.value for status in FINAL_STATUSES}
#: How the tasks of these handlers never end.
_NEVER = {ABORTING: "SUCCESS", FORKING: "FAIL", GROWN: "FAIL", PRICED: "FAIL"}


class EndJudge:
    """Judges calls and the documents at the end, when all versions have gone by."""

    def __init__(self, verdict: Verdict, asked: Asked, tasks: Mapping[str, TaskLog]) -> None:
        self._verdict = verdict
        self._asked = asked
        self._tasks = tasks

    def judge_documents(self, documents: Iterable[Document]) -> None:
        """Judge the tasks as they were at the end."""
        seen: set[str] = set()
        totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for document in documents:
            task_id = str(document.get("_id"))
            seen.add(task_id)
            state = document.get("task_state")
            status = str(state.get("status")) if isinstance(state, dict) else "none"
            totals[task_id.partition(":")[0]][status] += 1
            if status not in _FINAL:
                self._verdict.report("lost", task_id, "never ended", status=status)
            if _NEVER.get(task_id.partition(":")[0]) == status:
                self._verdict.report("wrong_ends", task_id, "ended as it cannot", status=status)
            self._compare(task_id, document)
        self._verdict.figures.tasks = len(seen)
        self._verdict.figures.by_name_and_status = {name: dict(counts) for name, counts in totals.items()}
        for task_id, log in self._tasks.items():
            if log.is_there and task_id not in seen:
                self._verdict.report("lost", task_id, "gone at the end, and no version told of its removal")

    def _compare(self, task_id: str, document: Document) -> None:
        log = self._tasks.get(task_id)
        if log is None or not log.is_there:
            self._verdict.doubt(f"no version was seen of {task_id}, which is there at the end")
        elif _seen(document) != _seen(log.document or {}):
            self._verdict.doubt(f"the last version seen of {task_id} is not what it was at the end")

    def judge_calls(self) -> None:
        """Judge what publishers were told."""
        for task_id, requests in self._asked.by_task.items():
            log = self._tasks.get(task_id)
            lives = log.lives if log is not None else []
            for request in sorted(requests, key=lambda r: r.told):
                start, end = request.sent - TOLERANCE, request.told + TOLERANCE
                if request.answer in PROMISES:
                    self._promised(task_id, lives, request, start, end)
                # A call that gathers changes nothing if it is sent again. `RoundJudge` judges it.
                if request.answer in ("done", "updated") and request.operation != "gather":
                    self._done(task_id, log, request, start, end)

    def _promised(self, task_id: str, lives: list[Life], request: Request, start: float, end: float) -> None:
        told = {"answer": request.answer, "sent": f"{request.sent:.3f}", "told": f"{request.told:.3f}"}
        if not any(life.meets(start, end) for life in lives):
            self._verdict.report("lost", task_id, "acknowledged, and it was not there", **told)
            return
        if request.answer != "created":
            return
        born = [life for life in lives if start <= life.created <= end]
        fresh = [life for life in born if not life.is_acknowledged]
        if fresh:
            fresh[0].is_acknowledged = True
        else:
            what = "told twice that it was created" if born else "told that it was created, and it had been there"
            self._verdict.report("double_acknowledgements", task_id, what, **told)

    def _done(self, task_id: str, log: TaskLog | None, request: Request, start: float, end: float) -> None:
        """Judge a change that was acknowledged: its write must be among the versions."""
        told = {"operation": request.operation, "sent": f"{request.sent:.3f}", "told": f"{request.told:.3f}"}
        lives = log.lives if log is not None else []
        writes = log.writes if log is not None else []
        within = [write for write in writes if start <= write.at <= end]
        match request.operation:
            case "remove":
                is_lost = any(life.created < start and (life.removed is None or life.removed > end) for life in lives)
            case "retry" | "rerun":
                is_lost = not any(write.is_reopening for write in within)
            case "cancel":
                earlier = [write for write in writes if write.at < start]
                is_lost = not any(write.is_ending for write in (*earlier[-1:], *within))
            case _:
                is_lost = not within
        if is_lost:
            self._verdict.report("lost", task_id, "a change was acknowledged, and never written", **told)


def _seen(document: Mapping[str, Any]) -> Document:
    """Return the document without what versions leave out."""
    left = {name: value for name, value in document.items() if name not in ("params", "task_state")}
    state = document.get("task_state")
    if not isinstance(state, dict):
        return {**left, "task_state": state}
    runs = state.get("worker_states")
    if isinstance(runs, list):
        runs = [{k: v for k, v in run.items() if k != "returns"} if isinstance(run, dict) else run for run in runs]
    return {**left, "task_state": {**state, "worker_states": runs}}
