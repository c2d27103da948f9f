"""The action log: writes down what a client changes, and reads it back.

An action is written down before it begins, and its result after its end, by two inserts. A single insert after the end
would lose every action whose process is killed before it: a purge of a million tasks would leave no trace. A single
insert before the action could not say what came of it, and a change of this insert would make the log one that can be
changed.

A write to the log that fails does not stop the action: in the night, a pause must not depend on it. The log of the
process warns instead.
"""

from __future__ import annotations

import logging
import os
import pwd
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args

from mtask.client import views
from mtask.database import setup
from mtask.errors import InvalidInput, MtaskError, shown
from mtask.features.audit_log import operations as actions
from mtask.features.audit_log.rules import DONE as DONE
from mtask.features.audit_log.rules import Actor, Via
from mtask.features.audit_log.rules import Intent as Intent
from mtask.features.schedules.client import whole
from mtask.kernel.document.identity import check_text, is_text
from mtask.kernel.driver.operation import Operation, T, apart, continued

logger = logging.getLogger("mtask.client")
#: Who acts in this context: a request of the web server, a command. It goes before the client's own actor. Each asyncio
#: task and each thread has its own value.
_ACTING: ContextVar[Actor | None] = ContextVar("mtask_acting", default=None)


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of the action log: who did what to what, when, and what came of it."""

    id: str
    time: datetime  #: when it began, by the server's clock, to the second
    actor: str  #: a user of the operating system, a service, or the name of a token
    via: str  #: "python", "command line" or "web"
    intent: str  #: "pause" or "retry", for example
    target: str  #: "queue:mail" or "task:send_email:42", for example
    detail: str = ""
    #: "done", or the name of the error that refused it. None: it is under way, or its process ended before it.
    result: str | None = None
    end_time: datetime | None = None


@contextmanager
def acting_as(name: str, via: Via = "python") -> Iterator[None]:
    """Let the action log name this actor for all that the block does, in this thread or asyncio task."""
    token = _ACTING.set(Actor(check_text("actor", name), via))
    try:
        yield
    finally:
        _ACTING.reset(token)


def system_user() -> str:
    """Return the name of the user that runs this process, as the operating system has it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


class ActionLog:
    """Writes the actions of one client."""

    def __init__(self, actor: str | None, *, is_on: bool = True) -> None:
        self._actor = None if actor is None else check_text("actor", actor)
        self._is_on = is_on
        self._is_made = False
        self._has_warned = False

    def around(self, intent: Intent, target: str, operation: Operation[T], detail: str = "") -> Operation[T]:
        """Return the operation with its two entries. An operation that refuses its input at once is not written."""
        try:
            call = next(operation)
        except StopIteration as stop:
            result: T = stop.value
            return result
        action_id = yield from self.begin(intent, target, detail)
        try:
            result = yield from continued(call, operation)
        except MtaskError as error:
            yield from self.end(action_id, type(error).__name__)
            raise
        yield from self.end(action_id, DONE)
        return result

    def begin(
        self, intent: Intent, target: str, detail: str = "", action_id: str | None = None
    ) -> Operation[str | None]:
        """Write down who is about to do what; return the action's id. None: that was not possible."""
        if not self._is_on:
            return None
        actor = _ACTING.get() or Actor(self._actor or system_user(), "python")
        try:
            if not self._is_made:
                yield from apart(setup.make_sure(["actions"]))
                self._is_made = True
            return (yield from apart(actions.begin(actor, intent, target, detail, action_id)))
        except MtaskError as error:
            self._warn(error)
            return None

    def end(self, action_id: str | None, result: str) -> Operation[None]:
        """Write down what came of an action."""
        if action_id is None or not self._is_on:
            return
        try:
            yield from apart(actions.end(action_id, result))
        except MtaskError as error:
            self._warn(error)

    def _warn(self, error: MtaskError) -> None:
        # A service without the right to write the log would fill its own log with this.
        level = logging.INFO if self._has_warned else logging.WARNING
        self._has_warned = True
        logger.log(level, "the action log lacks an entry; the action itself goes on: %s", error)


Several = str | Sequence[str] | None


def find(
    *, actor: Several, intent: Several, target: Several, since: datetime | None, limit: int, after: Action | str | None
) -> Operation[list[Action]]:
    """Check the arguments of a search in the log; return the operation. Raises InvalidInput."""
    given = {"actor": actor, "intent": intent, "target": target}
    criteria = {field: _texts(field, wanted) for field, wanted in given.items() if wanted is not None}
    for one in criteria.get("intent", ()):
        if one not in get_args(Intent):
            raise InvalidInput(f"{shown(one)} is no intent: use {', '.join(get_args(Intent))}.", field="intent")
    most = views.check_limit(limit)
    begin = None if since is None else whole(since, "since")
    last = after.id if isinstance(after, Action) else after
    if last is not None and (not isinstance(last, str) or not is_text(last)):
        raise InvalidInput("after: give an action, or the id of one.", field="after")

    def operation() -> Operation[list[Action]]:
        return [_action(document) for document in (yield from actions.find(criteria, begin, most, last))]

    return operation()


def _texts(field: str, wanted: str | Sequence[str]) -> list[str]:
    several = [wanted] if isinstance(wanted, str) or not isinstance(wanted, Iterable) else list(wanted)
    if not all(isinstance(one, str) and is_text(one) for one in several):
        raise InvalidInput(f"{field} is text or a list of texts.", field=field)
    return several


def _action(document: Mapping[str, Any]) -> Action:
    texts = {name: str(document.get(name, "")) for name in ("actor", "via", "intent", "target", "detail")}
    return Action(
        id=str(document["_id"]),
        time=document["time"],
        **texts,
        result=document["result"],
        end_time=document["end_time"],
    )


def said(values: Mapping[str, Any]) -> str:
    """Return the detail of an action: names with values, without those that are None."""
    return ", ".join(f"{name}={_shown(value)}" for name, value in values.items() if value is not None)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return shown(value, 80)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item) for item in value)}]"
    return str(value)[:80]
