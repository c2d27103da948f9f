"""What an executor knows of handlers of other apps: it asks the registry when a handler publishes by name."""

from __future__ import annotations

from mtask.arguments.publish import Declarations
from mtask.features.registry.client import Registry


def declarations() -> Declarations:
    """Return what finds out, and remembers for half a minute, what handlers declare."""
    return Registry()
