"""Each feature stands in the lists of `mtask.parts`: what is missing there does nothing, and nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from mtask.kernel.operations.relays import Relay
from mtask.kernel.worker.process.part import Part
from mtask.kernel.worker.process.state import Ledger
from mtask.parts import surfaces, worker
from mtask.parts.relays import RELAYS

FEATURES = Path(worker.__file__).parents[1] / "features"


class _Scope:
    ledger = Ledger()
    store = None


def modules(name: str) -> Iterator[ModuleType]:
    for path in sorted(FEATURES.glob(f"*/{name}.py")):
        yield import_module(f"mtask.features.{path.parent.name}.{name}")


def test_each_relay_of_a_feature_is_listed() -> None:
    found = [one for module in modules("operations") for one in vars(module).values() if isinstance(one, Relay)]
    assert found
    assert [relay.mark for relay in found if relay not in RELAYS] == []


def test_each_part_of_a_feature_is_listed() -> None:
    listed = {type(part) for part in worker.parts(cast(Any, _Scope()))}
    found = {
        one
        for module in modules("worker")
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Part) and one is not Part
    }
    assert found
    assert found - listed == set()


#: What surfaces collect of the modules of features, by their names.
_SIDES = {"cli": "register", "rest": "routes", "page": "addresses", "doctor": "CHECKS"}


def test_each_side_of_a_feature_for_users_is_listed() -> None:
    listed = {
        (name, side)
        for name, surface in surfaces.FEATURES.items()
        for side in (*surface.sides.split(), *(["cli"] if surface.commands else []))
    }
    found = {
        (module.__name__.split(".")[2], side)
        for side, collected in _SIDES.items()
        for module in modules(side)
        if hasattr(module, collected)
    }
    assert found == listed


def test_each_feature_says_where_to_begin() -> None:
    folders = [path for path in FEATURES.iterdir() if (path / "__init__.py").exists()]
    assert folders
    assert [path.name for path in folders if not (path / "README.md").exists()] == []
