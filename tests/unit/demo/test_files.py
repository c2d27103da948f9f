"""Which files the demo counts, and under which keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtask.demo.app import default_folder, find_files, key_of
from mtask.errors import InvalidInput
from mtask.kernel.document.identity import check_key


def test_regular_files_are_found_below_the_folder_and_keyed_by_their_paths(tmp_path: Path) -> None:
    for name in ("b.py", "a/deep/c.txt", "a/d", "__pycache__/b.pyc", "a/site-packages/x.py", "dist-packages/y.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "link.py").symlink_to(tmp_path / "b.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")

    found = find_files(tmp_path)

    assert [file.key for file in found] == ["b.py", "a/d", "a/deep/c.txt"]
    assert [file.path for file in found] == [tmp_path / file.key for file in found]
    assert [file.key for file in find_files(tmp_path, 2)] == ["b.py", "a/d"]


def test_the_standard_library_is_the_folder_by_default() -> None:
    assert "abc.py" in [file.key for file in find_files(default_folder(), 50)]


@pytest.mark.parametrize("name", ["absent", "file.txt", "empty"])
def test_a_folder_without_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.txt").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match=name):
        find_files(tmp_path / name)


def test_a_path_that_is_too_long_or_no_text_gets_a_key_of_its_own() -> None:
    long = "folder/" * 80
    paths = [f"{long}a.py", f"{long}b.py", os.fsdecode(b"caf\xe9.txt"), os.fsdecode(b"caf\xe8.txt"), "é/naïve.txt"]
    keys = [key_of(path) for path in paths]
    assert [check_key(key) for key in keys] == keys
    assert len(set(keys)) == len(keys)
    assert keys[0].startswith("folder/folder/")
    assert keys[2].startswith("caf.txt...")
    assert keys[4] == "é/naïve.txt"


def test_a_name_that_is_no_text_goes_into_the_params_as_bytes(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).touch()
    (file,) = find_files(tmp_path)
    assert file.argument == os.fsencode(tmp_path) + b"/caf\xe9.txt"
