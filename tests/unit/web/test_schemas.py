"""What the OpenAPI document says about values is what the client checks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import TypeAdapter

from mtask.errors import InvalidInput
from mtask.features.bulk.rest import BulkBody
from mtask.features.controls.rest import LimitBody
from mtask.features.schedules.rest import PutSchedule
from mtask.kernel.document.options import OPTION_NAMES, build_option
from mtask.search.partial import check_fields
from mtask.web import schemas


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [
        ("status", True),
        ("status,params.user_id,task_state.finish_time", True),
        ("_id", True),
        ("", False),
        ("status,", False),
        ("nothing", False),
        ("$where", False),
        ("params.$x", False),
        ("params..x", False),
    ],
)
def test_the_pattern_of_fields_is_the_rule(fields: str, is_valid: bool) -> None:
    assert (re.match(schemas.FIELDS["pattern"], fields) is not None) is is_valid
    try:
        check_fields(fields.split(","))
    except InvalidInput:
        assert not is_valid
    else:
        assert is_valid


@pytest.mark.parametrize(
    ("tag", "is_valid"),
    [('"1f0c"', True), ("*", True), ("", False), ("1f0c", False), ('W/"1f0c"', False), ('""', False)],
)
def test_the_pattern_of_etags(tag: str, is_valid: bool) -> None:
    assert (re.match(schemas.ETAG["pattern"], tag) is not None) is is_valid


def test_the_schema_of_options_has_each_option_with_its_bounds() -> None:
    schema: dict[str, Any] = TypeAdapter(schemas.Options).json_schema()
    assert set(schema["properties"]) == set(OPTION_NAMES)
    assert schema["additionalProperties"] is False
    for name, bounds in schema["properties"].items():
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound in bounds and name != "worker_timeout_ms":
                lease = {"worker_timeout_ms": 315_360_000_000} if name == "ping_interval_ms" else {}
                within = bounds[bound] if bound == "minimum" or name != "ping_interval_ms" else 1000
                assert build_option({name: within, **lease})
                with pytest.raises(InvalidInput):
                    build_option({name: bounds[bound] + step, **lease})


def test_whole_numbers_may_be_written_as_floats_and_others_may_not() -> None:
    assert LimitBody.model_validate({"concurrency": 10.0}).concurrency == 10
    for wrong in (10.5, "10", True):
        with pytest.raises(ValueError, match="concurrency"):
            LimitBody.model_validate({"concurrency": wrong})


def test_alternatives_are_part_of_the_schemas() -> None:
    assert [one["required"] for one in PutSchedule.model_json_schema()["oneOf"]] == [["cron"], ["every"], ["at"]]
    assert [one["required"] for one in BulkBody.model_json_schema()["oneOf"]] == [["filter", "dry_run"], ["plan"]]
