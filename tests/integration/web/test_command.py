"""`mtask web` as a process: its token, its refusals, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtask.web.tokens import digest_of
from tests.integration.cli.commands import Commands
from tests.mongo import PATIENCE, eventually
from tests.processes import kill_marked

ROOT = Path(__file__).parents[3]
_MARK = "MTASK_TEST_WEB"


def _environment(uri: str, database: str) -> dict[str, str]:
    given = {"MTASK_URI": uri, "MTASK_DATABASE": database, "PYTHONPATH": str(ROOT), _MARK: database}
    return {**os.environ, **given}


@contextmanager
def command(uri: str, database: str, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """Run `mtask web` during the block; give the process and what it has printed."""
    arguments = [sys.executable, "-m", "mtask.cli.main", "web", "--port", "0", "--json", *flags]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(arguments, cwd=folder, env=_environment(uri, database), stdout=out, stderr=err)
    try:
        yield process, eventually(lambda: _json_in(folder / "out"), PATIENCE, "it serves")
    finally:
        process.kill()
        process.wait(PATIENCE)
        kill_marked(_MARK, database)


def _json_in(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def test_sigterm_ends_it_at_once_though_viewers_are_connected(
    mongo_uri: str, database_name: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        process, printed = stack.enter_context(command(mongo_uri, database_name, tmp_path))
        headers = {"Authorization": f"Bearer {printed['token']}"}
        limits = httpx.Limits(max_connections=100)
        http = stack.enter_context(
            httpx.Client(base_url=printed["url"], headers=headers, trust_env=False, timeout=PATIENCE, limits=limits)
        )
        assert http.put("/v1/tasks/echo/a", json={}).status_code == 201
        assert httpx.get(f"{printed['url']}/v1/tasks", trust_env=False).status_code == 401
        streams = [stack.enter_context(http.stream("GET", "/v1/events")) for _ in range(50)]
        readers = [stream.iter_lines() for stream in streams]
        assert all("event: ready" in (next(lines), next(lines)) for lines in readers)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - begun < 5, "alone on the machine it takes 0.7 s; waiting for the viewers, for ever"
        assert all("event: closing" in list(lines) for lines in readers)
    assert printed["token"] not in (tmp_path / "err").read_text()
    assert (tmp_path / "err").read_text() == ""


def test_with_a_token_file_it_prints_no_token(mongo_uri: str, database_name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([{"name": "ci", "role": "read", "sha256": digest_of("secret-of-ci")}]))
    path.chmod(0o600)
    with command(mongo_uri, database_name, tmp_path, "--token-file", str(path)) as (process, printed):
        assert printed["token"] is None
        with httpx.Client(base_url=printed["url"], trust_env=False) as http:
            headers = {"Authorization": "Bearer secret-of-ci"}
            assert http.get("/v1/tasks", headers=headers).status_code == 200
            assert http.put("/v1/tasks/echo/a", headers=headers, json={}).status_code == 403
            assert http.get("/v1/tasks", headers={"Authorization": "Bearer wrong-one"}).status_code == 401
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    told = (tmp_path / "err").read_text() + (tmp_path / "out").read_text()
    assert "secret-of-ci" not in told
    assert "wrong-one" not in told


@pytest.mark.parametrize(
    "flags",
    [
        ["--host", "0.0.0.0"],
        ["--host", "0.0.0.0", "--no-token"],
        ["--host", "::", "--no-token"],
        ["--host", ""],
        ["--port", "70000"],
        ["--token-file", "missing.json"],
    ],
)
def test_it_refuses_to_start_where_strangers_could_use_it(mtask: Commands, flags: list[str]) -> None:
    ended = mtask("web", "--json", *flags)
    assert ended.code == 2, ended.err
    assert ended.error["error"] == "InvalidInput"


def test_without_a_database_it_serves_and_says_so(database_name: str, tmp_path: Path) -> None:
    uri = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300"
    flags = ("--no-token", "--read-only")
    with command(uri, database_name, tmp_path, *flags) as (_, printed), httpx.Client(trust_env=False) as http:
        url = printed["url"]
        assert http.get(f"{url}/healthz").status_code == 200
        for path in ("/readyz", "/v1/tasks", "/v1/events"):
            answer = http.get(f"{url}{path}", timeout=PATIENCE)
            assert (answer.status_code, answer.json()["type"]) == (503, "/v1/problems/database-unavailable"), path
            assert "127.0.0.1:1" not in answer.text
