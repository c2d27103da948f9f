"""What users install: a wheel that works in an empty environment, an sdist that makes it again, and precise types."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email import message_from_string
from hashlib import sha256
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mtask

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "tests" / "typing_example"
#: What is right, and what is wrong on each marked line. The second of each is about `call`.
RIGHT, WRONG = ("service.py", "calls.py"), ("misuse.py", "miscalls.py")
_MARK = "# wrong"
PAGE = ROOT / "mtask" / "web" / "page"
PARTS_OF_PAGE = (("templates", "base.html"), ("static", "app.css"), ("static", "vendor/htmx/htmx.min.js"))
#: Strict for the program that is right. For the mistakes only what a type's precision decides: strict mode would refuse
#: some of them for unknown types, or as unused expressions, too.
_PYRIGHT = {"strict": [*RIGHT], "reportUnusedExpression": "none", "reportUnnecessaryComparison": "error"}

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True)
class Built:
    """The files that `python -m build` makes."""

    sdist: Path
    wheel: Path  #: built from the sdist
    direct_wheel: Path  #: built from the working tree


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that holds the wheel and what it depends on, and nothing else."""

    folder: Path

    def run(self, command: str, *arguments: str) -> str:
        """Run a command of the environment in a folder without sources; return what it prints."""
        return run(self.folder, str(self.folder / "bin" / command), *arguments)


def run(folder: Path, *command: str, codes: Iterable[int] = (0,)) -> str:
    """Run a command that finds no source of ours by the folder or by the environment's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MTASK_", "PYTHON", "MYPY"))}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode in codes, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build with the backend that is installed: an isolated build would only download it."""
    folder = tmp_path_factory.mktemp("built")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(folder, *build, str(folder / "dist"), str(ROOT))
    run(folder, *build, str(folder / "direct"), "--wheel", str(ROOT))
    [sdist], [wheel], [direct] = (
        (folder / name).glob(files) for name, files in (("dist", "*.tar.gz"), ("dist", "*.whl"), ("direct", "*.whl"))
    )
    return Built(sdist, wheel, direct)


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Install the wheel into an empty environment, beside what it says that it depends on: linked, not downloaded."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check")
    run(folder, *pip, "install", "--quiet", "--no-compile", "--no-deps", "--no-index", str(built.wheel))
    [packages] = folder.glob("lib/python3.*/site-packages")
    with zipfile.ZipFile(built.wheel) as wheel:
        metadata = wheel.read(f"mtask-{mtask.__version__}.dist-info/METADATA").decode()
    for each in needed(message_from_string(metadata).get_all("Requires-Dist", [])):
        for top in {Path(file).parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(str(each.locate_file(top)))
    return Environment(folder)


def needed(requirements: Iterable[str], extra: str = "") -> Iterator[Distribution]:
    """Return what these requirements need here, and what that needs, each once."""
    known: dict[str, Distribution] = {}
    left = [(Requirement(text), extra) for text in requirements]
    while left:
        requirement, extra = left.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name not in known:
            known[name] = found = distribution(requirement.name)
            assert requirement.specifier.contains(found.version), (requirement, found.version)
            left += [(Requirement(text), "") for text in found.requires or ()]
            left += [(Requirement(text), each) for each in requirement.extras for text in found.requires or ()]
            yield found


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the user's programs to a folder from which no source of ours is found."""
    folder = tmp_path_factory.mktemp("example")
    for name in (*RIGHT, *WRONG):
        shutil.copy(EXAMPLE / name, folder)
    return folder


# --- wheel and sdist ----------------------------------------------------------------------------------------------


def test_installed_wheel_runs_in_an_empty_environment(installed: Environment) -> None:
    assert installed.run("mtask", "--version").strip() == f"mtask {mtask.__version__}"
    assert "--concurrency" in installed.run("mtask-worker", "--help")
    where = "import mtask, mtask.testing; print(mtask.__file__, *sorted(mtask.__all__), sep='\\n')"
    file, *names = installed.run("python", "-c", where).split()
    assert Path(file).is_relative_to(installed.folder)
    assert names == sorted(mtask.__all__)


def test_index_of_packages_takes_both_with_their_pages(built: Built) -> None:
    told = run(
        built.wheel.parent, sys.executable, "-m", "twine", "check", "--strict", str(built.wheel), str(built.sdist)
    )
    assert told.count("PASSED") == 2, told


def test_wheel_holds_the_package_with_its_types_and_licence_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    assert {name.partition("/")[0] for name in names} == {"mtask", f"mtask-{mtask.__version__}.dist-info"}
    assert {"mtask/py.typed", f"mtask-{mtask.__version__}.dist-info/licenses/LICENSE"} <= names
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "mtask").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    page = {str(file.relative_to(ROOT)) for kind in ("templates", "static") for file in (PAGE / kind).rglob("*.*")}
    assert {f"{kind}/{name}" for kind, name in PARTS_OF_PAGE} <= {
        str(Path(name).relative_to("mtask/web/page")) for name in page
    }
    assert page <= names


def test_wheel_from_the_sdist_equals_the_wheel_from_the_working_tree(built: Built) -> None:
    assert contents(built.wheel) == contents(built.direct_wheel)


def test_sdist_holds_what_a_user_needs_and_neither_benchmarks_nor_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {Path(name).parts[1] for name in sdist.getnames() if len(Path(name).parts) > 1}
    documents = {"README.md", "CHANGELOG.md", "LICENSE", "docs", "examples", "deploy"}
    assert names == {"mtask", "pyproject.toml", "PKG-INFO", ".gitignore", *documents}


def contents(wheel: Path) -> dict[str, str]:
    """Return the hash of each file in a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        return {name: sha256(opened.read(name)).hexdigest() for name in opened.namelist()}


# --- types --------------------------------------------------------------------------------------------------------


def marked(folder: Path) -> set[tuple[str, int]]:
    """Return the lines that are marked as mistakes."""
    lines = ((name, enumerate((folder / name).read_text().splitlines(), start=1)) for name in WRONG)
    return {(name, number) for name, numbered in lines for number, line in numbered if line.endswith(_MARK)}


@pytest.mark.long
def test_mypy_accepts_users_programs_and_refuses_each_mistake(installed: Environment, example: Path) -> None:
    python = str(installed.folder / "bin" / "python")
    # Bare of configuration, as a user without pydantic's plugin has it.
    flags = ("--strict", "--config-file=", "--no-incremental", "--output=json", f"--python-executable={python}")
    told = run(example, sys.executable, "-m", "mypy", *flags, *RIGHT, *WRONG, codes=(1,))
    refused = [error for error in map(json.loads, told.splitlines()) if error["severity"] == "error"]
    assert [error for error in refused if error["file"] in RIGHT] == []
    assert {(error["file"], error["line"]) for error in refused} == marked(example)


@pytest.mark.long
def test_pyright_accepts_users_programs_and_refuses_each_mistake(installed: Environment, example: Path) -> None:
    (example / "pyrightconfig.json").write_text(json.dumps(_PYRIGHT))
    python = str(installed.folder / "bin" / "python")
    told = run(example, sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python, "-p", ".", codes=(1,))
    refused = [error for error in json.loads(told)["generalDiagnostics"] if error["severity"] == "error"]
    assert [error for error in refused if Path(error["file"]).name in RIGHT] == []
    found = {(Path(error["file"]).name, error["range"]["start"]["line"] + 1) for error in refused}
    assert found == marked(example)
