"""Tells which rules of a collection's validator a refused document broke, from the details of MongoDB's error 121."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
        for rule in node["schemaRulesNotSatisfied"]:
            yield from _of(rule, path)
    elif "propertiesNotSatisfied" in node:
        for broken in node["propertiesNotSatisfied"]:
            for rule in broken["details"]:
                yield from _of(rule, f"{path}.{broken['propertyName']}" if path else broken["propertyName"])
    elif operator == "items" and "details" in node:
        for rule in node["details"]:
            yield from _of(rule, f"{path}.{node.get('itemIndex', 0)}")
    elif "missingProperties" in node:
        yield _told(path, f"missing: {', '.join(node['missingProperties'])}")
    elif operator == "$expr":
        yield _told(path, "the fields do not fit together (_id, name, key, tenant, times of leases, next_preempt_time)")
    elif "reason" in node:
        shown = repr(node["consideredValue"]) if "consideredValue" in node else ""
        value = f" ({shown[:_MAX_VALUE]})" if shown else ""
        yield _told(path, f"{node['reason']}{value}")


def _told(path: str, reason: str) -> str:
    return f"{path}: {reason}" if path else reason
