"""Tells which rules of a collection's validator a refused document broke, from the details of MongoDB's error 121."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
