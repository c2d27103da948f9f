"""Checks the tasks that a caller publishes, and puts them into the form that the store takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack, overload

from mtask.arguments.criteria import LookupCriteria
from mtask.errors import (
    MAX_DELAY,
    DatabaseBusy,
    DatabaseUnavailable,
    DocumentTooLarge,
    InvalidInput,
    InvalidParams,
    MtaskError,
    NotStorable,
    UnknownTask,
    UnknownTaskName,
    shown,
)
from mtask.features.callbacks.rules import DELIVERY, stored_callback
from mtask.features.callbacks.rules import CallbackRef as CallbackRef
from mtask.features.calls.call import Call as Call
from mtask.features.gathering import client as gathering
from mtask.features.gathering.client import CallArguments, GatherArguments, Naming, as_argument
from mtask.kernel.document.handlers import Around, Begun, Handler, enter, handler_of, leave
from mtask.kernel.document.identity import (
    check_name,
    check_tenant,
    check_text,
    fresh_key,
    own_key,
    stored_key,
    task_id_of,
)
from mtask.kernel.document.lookup import Lookup, entries_of, values_by_name
from mtask.kernel.document.options import (
    DEFAULT_OPTION,
    STORED_NAMES,
    TaskOptions,
    option_of,
    said_name,
    with_new_names,
)
from mtask.kernel.document.task import DEFAULT_QUEUE
from mtask.kernel.document.values import Trace, storable
from mtask.kernel.driver.bson import MAX_VALUE_BYTES, as_sent, is_scalar, stored_size
from mtask.kernel.driver.codec import done
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations.publish import IfExists, NewTask, Policy, Published, PublishPolicy, check_fields, encoded
from mtask.kernel.statements.publish import NewParams
from mtask.lazy import LazyModule
from mtask.says import Says, split

if TYPE_CHECKING:
    from mtask.features.registry import rules as registry
    from mtask.features.registry.rules import Declaration
else:
    registry = LazyModule("mtask.features.registry.rules")  # many services publish no task by a handler

T = TypeVar("T")
#: The name of a task, or the registered handler of that name.
TaskRef: TypeAlias = str | Callable[..., Any] | Handler
#: The default options, encoded once, because most tasks have them.
_DEFAULT_OPTION = as_sent(DEFAULT_OPTION.stored())
_KEEP = Policy()
_REJECT = 'if_exists="reject"'
_EXISTING = "A task that exists"


#: The span for which this asyncio task, or this thread, publishes tasks.
_TRACE: ContextVar[Trace | None] = ContextVar("mtask_trace", default=None)


@contextmanager
def traced_by(trace: Trace | None) -> Iterator[None]:
    """Let the tasks that the block publishes belong to this span. The web server passes on its callers' spans so."""
    token = _TRACE.set(trace)
    try:
        yield
    finally:
        _TRACE.reset(token)


def current_trace() -> Trace | None:
    """Return the span that `traced_by` gives."""
    return _TRACE.get()


class Known(NamedTuple):
    """What was found out about the handlers of a name."""

    until: float  #: how long it may be believed, by the monotonic clock
    declaration: Declaration | None
    #: The warning about a name under which no handler is registered. None: there is one, or nobody can tell.
    unknown: UnknownTaskName | None = None


class Declarations:
    """What a client knows of the handlers of names. It finds out no more: see `mtask.features.registry.client`."""

    #: Whether a name is refused under which no handler is registered.
    rejects = False

    def __init__(self) -> None:
        #: By name. Entries are replaced, and never changed, so any thread may read them.
        self.entries: dict[str, Known] = {}

    def lacking(self, specs: Iterable[Any]) -> list[str]:
        """Return the names of these tasks about which nothing is known now. Handlers speak for themselves."""
        now = monotonic()
        found: dict[str, None] = {}
        for spec in specs:
            name = getattr(spec, "task", None)
            if isinstance(name, str) and ((entry := self.entries.get(name)) is None or entry.until < now):
                found[name] = None
        return list(found)

    def learn(self, names: Sequence[str]) -> Operation[None]:
        """Find out about these names, also if it is known already. Raises a DatabaseError."""
        return done(None)

    def declaration(self, name: str) -> Declaration | None:
        """Return what is known to be declared for tasks of this name; raise UnknownTask if the name is refused."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        if entry.unknown is not None and self.rejects:
            raise UnknownTask(name, entry.unknown.nearest)
        return entry.declaration


class KeyArguments(TypedDict, total=False):
    """The key of a task."""

    key: Annotated[str | None, Says("The idempotency key, unique per name. Else a fresh key.", flag="--key -k")]


class StartArguments(TypedDict, total=False):
    """What every task has beside its params and options."""

    queue: Annotated[str | None, Says("Queue. Else 'default'.")]
    start_time: Annotated[datetime | None, Says("Earliest start, ISO 8601: 2030-01-31T08:00:00Z.", "INSTANT")]
    delay: Annotated[timedelta | float | None, Says("Earliest start, from now: 90s, 5m, 1h30m.", "DURATION")]


class WorkArguments(StartArguments, total=False):
    """What a task and a step of a flow have beside their params and options."""

    callback: Annotated[CallbackRef | None, Says("Who is told of its end.", flag="")]


class OwnArguments(LookupCriteria, total=False):
    """What a step of a flow does not have."""

    tenant: Annotated[str | None, Says("Whose task it is.", flag="")]
    expires: Annotated[
        datetime | timedelta | float | None, Says("It never starts later: 90s, 5m, or an instant.", "TIME")
    ]


class TaskArguments(KeyArguments, WorkArguments, OwnArguments, total=False):
    """What a task has beside its params and options."""


class SpecArguments(TaskArguments, TaskOptions, total=False):
    """The keyword arguments of `TaskSpec`."""


class StepArguments(WorkArguments, TaskOptions, total=False):
    """The keyword arguments of `Flow.add`, beside its dependencies."""


class AddedArguments(StartArguments, LookupCriteria, TaskOptions, total=False):
    """The keyword arguments of a task that a handler adds: of `Child`, `add_child` and `Next`."""


class ExistingArguments(TypedDict, total=False):
    """What becomes of a task that exists."""

    if_exists: Annotated[
        IfExists,
        Says(
            "keep: untouched. update: params, options, queue, lookup and start_time replaced. reject: an error.",
            panel=_EXISTING,
            default="keep",
        ),
    ]
    clean_failed: Annotated[bool, Says("Drop its failed runs, so that it runs again.", panel=_EXISTING, default=False)]
    clean_success: Annotated[bool, Says("Drop its successes, so that it runs again.", panel=_EXISTING, default=False)]
    not_update_running: Annotated[bool, Says("Fail while a live run holds it.", panel=_EXISTING, default=False)]


class PublishManyArguments(ExistingArguments, GatherArguments, total=False):
    """The keyword arguments of `publish_many`."""


class PolicyArguments(ExistingArguments, CallArguments, total=False):
    """What becomes of a task that exists, and how calls gather."""


class PublishArguments(TaskArguments, PolicyArguments, TaskOptions, total=False):
    """The keyword arguments of `publish`."""


class TaskSpec:
    """One task for `publish_many`. It has the arguments of `publish`. `publish_many` checks these arguments."""

    __slots__ = (*TaskArguments.__annotations__, "call", "options", "params", "task", "tells_time", "trace")

    @overload
    def __init__(self, task: Call[Any], **arguments: Unpack[SpecArguments]) -> None: ...

    @overload
    def __init__(self, task: TaskRef, params: Any = None, **arguments: Unpack[SpecArguments]) -> None: ...

    def __init__(self, task: TaskRef | Call[Any], params: Any = None, **arguments: Unpack[SpecArguments]) -> None:
        #: The call that was given in place of a task and its params, or None.
        self.call: Call[Any] | None = None
        if isinstance(task, Call):
            self.call = task
            task, params = task.parts(params)
        self.task: TaskRef = task
        self.params = params
        self.key = arguments.pop("key", None)
        self.queue = arguments.pop("queue", None)
        self.start_time = arguments.pop("start_time", None)
        self.delay = arguments.pop("delay", None)
        self.lookup = arguments.pop("lookup", None)
        self.callback = arguments.pop("callback", None)
        self.tenant = arguments.pop("tenant", None)
        self.expires = arguments.pop("expires", None)
        self.options: TaskOptions = with_new_names(arguments)
        #: The span that publishes the task, as `traceparent` and `tracestate`: for middleware around the publish.
        self.trace: Mapping[str, str] | None = None
        #: Whether `Published.create_time` is wanted, for a task without a given key: for middleware around the publish.
        self.tells_time = False

    def __repr__(self) -> str:
        of = "" if self.tenant is None else f", tenant={self.tenant!r}"
        return f"TaskSpec({self.task!r}, key={self.key!r}{of})"

    def prepare(
        self,
        policy: PublishPolicy = _KEEP,
        named: Naming = as_argument,
        tenant: str | None = None,
        known: Declarations | None = None,
    ) -> NewTask:
        """Check the task and return it; raise a subclass of InvalidInput, whose message names arguments by `named`.

        `tenant` is the tenant of a spec that names none. `known` tells what handlers declare that are not at hand.
        """
        handler = None if isinstance(self.task, str) else handler_of(self.task)
        name = handler.name if handler else check_name(self.task)
        _check_ours(name)
        declared: Handler | Declaration | None = handler
        version, made_for = None, handler.version if handler else 1
        if known is None:
            pass
        elif handler is not None:
            version = (handler.known.get("declared") or registry.declared_by(handler))["hash"]
        elif (found := known.declaration(name)) is not None:
            declared, version, made_for = found, found.hash, found.version.version
        params = _checked_params(name, self.params)
        is_plain = isinstance(policy, Policy)
        collects = not is_plain and gathering.collects(policy)
        if collects:
            if self.call is not None:
                reason = "collect makes a list of the params of many calls, so the handler is called with another one"
                raise InvalidInput(f"{reason}: publish the handler with the params of one.", field="collect")
            gathering.check_size(name, params)
        if handler and self.options:
            _check_no_params(handler, self.options)
        if declared:
            declared.bind({"calls": [params]} if collects else params)
        given_tenant = self.tenant if self.tenant is not None else tenant
        tenant = None if given_tenant is None else check_tenant(given_tenant)
        key = stored_key(tenant, self.key if self.key is not None else fresh_key(datetime.now(UTC)))
        default_queue = declared.queue if declared else DEFAULT_QUEUE
        option = option_of(declared.options if declared else {}, self.options)
        if not is_plain:
            retention = named(said_name("retain_success_ms", self.options))
            gathering.check_task(policy, self.key, self.start_time, self.delay, option, named, retention)
            if self.expires is not None:
                raise InvalidInput(f"{named('expires')} is of one task, and not of calls that gather.", field="expires")
        return NewTask(
            task_id=task_id_of(name, key),
            name=name,
            key=key,
            queue=check_text("queue", self.queue) if self.queue is not None else default_queue,
            params=params,
            task_option=_DEFAULT_OPTION if option is DEFAULT_OPTION else option.stored(),
            start=_start(self.start_time, self.delay, named),
            lookup=_lookup(None if collects else declared, params, self.lookup),
            trace=self.trace or current_trace(),
            callback=None if self.callback is None else stored_callback(self.callback, tenant),
            tenant=tenant,
            # What gathers, or is renewed, is of several calls. Each may know another version.
            declared=version if is_plain else None,
            expires=self._expires(declared if is_plain else None, named),
            version=None if made_for == 1 else made_for,
            tells_time=self.tells_time and self.key is None,
        )

    def _expires(self, declared: Handler | Declaration | None, named: Naming) -> datetime | timedelta | None:
        """Return when the task expires, as it says or as its handler declares; raise InvalidInput."""
        if self.expires is not None or declared is None or declared.expires_ms is None:
            return expiry_of(self.expires, named)
        return timedelta(milliseconds=declared.expires_ms)


def expiry_of(expires: datetime | timedelta | float | None, named: Naming = as_argument) -> datetime | timedelta | None:
    """Check when a task expires; raise InvalidInput."""
    if isinstance(expires, datetime):
        return _utc(expires, "expires")
    if expires is None:
        return None
    wait = _length(expires, "expires", named)
    if not wait:
        raise InvalidInput(f"{named('expires')} is 0: give a time in which the task may start.", field="expires")
    return wait


def spec_of(task: TaskRef | Call[Any], params: Any, **arguments: Unpack[SpecArguments]) -> TaskSpec:
    """Return the spec of a task and its params, or of a call; raise InvalidInput if a call comes with params."""
    made: Callable[..., TaskSpec] = TaskSpec  # its overloads know which of the two it is, and here nobody does
    return made(task, params, **arguments)


def _lookup(handler: Handler | Declaration | None, params: Any, given: Lookup | None) -> list[dict[str, Any]] | None:
    """Return the lookups in their stored form: those that the handler takes from the params, and those given."""
    taken = handler.lookup_in(params) if handler else {}
    if not taken and given is None:
        return None
    if given is not None:
        values_by_name(given, is_scalar)  # a mapping, as the next line needs one
    return entries_of(values_by_name({**taken, **(given or {})}, is_scalar))


def prepare_many(
    specs: Iterable[TaskSpec],
    policy: PublishPolicy = _KEEP,
    tenant: str | None = None,
    known: Declarations | None = None,
) -> list[NewTask]:
    """Check all tasks, before any is published. Raise InvalidInput with the index of the first bad task.

    `tenant` is the tenant of the specs that name none. `known` tells what handlers declare that are not at hand.
    """
    prepared = []
    for index, spec in enumerate(specs):
        if not isinstance(spec, TaskSpec):
            raise InvalidInput(f"task {index} is {type(spec).__name__}, not a TaskSpec", field=str(index))
        try:
            prepared.append(spec.prepare(policy, tenant=tenant, known=known))
        except MtaskError as error:
            error.add_note(f"in task {index} of publish_many; nothing was published")
            raise
    return prepared


def published_by(
    task: TaskRef | Call[Any], params: Any, arguments: Mapping[str, Any]
) -> tuple[TaskSpec, PublishPolicy]:
    """Return the task and the policy of one call of `publish`; raise InvalidInput."""
    existing, given = split(PolicyArguments, arguments)
    return spec_of(task, params, **given), policy(**existing)


def policy(
    if_exists: IfExists = "keep",
    *,
    clean_failed: bool = False,
    clean_success: bool = False,
    not_update_running: bool = False,
    named: Naming = as_argument,
    **gathers: Unpack[CallArguments],
) -> PublishPolicy:
    """Check the arguments about tasks that exist already; return them as a policy. Messages name them by `named`."""
    if if_exists not in ("keep", "update", "reject"):
        message = f'{named("if_exists")} is "keep", "update" or "reject", not {shown(if_exists)}'
        raise InvalidInput(message, field="if_exists")
    if if_exists == "reject" and (clean_failed or clean_success):
        cleans = f"{named('clean_failed')} and {named('clean_success')}"
        message = f"{named(_REJECT)} leaves an existing task alone: drop {cleans}."
        raise InvalidInput(message, field="if_exists")
    own = gathering.prepare(**gathers, named=named) if gathers else None
    if own is not None and (if_exists != "keep" or clean_failed or clean_success or not_update_running):
        raise InvalidInput(
            f"{named('debounce')}, {named('collect')}, {named('if_running')} and {named('window')} decide about an "
            f"existing task themselves: drop {named('if_exists')}, {named('clean_failed')}, {named('clean_success')} "
            f"and {named('not_update_running')}.",
            field="if_exists",
        )
    return own or Policy(if_exists, clean_failed, clean_success, not_update_running)


def _utc(instant: datetime, field: str) -> datetime:
    """Return an instant in UTC; raise InvalidInput."""
    if not isinstance(instant, datetime):
        raise InvalidInput(f"{field} is a datetime, not {type(instant).__name__}.", field=field)
    if instant.utcoffset() is None:
        example = "give an aware datetime, such as datetime.now(UTC) + ..."
        raise InvalidInput(f"{field} has no time zone: {example}", field=field)
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(f"{field} {instant} lies, in UTC, outside of the years 1 to 9999.", field=field) from None


def _start(start_time: datetime | None, delay: timedelta | float | None, named: Naming) -> datetime | timedelta | None:
    if start_time is not None and delay is not None:
        raise InvalidInput(f"give {named('start_time')} or {named('delay')}, not both.", field="delay")
    if start_time is not None:
        return _utc(start_time, "start_time")
    return None if delay is None else _length(delay, "delay", named)


def _length(given: timedelta | float, field: str, named: Naming) -> timedelta:
    """Return a length of time; raise InvalidInput."""
    if isinstance(given, bool) or not isinstance(given, timedelta | int | float):
        raise InvalidInput(f"{field} is a timedelta or seconds, not {type(given).__name__}.", field=field)
    try:
        wait = given if isinstance(given, timedelta) else timedelta(seconds=given)
    except (OverflowError, ValueError):
        raise InvalidInput(f"{field} {shown(given)} is no length of time.", field=field) from None
    if not timedelta(0) <= wait <= MAX_DELAY:
        message = f"{named(field)} {wait.total_seconds():g} s lies outside of 0 to 10 years."
        raise InvalidInput(message, field=field)
    return wait


class Unchanged(Enum):
    """The params of a task that stay as they are. None is a value that params can have."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


def new_params(task: TaskRef, params: Any, known: Declarations | None = None) -> NewParams:
    """Return new params of a task that exists, as they are stored; raise InvalidParams.

    The handler checks them if it is at hand, else what is known of it.
    """
    handler = handler_of(task)
    name = handler.name if handler else check_name(task)
    _check_ours(name)
    checked = _checked_params(name, params)
    declared: Handler | Declaration | None = handler
    version, made_for = None, handler.version if handler else 1
    if known is None:
        pass
    elif handler is not None:
        version = registry.hash_of(handler)
    elif (entry := known.entries.get(name)) is not None and entry.declaration is not None:
        declared = entry.declaration
        version, made_for = entry.declaration.hash, entry.declaration.version.version
    if declared:
        declared.bind(checked)
    return NewParams(checked, declared=version, version=None if made_for == 1 else made_for)


def _check_ours(name: str) -> None:
    """Raise InvalidInput if the params of these tasks are mtask's own: workers sign what they hold."""
    if name == DELIVERY:
        raise InvalidInput(f"{DELIVERY} is a task of mtask's own: publish a task with a callback.", field="name")


def _check_no_params(handler: Handler, options: Mapping[str, Any]) -> None:
    """Raise InvalidParams if an argument of the handler is given where options are: publish(send, to="ann")."""
    for option in options:
        if option in STORED_NAMES:
            continue
        place = handler.place_of(option)
        if option in handler.fields.values():
            what, example = "an argument of the handler", f"{{{option!r}: ...}}"
        elif place is not None:
            what, example = f"a field of the handler's argument {place!r}", f"{{{place!r}: {{{option!r}: ...}}}}"
        else:
            continue
        reason = f"{option!r} is {what}, and no option: give all arguments as one mapping, "
        raise InvalidParams(handler.name, f"{reason}publish({handler.name}, {example})")


def _checked_params(name: str, params: Any) -> Any:
    try:
        value = storable(params)
    except RecursionError:
        raise InvalidParams(name, "they are nested too deeply, or hold themselves") from None
    try:
        stored_size(value)
    except NotStorable as error:
        path, reason = _path_of_unstorable(value, error)
        raise InvalidParams(name, f"{path} cannot be stored as BSON: {reason}") from error
    except DocumentTooLarge as error:
        raise explain_unstorable(error, name) from error
    return value


def _path_of_unstorable(value: Any, error: NotStorable) -> tuple[str, str]:
    """Find the part of the params that BSON cannot hold. Return its path and the reason."""
    path: list[str] = []
    while True:
        entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for name, item in entries:
            try:
                stored_size(item)
            except DocumentTooLarge:
                continue
            except NotStorable as inner:
                path.append(name if isinstance(name, str) and name.isidentifier() else shown(name, 40))
                value, error = item, inner
                break
        else:
            return ".".join(path[:20]) or "they", error.reason


def explain_unstorable(error: NotStorable | DocumentTooLarge, name: str) -> InvalidParams:
    """Return the error for params that a document cannot hold."""
    if isinstance(error, DocumentTooLarge):
        limit = MAX_VALUE_BYTES // 2**20
        return InvalidParams(name, f"they exceed {limit} MB: store them elsewhere and pass a reference")
    return InvalidParams(name, f"they cannot be stored as BSON: {error.reason}")


# --- publishing ------------------------------------------------------------------------------------------


def publish(
    spec: TaskSpec,
    policy: PublishPolicy,
    middleware: Sequence[Around[TaskSpec]] = (),
    *,
    in_session: bool = False,
    tenant: str | None = None,
    known: Declarations | None = None,
) -> Operation[Published]:
    """Publish one task. `tenant` is the tenant of a spec that names none. `known` tells what handlers declare."""
    if middleware:
        then = partial(publish, policy=policy, in_session=in_session, tenant=tenant, known=known)
        return publish_around(spec, middleware, then)
    preparation = Preparation(lambda known: spec.prepare(policy, tenant=tenant, known=known), [spec], known)

    def operation() -> Operation[Published]:
        prepared = preparation.made
        try:
            prepared = yield from preparation.complete()
            yield from check_fields([prepared])
            (new,) = yield from encoded([prepared])
            return (yield from policy.publish(new, in_session=in_session))
        except DatabaseUnavailable as error:
            _tell_keys(error, [spec], [prepared])
            raise
        except (NotStorable, DocumentTooLarge) as error:
            raise explain_unstorable(error, prepared.name) from error

    return operation()


def publish_many(
    specs: Iterable[TaskSpec],
    policy: PublishPolicy,
    middleware: Sequence[Around[TaskSpec]] = (),
    *,
    in_session: bool,
    tenant: str | None = None,
    known: Declarations | None = None,
) -> Operation[list[Any]]:
    """Publish many tasks. `tenant` is the tenant of the specs that name none. `known` tells what handlers declare."""
    if middleware:
        then = partial(publish_many, policy=policy, in_session=in_session, tenant=tenant, known=known)
        return publish_many_around(specs, middleware, then)
    specs = list(specs)
    preparation = Preparation(lambda known: prepare_many(specs, policy, tenant, known), specs, known)

    def operation() -> Operation[list[Any]]:
        prepared = preparation.made
        if not prepared:
            return []
        try:
            prepared = yield from preparation.complete()
            yield from check_fields(prepared)
            new = yield from encoded(prepared)
            return (yield from policy.publish_many(new, in_session=in_session))
        except DatabaseUnavailable as error:
            _tell_keys(error, specs, prepared)
            raise
        except (NotStorable, DocumentTooLarge) as error:
            reason = "a task's params cannot be stored" if isinstance(error, NotStorable) else "a task exceeds 16 MB"
            raise InvalidParams(
                prepared[0].name, f"{reason}: {error.reason}. Tasks before it may be published; call again"
            ) from error

    return operation()


class Preparation(Generic[T]):
    """The checks of what is to be published: at once, and once more when it is known what handlers declare.

    What is wrong whatever a handler declares raises an error at once. The params may fit a version of the handler that
    is newer than what is known: before they are refused, it is found out anew.
    """

    __slots__ = ("_known", "_make", "lacking", "made")

    def __init__(
        self, make: Callable[[Declarations | None], T], specs: Iterable[Any], known: Declarations | None
    ) -> None:
        """`make` checks and returns what is to be published. `specs` have the tasks in it, each as `task`."""
        self._make, self._known = make, known
        #: The names about which `complete` must find out something.
        self.lacking = [] if known is None else known.lacking(specs)
        #: What is to be published. If a name is lacking, `complete` returns it.
        self.made: T
        if self.lacking or known is None:
            self.made = make(None)
            return
        try:
            self.made = make(known)
        except InvalidParams as error:
            self.made = make(None)  # raises again if a handler that is at hand refuses the params
            self.lacking = [error.task_name]

    def complete(self) -> Operation[T]:
        """Find out what is lacking, and return what is to be published. Raises InvalidInput or a DatabaseError."""
        if self.lacking:
            assert self._known is not None
            yield from self._known.learn(self.lacking)
            self.made, self.lacking = self._make(self._known), []
        return self.made


def _tell_keys(error: DatabaseUnavailable, specs: Sequence[TaskSpec], prepared: Sequence[NewTask]) -> None:
    """Have the error tell the keys that were made: a repeat without them would publish other tasks."""
    pairs = enumerate(zip(specs, prepared, strict=True))
    keys = {place: own_key(new.tenant, new.key) for place, (spec, new) in pairs if spec.key is None}
    if keys and not isinstance(error, DatabaseBusy):
        error.repeat_with(keys)


# --- middleware ------------------------------------------------------------------------------------------

# Publishes tasks with middleware around each publish. See `mtask.app.middleware`.

PublishMiddleware = Sequence[Around[TaskSpec]]


def publish_around(
    spec: TaskSpec, middleware: PublishMiddleware, then: Callable[[TaskSpec], Operation[Published]]
) -> Operation[Published]:
    """Publish one task with the middleware around the publish. Before its `yield`, a middleware may change the spec."""
    begun = enter(middleware, spec)
    try:
        published = yield from then(spec)
    except BaseException as error:
        leave(begun, None, error)
        raise
    leave(begun, published)
    return published


def publish_many_around(
    specs: Iterable[TaskSpec], middleware: PublishMiddleware, then: Callable[[list[TaskSpec]], Operation[list[Any]]]
) -> Operation[list[Any]]:
    """Publish many tasks, with the middleware around the publish of each task.

    The middleware gets copies of the specs. If a middleware raises an error before its `yield`, no task is published.
    """
    own = [copied(spec) for spec in specs]
    all_begun: list[Begun] = []
    try:
        for spec in own:
            # For an object that is no TaskSpec, `publish_many` raises an error with a clear message.
            all_begun.append(enter(middleware, spec) if isinstance(spec, TaskSpec) else [])  # noqa: PERF401 each as it is
        results = yield from then(own)
    except BaseException as error:
        for begun in all_begun:
            leave(begun, None, error)
        raise
    for begun, result in zip(all_begun, results, strict=True):
        is_error = isinstance(result, Exception)
        leave(begun, None if is_error else result, result if is_error else None)
    return results


def copied(spec: TaskSpec) -> TaskSpec:
    """Return a copy of a spec that a middleware may change."""
    own = copy.copy(spec)
    if isinstance(own, TaskSpec):
        own.options = own.options.copy()
        own.callback = dict(own.callback) if isinstance(own.callback, Mapping) else own.callback
        own.lookup = dict(own.lookup) if isinstance(own.lookup, Mapping) else own.lookup
    return own
