"""Translates the driver's errors into mtask's errors, by class, code or label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bson.errors import BSONError
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    DuplicateKeyError,
    ExecutionTimeout,
    InvalidURI,
    NetworkTimeout,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
    WriteConcernError,
    WTimeoutError,
)
from pymongo.errors import DocumentTooLarge as DriverDocumentTooLarge

from mtask import errors

DUPLICATE_KEY = 11000
#: The errors that the BSON encoder raises for a value that BSON cannot hold.
NOT_STORABLE = (BSONError, OverflowError, UnicodeError, RecursionError)
#: Codes of temporary errors: the server was interrupted, shut down, stepped down, ran out of time, or has no snapshot
#: yet. The server may still have carried out the operation.
_PASSING = frozenset({6, 7, 50, 89, 91, 112, 189, 246, 262, 9001, 10107, 11600, 11601, 11602, 13435, 13436})
_TOO_LARGE = frozenset({10334, 17419, 17420, 17280, 16493})
#: TemporarilyUnavailable and TransactionTooLargeForCache: other writes fill the cache. The server rolled this one back.
_BUSY = frozenset({365, 388})
_UNAUTHORIZED, _ATLAS = 13, 8000
_ACCESS = frozenset({_UNAUTHORIZED, 18, _ATLAS})
_STABLE_API = 323
_STANDALONE = frozenset({40573})
VALIDATION = 121
_TOO_DEEP = "maximum nested object depth"
_BEYOND_BSON = re.compile(r"BSONObj|object to insert too large|Size must be between", re.IGNORECASE)
#: The credentials in a URI end at the last "@", because a password that is not escaped may contain "@" and "/".
_CREDENTIALS = re.compile(r"(//|\")[^\s\"]*@")


def scrubbed(text: str) -> str:
    """Return the text without the credentials of any URI in it."""
    return _CREDENTIALS.sub(r"\1***@", text)


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return the error's message as one scrubbed line, without the driver's list of servers."""
    text = (
        scrubbed(str(error))
        .split(", Timeout:")[0]
        .split(" (configured timeouts")[0]
        .split(", full error:")[0]
        .split(", Topology Description")[0]
    )
    text = " ".join(text.split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def translated(error: Exception) -> Exception:
    """Return mtask's error for a driver's error. Return any other error unchanged."""
    reason = first_line(error)
    if isinstance(error, DriverDocumentTooLarge):  # it is also a BSONError
        return errors.DocumentTooLarge(reason)
    if isinstance(error, NOT_STORABLE):
        return errors.NotStorable(reason)
    if not isinstance(error, PyMongoError):
        return error
    if isinstance(error, DuplicateKeyError):
        return errors.DuplicateKey(reason, error.code)
    if isinstance(error, InvalidURI | ConfigurationError):
        return errors.InvalidURI(reason)
    if isinstance(error, ExecutionTimeout | NetworkTimeout):
        return errors.DatabaseTimeout(reason)
    if isinstance(
        error,
        AutoReconnect
        | ConnectionFailure
        | NotPrimaryError
        | ServerSelectionTimeoutError
        | WTimeoutError
        | WaitQueueTimeoutError,
    ):
        return errors.DatabaseUnavailable(reason)
    if isinstance(error, BulkWriteError):
        return _from_bulk(error)
    if isinstance(error, OperationFailure):
        return _from_code(error, error.code, reason)
    return errors.OperationFailed(reason)


def _from_bulk(error: BulkWriteError) -> errors.MtaskError:
    failed = error.details.get("writeErrors") or error.details.get("writeConcernErrors") or [{}]
    reason = scrubbed(str(failed[0].get("errmsg", error)))
    code = failed[0].get("code")
    return errors.DuplicateKey(reason, code) if code == DUPLICATE_KEY else _from_code(error, code, reason)


def _from_code(error: OperationFailure, code: int | None, reason: str) -> errors.MtaskError:
    if isinstance(error, WriteConcernError) or error.timeout or error.has_error_label("RetryableWriteError"):
        return errors.DatabaseUnavailable(reason)
    if code in _BUSY:
        return errors.DatabaseBusy(reason)
    if code in _PASSING:
        return errors.DatabaseUnavailable(reason)
    if code in _ACCESS:
        is_known = code == _UNAUTHORIZED or (code == _ATLAS and "not allowed" in reason)
        return errors.AccessDenied(reason, is_unauthorized=is_known)
    if code == _STABLE_API:
        return errors.NotInStableApi(reason, code)
    if code in _STANDALONE or (code == 20 and "replica set" in reason):
        return errors.NotReplicaSet("this address")
    if _TOO_DEEP in reason:
        return errors.NotStorable("it is nested too deeply", code)
    if code in _TOO_LARGE or _BEYOND_BSON.search(reason):
        return errors.DocumentTooLarge(reason, code)
    if code == VALIDATION:
        broken = (error.details or {}).get("errInfo", {}).get("details", {})
        rules = broken_rules(broken)
        return errors.OperationFailed(f"{reason}: {'; '.join(rules)[:600]}" if rules else reason, code)
    return errors.OperationFailed(reason, code)


# --- refusals --------------------------------------------------------------------------------------------

# Tells which rules of a collection's validator a refused document broke, from the details of MongoDB's error 121.

_Node = Mapping[str, Any]
_MAX_VALUE = 80


def broken_rules(details: _Node) -> list[str]:
    """Return each broken rule as "field: reason (value)". Empty: the details have another form."""
    return list(dict.fromkeys(_of(details, "")))


def _of(node: _Node, path: str) -> Iterator[str]:
    operator = node.get("operatorName")
    if "clausesNotSatisfied" in node:
        clauses = node["clausesNotSatisfied"]
        # The validator of tasks has two cases: the first is a short form of the second, which holds all rules.
        for clause in clauses[-1:] if operator == "$or" else clauses:
            yield from _of(clause["details"], path)
    elif "schemaRulesNotSatisfied" in node:
        yield from _all(node["schemaRulesNotSatisfied"], path)
    elif "propertiesNotSatisfied" in node:
        for broken in node["propertiesNotSatisfied"]:
            yield from _all(broken["details"], f"{path}.{broken['propertyName']}" if path else broken["propertyName"])
    elif "schemasNotSatisfied" in node:  # of anyOf: each alternative has rules of its own
        yield " or ".join(f"({'; '.join(_all(each['details'], path))})" for each in node["schemasNotSatisfied"])
    elif operator == "items" and "details" in node:
        yield from _all(node["details"], f"{path}.{node.get('itemIndex', 0)}")
    elif "missingProperties" in node:
        yield _told(path, f"missing: {', '.join(node['missingProperties'])}")
    elif operator == "$expr":
        yield _told(path, "the fields do not fit together (_id, name, key, tenant, times of leases, next_preempt_time)")
    elif "reason" in node:
        shown = repr(node["consideredValue"]) if "consideredValue" in node else ""
        value = f" ({shown[:_MAX_VALUE]})" if shown else ""
        yield _told(path, f"{node['reason']}{value}")
    elif operator is not None:
        yield _told(path, f"{operator} does not hold")


def _all(rules: Iterable[_Node], path: str) -> Iterator[str]:
    for rule in rules:
        yield from _of(rule, path)


def _told(path: str, reason: str) -> str:
    return f"{path}: {reason}" if path else reason
