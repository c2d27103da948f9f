"""The files to deploy by agree with the command line, with each other, and with the time that a stop takes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from mtask.cli import health
from mtask.cli.commands import app as mtask_app
from mtask.cli.workers.command import cli as worker_app
from mtask.health import MAX_AGE
from mtask.kernel.worker.process.health import INTERVAL
from mtask.kernel.worker.process.worker import _CANCEL_GRACE, _LAST_WRITES
from mtask.settings import Settings
from mtask.web.settings import WebSettings

ROOT = Path(__file__).parents[3]
KUBERNETES = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
UNIT = ROOT / "deploy/systemd/mtask-worker@.service"
#: The time after --shutdown-timeout in which the worker ends itself, in seconds: `_arm_last_resort` in worker.py.
LAST_RESORT = _CANCEL_GRACE + _LAST_WRITES + 1.0
Step = tuple[str, str]


# --- what the files hold ------------------------------------------------------------------------------------------


@cache
def stages() -> dict[str, list[Step]]:
    """Return the instructions of each stage of the Dockerfile, with those of the stages that it is made from."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    made: dict[str, list[Step]] = {}
    for line in filter(str.strip, text.splitlines()):
        name, rest = line.split(maxsplit=1)
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            current = made[stage] = [*made.get(base, [(name, base)])]
        else:
            current.append((name, rest.strip()))
    return made


def last(stage: str, instruction: str) -> str:
    """Return what the last such instruction of a stage says."""
    return [rest for name, rest in stages()[stage] if name == instruction][-1]


@cache
def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """Return all objects of Kubernetes, by kind and name."""
    documents = [document for path in KUBERNETES for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return {
        (found["kind"], found["metadata"].get("name") or found["metadata"]["generateName"].rstrip("-")): found
        for found in documents
    }


def pod(kind: str, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifests()[kind, name]["spec"]["template"]["spec"]
    return spec


PODS = [("Deployment", "mtask-worker"), ("Deployment", "mtask-web"), ("Job", "mtask-init")]


@cache
def unit() -> dict[str, str]:
    """Return the settings of the systemd unit."""
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def flags_of(command: Any) -> set[str]:
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}


WORKER_FLAGS = flags_of(typer.main.get_command(worker_app))
WEB_FLAGS = flags_of(typer.main.get_command(mtask_app).get_command(None, "web"))  # type: ignore[attr-defined]


def value_of(flag: str, command: list[str]) -> str:
    return command[command.index(flag) + 1]


def settings_of(environment: Iterator[str]) -> list[str]:
    return [name.removeprefix("MTASK_").lower() for name in environment if name.startswith("MTASK_")]


# --- the image ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["worker", "web"])
def test_image_is_slim_runs_as_another_user_and_takes_signals_itself(stage: str) -> None:
    assert re.fullmatch(r"python:3\.1[1-3]-slim", last(stage, "FROM"))
    assert last(stage, "USER") == "10001"
    assert last(stage, "STOPSIGNAL") == "SIGTERM"
    assert json.loads(last(stage, "ENTRYPOINT"))[0] == f"mtask-{stage}"
    assert [name for name, _ in stages()[stage]].index("USER") > 0
    built = " ".join(rest for name, rest in stages()[stage] if name == "RUN")
    assert not re.search(r"\bpip\b|apt|gcc|build-essential", built), "what builds stays in the stage that builds"


def test_image_copies_what_is_there_and_in_the_context_of_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    copies = [rest for steps in stages().values() for name, rest in steps if name == "COPY" and "--from" not in rest]
    sources = {source.removeprefix("./") for rest in copies for source in rest.split()[:-1]}
    assert sources == {"pyproject.toml", "README.md", "LICENSE", "mtask", "examples"}
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored


def test_image_asks_for_health_as_the_worker_tells_it() -> None:
    environment = [pair for name, rest in stages()["worker"] if name == "ENV" for pair in shlex.split(rest)]
    path = next(pair.partition("=")[2] for pair in environment if pair.startswith("MTASK_HEALTH_FILE="))
    command = json.loads(last("worker", "HEALTHCHECK").partition("CMD ")[2])
    assert command == ["mtask-health", path]
    made = " ".join(rest for name, rest in stages()["worker"] if name == "RUN")
    assert f"--owner=10001 {Path(path).parent} " in made
    probe = json.loads(last("web", "HEALTHCHECK").partition("CMD ")[2])
    compile(probe[2], "probe", "exec")
    assert f":{value_of('--port', json.loads(last('web', 'ENTRYPOINT')))}/healthz" in probe[2]


@pytest.mark.parametrize(("extras", "installed"), [("web,motor", "mtask-1.whl[web,motor]"), ("", "mtask-1.whl")])
def test_image_is_built_with_the_extras_that_are_asked_for_or_none(tmp_path: Path, extras: str, installed: str) -> None:
    (tmp_path / "mtask-1.whl").touch()
    [run] = [rest for name, rest in stages()["build"] if name == "RUN" and " install " in rest]
    wheel = run.partition("--compile ")[2].replace("/wheels/", "")
    told = subprocess.run(
        ["sh", "-euc", f"echo {wheel}"],
        cwd=tmp_path,
        env={**os.environ, "EXTRAS": extras},
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == installed


@pytest.mark.long
def test_commands_of_the_image_work_in_a_folder(tmp_path: Path) -> None:
    """The build of the image, by hand: the wheel and its environment, but with the packages of this environment."""
    runs = [rest for name, rest in stages()["build"] if name == "RUN"]
    wheels, target = tmp_path / "wheels", tmp_path / "opt"
    for path in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / path, tmp_path)
    shutil.copytree(ROOT / "mtask", tmp_path / "mtask", ignore=shutil.ignore_patterns("__pycache__"))
    for run in runs:
        command = run.replace("/wheels", str(wheels)).replace("/opt/mtask", str(target))
        environment = {**os.environ, "EXTRAS": "web"}
        subprocess.run(
            ["sh", "-euc", command], cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=280
        )
    scripts = target / "bin"
    for command in ("mtask --version", "mtask-worker --version", "mtask-web --help", "mtask-health --help"):
        name, flag = command.split()
        subprocess.run([scripts / name, flag], check=True, capture_output=True, cwd=tmp_path / "wheels", env={})


# --- Kubernetes ---------------------------------------------------------------------------------------------------


def test_every_object_is_there_once() -> None:
    kinds = sorted(kind for kind, _ in manifests())
    assert kinds == [
        *("Deployment", "Deployment", "Job"),
        *("PodDisruptionBudget", "PodDisruptionBudget"),
        *("Secret", "Service"),
    ]


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_pod_runs_as_another_user_on_a_root_that_it_cannot_write(kind: str, name: str) -> None:
    spec = pod(kind, name)
    assert spec["securityContext"]["runAsNonRoot"]
    assert str(spec["securityContext"]["runAsUser"]) == last("worker", "USER")
    assert spec["automountServiceAccountToken"] is False
    [container] = spec["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"].keys() == {"memory"}
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounted == {volume["name"] for volume in spec.get("volumes", [])}


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_pod_uses_the_version_the_secret_and_settings_that_exist(kind: str, name: str) -> None:
    [container] = pod(kind, name)["containers"]
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert container["image"].endswith(f":{version}")
    keys = manifests()["Secret", "mtask"]["stringData"].keys()
    for variable in container["env"]:
        assert variable["name"].removeprefix("MTASK_").lower() in Settings.model_fields
        source = variable.get("valueFrom", {}).get("secretKeyRef")
        assert source is None or (source["name"] == "mtask" and source["key"] in keys)
    assert any(variable["name"] == "MTASK_URI" and "valueFrom" in variable for variable in container["env"])


@pytest.mark.parametrize(("name", "known"), [("mtask-worker", WORKER_FLAGS), ("mtask-web", WEB_FLAGS)])
def test_flags_are_those_of_the_command_line(name: str, known: set[str]) -> None:
    [container] = pod("Deployment", name)["containers"]
    stage = json.loads(last(name.removeprefix("mtask-"), "ENTRYPOINT"))
    flags = {part for part in [*stage, *container["args"]] if part.startswith("--")}
    assert flags
    assert flags - known == set()


def test_worker_is_given_longer_to_stop_than_it_takes() -> None:
    spec = pod("Deployment", "mtask-worker")
    timeout = float(value_of("--shutdown-timeout", spec["containers"][0]["args"]))
    assert spec["terminationGracePeriodSeconds"] >= timeout + LAST_RESORT + 5
    assert "lifecycle" not in spec["containers"][0]


def test_worker_is_not_the_first_process_of_its_container() -> None:
    """The first process must reap what handlers leave behind, which a worker does not."""
    assert pod("Deployment", "mtask-worker")["shareProcessNamespace"] is True
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    assert compose["services"]["worker"]["init"] is True
    assert "docker run --init -e MTASK_URI=URI mtask " in (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_probes_of_the_worker_tell_a_dead_worker_from_an_absent_database(tmp_path: Path) -> None:
    [container] = pod("Deployment", "mtask-worker")["containers"]
    [path] = [variable["value"] for variable in container["env"] if variable["name"] == "MTASK_HEALTH_FILE"]
    assert [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "run"] == [
        str(Path(path).parent)
    ]
    for kind in ("startup", "liveness", "readiness"):
        name, *arguments = container[f"{kind}Probe"]["exec"]["command"]
        assert name == "mtask-health"
        assert arguments[0] == path
        assert ("--ready" in arguments) == (kind == "readiness")
        assert health.main([str(tmp_path / "none"), *arguments[1:]]) == 1  # it takes these flags
    alive = container["livenessProbe"]["exec"]["command"]
    assert float(value_of("--max-age", alive)) == MAX_AGE


def test_probes_of_the_web_page_name_a_host_that_it_accepts() -> None:
    [container] = pod("Deployment", "mtask-web")["containers"]
    [port] = container["ports"]
    entry = json.loads(last("web", "ENTRYPOINT"))
    assert int(value_of("--port", entry)) == port["containerPort"]
    settings = WebSettings(value_of("--host", entry), port["containerPort"])
    for kind, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz")):
        asked = container[f"{kind}Probe"]["httpGet"]
        assert (asked["path"], asked["port"]) == (path, port["name"])
        [header] = asked["httpHeaders"]
        assert header["name"] == "Host"
        assert settings.accepts_host(header["value"], port["containerPort"])
    [service_port] = manifests()["Service", "mtask-web"]["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]


@pytest.mark.parametrize("name", ["mtask-worker", "mtask-web"])
def test_selectors_find_their_pods(name: str) -> None:
    deployment = manifests()["Deployment", name]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert manifests()["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"] == labels


# --- systemd ------------------------------------------------------------------------------------------------------


def test_unit_starts_a_worker_with_flags_and_settings_that_exist() -> None:
    command = shlex.split(unit()["ExecStart"])
    assert Path(command[0]).name == "mtask-worker"
    flags = {part for part in command if part.startswith("--")}
    assert flags
    assert flags - WORKER_FLAGS == set()
    assert value_of("--health-file", command) == f"/run/{unit()['RuntimeDirectory']}/health"
    named = re.findall(r"^# +(MTASK_\w+)=", UNIT.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"uri", "app"} <= set(settings_of(iter(named))) <= set(Settings.model_fields)


def test_unit_gives_the_worker_longer_to_stop_than_it_takes() -> None:
    timeout = float(value_of("--shutdown-timeout", shlex.split(unit()["ExecStart"])))
    assert float(unit()["TimeoutStopSec"]) >= timeout + LAST_RESORT + 5
    # The worker ends its executors itself, when their runs have ended.
    assert (unit()["KillMode"], unit()["KillSignal"]) == ("mixed", "SIGTERM")


def test_unit_waits_for_the_worker_and_watches_it() -> None:
    assert (unit()["Type"], unit()["NotifyAccess"]) == ("notify", "main")
    # A handler may block the event loop for as long as the probes of the other deployments allow.
    assert float(unit()["WatchdogSec"]) == MAX_AGE > 3 * INTERVAL


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    # A program that exists here stands for the worker: systemd looks for it.
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", UNIT.read_text(), flags=re.MULTILINE)
    path = tmp_path / "mtask-worker@1.service"
    path.write_text(text)
    ran = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False, timeout=60)
    if "Failed to" in ran.stderr and "mtask" not in ran.stderr:
        pytest.skip(ran.stderr)  # it cannot work here, in a container for example
    assert (ran.returncode, [line for line in ran.stderr.splitlines() if "mtask" in line]) == (0, [])
