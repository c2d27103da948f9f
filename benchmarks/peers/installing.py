"""Install the peers below `build/peers/`: a virtual environment for each Python peer, one `node_modules` for Node."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.measuring.server import NotMeasured

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
REQUIREMENTS = HERE / "requirements"
_MARK = "installed"
_PATIENCE = 600.0


def python_of(name: str, build: Path) -> Path:
    """Return the Python of this peer's environment, which is made if it is missing or has other versions."""
    pinned = REQUIREMENTS / f"{name}.txt"
    folder = build / f"venv-{name}"
    mark = folder / _MARK
    fingerprint = hashlib.sha256(pinned.read_bytes() + sys.version.encode()).hexdigest()
    if not mark.exists() or mark.read_text() != fingerprint:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=False, symlinks=True)
        # By the pip of this environment: that of a new one would have to be unpacked first.
        _install(
            name,
            [
                *(sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")),
                *("install", "--quiet", "--no-deps", "--disable-pip-version-check", "-r", str(pinned)),
            ],
            build,
        )
        mark.write_text(fingerprint)
    return folder / "bin" / "python"


def node_folder(build: Path) -> Path:
    """Return a folder with the Node programs and their packages, installed by the lock file."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotMeasured("node and npm are not installed. Run: apt-get install nodejs npm")
    folder = build / "node"
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = hashlib.sha256((PROGRAMS / "package-lock.json").read_bytes()).hexdigest()
    mark = folder / _MARK
    if not mark.exists() or mark.read_text() != fingerprint:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(PROGRAMS / name, folder / name)
        # Without install scripts: the one there is compiles an option that BullMQ does without. Not by `npm ci`: it
        # refuses a lock without the builds of that option for other systems.
        _install("Node's packages", ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
        mark.write_text(fingerprint)
    for source in PROGRAMS.glob("*.mjs"):
        shutil.copy(source, folder / source.name)
    return folder


def _install(what: str, command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(f"{what} could not be installed: {error}") from None
    if done.returncode != 0:
        raise NotMeasured(f"{what} could not be installed: {(done.stderr or done.stdout).strip()[-800:]}")


def pinned_versions(requirement: str) -> str:
    """Return the version that a requirements file pins for a package, as `requirement` names it: `file/package`."""
    file, _, package = requirement.partition("/")
    for line in (REQUIREMENTS / f"{file}.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if name == package:
            return version
    raise KeyError(requirement)
