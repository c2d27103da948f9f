"""Each feature stands in the lists of `mtask.parts`: what is missing there does nothing, and nobody notices."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mtask.kernel.document.handlers import Handler
from mtask.kernel.operations.relays import Relay
from mtask.kernel.statements.filters import Filter
from mtask.kernel.worker.process.part import Part, Service
from mtask.kernel.worker.running.call import Execution
from mtask.parts import surfaces, worker
from mtask.parts.relays import RELAYS

FEATURES = Path(worker.__file__).parents[1] / "features"
CONTRIB = FEATURES.with_name("contrib")


class Told(Part):
    """A part that overrides each hook, and notes which ones are called."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name = name
        self.told = told

    def wake(self) -> None:
        self.told.append(f"{self.name} woken")

    def watches(self) -> Mapping[str, Callable[[], object]]:
        return {"controls": self.wake}

    def guard(self) -> list[Filter]:
        return [{"sealed": self.name}]

    def skips(self, document: Mapping[str, Any]) -> bool:
        return bool(document["sealed"] == self.name)

    def execution(self, handler: Handler) -> Execution | None:
        self.told.append(f"{self.name} executes")
        return None

    async def upkeep(self, count: int, *, is_full: bool) -> None:
        self.told.append(f"{self.name} looks after {count} {is_full}")

    def services(self) -> Sequence[Service]:
        return (Service(stop=self.wake),)

    def beat(self) -> Mapping[str, Any]:
        return {self.name: 1}


def modules(name: str, folder: Path = FEATURES) -> Iterator[ModuleType]:
    for path in sorted(folder.glob(f"*/{name}.py")):
        yield import_module(f"mtask.{folder.name}.{path.parent.name}.{name}")


def test_each_relay_of_a_feature_is_listed() -> None:
    found = [one for module in modules("operations") for one in vars(module).values() if isinstance(one, Relay)]
    assert found
    assert [relay.mark for relay in found if relay not in RELAYS] == []


def test_each_part_of_a_feature_is_listed() -> None:
    named = re.findall(r"\w+", " ".join(str(each.type) for each in fields(worker.Features) if each.name != "others"))
    listed = {*named, *(getattr(make, "__name__", "") for make in worker.PARTS)}
    sources = [path for path in FEATURES.rglob("*.py") if "(Part)" in path.read_text()]
    found = [name for path in sources for name in re.findall(r"^class (\w+)\(Part\)", path.read_text(), re.M)]
    assert found
    assert sorted(listed - {"None"}) == sorted(found)


def test_the_hooks_of_all_parts_are_collected_in_order() -> None:
    told: list[str] = []
    parts: dict[str, Any] = {each.name: Told(each.name, told) for each in fields(worker.Features)}
    parts |= {"others": [Told("one", told), Told("another", told)], "scheduler": None, "keeper": None}
    guards = worker.Features(**parts).hooks().guard()
    assert [guard["sealed"] for guard in guards] == [
        *(
            "controls",
            "retention",
            "keys",
            "breakers",
            "limits",
            "flows",
            "one",
            "another",
            "recorder",
            "handlers",
            "rollout",
            "executors",
        )
    ]


def test_each_hook_that_a_part_overrides_is_collected() -> None:
    told: list[str] = []
    hooks = worker.collected([Part(), Told("a", told), Part(), Told("b", told)])
    assert hooks.guard() == [{"sealed": "a"}, {"sealed": "b"}]
    assert [hooks.skips({"sealed": name}) for name in "abc"] == [True, True, False]
    assert [beat() for beat in hooks.beats] == [{"a": 1}, {"b": 1}]
    assert len(hooks.services) == 2
    hooks.wake("controls")
    hooks.wake("schedules")
    handler: Any = None
    assert [find(handler) for find in hooks.executions] == [None, None]
    for upkeep in hooks.upkeeps:
        asyncio.run(upkeep(3, is_full=True))
    assert told == [
        *("a woken", "b woken", "a executes", "b executes"),
        *("a looks after 3 True", "b looks after 3 True"),
    ]


def test_what_no_part_overrides_is_empty() -> None:
    hooks = worker.collected([Part(), Part()])
    assert (hooks.guarding, hooks.executions, hooks.upkeeps, hooks.services, hooks.beats) == ((), (), (), (), ())
    assert not hooks.watches
    assert not hooks.skips({"sealed": "queue:mail"})


def test_idle_parts_are_asked_about_their_field_alone() -> None:
    idle, busy = Told("a", []), Told("b", [])
    idle.is_idle, idle.field, idle.always = True, "version", [{"version": 1}]
    hooks = worker.collected([idle, busy])
    assert hooks.guard() == [{"version": 1}, {"sealed": "b"}]
    assert not hooks.skips({"sealed": "a"})
    assert hooks.skips({"sealed": "a", "version": 2})
    idle.is_idle = False
    assert hooks.guard() == [{"version": 1}, {"sealed": "a"}, {"sealed": "b"}]
    assert hooks.skips({"sealed": "a"})


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


def test_each_part_of_contrib_for_users_is_listed() -> None:
    found = {module.__name__.split(".")[2] for module in modules("cli", CONTRIB) if hasattr(module, "register")}
    assert found == {name for name, joined in surfaces.CONTRIB.items() if joined.commands}


def test_each_feature_says_where_to_begin() -> None:
    folders = [path for each in (FEATURES, CONTRIB) for path in each.iterdir() if (path / "__init__.py").exists()]
    assert folders
    assert [path.name for path in folders if not (path / "README.md").exists()] == []
