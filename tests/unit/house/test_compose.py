"""docker-compose.yml, the Dockerfile, the Makefile and CI agree with the examples and the command line."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtask import App
from mtask.settings import Settings
from mtask.web.settings import WebSettings

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    compose: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    found: dict[str, Any] = compose["services"]
    assert set(compose["volumes"]) == {"mongo-data"}
    return found


@pytest.fixture(scope="module")
def dockerfile() -> list[list[str]]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def arguments_of(dockerfile: list[list[str]], instruction: str) -> list[str]:
    return [rest for name, rest in dockerfile if name == instruction]


def seconds(duration: str) -> int:
    assert duration.endswith("s")
    return int(duration.removesuffix("s"))


def test_mongo_is_a_recent_server_started_as_a_replica_set(services: dict[str, Any]) -> None:
    mongo = services["mongo"]
    assert re.fullmatch(r"mongo:8\.\d+", mongo["image"])
    assert mongo["command"][mongo["command"].index("--replSet") + 1] == "rs0"
    assert "mongo-data:/data/db" in mongo["volumes"]
    assert all(port.startswith("127.0.0.1:") for port in mongo["ports"]), "without a password: not for the network"


def test_health_check_initiates_the_set_under_a_name_that_containers_can_look_up(services: dict[str, Any]) -> None:
    check = services["mongo"]["healthcheck"]
    script = check["test"][-1]
    assert check["test"][0] == "CMD"
    assert "rs.initiate(" in script
    assert 'host: "mongo:27017"' in script
    assert "isWritablePrimary" in script
    assert "$" not in script, "docker compose would read it as a variable"
    assert services["worker"]["depends_on"] == {"mongo": {"condition": "service_healthy"}}


def test_worker_serves_the_example_app_over_the_replica_set(services: dict[str, Any]) -> None:
    path, *flags = services["worker"]["command"]
    module, _, attribute = path.partition(":")
    app = getattr(importlib.import_module(module), attribute)
    assert isinstance(app, App)
    assert set(app.handlers) >= {"send_email"}
    assert flags[flags.index("--uri") + 1] == "mongodb://mongo:27017/?replicaSet=rs0"


def test_worker_is_given_longer_to_stop_than_it_takes(services: dict[str, Any]) -> None:
    command = services["worker"]["command"]
    timeout = float(command[command.index("--shutdown-timeout") + 1])
    assert timeout == Settings.model_fields["shutdown_timeout"].default
    assert seconds(services["worker"]["stop_grace_period"]) >= timeout + 10


def test_worker_command_line_has_the_flags_that_compose_uses(
    services: dict[str, Any], dockerfile: list[list[str]]
) -> None:
    assert arguments_of(dockerfile, "ENTRYPOINT")[-1] == '["mtask-worker"]'
    assert services["worker"]["build"] == {"context": ".", "target": "worker"}
    ran = subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "mtask-worker", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    flags = [part for part in services["worker"]["command"] if part.startswith("--")]
    assert flags
    assert [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", ran.stdout)] == []


def test_web_page_takes_a_token_and_is_published_to_the_host_alone(
    services: dict[str, Any], dockerfile: list[list[str]]
) -> None:
    web = services["web"]
    assert web["profiles"] == ["web"], "it needs a token, so it starts only where it is asked for"
    assert web["environment"] == {"MTASK_WEB_TOKENS": "${MTASK_WEB_TOKENS:-}"}
    command = web["command"]
    host, port = (command[command.index(flag) + 1] for flag in ("--host", "--port"))
    assert web["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert is_public(host)
    assert seconds(web["stop_grace_period"]) >= 5
    [entry] = web["entrypoint"]
    with (ROOT / "pyproject.toml").open("rb") as file:
        module, _, function = tomllib.load(file)["project"]["scripts"][entry].partition(":")
    assert services["web"]["build"] == {"context": ".", "target": "web"}
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())", *command],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "MTASK_WEB_TOKENS": ""},
    )
    assert ran.returncode == 2, "without a token it refuses to start"
    assert "MTASK_WEB_TOKENS" in ran.stderr


def is_public(host: str) -> bool:
    return WebSettings(host=host).is_public


def test_ci_runs_the_tests_as_the_readme_does() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "exec make test </dev/null"
    assert "set -euo pipefail" in lines
    for tool in ("setup.sh", "pythons.sh"):
        assert os.access(ROOT / "tools" / tool, os.X_OK)


def test_what_runs_on_each_python_is_there_and_the_versions_are_those_of_the_package() -> None:
    script = (ROOT / "tools" / "pythons.sh").read_text(encoding="utf-8")
    named = re.findall(r"^    (?:--ignore=|--ignore-glob=)?'?(tests/[^\s']+)'?$", script, re.MULTILINE)
    assert len(named) > 3
    for test in named:
        assert list(ROOT.glob(test)), test
    versions = re.search(r"^versions=\((.*)\)$", script, re.MULTILINE)
    assert versions is not None
    told = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert versions[1].split() == told


def test_setup_installs_extras_and_groups_that_exist() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    script = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    cases = dict(re.findall(r"^    (\w+)\) extras=(\S*) ;;$", script, re.MULTILINE))
    assert cases.keys() - {"demo"} == {"test", "dev", "docs"} <= groups.keys()
    named = {extra for several in cases.values() for extra in several.split(",") if extra}
    assert {"local", "web"} < named <= extras.keys()
    included = {each["include-group"] for group in groups.values() for each in group if isinstance(each, dict)}
    assert included == {"test", "lint", "django"} <= groups.keys()
    assert not {"short", "dev", "docs"} & extras.keys(), "who installs mtask needs none of these"
    told = re.search(r"pip install --group dev -e '\.\[(.*)\]'", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert told is not None
    assert told[1] == cases["dev"]


@pytest.mark.parametrize("script", ["tools/setup.sh", "tools/pythons.sh", "tools/django.sh", ".ci/run"])
def test_script_is_sound_bash(script: str) -> None:
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


def test_make_test_runs_each_check() -> None:
    ran = subprocess.run(
        ["make", "--dry-run", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    commands = [shlex.split(line) for line in ran.stdout.splitlines() if line.strip()]
    for check in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["lint-imports"]):
        assert check in commands
    assert ["python", "-m", "tests.chaos", "--once"] in [command[:4] for command in commands]
    whole = ["pytest", "-n", "5", "--dist", "loadfile", "--no-loadscope-reorder"]  # all of them
    assert commands[-1] == [*whole, "--durations", "30", "--durations-min", "5"]
