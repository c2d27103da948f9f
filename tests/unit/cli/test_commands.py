"""The table of commands holds what the modules register."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import mtask
from mtask.cli.commands import MODULES, made_by
from mtask.cli.main import run

HOUSE = Path(mtask.__file__).parent


@pytest.mark.parametrize("module", MODULES)
def test_the_table_names_the_commands_that_a_module_registers(module: str) -> None:
    assert tuple(made_by(module)) == MODULES[module]


def test_the_table_names_every_module_that_registers_commands() -> None:
    files = [*HOUSE.glob("cli/*/*.py"), *HOUSE.rglob("cli.py"), *HOUSE.glob("features/*/*.py")]
    modules = (".".join(("mtask", *file.relative_to(HOUSE).with_suffix("").parts)) for file in files)
    assert {module for module in modules if hasattr(import_module(module), "register")} == set(MODULES)


def test_no_two_modules_register_one_name() -> None:
    names = [name for registered in MODULES.values() for name in registered]
    assert sorted(names) == sorted(set(names))


def test_wrong_name_of_a_command_brings_the_nearest_of_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schdule"]) == 2
    assert "Did you mean 'schedule', 'schema'?" in capsys.readouterr().err
