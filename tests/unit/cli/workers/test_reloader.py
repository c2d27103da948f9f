"""Which files count as the user's code, and how a change of them is noticed."""

from __future__ import annotations

import os
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from mtask.cli.workers.reloader import Sources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in ("app.py", "shop/tasks.py", "shop/deep/er.py"):
        save(tmp_path / path)
    return tmp_path


def save(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_each_saved_added_moved_and_removed_file_is_told_once(folder: Path) -> None:
    sources = Sources(folder)
    assert (len(sources), sources.changed()) == (3, [])
    save(folder / "app.py", "changed")
    save(folder / "new/one.py")
    save(folder / ".env", "MTASK_QUEUES=a")
    (folder / "shop/tasks.py").unlink()
    (folder / "shop/deep").rename(folder / "shop/deeper")
    assert sources.changed() == [
        ".env",
        "app.py",
        "new/one.py",
        "shop/deep/er.py",
        "shop/deeper/er.py",
        "shop/tasks.py",
    ]
    assert sources.changed() == []


def test_file_that_is_saved_with_its_old_size_or_its_old_time_is_told(folder: Path) -> None:
    save(folder / "app.py", "a = 1")
    os.utime(folder / "app.py", ns=(10**18, 10**18))
    sources = Sources(folder)
    save(folder / "app.py", "a = 2")
    assert sources.changed() == ["app.py"]
    os.utime(folder / "app.py", ns=(10**18, 10**18))  # the time goes back, as with a file that git restores
    assert sources.changed() == ["app.py"]
    save(folder / "app.py", "a = 2345")
    os.utime(folder / "app.py", ns=(10**18, 10**18))
    assert sources.changed() == ["app.py"]


@pytest.mark.parametrize(
    "path",
    [
        *("README.md", "shop/.env", "shop/page.html", "app.pyc"),
        *(".git/hook.py", ".venv/a.py", "shop/__pycache__/a.py", "node_modules/a.py", "lib/site-packages/a.py"),
        *("env/lib/a.py", "linked/a.py"),
    ],
)
def test_other_files_and_those_of_others_do_not_count(
    folder: Path, path: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    save(folder / "env/pyvenv.cfg")
    (folder / "linked").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    sources = Sources(folder)
    save(folder / path)
    assert sources.changed() == []


def test_folder_that_cannot_be_read_and_link_that_leads_nowhere_do_no_harm(folder: Path) -> None:
    (folder / "gone.py").symlink_to(folder / "nothing")
    (folder / "round").symlink_to(folder)
    closed = folder / "closed"
    save(closed / "a.py")
    closed.chmod(0)
    try:
        sources = Sources(folder)
        assert sources.changed() == []
        assert len(sources) >= 3
    finally:
        closed.chmod(0o700)


def test_bytecode_of_changed_files_is_forgotten(folder: Path) -> None:
    kept, stale = (Path(cache_from_source(str(folder / name))) for name in ("shop/tasks.py", "app.py"))
    save(kept)
    save(stale)
    Sources(folder).forget_bytecode(["app.py", ".env", "shop/deep/er.py"])
    assert kept.exists()
    assert not stale.exists()
