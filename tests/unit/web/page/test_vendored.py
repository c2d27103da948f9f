"""What the page takes from npm is what its list says: package, version, files and their hashes, and the licences."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import mtask
from mtask.web.page import rendering

VENDOR = Path(mtask.__file__).parent / "web" / "page" / "static" / "vendor"


def test_files_are_those_of_the_listed_packages() -> None:
    listed = json.loads((VENDOR / "vendored.json").read_text(encoding="utf-8"))
    expected: dict[str, str] = {}
    for name, entry in listed.items():
        assert set(entry) == {"package", "version", "licence", "files"}
        assert "LICENSE" in entry["files"], f"{name} comes with its licence"
        expected |= {f"{name}/{Path(file).name}": digest for file, digest in entry["files"].items()}
    found = {
        file.relative_to(VENDOR).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in VENDOR.glob("*/*")
    }
    assert found == expected


def test_page_serves_no_other_foreign_files() -> None:
    served = {path.removeprefix("/static/vendor/") for path in rendering.static_files() if "/vendor/" in path}
    assert served == {"htmx/htmx.min.js", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css"}


def test_address_of_a_file_changes_with_its_content() -> None:
    address = rendering.static_url("app.css")
    path, _, version = address.partition("?v=")
    assert rendering.static_files()[path][2] == version
    assert rendering.static("/static/app.css") is not None
    assert rendering.static("/static/../page.py") is None
