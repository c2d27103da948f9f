"""What the demo counts in a file, and how totals are added up and compared."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mtask.demo import app
from mtask.demo.app import Totals, count_file, differences

SOURCE = '''
# a comment names nothing
def greet(name: str) -> str:
    """A docstring with "quotes" names nothing."""
    text = f"hello {name}" + 'it\\'s' + rb"""a \\" b""".decode()
    return text  # name
'''


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_names_of_a_python_source_are_counted_outside_of_strings_comments_and_keywords(tmp_path: Path) -> None:
    counted = count_file(written(tmp_path, "greet.py", SOURCE))
    assert counted["kind"] == "python"
    assert counted["identifiers"] == {"greet": 1, "name": 1, "str": 2, "text": 2, "decode": 1}


@pytest.mark.parametrize("broken", ['x = """never closed', "x = 'open\ny = 1", "'" * 7, '"""' * 5 + "x", "\\", "#"])
def test_a_source_that_is_no_python_is_counted_all_the_same(tmp_path: Path, broken: str) -> None:
    assert count_file(written(tmp_path, "broken.py", broken))["bytes"] == len(broken)


def test_words_of_another_text_are_counted(tmp_path: Path) -> None:
    counted = count_file(written(tmp_path, "notes.txt", "one two, two\nthree's 4 naïve"))
    assert counted["kind"] == "text"
    assert (counted["lines"], counted["words"]) == (1, 6)
    assert counted["identifiers"] == {"one": 1, "two": 2, "three": 1, "s": 1, "naïve": 1}


def test_a_binary_file_is_only_hashed(tmp_path: Path) -> None:
    content = b"\x7fELF\0\n words \n"
    assert count_file(written(tmp_path, "library.so", content)) == {
        "sha256": hashlib.sha256(content).hexdigest(),
        "kind": "binary",
        "bytes": len(content),
        "lines": 0,
        "words": 0,
        "identifiers": {},
    }


def test_text_that_is_not_utf_8_and_an_empty_file_are_counted(tmp_path: Path) -> None:
    assert count_file(written(tmp_path, "latin.txt", b"caf\xe9 au lait\n"))["words"] == 3
    assert count_file(written(tmp_path, "empty.txt", b""))["bytes"] == 0


@pytest.mark.parametrize("name", ["long.txt", "long.py"])
def test_a_file_longer_than_a_block_is_counted_as_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    content = "".join(f"line {number} of the_text\n" for number in range(200)) + "x" * 100 + "\nlast"
    path = written(tmp_path, name, content)
    whole = count_file(path)
    monkeypatch.setattr(app, "BLOCK_BYTES", 256)
    monkeypatch.setattr(app, "SOURCE_BYTES", 256)
    assert count_file(path) == whole | {"kind": "text"}


def test_only_the_most_frequent_names_are_kept(tmp_path: Path) -> None:
    words = [f"word{number} " * (100 - number) for number in range(app.MOST_FREQUENT + 5)]
    identifiers = count_file(written(tmp_path, "words.txt", "\n".join(words)))["identifiers"]
    assert list(identifiers.items()) == [(f"word{n}", 100 - n) for n in range(app.MOST_FREQUENT)]


def test_lines_and_words_are_those_of_wc(tmp_path: Path) -> None:
    wc = shutil.which("wc")
    if wc is None:
        pytest.skip("there is no wc here")
    path = Path(app.__file__)
    said = subprocess.run([wc, "-lwc", str(path)], capture_output=True, text=True, check=True).stdout.split()
    counted = count_file(path)
    assert [str(counted[name]) for name in ("lines", "words", "bytes")] == said[:3]


def totals_of(*files: Path) -> Totals:
    totals = Totals()
    for file in files:
        totals.add(file.name, count_file(file))
    return totals


def test_digest_is_the_hash_of_what_sha256sum_prints(tmp_path: Path) -> None:
    files = [written(tmp_path, "b.txt", "two"), written(tmp_path, "a.txt", "one")]
    lines = "".join(
        f"{hashlib.sha256(text).hexdigest()}  {key}\n" for key, text in (("a.txt", b"one"), ("b.txt", b"two"))
    )
    assert totals_of(*files).digest == hashlib.sha256(lines.encode()).hexdigest()


def test_totals_of_the_same_files_are_equal_in_whatever_order(tmp_path: Path) -> None:
    files = [written(tmp_path, f"{number}.txt", f"word {number}\n") for number in range(5)]
    assert differences(totals_of(*files), totals_of(*reversed(files))) == []
    assert totals_of(*files).rows() == totals_of(*reversed(files)).rows()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda totals: totals.hashes.update({"a.txt": "f" * 64}), "a.txt: SHA-256 ffffffffffff by its task"),
        (lambda totals: totals.hashes.pop("a.txt"), "a.txt: absent by its task"),
        (
            lambda totals: totals.fail("z.txt", "cannot be read: gone"),
            "z.txt: cannot be read: gone by its task, absent",
        ),
        (lambda totals: setattr(totals, "lines", totals.lines + 1), "the lines differ"),
        (lambda totals: totals.identifiers.update({"one": 1}), "the identifiers differ"),
    ],
)
def test_whatever_differs_is_named(tmp_path: Path, change: Callable[[Totals], object], told: str) -> None:
    direct, tasks = (totals_of(written(tmp_path, "a.txt", "one\n")) for _ in range(2))
    change(tasks)
    assert any(line.startswith(told) for line in differences(tasks, direct))
