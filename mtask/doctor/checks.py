"""The doctor looks for problems of the server, the collections, the workers and the tasks, and names remedies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from mtask.database import setup
from mtask.database.schema import LAYOUTS, schema_title
from mtask.doctor import backlog
from mtask.doctor import operations as diagnosis
from mtask.errors import AccessDenied, DatabaseError, DatabaseUnavailable, NotInStableApi, SchemaMismatch
from mtask.kernel.document.status import FINAL
from mtask.kernel.document.task import SCHEMA_REVISION, SCHEMA_VERSION
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.roles import role_name
from mtask.parts import surfaces
from mtask.search.findings import Check, Finding, Findings, Level, fail, ok, rough, warn

__all__ = ["Finding", "Level", "examine"]

CLOCK_TOLERANCE = timedelta(seconds=2)
OPLOG_WINDOW = timedelta(hours=1)
#: The longest time that an expired task may still exist. MongoDB's TTL monitor runs once a minute.
TTL_GRACE = timedelta(minutes=5)
#: The most documents that a finding names.
MAX_NAMED = 10_000
_MAX_ID = 600
_TITLE = re.compile(r"^mtask \w+, schema_version (\d+), revision (\d+)$")
_RUN_INIT = "Run `mtask init`."
Document = dict[str, Any]


def examine(database: str, patience: timedelta) -> Findings:
    """Run all checks. A check that cannot run does not prevent the others."""
    found = yield from _server()
    if any(finding.level is Level.FAIL and finding.check == "server" for finding in found):
        return found
    collections: dict[str, Mapping[str, Any]] = {}
    found += yield from _guarded("rights", _rights(database))
    found += yield from _guarded("collections", _collections(collections))
    found += yield from _guarded("server status", _status())
    if "tasks" in collections:
        found += yield from _guarded("documents", _documents())
        found += yield from _guarded("document sizes", _sizes())
        found += yield from _guarded("retention", _retention())
        found += yield from _guarded("tasks", backlog.tasks_and_workers(patience))
    checks: list[Check] = [check for feature in surfaces.modules("doctor").values() for check in feature.CHECKS]
    for check in checks:
        if check.collection in collections:
            found += yield from _guarded(check.name, check.examine())
    return found


def _guarded(check: str, findings: Findings) -> Findings:
    try:
        return (yield from findings)
    except AccessDenied as error:
        # The check `rights` tests what every user must be allowed to do. The other checks need rights that few users
        # have.
        finding = fail if check == "rights" else warn
        who = f"a user with the role {' or '.join(error.roles)}" if error.roles else "an administrator"
        return [finding(check, f"not examined, this user lacks rights: {error.need or error.reason}", f"Ask as {who}.")]
    except NotInStableApi as error:
        return [warn(check, f"not examined: {error.reason}", "Call `mtask doctor`, or a client without strict.")]
    except DatabaseUnavailable as error:
        return [warn(check, f"not examined, no answer in time: {error.reason}", "Call again when the load is lower.")]
    except DatabaseError as error:
        return [warn(check, f"not examined: {error}", "Call again, with --debug for more.")]


def _server() -> Findings:
    try:
        yield from diagnosis.greeting()  # this call connects, so that the next call takes only one round trip
        before = datetime.now(UTC)
        hello = yield from diagnosis.greeting()
        after = datetime.now(UTC)
        version = yield from diagnosis.version(hello)
    except DatabaseError as error:
        return [unreachable(error)]
    address = str(hello.get("me") or hello.get("primary") or "the server")
    found = [_version(address, version), *_topology(address, hello)]
    found.append(_clock(before, hello["localTime"], after))
    return found


def unreachable(error: DatabaseError) -> Finding:
    """Return the finding for a server that does not answer or that rejects the login."""
    reason = getattr(error, "reason", str(error))
    if isinstance(error, AccessDenied):
        remedy = "Check user, password and authSource in --uri (MTASK_URI)."
        return fail("server", f"it rejects the login: {reason}", remedy)
    return fail("server", f"not reachable: {reason}", "Check that it runs, and --uri (MTASK_URI).")


def _version(address: str, version: str) -> Finding:
    needed = setup.MIN_RELEASE
    if _numbers(version) < _numbers(needed):
        message = f"MongoDB {version} at {address} is too old"
        return fail("version", message, f"Upgrade the server to {needed} or later.", version=version)
    return ok("version", f"MongoDB {version} at {address}", version=version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _topology(address: str, hello: Mapping[str, Any]) -> list[Finding]:
    if hello.get("msg") == "isdbgrid":
        return [ok("replica set", "a sharded cluster, through mongos")]
    name = hello.get("setName")
    if name is None:
        remedy = "Restart it with `mongod --replSet rs0 ...`, then run `mongosh --eval 'rs.initiate()'` once."
        return [fail("replica set", f"{address} is a standalone: without change streams and transactions", remedy)]
    if not hello.get("isWritablePrimary"):
        primary = hello.get("primary")
        message = f"{address} is not the primary of {name}" + (f", {primary} is" if primary else ": there is none now")
        remedy = "Put all members and replicaSet= into the URI." if primary else "Bring a majority of the members up."
        return [fail("replica set", message, remedy)]
    members = len(hello.get("hosts", []))
    found = [ok("replica set", f"{name}, {members} member{'s' * (members != 1)}, primary {address}", members=members)]
    if hello.get("logicalSessionTimeoutMinutes") is None:
        remedy = "Check that every member runs wiredTiger and the same version."
        found.append(fail("transactions", "the server offers no sessions, so no transactions", remedy))
    else:
        found.append(ok("transactions", "sessions and transactions are available"))
    return found


def _clock(before: datetime, server: datetime, after: datetime) -> Finding:
    offset = ((before - server) + (after - server)) / 2
    seconds = offset / timedelta(seconds=1)
    relation = "ahead of" if seconds > 0 else "behind"
    message = f"this machine is {rough(abs(seconds))} {relation} the server"
    if abs(seconds) < 0.01:
        message = "this machine and the server agree"
    if abs(offset) > CLOCK_TOLERANCE:
        remedy = "Tasks are unaffected, but times in logs don't match: synchronize this machine's clock (NTP)."
        return warn("clock", message, remedy, offset_ms=round(seconds * 1000))
    return ok("clock", message, offset_ms=round(seconds * 1000))


def _rights(database: str) -> Findings:
    rights = yield from diagnosis.rights(database)
    if rights.user is None:
        yield from diagnosis.try_read_and_write()
        return [ok("rights", "no access control: everyone may read and write")]
    if not rights.roles:
        nearest, lacking = min(rights.lacking.items(), key=lambda item: len(item[1]))
        message = f"{rights.user} lacks what any role needs; for {nearest}: {', '.join(lacking)}"
        remedy = f"Grant it a role that `mtask roles` lists, such as {role_name(database, nearest)}."
        return [fail("rights", message, remedy, lacking=lacking)]
    if rights.roles != ["deployer"]:
        yield from diagnosis.try_read_and_write()
    may = f"{rights.user} may do what the role{'s' * (len(rights.roles) > 1)} {', '.join(rights.roles)} may"
    return [ok("rights", may, user=rights.user, roles=list(rights.roles))]


def _collections(collections: dict[str, Mapping[str, Any]]) -> Findings:
    found: list[Finding] = []
    collections.update((yield from diagnosis.collection_options()))
    missing = [collection for collection in setup.ESSENTIAL if collection not in collections]
    if missing:
        remedy = f"{_RUN_INIT} Publishing and starting a worker do it, too."
        found.append(warn("collections", f"not in this database: {', '.join(missing)}", remedy, missing=missing))
    for collection, layout in LAYOUTS.items():
        if collection not in collections:
            continue  # a collection that is not essential is made at its first use
        found.append(_validator(collection, collections[collection], layout.validator()))
        state = yield from diagnosis.index_state(collection)
        check = f"indexes of {collection}"
        if state.missing:
            found.append(fail(check, f"missing: {', '.join(state.missing)}", _RUN_INIT, missing=state.missing))
        if state.differing:
            remedy = "Drop them, then run `mtask init`."
            message = f"keys or options differ from mtask's: {', '.join(state.differing)}"
            found.append(fail(check, message, remedy, differing=state.differing))
        if not state.missing and not state.differing:
            found.append(ok(check, "as they should be"))
    return found


def _validator(collection: str, options: Mapping[str, Any], wanted: Mapping[str, Any]) -> Finding:
    check = f"validator of {collection}"
    present = options.get("validator") or {}
    title = str(present.get("$jsonSchema", {}).get("title", ""))
    known = _TITLE.match(title)
    if not present:
        message = "missing: malformed documents get in"
        return fail(check, message, _RUN_INIT)
    if known is None:
        return fail(check, "not one of mtask's", "Is this the right --database? If so, run `mtask init`.")
    version, revision = int(known[1]), int(known[2])
    if version > SCHEMA_VERSION:
        return fail(check, f"schema_version {version}: made by a newer mtask", "Upgrade mtask.")
    if (version, revision) > (SCHEMA_VERSION, SCHEMA_REVISION):
        return ok(check, f"revision {revision}, made by a newer mtask; compatible")
    if title != schema_title(collection):
        return warn(check, f"schema_version {version}, revision {revision}: older than this mtask", _RUN_INIT)
    strict = options.get("validationAction", "error") == "error" and options.get("validationLevel", "strict") != "off"
    if present != wanted or not strict:
        return warn(check, "changed since mtask made it", f"{_RUN_INIT} It restores the validator.")
    return ok(check, f"schema_version {version}, revision {revision}")


def _status() -> Findings:
    status = yield from diagnosis.server_status()
    engine = status.storage_engine
    found = [
        ok("storage engine", engine or "unknown")
        if engine in ("wiredTiger", "inMemory", "")
        else fail("storage engine", f"{engine} has no transactions", "Use wiredTiger.")
    ]
    if status.oplog_first and status.oplog_last:
        window = status.oplog_last - status.oplog_first
        length = rough(window.total_seconds())
        # If the oplog is as old as the server, it has dropped nothing yet.
        if window >= OPLOG_WINDOW or status.uptime_s <= window.total_seconds() + 60:
            found.append(ok("oplog window", length, window_s=window.total_seconds()))
        else:
            message = f"{length}: a worker cut off for longer must scan instead of resuming its change stream"
            remedy = "Enlarge the oplog: `db.adminCommand({replSetResizeOplog: 1, size: MEGABYTES})`."
            found.append(warn("oplog window", message, remedy, window_s=window.total_seconds()))
    else:
        found.append(warn("oplog window", "this server does not show it", "Ask it with `rs.printReplicationInfo()`."))
    return found


def _documents() -> Findings:
    misfits = yield from diagnosis.misfits(MAX_NAMED)
    if not misfits:
        return [ok("documents", "all fit the schema")]
    found = []
    newer = [misfit for misfit in misfits if diagnosis.is_newer(misfit) and not misfit.is_marked]
    if newer:
        message = f"{newer[0].document_id!r} has schema_version {newer[0].schema_version}: written by a newer mtask"
        ids = [str(misfit.document_id) for misfit in newer]
        found.append(fail("documents", message, "Upgrade mtask.", task_ids=ids))
    marked_ids = [str(misfit.document_id) for misfit in misfits if misfit.is_marked]
    others = [misfit for misfit in misfits if misfit.is_marked or not diagnosis.is_newer(misfit)]
    unmarked = [misfit for misfit in others if not misfit.is_marked]
    if others:
        has_more = len(misfits) == MAX_NAMED
        found.append(_malformed(unmarked or others, marked_ids, are_marked=not unmarked, has_more=has_more))
    return found


def _malformed(
    misfits: Sequence[diagnosis.Misfit], marked_ids: Sequence[str], *, are_marked: bool, has_more: bool
) -> Finding:
    ids = [str(misfit.document_id) for misfit in misfits]
    first = ids[0] if len(ids[0]) <= _MAX_ID else f"{ids[0][:_MAX_ID]}..."
    many = f"{len(ids)}{' or more' * has_more} malformed, such as {first}"
    remedy = f"`mtask show {first}` shows what is wrong; mend or remove them"
    if are_marked:
        return warn("documents", f"{many}; workers have marked them FAIL", f"{remedy}.", task_ids=ids)
    # No worker has marked these documents. Possible reasons: no live worker serves them, they are not due, they have
    # finished, or they have no room for the mark.
    remedy += " by hand: workers mark only the tasks that they meet. `mtask doctor --json` names all."
    marked = f"; {len(marked_ids)} more are marked" if marked_ids else ""
    message = f"{many}, and not marked FAIL by any worker{marked}"
    return fail("documents", message, remedy, task_ids=ids, marked_ids=marked_ids)


def _sizes() -> Findings:
    large = yield from diagnosis.oversized(MAX_NAMED)
    if not large:
        return [ok("document sizes", "all leave room for the workers' writes")]
    ids = [str(document["_id"]) for document in large]
    more = " or more" * (len(large) == MAX_NAMED)
    message = f"{len(ids)}{more} within 1 KB of MongoDB's 16 MB, such as {ids[0][:_MAX_ID]}: no worker can run them"
    remedy = "Remove them, and publish them again with smaller params."
    are_over = all(document.get("status") in FINAL for document in large)
    return [(warn if are_over else fail)("document sizes", message, remedy, task_ids=ids)]


def readable(check: str, every: Callable[[], Operation[list[Document]]], parsed: Callable[[Document], Any]) -> Findings:
    """Read all documents of a collection, and tell of those that are malformed."""
    malformed: list[SchemaMismatch] = []
    documents = yield from every()
    for document in documents:
        try:
            parsed(document)
        except SchemaMismatch as error:
            malformed.append(error)
    if not malformed:
        return [ok(check, "all can be read")]
    return [fail(check, f"{len(malformed)} malformed, such as {malformed[0].reason}", malformed[0].remedy)]


def _retention() -> Findings:
    late = yield from diagnosis.overdue_expiry(TTL_GRACE // timedelta(milliseconds=1))
    if late:
        message = f"{late}{' or more' * (late >= 1000)} tasks should have been removed over 5 min ago"
        remedy = "Turn the TTL monitor on: `db.adminCommand({setParameter: 1, ttlMonitorEnabled: true})`."
        return [warn("retention", message, remedy, overdue=late)]
    return [ok("retention", "nothing is overdue for removal")]
