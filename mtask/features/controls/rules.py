"""Controls: the pause, the limits, the fair turns and the retention of a queue; the pause of a task name; the pause and
the limit of a tenant. They apply to all workers.

Each queue, task name or tenant with a control has one document in the collection `controls`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from mtask.errors import InvalidInput
from mtask.kernel.document.handlers import MAX_BREAKER_FAILURES, MAX_BREAKER_WAIT_MS, MIN_BREAKER_WAIT_MS
from mtask.kernel.document.identity import check_name, check_tenant, check_text
from mtask.kernel.document.options import WHOLE, PositiveCount
from mtask.kernel.document.task import Instant, Text
from mtask.kernel.document.values import Stored

Kind = Literal["queue", "name", "tenant"]
#: The most limit_keys of a queue that wait after a RateLimited. Of more, the oldest is dropped.
MAX_LIMITED_KEYS = 1_000
#: The most runs or starts that one document of permits can count.
MAX_PERMITS = 1_000
MAX_KEPT = 1_000_000
MIN_WINDOW_MS, MAX_WINDOW_MS = 100, 86_400_000
#: The advice about a control that cannot be read, for error messages.
MENDING = (
    "set the malformed part again (mtask pause, resume, limit or keep), or mend the document by hand, or remove it: "
    "then no control applies"
)


class Limit(BaseModel):
    """A limit that counts the runs of all workers together.

    `concurrency`: the most runs at once; None: no such limit. `starts`: the most starts in any window of `window_ms`;
    None: no such limit.
    """

    model_config = ConfigDict(defer_build=True, extra="ignore", frozen=True)

    concurrency: Annotated[int, Field(ge=1, le=MAX_PERMITS), WHOLE] | None = None
    starts: Annotated[int, Field(ge=1, le=MAX_PERMITS), WHOLE] | None = None
    window_ms: Annotated[int, Field(ge=MIN_WINDOW_MS, le=MAX_WINDOW_MS), WHOLE] | None = None

    @model_validator(mode="after")
    def _starts_have_a_window(self) -> Self:
        if (self.starts is None) != (self.window_ms is None):
            raise ValueError("starts and window_ms go together")
        if self.concurrency is None and self.starts is None:
            raise ValueError("it limits nothing: give concurrency, or starts and window_ms")
        return self

    def __str__(self) -> str:
        parts = [] if self.concurrency is None else [f"{self.concurrency} at once"]
        if self.starts is not None and self.window_ms is not None:
            parts.append(f"{self.starts} starts in {self.window_ms / 1000:g} s")
        return ", ".join(parts)


class LimitedKey(Stored):
    """A limit_key whose tasks wait, because one of them has raised RateLimited."""

    limit_key: Text
    until: Instant


class BreakerRule(Stored):
    """How many failures in a row, in one worker, hold back a queue, and for how long at first."""

    failures: Annotated[int, Field(ge=1, le=MAX_BREAKER_FAILURES), WHOLE]
    wait_ms: Annotated[int, Field(ge=MIN_BREAKER_WAIT_MS, le=MAX_BREAKER_WAIT_MS), WHOLE]

    def __str__(self) -> str:
        return f"breaker: {self.failures} failures in a row, {self.wait_ms / 1000:g} s"


class Opened(Stored):
    """A breaker that has opened: no task of the target starts, but for one at a time, as a probe, after the wait."""

    by: Text  #: the worker that makes the next probe
    time: Instant  #: when it opened
    wait_ms: Annotated[int, Field(ge=1, le=MAX_BREAKER_WAIT_MS), WHOLE]
    until: Instant  #: the end of the wait: the server's clock shows it
    #: The worker `by` alone may make the probe until then. It moves this time on while it lives.
    held_until: Instant
    reason: Text | None = None  #: the last failure


class Control(Stored):
    """The control of one queue, one task name or one tenant."""

    id: Annotated[Text, Field(alias="_id")]  #: for example "queue:mail", "name:send_email" or "tenant:acme"
    kind: Kind
    target: Annotated[Text, Field(min_length=1)]
    paused: StrictBool = False
    #: The end of the pause, by the server's clock. Nobody writes at the end. None: the pause lasts until `resume`.
    until: Instant | None = None
    #: Until when the tasks wait because one of them has raised RateLimited, and until when those of limit_keys do.
    limited_until: Instant | None = None
    limited_keys: list[LimitedKey] | None = None
    limit: Limit | None = None  #: for the whole queue, or for the tenant in all queues
    key_limit: Limit | None = None  #: for the tasks of each limit_key in the queue
    tenant_limit: Limit | None = None  #: for the tasks of each tenant in the queue
    fair: StrictBool = False  #: whether the tenants of the queue take turns
    breaker: BreakerRule | None = None  #: of a queue; those of names are declared by their handlers
    opened: Opened | None = None
    #: The number of SUCCESS tasks that the queue keeps, the newest ones. None: the queue keeps all.
    keep_success: Annotated[int, Field(ge=0, le=MAX_KEPT), WHOLE] | None = None
    #: The number of FAIL and CANCELED tasks together that the queue keeps, the newest ones. None: the queue keeps all.
    keep_fail: Annotated[int, Field(ge=0, le=MAX_KEPT), WHOLE] | None = None
    #: The number of this version of the control: each change adds 1. A worker reports the revision that it has applied.
    revision: PositiveCount
    update_time: Instant
    schema_version: Literal[1]

    @model_validator(mode="after")
    def _identity_holds(self) -> Self:
        if self.id != control_id(self.kind, self.target):
            raise ValueError(f"_id {self.id!r} is not kind:target")
        of_queues = (
            self.key_limit,
            self.tenant_limit,
            self.fair or None,
            self.keep_success,
            self.keep_fail,
            self.breaker,
        )
        if self.kind == "name" and any(value is not None for value in (self.limit, *of_queues)):
            raise ValueError("limits, fair turns and retention are for queues, not for task names")
        if self.kind != "queue" and self.limited_keys:
            raise ValueError("limit_keys are of queues")
        if self.kind == "tenant" and any(value is not None for value in of_queues):
            raise ValueError("a tenant has a pause and one limit; the rest is for queues")
        return self

    def at(self, now: datetime) -> Self:
        """Return the control without the pause and the limits that are over at `now`, by the server's clock."""
        over: dict[str, Any] = {}
        if self.paused and self.until is not None and self.until <= now:
            over |= {"paused": False, "until": None}
        if self.limited_until is not None and self.limited_until <= now:
            over["limited_until"] = None
        if self.limited_keys and any(each.until <= now for each in self.limited_keys):
            over["limited_keys"] = [each for each in self.limited_keys if each.until > now] or None
        return self.model_copy(update=over) if over else self

    @property
    def holds(self) -> bool:
        """Whether no task of the target may start: it is paused, or one of them has raised RateLimited. See `at`."""
        return self.paused or self.limited_until is not None

    @property
    def said(self) -> str:
        """Why no task of the target starts, in words."""
        if self.paused:
            return "is paused"
        if self.limited_until is not None:
            return "waits, as a handler has raised RateLimited"
        return "is held back by its breaker, as too many runs have failed" if self.opened is not None else ""

    @property
    def is_held(self) -> bool:
        """Whether no task of the target starts, but for the probe of a breaker."""
        return self.holds or self.opened is not None

    @property
    def known_end(self) -> datetime | None:
        """Until when no task of the target starts; None: nobody can tell."""
        if self.paused and self.until is None:
            return None
        opened = None if self.opened is None else self.opened.until
        return max((end for end in (self.until, self.limited_until, opened) if end is not None), default=None)

    @property
    def ends(self) -> Iterable[datetime]:
        """The instants at which something of the control ends by itself."""
        keys = [each.until for each in self.limited_keys or ()]
        return [instant for instant in (self.until if self.paused else None, self.limited_until, *keys) if instant]


class Start(BaseModel):
    """One start of a run that counts against a limit on starts."""

    task_id: Text
    token: Text  #: the token of the claim
    #: The time at which the handler began. If it is not known yet: the latest possible time of the claim.
    time: Instant
    not_before: Any = None  #: an instant: the window has room from then on, so the handler waits for it


class Running(BaseModel):
    """A run that holds a permit."""

    task_id: Text
    token: Text  #: the token of the claim
    claim_by: Instant  #: the time until which the claim is valid


class Waiting(BaseModel):
    """The tasks that wait in one worker for a permit."""

    worker_id: Text
    until: Any = None  #: an instant: the entry holds until then
    has_room: Any = None  #: whether the worker had room for more runs when it asked
    #: The best tasks, at most 100: {task_id, is_single, tenant, rank}. The rank is a list: 0 if the task was
    #: interrupted, else 1; its priority, negated; its stored next_preempt_time.
    tasks: Any = None


class LastTurn(BaseModel):
    """The last turn of a tenant in a fair queue. The tenant with the smallest number is next."""

    tenant: Text  #: "" stands for the tasks of no tenant
    turn: Any = None  #: a number


class PermitPoolDocument(Stored):
    """The permits of a limited queue, of one limit_key or tenant in it, or of a tenant: a document in `places`.

    A field of the type Any may be malformed in a stored document, and some updates of a worker leave it as it is. The
    validator must not refuse these updates.
    """

    id: Annotated[
        Text, Field(alias="_id")
    ]  #: a JSON list: the queue, the limit_key and the tenant. What comes last and is null is left out.
    starts: list[Start] = Field(default_factory=list)
    #: The times of further starts: of those that have begun, except where tenants take turns.
    start_times: list[Any] | None = None
    running: list[Running] = Field(default_factory=list)
    concurrency: Any = None  #: the most runs at once, as the last request has it
    left: Any = None  #: the number of permits that the last request has left
    waiting: list[Waiting] | None = None  #: only where several workers serve the queue
    turn: Any = None  #: the number of turns so far, in a fair queue
    turns: list[LastTurn] | None = None
    call: Any = None  #: a time and how many permits were left then, and below it the workers that were called
    quiet_time: Any = None  #: the instant of the last update that calls nobody
    expire_time: Instant | None = None
    schema_version: Literal[1]


def control_id(kind: Kind, target: str) -> str:
    """Return the `_id` of a control. A kind holds no colon, so no two targets share an `_id`."""
    return f"{kind}:{target}"


def check_target(queue: object, name: object, tenant: object = None) -> tuple[Kind, str]:
    """Return the kind and the name of the target.

    Raises InvalidInput unless exactly one of `queue`, `name` and `tenant` is given.
    """
    if [queue, name, tenant].count(None) != 2:
        raise InvalidInput("say which: a queue, the name of a task, or a tenant, and only one of them.", field="queue")
    if tenant is not None:
        return "tenant", check_tenant(tenant)
    return ("queue", check_text("queue", queue)) if name is None else ("name", check_name(name))
