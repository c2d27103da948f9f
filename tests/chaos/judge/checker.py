"""The checker: reads the history of a run under faults and says what it proves.

`python -m tests.chaos.judge.checker FOLDER` prints the verdict, and exits with 1 unless it is clean. Nothing is taken
on trust: every version of every task is derived anew by the rules, and compared with what publishers were told, what
handlers did and what their transactions wrote. What cannot be read, or was not all seen, proves nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from bson.errors import BSONError

from tests.chaos.history import Call, Clock, Document, Fault, History, Note, Version
from tests.chaos.judge.chain import Chain
from tests.chaos.judge.ends import EndJudge
from tests.chaos.judge.executors import ExecutorJudge, Life
from tests.chaos.judge.handlers import HandlerJudge
from tests.chaos.judge.logs import judge_logs
from tests.chaos.judge.order import OrderJudge
from tests.chaos.judge.queues import FiringJudge, Limit, LimitJudge, judge_pauses, paused_names
from tests.chaos.judge.record.asked import Asked
from tests.chaos.judge.record.course import Course
from tests.chaos.judge.record.verdict import Verdict
from tests.chaos.judge.releases import judge_misfits
from tests.chaos.load.order import ORDERED, QUEUES
from tests.chaos.load.tasks import ABORTING

T = TypeVar("T")
DEPOSITING = frozenset({"deposit", "deposit_plain", "deposit_isolated", ABORTING})
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OSError, BSONError)


def check(history: History, depositing: Collection[str] = DEPOSITING) -> Verdict:
    """Judge a history. `depositing` names the handlers that write one effect into their run's transaction."""
    verdict = Verdict()
    facts = _facts(history, verdict)
    if facts is None:
        return verdict
    clock = Clock(facts["epoch"])
    faults = list(_readable(lambda: history.faults(), "faults", _is_fault, verdict))
    asked = Asked(_readable(history.calls, "calls", _is_call, verdict), clock)
    limits, schedules = _limits(facts, verdict), _schedules(facts, verdict)
    apart = (
        {limit.name for limit in limits}
        | set(QUEUES)
        | paused_names(faults)
        | {schedule.name for schedule in schedules}
    )
    course = Course(verdict.figures, clock, facts["started"], faults, apart)
    for schedule in schedules:
        schedule.ask(asked)
    chain = Chain(verdict, asked, course)
    for version in _readable(history.versions, "versions", _is_version, verdict):
        chain.follow(version)
    chain.conclude()
    handlers = HandlerJudge(verdict, clock, chain.runs, depositing)
    notes = _readable(history.notes, "notes", _is_note, verdict)
    handlers.read(notes, verdict.figures.timeline, clock.epoch + facts["started"])
    handlers.judge()
    handlers.judge_effects(_readable(history.effects, "effects", _is_document, verdict))
    handlers.measure_overtime(faults)
    _judge_executors(facts, faults, asked, chain, handlers, clock, verdict)
    chain.round_judge.conclude(handlers.saw)
    chain.owed_judge.judge_handlers(handlers.added, handlers.going_on, chain.runs, chain.tasks, clock)
    ends = EndJudge(verdict, asked, chain.tasks)
    ends.judge_documents(_readable(history.documents, "documents", _is_document, verdict))
    ends.judge_calls()
    for schedule in schedules:
        schedule.judge(chain.tasks)
    judge_pauses(verdict, faults, chain.runs, chain.tasks)
    judge_logs(verdict, history.logs())
    with _doubting("the ends of processes", verdict):
        judge_misfits(verdict, chain.runs.values(), facts.get("ends", ()), clock)
    _judge_limits(limits, history, facts, chain, handlers, verdict)
    _judge_order(facts, faults, asked, chain, handlers, clock, verdict)
    course.conclude()
    _count(verdict, chain, asked)
    _doubt(verdict, history, facts, chain, asked)
    return verdict


# --- reading --------------------------------------------------------------------------------------------------


def _facts(history: History, verdict: Verdict) -> Document | None:
    try:
        facts = history.facts()
        readable = all(_is_instant(facts[name]) for name in ("epoch", "started"))
    except _UNREADABLE as error:
        verdict.doubt(f"facts.json cannot be read: {type(error).__name__}: {error}")
        return None
    if not readable:
        verdict.doubt("facts.json holds no epoch, or not when the run began")
        return None
    return facts


def _readable(
    read: Callable[[], Iterable[T]], what: str, is_whole: Callable[[T], bool], verdict: Verdict
) -> Iterator[T]:
    """Yield what can be read, up to the first that cannot: with that, nothing is proven."""
    count = 0
    try:
        for record in read():
            if not is_whole(record):
                verdict.doubt(f"{what}: record {count + 1} is garbled: {str(record)[:200]}")
                return
            count += 1
            yield record
    except _UNREADABLE as error:
        verdict.doubt(f"{what} cannot be read after {count} records: {type(error).__name__}: {error}")


@contextmanager
def _doubting(what: str, verdict: Verdict) -> Iterator[None]:
    """Doubt the history if these facts cannot be read."""
    try:
        yield
    except _UNREADABLE as error:
        verdict.doubt(f"the facts of {what} cannot be read: {type(error).__name__}: {error}")


def _is_instant(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_call(call: Call) -> bool:
    texts = isinstance(call.call_id, str) and isinstance(call.task_id, str) and isinstance(call.operation, str)
    return texts and _is_instant(call.sent) and (call.told is None or _is_instant(call.told))


def _is_note(note: Note) -> bool:
    texts = (note.event, note.task_id, note.run_id, note.worker_id)
    return all(isinstance(text, str) for text in texts) and _is_instant(note.at)


def _is_fault(fault: Fault) -> bool:
    return _is_instant(fault.start) and _is_instant(fault.end) and isinstance(fault.detail, dict)


def _is_version(version: Version) -> bool:
    return isinstance(version.at, datetime) and isinstance(version.document, dict | None)


def _is_document(document: Any) -> bool:
    return isinstance(document, dict)


# --- what holds for queues --------------------------------------------------------------------------------------


def _schedules(facts: Document, verdict: Verdict) -> list[FiringJudge]:
    try:
        return [FiringJudge(verdict, schedule) for schedule in facts.get("schedules", ())]
    except _UNREADABLE as error:
        verdict.doubt(f"the facts of schedules cannot be read: {type(error).__name__}: {error}")
        return []


def _limits(facts: Document, verdict: Verdict) -> list[Limit]:
    try:
        return [Limit(**limit) for limit in facts.get("limits", ())]
    except _UNREADABLE as error:
        verdict.doubt(f"the facts of limits cannot be read: {type(error).__name__}: {error}")
        return []


def _judge_limits(
    limits: Sequence[Limit], history: History, facts: Document, chain: Chain, handlers: HandlerJudge, verdict: Verdict
) -> None:
    judge = LimitJudge(verdict, chain.runs, chain.tasks, handlers.work)
    drained_at = facts.get("drained_at")
    judge.judge(limits, facts["epoch"] + drained_at if _is_instant(drained_at) else None)
    if limits and not history.places_path.exists():
        verdict.doubt("the places at the end are missing")
    # In the end, the queues whose order is judged are not full any more, and only a full one takes permits back that
    # nobody has returned.
    places = _readable(history.places, "places", _is_document, verdict)
    judge.judge_places(place for place in places if not _is_of_order(place))


def _is_of_order(place: Document) -> bool:
    return str(place.get("_id")).startswith(tuple(f'["{queue}"' for queue in ORDERED))


def _judge_order(
    facts: Document,
    faults: Sequence[Fault],
    asked: Asked,
    chain: Chain,
    handlers: HandlerJudge,
    clock: Clock,
    verdict: Verdict,
) -> None:
    with _doubting("the order", verdict):
        runs, works, is_hasty = chain.runs, handlers.work, bool(facts.get("is_once"))
        judge = OrderJudge(verdict, clock, faults, asked, chain.tasks, runs, works, is_hasty=is_hasty)
        judge.judge(facts.get("order", ()), facts.get("ends", ()))


# --- executors --------------------------------------------------------------------------------------------------


def _judge_executors(
    facts: Document,
    faults: Sequence[Fault],
    asked: Asked,
    chain: Chain,
    handlers: HandlerJudge,
    clock: Clock,
    verdict: Verdict,
) -> None:
    with _doubting("executors", verdict):
        judge = ExecutorJudge(verdict, clock, chain.runs, handlers.work, faults, facts.get("isolated", ()))
        workers = [Life(end["pid"], end["began"], end["at"]) for end in facts.get("ends", ())]
        judge.judge(workers, asked.changed, facts.get("processes_left", 0))


# --- summing up -------------------------------------------------------------------------------------------------


def _count(verdict: Verdict, chain: Chain, asked: Asked) -> None:
    figures = verdict.figures
    figures.versions = chain.version_count
    figures.runs = len(chain.runs)
    for run in chain.runs.values():
        figures.runs_by_status[run.status.value] = figures.runs_by_status.get(run.status.value, 0) + 1
    figures.calls = {operation: dict(answers) for operation, answers in asked.answers.items()}


def _doubt(verdict: Verdict, history: History, facts: Document, chain: Chain, asked: Asked) -> None:
    """Note what stands against the proof, however well all looks."""
    gaps = facts.get("observer_gaps")
    if gaps is None:
        verdict.doubt("the observer did not say whether it saw everything")
    elif gaps != 0:
        verdict.doubt(f"the observer may have missed versions: {gaps} gaps")
    if not chain.version_count:
        verdict.doubt("no version of any task was seen")
    if not asked.count:
        verdict.doubt("nothing was asked for")
    for name, path in {"documents": history.documents_path, "effects": history.effects_path}.items():
        if not path.exists():
            verdict.doubt(f"the {name} at the end are missing")
    for name, code in (facts.get("exit_codes") or {}).items():
        if code:
            verdict.doubt(f"worker {name} did not end in order at the end of the run: exit code {code}")
    if facts.get("not_drained") or facts.get("drained_at") is None:
        verdict.doubt(f"the backlog did not drain: {facts.get('not_drained')}")
    expected = facts.get("tasks_expected")
    if isinstance(expected, int) and len(chain.tasks) < expected:
        verdict.doubt(f"{len(chain.tasks)} tasks were seen of {expected} expected")


def main(given: Sequence[str] | None = None) -> int:
    """Print the verdict on the history in a folder."""
    arguments = sys.argv[1:] if given is None else given
    folders = [Path(argument) for argument in arguments if not argument.startswith("-")]
    if len(folders) != 1 or not folders[0].is_dir():
        print("usage: python -m tests.chaos.judge.checker [--json] FOLDER", file=sys.stderr)
        return 2
    verdict = check(History(folders[0]))
    print(json.dumps(verdict.as_dict(), indent=2) if "--json" in arguments else verdict.describe())
    return 0 if verdict.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
