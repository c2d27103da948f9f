"""Log records. Each record has a constant message and fields. `mtask-worker` prints the fields after the message."""

from __future__ import annotations

from typing import Any

#: The name of the attribute that holds the fields of a log record.
FIELDS = "mtask_fields"


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the fields in the form of the argument `extra` of a log call."""
    return {FIELDS: values}
