"""What is told of a document that the validator refuses."""

from __future__ import annotations

from typing import Any

import pytest

from mtask.kernel.driver.errors import broken_rules

_TYPE = {"operatorName": "bsonType", "reason": "type did not match", "consideredValue": 5, "consideredType": "int"}


def schema(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"operatorName": "$jsonSchema", "schemaRulesNotSatisfied": list(rules)}


def prop(name: str, *details: dict[str, Any]) -> dict[str, Any]:
    return {"operatorName": "properties", "propertiesNotSatisfied": [{"propertyName": name, "details": list(details)}]}


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ({}, []),
        (schema(prop("queue", _TYPE)), ["queue: type did not match (5)"]),
        (schema(prop("a", prop("b", _TYPE))), ["a.b: type did not match (5)"]),
        (
            schema(prop("runs", {"operatorName": "items", "itemIndex": 2, "details": [prop("status", _TYPE)]})),
            ["runs.2.status: type did not match (5)"],
        ),
        (
            schema(prop("a", {"operatorName": "required", "missingProperties": ["b", "c"]})),
            ["a: missing: b, c"],
        ),
        (
            {"clausesNotSatisfied": [{"index": 0, "details": schema(prop("a", _TYPE))}]},
            ["a: type did not match (5)"],
        ),
        (
            {
                "operatorName": "$or",
                "clausesNotSatisfied": [
                    {"index": 0, "details": {"operatorName": "$in", "reason": "no matching value"}},
                    {"index": 1, "details": schema(prop("a", _TYPE))},
                ],
            },
            ["a: type did not match (5)"],
        ),
        (
            schema(prop("a", {"operatorName": "maxLength", "reason": "too long", "consideredValue": "x" * 999})),
            [f"a: too long ('{'x' * 79})"],
        ),
        (
            schema(
                prop(
                    "limit",
                    {
                        "operatorName": "anyOf",
                        "schemasNotSatisfied": [
                            {"index": 0, "details": [{"operatorName": "required", "missingProperties": ["window_ms"]}]},
                            {"index": 1, "details": [prop("starts", _TYPE), _TYPE]},
                        ],
                    },
                )
            ),
            ["(limit: missing: window_ms) or (limit.starts: type did not match (5); limit: type did not match (5))"],
        ),
        (schema(prop("a", {"operatorName": "additionalProperties"})), ["a: additionalProperties does not hold"]),
        ({"form": "of a later server"}, []),
    ],
    ids=str,
)
def test_each_broken_rule_is_told_with_its_field_and_a_short_value(details: dict[str, Any], told: list[str]) -> None:
    assert broken_rules(details) == told


def test_rules_that_concern_several_fields_are_told_by_their_names() -> None:
    [told] = broken_rules({"operatorName": "$expr", "reason": "expression did not match", "expressionResult": False})
    assert "_id, name, key" in told
