"""The features' sides for users: what each adds to the command line, the REST API, the page and the doctor.

Modules are named here and imported by who needs them: a command imports its own module alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple


class Surface(NamedTuple):
    """The sides of a feature. Each is a module in its folder."""

    sides: str  #: `rest` has `routes`, `page` has `addresses`, `doctor` has `CHECKS`
    commands: tuple[str, ...] = ()  #: what the module `cli` registers


#: All features with sides for users. Users find commands, addresses and checks in this order, after those of the queue.
FEATURES: Mapping[str, Surface] = {
    "controls": Surface("rest page doctor", ("purge", "pause", "resume", "limit", "fair", "keep", "controls")),
    "breaker": Surface("rest page doctor", ("breaker",)),
    "bulk": Surface("rest page", ("bulk",)),
    "flows": Surface("rest page doctor", ("flow",)),
    "schedules": Surface("rest page doctor", ("schedule",)),
    "gathering": Surface("doctor"),
    "callbacks": Surface("doctor"),
    "encryption": Surface("doctor", ("keys",)),
    "events": Surface("rest", ("tail",)),
    "logs": Surface("rest", ("logs",)),
    "metrics": Surface("rest", ("top", "metrics")),
    "registry": Surface("rest page doctor", ("handlers",)),
    "rollout": Surface("doctor"),
    "audit_log": Surface("rest page", ("log",)),
}

#: What joins mtask and other packages, in `mtask/contrib`: the commands of each.
CONTRIB: Mapping[str, Surface] = {
    "agenda": Surface("", ("migrate",)),
}


def module_of(feature: str, side: str) -> Any:
    """Return the module of one side of a feature."""
    return import_module(f"mtask.features.{feature}.{side}")


def modules(side: str) -> dict[str, Any]:
    """Return the modules of all features with this side, by feature."""
    return {name: module_of(name, side) for name, surface in FEATURES.items() if side in surface.sides.split()}
