"""What the executors of a worker get from it at their start."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from mtask.features.encryption.settings import Encryption


@dataclass(frozen=True, slots=True)
class Origin:
    """What the executors of one worker get from it."""

    uri: str
    database: str
    worker_id: str
    incarnation: str
    log_format: str = "text"
    keep_logs: int = 0  #: the most lines of a run that are kept
    encryption: Encryption | None = field(default=None, repr=False)

    def hello(self) -> dict[str, Any]:
        """Return the first message to an executor. It holds the URI, so it must not be on a command line."""
        root, own = logging.getLogger(), logging.getLogger("mtask")
        levels = {"log_level": root.getEffectiveLevel(), "own_log_level": own.getEffectiveLevel()}
        logs = {"log_format": self.log_format, "keep_logs": self.keep_logs}
        # Handlers publish, and their transactions write results, from the executor: it needs the keys, too.
        keys = {} if self.encryption is None else {"encryption": self.encryption.document()}
        worker = {"worker_id": self.worker_id, "incarnation": self.incarnation}
        return {"uri": self.uri, "database": self.database, **worker, **levels, **logs, **keys}
