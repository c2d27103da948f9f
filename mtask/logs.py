"""Log records: each has a constant message and fields. `mtask-worker` prints the fields after the message."""

from __future__ import annotations

from typing import Any

#: The attribute of a record that holds the fields.
FIELDS = "mtask_fields"


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the argument `extra` of a log call, with these fields."""
    return {FIELDS: values}
