"""What a process must not import at its start: each of these modules, or what it brings, slows down the start."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mtask
import mtask.client

_MODULES = "import sys; print(*sys.modules, sep='\\n', file=sys.stderr)"
_VERSION = f"""
import atexit
atexit.register(lambda: exec({_MODULES!r}))
import sys
from mtask.cli.main import run
sys.exit(run(["--version"]))
"""
_FIND = f"""
from mtask.cli.main import run
assert run(["find", "--help"]) == 0
{_MODULES}
"""

_COMPLETE = f"""
import os
os.environ.update(_MTASK_COMPLETE="complete_bash", COMP_WORDS="mtask publish --pr", COMP_CWORD="2")
from mtask.cli.main import run
assert run([]) == 0
{_MODULES}
"""
_HELP = f"""
from mtask.cli.main import run
assert run(["--help"]) == 0
{_MODULES}
"""
_WORKER_VERSION = _VERSION.replace("mtask.cli.main import run", "mtask.cli.workers.command import cli").replace(
    'sys.exit(run(["--version"]))', 'cli(["--version"])'
)
_DRIVERS = {"asyncio", "bson", "mtask.app", "mtask.client", "mtask.kernel", "pydantic", "pymongo"}

#: The starts, with the modules that they must not import: each stands for all that it brings.
STARTS = {
    "import mtask": (f"import mtask\n{_MODULES}", {*_DRIVERS, "contextlib", "re", "typing"}),
    "completion": (_COMPLETE, {*_DRIVERS, "mtask.cli.commands", "pathlib", "rich", "typer", "typing"}),
    "mtask --version": (_VERSION, {*_DRIVERS, "mtask.cli.commands", "rich", "typer"}),
    "mtask --help": (_HELP, {"asyncio", "bson", "mtask.cli.context", "mtask.cli.tasks", "mtask.kernel", "pymongo"}),
    "mtask-worker, before it handles signals": (
        f"import mtask.cli.worker\n{_MODULES}",
        {*_DRIVERS, "mtask.cli.workers", "rich", "typer"},
    ),
    "mtask-worker --version": (
        _WORKER_VERSION,
        {"bson", "mtask.cli.workers.serving", "mtask.kernel", "pymongo"},
    ),
    "from mtask import App": (
        f"from mtask import App\n{_MODULES}",
        {
            "apscheduler",
            "dotenv",
            "mtask.client.aio",
            "mtask.otel",
            "opentelemetry",
            "pydantic_settings",
            "rich",
            "typer",
        },
    ),
    "from mtask import Client": (
        f"from mtask import Client\n{_MODULES}",
        {
            "mtask.app",
            "mtask.client.aio",
            "mtask.features.flows.requests",
            "mtask.doctor.checks",
            "mtask.doctor.explain",
            "mtask.features.events.events_sync",
            "mtask.features.encryption.cipher",
            "mtask.features.flows.settle",
            "mtask.kernel.worker",
            "mtask.parts.relays",
            "mtask.parts.worker",
        },
    ),
    "mtask find": (
        _FIND,
        {
            "apscheduler",
            "mtask.app.app",
            "mtask.features.flows.cli",
            "mtask.cli.tasks.publish",
            "mtask.client.aio",
            "mtask.demo.play",
            "mtask.local.server",
            "mtask.kernel.worker.process.worker",
            "mtask.parts.assembly",
            "prometheus_client",
        },
    ),
    "mtask-worker": (
        f"import mtask.cli.workers.serving\n{_MODULES}",
        {
            "apscheduler",
            "ctypes",
            "http.client",
            "mtask.features.callbacks.sending",
            "mtask.features.isolation.pool",
            "mtask.features.logs.worker",
            "mtask.client.aio",
            "mtask.doctor.checks",
            "mtask.client.sync",
            "mtask.web",
            "prometheus_client",
            "mtask.otel",
            "opentelemetry",
            "rich",
        },
    ),
}


@pytest.mark.parametrize("start", STARTS)
def test_start_imports_only_what_it_needs(start: str) -> None:
    code, unwanted = STARTS[start]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    imported = set(ended.stderr.split())
    assert "mtask" in imported
    assert imported & unwanted == set()


@pytest.mark.parametrize("package", [mtask, mtask.client], ids=lambda package: package.__name__)
def test_type_checkers_and_users_find_the_same_public_names(package: ModuleType) -> None:
    [block, *_] = [node for node in ast.parse(Path(str(package.__file__)).read_text()).body if isinstance(node, ast.If)]
    for_checkers = {
        alias.name: node.module or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert for_checkers == package._MODULE_OF
    assert sorted(for_checkers) == sorted(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is getattr(sys.modules[for_checkers[name]], name)


def test_packages_are_reached_without_an_import_of_their_own() -> None:
    code = "import mtask; mtask.errors.InvalidInput, mtask.client.Client, mtask.kernel.document.task"
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_wrong_name_is_an_attribute_error_as_in_every_module() -> None:
    with pytest.raises(AttributeError, match="module 'mtask' has no attribute 'Worker'"):
        getattr(mtask, "Worker")  # noqa: B009 mypy knows that there is none
