"""Judges a schedule: each of its nominal times was published once, by its key, and nothing else was."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from tests.faults.checks.asked import Asked
from tests.faults.checks.logs import Document, TaskLog
from tests.faults.checks.verdict import Verdict


class FiringJudge:
    """Judges what a schedule has published; its catch_up leaves nothing out, however long nobody was there."""

    def __init__(self, verdict: Verdict, schedule: Document) -> None:
        self._verdict = verdict
        self.name: str = schedule["name"]
        self._fired: int = schedule["fired"]
        interval = timedelta(seconds=schedule["interval"])
        # What it says of itself is believed only where it says that it has fired on.
        end = _instant(max(schedule["until"] + 0.001, schedule["next"]))
        self._times: dict[str, datetime] = {}
        moment = _instant(schedule["first"])
        while moment < end:
            text = moment.replace(tzinfo=None).isoformat(timespec="milliseconds" if moment.microsecond else "seconds")
            self._times[f"{self.name}:{self.name}/{text}Z"] = moment
            moment += interval

    def ask(self, asked: Asked) -> None:
        """Have its tasks count as asked for: nobody else publishes them."""
        for task_id, moment in self._times.items():
            asked.expect(task_id, moment.timestamp())

    def judge(self, tasks: Mapping[str, TaskLog]) -> None:
        """Judge its tasks, when all versions have gone by."""
        missing = [task_id for task_id in self._times if task_id not in tasks]
        found = [task_id for task_id in tasks if task_id.partition(":")[0] == self.name]
        stray = [task_id for task_id in found if task_id not in self._times]
        twice = [task_id for task_id in found if len(tasks[task_id].lives) > 1]
        for what, task_ids in {
            "a firing was never published": missing,
            "published, and it is none of its times": stray,
            "published twice": twice,
        }.items():
            for task_id in task_ids:
                self._verdict.report("wrong_firings", task_id, what)
        for task_id, moment in self._times.items():
            start = self._start_time(tasks.get(task_id))
            if start is not None and start != moment:
                self._verdict.report("wrong_firings", task_id, "due at another time", start_time=start.isoformat())
        if self._fired != len(self._times):
            what = "it says that it has fired another number of times"
            self._verdict.report("wrong_firings", self.name, what, says=self._fired, expected=len(self._times))
        self._verdict.figures.controls[f"firings of {self.name}"] = {
            "expected": len(self._times),
            "missing": len(missing),
            "twice": len(twice) + max(0, self._fired - len(self._times)),
            "stray": len(stray),
        }

    def _start_time(self, log: TaskLog | None) -> datetime | None:
        state = (log.document or {}).get("task_state") if log is not None else None
        start = state.get("start_time") if isinstance(state, dict) else None
        return start if isinstance(start, datetime) else None


def _instant(seconds: float) -> datetime:
    """Return the instant to the millisecond, as the server has it."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=round(seconds * 1000))
