"""The codec of a store with data keys: it encrypts what is stored, and decrypts what was read, as far as keys allow.

What must be encrypted and is not, and what was encrypted for another place, is refused: a Sealed stands for it, which
no key makes readable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from mtask.errors import DatabaseError, InvalidLookup, MtaskError, WorkersTooOld
from mtask.features.encryption import readable
from mtask.features.encryption.cipher import LOOKUP, Cipher, canonical, why_in
from mtask.features.encryption.settings import QUEUE, TENANT, key_names
from mtask.features.encryption.vault import Damaged
from mtask.kernel.document.lookup import LookupEntry
from mtask.kernel.document.parts import Sealed, is_sealed, refused
from mtask.kernel.document.task import StoredTask, Task
from mtask.kernel.driver.codec import Owner, owner_of, params_of
from mtask.kernel.driver.operation import Call, Operation
from mtask.kernel.operations import workers
from mtask.kernel.operations.encode import MESSAGE, PARAMS, REASON, RETURNS, TRACEBACK
from mtask.kernel.worker.process import log

Document = dict[str, Any]
#: The first revision whose workers know encrypted tasks. An older worker marks one FAIL: its params fit no handler.
REVISION = 7
_EXAMPLES = 5


class Encrypting(Cipher):
    """Encrypts what is about to be stored. `EncryptionCodec` also decrypts."""

    def load(self, owners: Iterable[Owner], *, to_publish: bool = False) -> Operation[None]:
        """Load the data keys of these owners. `to_publish`: raise WorkersTooOld if a live worker knows none."""
        names = set[str]()
        for owner in owners:
            names.update(self.names_for(owner.queue, owner.key))
            if owner.sealed is not None:
                names.add(owner.sealed)
        if not self.vault.lacks(names):
            return
        yield from self.load_keys(sorted(names))
        if to_publish and any(self.vault.problem_of(name) is None for name in names):
            # Workers come seldom, and keys are loaded again after a minute: this need not be asked for each task.
            old = yield from workers.older(REVISION, _EXAMPLES)
            if old:
                raise WorkersTooOld(old, what="encrypted tasks")

    def content(self, owner: Owner, params: Any, lookup: Sequence[Mapping[str, Any]] | None) -> Document:
        """Encrypt params and lookups, if the queue or the tenant has a data key."""
        name = self.vault.name_of(owner.queue, owner.key)
        if name is None:
            return {}
        made = {"params": self.encrypt_params(name, owner, params, lookup), "sealed": name}
        if lookup is not None:
            made["lookup"] = [
                {"k": entry["k"], "v": self.encrypt_lookup(name, entry["k"], entry["v"])} for entry in lookup
            ]
        return made

    def value(self, owner: Owner, field: str, value: Any) -> Any:
        """Encrypt a value, if the queue or the tenant has a data key. An encrypted task stays encrypted in any case."""
        if value is None:  # nothing is to be hidden in it, and most handlers return it
            return None
        name = self.vault.name_of(owner.queue, owner.key)
        if name is None and owner.sealed in key_names([owner.queue], owner.key):
            name = owner.sealed
        return value if name is None else self.encrypt(name, owner, field, value)

    def criteria(self, criteria: Mapping[str, Any], *, encoded_only: bool = False) -> Operation[Document]:
        """Add to looked-up values their encrypted forms, under each data key that a task found may have.

        With `encoded_only`, the encrypted forms stand for the values, if there are any.

        Raises InvalidInput and subclasses of DatabaseError.
        """
        given = dict(criteria)
        if not given.get("lookup"):
            return given
        names = yield from self._names_to_look_under(given)
        found: dict[str, list[Any]] = {}
        for name, values in given["lookup"].items():
            encrypted = [self.encrypt_lookup(key, name, one) for key in names for one in values if _may_be_lookup(one)]
            found[name] = encrypted if encrypted and encoded_only else [*values, *encrypted]
        return {**given, "lookup": found}

    def _names_to_look_under(self, criteria: Mapping[str, Any]) -> Operation[list[str]]:
        tenants = _several(criteria.get("key"))
        if (prefix := criteria.get("key_prefix")) and ":" in prefix:
            tenants.append(prefix)
        several = _several(criteria.get("queue"))
        names: list[str]
        if several and tenants:
            names = [name for queue in several for key in tenants for name in self.names_for(queue, key)]
        else:
            names = yield Call("codec", "names")
        yield from self.load_keys(names)
        return [name for name in dict.fromkeys(names) if self.vault.problem_of(name) is None]

    def stored_criteria(self, bulk_id: str, criteria: Mapping[str, Any]) -> Operation[Document]:
        """Encrypt the params by which a bulk change finds its tasks, as its criteria are stored for days.

        This takes the data key of the tenant or queue that the criteria name, or else any. Without a data key, they
        stay readable.
        """
        given = dict(criteria)
        if not given.get("params"):
            return given
        named = [QUEUE + queue for queue in _several(given.get("queue"))]
        if given.get("tenant") is not None:
            named.insert(0, TENANT + given["tenant"])
        rows = yield Call("codec", "every")
        names = [row.name for row in rows if row.remove_time is None]
        for name in sorted(names, key=lambda name: named.index(name) if name in named else len(named)):
            yield from self.load_keys([name])
            if self.vault.problem_of(name) is None:
                bound = {"v": given["params"], "bulk": bulk_id, "field": PARAMS}
                return {**given, "params": self.vault.encrypt(name, bound)}
        return given


def _several(wanted: Any) -> list[str]:
    return [] if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)


def _may_be_lookup(value: Any) -> bool:
    # Such values cannot be encrypted, so only readable tasks have them.
    return not isinstance(value, bool | float)


# --- decrypting -------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """One value to decrypt."""

    owner: Owner
    field: str
    sealed: Sealed
    put: Callable[[Any], None]  #: puts the result in its place
    told: list[Any] | None = None  #: takes what params say of the lookups of their task


#: The lookups in a part of a document, and what its params say of them.
Bound = tuple[Sequence[LookupEntry] | None, list[Any]]
#: The names of fields in documents that hold encrypted values, and the names under which they are encrypted.
_FIELDS: Mapping[str, str] = {
    "params": PARAMS,
    "calls": PARAMS,
    "returns": RETURNS,
    "fail_reason": REASON,
    "reason": REASON,
    "message": MESSAGE,
    "traceback": TRACEBACK,
}
#: The fields without which values of a partial read cannot be checked.
_OWNING = ("queue", "task_state.former_queues", "sealed")
#: The first parts of the fields that hold what must be encrypted.
_HOLDING = frozenset({"params", "lookup", "former_params", "again", "returns", "runs", "task_state"})
_COPIED = "it is not among the lookups with which these params were encrypted: it was copied here"


class EncryptionCodec(Encrypting):
    """Encrypts what is about to be stored, and decrypts what was read."""

    def open_tasks(self, tasks: Sequence[Task]) -> Operation[None]:
        """Decrypt the values of tasks in place."""
        closed = [self._closed_in(task) for task in tasks]
        yield from self.load_keys((), (place.sealed.content[1:17] for places, _ in closed for place in places))
        for task, (places, bound) in zip(tasks, closed, strict=True):
            self._put_opened(places)
            _check_lookups(task.id, bound)

    def _closed_in(self, task: Task) -> tuple[list[Place], list[Bound]]:
        """Refuse what is readable and must not be. Return what is to be decrypted, and the lookups with their bonds."""
        readable.refuse_readable(task, self.prescribes)
        return _places_in(task)

    def _open_places(self, places: Sequence[Place]) -> Operation[None]:
        """Decrypt these values, and put each in its place."""
        if places:
            yield from self.load_keys((), (place.sealed.content[1:17] for place in places))
            self._put_opened(places)

    def _put_opened(self, places: Iterable[Place]) -> None:
        """Decrypt these values with keys that are loaded, and put each in its place."""
        for owner, field, sealed, put, told in places:
            if field.startswith("lookup "):
                put(self.decrypt_lookup(owner, field.removeprefix("lookup "), sealed))
            else:
                put(self.decrypt(owner, field, sealed, told))

    def open_values(self, values: Sequence[tuple[Owner, str, Sealed]]) -> Operation[list[Any]]:
        """Return these values decrypted, each with its owner and its field."""
        yield from self.load_keys((), (sealed.content[1:17] for _, _, sealed in values))
        return [self.decrypt(owner, field, sealed) for owner, field, sealed in values]

    def open_parts(self, parts: Sequence[tuple[Owner, Any]]) -> Operation[None]:
        """Decrypt in place the params and lookups of what publishes tasks, such as a schedule."""
        places = [place for owner, part in parts for place in _content_of(owner, part, [])]
        yield from self.load_keys((), (place.sealed.content[1:17] for place in places))
        for owner, part in parts:
            self.open_part(owner, part)

    def open_part(self, owner: Owner, part: Any) -> None:
        """Do the same with keys that are loaded."""
        if self.is_readable_refused(owner):
            readable.refuse_content(owner.task_id, part)
        told: list[Any] = []
        self._put_opened(list(_content_of(owner, part, told)))
        _check_lookups(owner.task_id, [(part.lookup, told)])

    def open_criteria(self, bulk_id: str, params: Sealed) -> Operation[Any]:
        """Return the params by which a bulk change finds its tasks, or the same Sealed with the reason why not."""
        yield from self.load_keys((), [params.content[1:17]])
        try:
            _, problem = self.vault.key_of(params.content[1:17])
            if problem is not None:
                raise problem
            found = self.vault.decrypt(params.content)
            if not isinstance(found, dict) or (found.get("bulk"), found.get("field")) != (bulk_id, PARAMS):
                raise Damaged("they were encrypted for another bulk change, and copied here")
        except MtaskError as error:
            return Sealed(params.content, why_in(error), field=params.field)
        return found["v"]

    def extra_fields(self, fields: Sequence[str]) -> list[str]:
        """Return the fields that a partial read needs besides, so that it can decrypt the fields that are asked for."""
        extra = [*_OWNING]
        if any(name.startswith("params.") for name in fields):
            extra.append("params")  # a path below encrypted params leads nowhere on the server
        if any(_first_of(name) == LOOKUP for name in fields):
            extra += [PARAMS, LOOKUP]  # the params tell which lookups are those of the task
        return [name for name in dict.fromkeys(extra) if name not in fields]

    def open_fields(self, task_id: str, values: Document, fields: Sequence[str]) -> Operation[Document]:
        """Return the values of these fields, decrypted. `values` holds extra fields, too."""
        name, _, key = task_id.partition(":")
        former = values.get("task_state.former_queues")
        queues = [queue for queue in (values.get("queue"), *(former or ())) if isinstance(queue, str)]
        owner, told = Owner(name, key, queues, values.get("sealed")), list[Any]()
        if self.is_readable_refused(owner):
            held = [field for field in values if _first_of(field) in _HOLDING and not field.startswith("params.")]
            values = {**values, **{field: readable.without_readable(task_id, field, values[field]) for field in held}}
            if PARAMS in values and values[PARAMS] is None:
                values[PARAMS] = refused(task_id, PARAMS)
        own = {PARAMS: values[PARAMS]} if PARAMS in values else {}
        others = {field: value for field, value in values.items() if field != PARAMS}
        is_hidden = isinstance(own.get(PARAMS), Sealed)
        places = [*places_in_values(owner, others), *(p._replace(told=told) for p in places_in_values(owner, own))]
        yield from self._open_places(places)
        values = {**others, **own}
        entries = [LookupEntry.model_construct(**each) for each in values.get(LOOKUP) or () if {"k", "v"} == set(each)]
        _check_lookups(task_id, [(entries, told)])
        are_copied = any(isinstance(entry.v, Sealed) and entry.v.why == _COPIED for entry in entries)
        for field in fields:
            if is_hidden and field.startswith("params."):
                values[field] = _at(values[PARAMS], field.split(".")[1:])
            elif are_copied and _first_of(field) == LOOKUP:
                values[field] = refused(task_id, field, _COPIED)
        return {field: values[field] for field in fields}

    # --- claimed tasks --------------------------------------------------------------------------------------

    def is_needed(self, documents: Sequence[Mapping[str, Any]]) -> bool:
        """Return True: also what the run of a readable task writes may have to be encrypted."""
        return True

    def open_claimed(self, tasks: Sequence[StoredTask]) -> Operation[list[Exception | None]]:
        """Decrypt claimed tasks in place, and load the data keys of what their runs will write."""
        closed = [self._closed_in(task) for task in tasks]
        names = {name for task in tasks for name in self.names_for(task.queue, task.key)}
        names |= {task.sealed for task in tasks if task.sealed is not None}
        key_ids = {place.sealed.content[1:17] for places, _ in closed for place in places}
        try:
            yield from self.load_keys(sorted(names), sorted(key_ids))
        except DatabaseError as error:
            log.logger.warning("data keys not loaded", extra=log.fields(keys=len(names), reason=log.told(error)))
        return [self._with_values(task, *found) for task, found in zip(tasks, closed, strict=True)]

    def _with_values(self, task: StoredTask, places: list[Place], bound: list[Bound]) -> Exception | None:
        try:
            # What the run returns must be encrypted, too, even if somebody has published the task readable.
            self.vault.name_of(task.queue, task.key)
        except MtaskError as error:
            return self.unreadable(task, str(error))
        try:
            self._put_opened(places)
            _check_lookups(task.id, bound)
        except Exception as error:  # an error at one task does not stop the others
            return error
        for value in params_of(task):
            if isinstance(value, Sealed):
                return value.error if value.is_final else self.unreadable(task, value.why)
        refused_lookups = (entry.v for entry in task.lookup or () if isinstance(entry.v, Sealed) and entry.v.is_final)
        return next((value.error for value in refused_lookups), None)


def _check_lookups(task_id: str, bound: Sequence[Bound]) -> None:
    """Refuse lookups of which the params say nothing. Params that mtask 0.2 encrypted do not tell the lookups."""
    for lookup, told in bound:
        entries = [entry for entry in lookup or () if not isinstance(entry.v, Sealed)]
        if not entries or not told or None in told:
            continue
        if not any(all(_is_told(entry, texts) for entry in entries) for texts in told):
            for entry in entries:
                entry.v = refused(task_id, f"lookup {entry.k}", _COPIED)


def _is_told(entry: LookupEntry, texts: Any) -> bool:
    try:
        return canonical(entry.k, entry.v) in texts
    except InvalidLookup:  # no such value can have been encrypted
        return False


def _places_in(task: Task) -> tuple[list[Place], list[Bound]]:
    """Return the encrypted values of a task, and its parts with lookups."""
    owner = owner_of(task)
    found: list[Place] = []
    bound: list[Bound] = []
    parts: list[Any] = [task] if task.again is None else [task, task.again]
    for part in parts:
        told: list[Any] = []
        bound.append((part.lookup, told))
        found += _content_of(owner, part, told)
    for former in task.former_params:
        found += _params_in(owner, former)
    if _is_closed(task.task_state.reason):
        found.append(Place(owner, REASON, task.task_state.reason, _setter(task.task_state, "reason")))
    for run in task.runs:
        if _is_closed(run.returns):
            found.append(Place(owner, RETURNS, run.returns, _setter(run, "returns")))
        if _is_closed(run.fail_reason):
            found.append(Place(owner, REASON, run.fail_reason, _setter(run, "fail_reason")))
        if run.error is not None and _is_closed(run.error.traceback):
            found.append(Place(owner, TRACEBACK, run.error.traceback, _setter(run.error, "traceback")))
        if run.progress is not None and _is_closed(run.progress.message):
            found.append(Place(owner, MESSAGE, run.progress.message, _setter(run.progress, "message")))
    return found, bound


def _is_closed(value: Any) -> TypeGuard[Sealed]:
    """Whether this value is encrypted, and a key may make it readable."""
    return isinstance(value, Sealed) and not value.is_final


def _content_of(owner: Owner, part: Any, told: list[Any]) -> Iterator[Place]:
    """Return the encrypted params and lookups of a task, of its next round or of a schedule."""
    yield from _params_in(owner, part, told)
    for entry in part.lookup or ():
        if _is_closed(entry.v):
            yield Place(owner, f"lookup {entry.k}", entry.v, _setter(entry, "v"))


def _params_in(owner: Owner, part: Any, told: list[Any] | None = None) -> Iterator[Place]:
    if _is_closed(part.params):
        yield Place(owner, PARAMS, part.params, _setter(part, "params"), told)
    elif type(part.params) is dict and type(calls := part.params.get("calls")) is list:
        for index, call in enumerate(calls):
            if _is_closed(call):
                yield Place(owner, PARAMS, call, _item_setter(calls, index), told)


def _setter(part: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(part, name, value)


def _item_setter(values: Any, index: Any) -> Callable[[Any], None]:
    return lambda value: values.__setitem__(index, value)


def places_in_values(owner: Owner, values: Any, field: str = PARAMS) -> Iterator[Place]:
    """Return the encrypted values in a part of a document, at any depth."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(values, dict):
        entries = values.items()
    elif isinstance(values, list):
        entries = enumerate(values)
    for name, value in list(entries):
        inner = _FIELDS.get(str(name).rpartition(".")[2], field)
        if is_sealed(value) or _is_closed(value):
            if name == "v" and isinstance(values, dict) and isinstance(values.get("k"), str):
                inner = f"lookup {values['k']}"
            sealed = value if isinstance(value, Sealed) else Sealed(value)
            yield Place(owner, inner, sealed, _item_setter(values, name))
        elif isinstance(value, dict | list):
            yield from places_in_values(owner, value, inner)


def _first_of(field: str) -> str:
    return field.partition(".")[0]


def _at(value: Any, path: Sequence[str]) -> Any:
    if isinstance(value, Sealed):
        return value
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value
