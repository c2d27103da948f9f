"""Log records: a constant message with fields, which `mtask-worker` prints behind it."""

from __future__ import annotations

from typing import Any

#: The attribute of a record that holds the fields.
FIELDS = "mtask_fields"


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the `extra` of a log call."""
    return {FIELDS: values}
