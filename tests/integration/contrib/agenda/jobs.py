"""Jobs as Agenda writes them: 5.0.0 wrote those of `jobs5.json` through its API, and 6.2.6 those of `jobs6.json`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bson import ObjectId, json_util

Document = dict[str, Any]


def written_by(version: int, now: datetime) -> list[Document]:
    """Return the jobs of a version of Agenda, as if it had written them within a day from `now`."""
    text = (Path(__file__).parent / f"jobs{version}.json").read_text()
    stored = json_util.loads(text, json_options=json_util.CANONICAL_JSON_OPTIONS.with_options(tz_aware=True))
    # By whole days, so that the times of crons stay some. So none is overdue.
    by = timedelta(days=-((stored["written"] - now) // timedelta(days=1)))
    return [{name: _moved(value, by) for name, value in job.items()} for job in stored["jobs"]]


def _moved(value: Any, by: timedelta) -> Any:
    return value + by if isinstance(value, datetime) else value


def job(number: int, **fields: Any) -> Document:
    """Return a job that waits, with an id made of a number."""
    waits = {"name": "send", "data": {"n": number}, "priority": 0, "type": "normal", "nextRunAt": datetime.now(UTC)}
    return {"_id": ObjectId(f"{number:024x}"), **waits, **fields}
