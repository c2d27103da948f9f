"""The migration: each job that waits is moved, and each that stays is counted with the reason why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtask.arguments.publish import TaskSpec
from mtask.client.sync import Client
from mtask.contrib.agenda import rules
from mtask.contrib.agenda.jobs import Document, Jobs
from mtask.contrib.agenda.rules import Left, Move, Repeat
from mtask.errors import InvalidInput
from mtask.features.registry.client import RegisteredHandler
from mtask.features.schedules.client import ScheduleArguments, ScheduleSpec
from mtask.kernel.document.options import TaskOptions

#: The most ids of jobs that are told of those that stay for one reason.
MOST_IDS = 20


@dataclass(slots=True)
class Became:
    """How many jobs of a name became tasks, and how many schedules."""

    name: str  #: of the tasks
    tasks: int = 0
    schedules: int = 0


@dataclass(slots=True)
class Stayed:
    """How many jobs of a name stay for a reason, and the ids of the first ones."""

    count: int = 0
    ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """What became of the jobs of a collection."""

    moved: dict[str, Became] = field(default_factory=dict)  #: by the name of the job
    left: dict[tuple[str, str], Stayed] = field(default_factory=dict)  #: by the name of the job, and the reason
    #: How many schedules are in the time zone of the migration, as their jobs name none.
    zoneless: int = 0

    @property
    def moved_cnt(self) -> int:
        """The number of jobs that were moved."""
        return sum(one.tasks + one.schedules for one in self.moved.values())

    @property
    def left_cnt(self) -> int:
        """The number of jobs that stay."""
        return sum(one.count for one in self.left.values())

    def add(self, job: Mapping[str, Any], move: Move) -> None:
        """Count a job that was moved."""
        became = self.moved.setdefault(job["name"], Became(move.name))
        if move.repeat is None:
            became.tasks += 1
        else:
            became.schedules += 1
            self.zoneless += rules.names_no_zone(job, move.repeat)

    def leave(self, job: Mapping[str, Any], reason: str) -> None:
        """Count a job that stays."""
        stayed = self.left.setdefault((str(job.get("name")), reason), Stayed())
        stayed.count += 1
        if len(stayed.ids) < MOST_IDS:
            stayed.ids.append(str(job["_id"]))


class Migration:
    """Moves the jobs of one collection. It can be stopped at any moment, and begun again."""

    def __init__(self, client: Client, jobs: Jobs, names: Mapping[str, str], timezone: str) -> None:
        """`names`: those of tasks, by those of jobs. `timezone`: that of times that name none. Raises InvalidInput."""
        self._client = client
        self._jobs = jobs
        self._names = names
        self._timezone = timezone
        self._handlers: dict[str, RegisteredHandler | None] = {}
        known = jobs.names() if names else set()
        for name in names:
            if name not in known:
                there = ", ".join(map(repr, sorted(known)[:MOST_IDS])) or "none"
                raise InvalidInput(f"no job of {jobs.place} is named {name!r}; there are: {there}.", field="name")

    def run(self, *, dry_run: bool = False) -> Result:
        """Move all jobs that wait; return what became of each. With `dry_run`, move none, and tell what would be."""
        result = Result()
        for job in self._jobs.every():
            try:
                rules.move_of(job, self._names, self._timezone)
                move = self._checked(job["_id"]) if dry_run else self._moved(job["_id"])
            except Left as left:
                result.leave(job, left.reason)
                if left.reason == rules.REVIVED and not dry_run:
                    self._jobs.disable(job["_id"])
            except InvalidInput as error:
                result.leave(job, str(error))
            else:
                result.add(job, move)
        return result

    def _move_of(self, job: Document | None) -> Move:
        if job is None:
            raise Left(rules.GONE)
        return rules.move_of(job, self._names, self._timezone)

    def _moved(self, job_id: Any) -> Move:
        """Move one job, as it is now; raise Left or InvalidInput."""

        def moved(session: Any) -> Move:
            move = self._move_of(self._jobs.job(job_id, session))
            self._jobs.disable(job_id, self._published(move, session), session)
            return move

        return self._jobs.transact(moved)

    def _published(self, move: Move, session: Any) -> str:
        """Publish what becomes of a job; return what it is called."""
        if move.repeat is not None:
            schedule = self._client.add_schedule(
                move.key,
                move.name,
                move.repeat.trigger,
                move.params,
                if_exists="keep",
                session=session,
                **_when(move, move.repeat),
            )
            # A run that is overdue, or planned for another time than the cron names, is a task of its own.
            if rules.is_near(schedule.schedule_state.next_fire_time, move.next_run):
                return f"schedule {move.key}"
        published = self._client.publish(
            move.name, move.params, key=move.key, start_time=move.next_run, session=session, **_options(move)
        )
        return f"task {published.task_id}" if move.repeat is None else f"schedule {move.key}"

    def _checked(self, job_id: Any) -> Move:
        """Return what would become of one job; raise Left or InvalidInput."""
        move = self._move_of(self._jobs.job(job_id))
        handler = self._handler(move.name)
        if handler is not None and handler.declaration is not None:
            handler.declaration.bind(move.params)
        if move.repeat is None:
            TaskSpec(move.name, move.params, key=move.key, start_time=move.next_run, **_options(move)).prepare()
        else:
            ScheduleSpec(move.key, move.name, move.repeat.trigger, move.params, **_when(move, move.repeat)).prepare()
        return move

    def _handler(self, name: str) -> RegisteredHandler | None:
        if name not in self._handlers:
            self._handlers[name] = self._client.get_handler(name)
        return self._handlers[name]


def _options(move: Move) -> TaskOptions:
    return {"priority": move.priority} if move.priority else {}


def _when(move: Move, repeat: Repeat) -> ScheduleArguments:
    # Agenda runs no job while a run of it goes on.
    made: ScheduleArguments = {"start_time": repeat.start_time, "end_time": repeat.end_time, "overlap": "skip"}
    if move.priority:
        made["priority"] = move.priority
    return made
