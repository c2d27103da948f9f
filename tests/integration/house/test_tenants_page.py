"""The code of docs/tenants.md is executed, in its order, and so are its commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tests.integration.cli.commands import Commands

PAGE = Path(__file__).parents[3] / "docs" / "tenants.md"


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found


def test_code_of_the_page_runs_as_written(
    mongo_uri: str,
    database_name: str,
    mongo: MongoClient[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    walled = f"{database_name}_walled"
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for block in blocks("python"):
            exec(compile(block.replace("shop_acme", walled), str(PAGE), "exec", dont_inherit=True), names)
        assert mongo[walled]["tasks"].count_documents({"_id": "import_file:f"}) == 1
    finally:
        names["client"].close()
        mongo.drop_database(walled)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "import_file:acme:c",
        "3 4",
        "['a', 'c', 'night/import']",
        "{('import_file', 'INIT'): 3}",
    ]
    controls = {found["_id"]: found for found in mongo[database_name]["controls"].find()}
    assert controls["queue:default"]["fair"] is True
    assert controls["tenant:acme"]["limit"]["concurrency"] == 5
    assert controls["tenant:beta"]["paused"] is False


def test_commands_of_the_page_run_as_written(
    mtask: Commands, mongo: MongoClient[dict[str, Any]], database_name: str
) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if "tail" not in line]
    assert len(lines) == 8
    for line in lines:
        command, *arguments = shlex.split(line)
        assert command == "mtask"
        mtask.ok(*arguments)
    assert [found["_id"] for found in mongo[database_name]["tasks"].find()] == ["import_file:acme:e"]


def test_update_of_the_page_gives_older_tasks_their_tenant(
    mtask: Commands, mongo: MongoClient[dict[str, Any]], database_name: str
) -> None:
    mtask.ok("publish", "import_file", "--key", "acme:old")
    mtask.ok("publish", "import_file", "--key", "other")
    (update,) = blocks("javascript")
    matched = re.search(r"_id: /(.*?)/, tenant: null }, \[(.*)\]\);", update)
    assert matched is not None
    criteria = {"_id": {"$regex": matched[1]}, "tenant": None}
    stage = json.loads(re.sub(r"(\$?\w+):", r'"\1":', matched[2]))
    assert mongo[database_name]["tasks"].update_many(criteria, [stage]).modified_count == 1
    assert mongo[database_name]["tasks"].find_one({"tenant": "acme"}, {"_id": 1}) == {"_id": "import_file:acme:old"}
