"""Callbacks by the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.cli.commands import Commands

URL = "https://hooks.example.com/a"


def test_publish_takes_a_callback_and_show_prints_it(mtask: Commands) -> None:
    flags = ["--callback-url", URL, "--callback-on", "fail,canceled", "--callback-secret", "shop"]
    mtask.ok("publish", "t", "--key", "k", *flags)
    shown = mtask.ok("show", "t", "k", "--json").json["task"]
    assert shown["callback"] == {"url": URL, "on": ["FAIL", "CANCELED"], "secret": "shop"}
    mtask.ok("cancel", "t", "k")
    (told,) = mtask.ok("find", "--lookup", "callback_of=t:k", "--json").json
    assert told["name"] == "mtask/callback"


def test_each_line_of_a_file_may_have_its_own(mtask: Commands, tmp_path: Path) -> None:
    lines = [{"key": "a"}, {"key": "b", "callback": {"url": f"{URL}/b", "on": ["FAIL"]}}]
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    mtask.ok("publish", "t", "--many", str(path), "--callback-url", URL)
    urls = [mtask.ok("show", "t", key, "--json").json["task"]["callback"]["url"] for key in "ab"]
    assert urls == [URL, f"{URL}/b"]


def test_wrong_flags_are_refused(mtask: Commands) -> None:
    for flags in (
        ["--callback-url", "ftp://a"],
        ["--callback-on", "FAIL"],
        ["--callback-secret", "a"],
        ["--callback-url", URL, "--callback-on", "LOST"],
        ["--callback-url", URL, "--callback-secret", "a b"],
    ):
        ended = mtask("publish", "t", "--key", "k", *flags)
        assert ended.code == 2, flags
        assert "callback" in ended.err
