"""No password that a user gives ever comes back in a message."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from mtask.cli import output
from mtask.demo.database import DemoDatabase
from mtask.errors import MtaskError
from mtask.kernel.driver import connect
from mtask.kernel.driver.errors import first_line, scrubbed, translated
from mtask.local import LocalServer, Security
from mtask.parts.worker import WorkerOptions
from mtask.settings import Settings

SECRET = "hunter2"
URIS = [
    "mongodb://user:{}@host/db",
    "mongodb://user:{}@host:27017,other:27018/db?replicaSet=rs0",
    "mongodb+srv://user:{}@cluster.example.com/db",
    "mongodb://user:a@{}@host/db",
    "mongodb://user:a/{}@host:27017/db",
    "mongodb://user:{}/a@host:27017/db",
    "mongodb://user:a:{}@host/db",
    "mongodb://{}@host/db",
    "http://user:{}@host/",
]
BAD_URIS = [
    *URIS[3:7],
    "mongodb://user:{}@host:notaport/",
    "mongodb://user:{}@host:99999/",
    "mongodb://user:{}@",
    "mongodb://user:a%{}@host/",
    "mongodb://user:{} x@host:y/",
    "mongodb+srv://user:{}@host:27017/",
    "mongodb://user:{}@host/?readPreference=nearby",
    "mongodb://user:{}@host/?authMechanism=MAGIC",
    "http://user:{}@host/",
    "user:{}@host/",
    "mongodb://user:{}@host/a.b",
    "mongodb://user:1/{}@host/a b",
]


@pytest.mark.parametrize("uri", URIS)
@pytest.mark.parametrize("text", ["{}", "cannot reach {}: timed out", 'bad "{}"', "tried {} and gave up"])
def test_credentials_of_a_uri_are_scrubbed_from_any_text(uri: str, text: str) -> None:
    made = scrubbed(text.format(uri.format(SECRET)))
    assert SECRET not in made
    assert "***@" in made


def test_text_without_a_uri_stays_as_it_is() -> None:
    text = "document 7 of task mail:42 at db1:27017 (code 11000)"
    assert scrubbed(text) == text


@pytest.mark.parametrize("uri", BAD_URIS)
def test_the_error_for_a_bad_uri_does_not_hold_its_password(uri: str) -> None:
    given = uri.format(SECRET)
    for use in (_database_of, _open):
        error = refusal(use, given)
        if error is not None:
            shown = "".join(traceback.format_exception(error))
            assert SECRET not in str(error) + repr(vars(error))
            assert SECRET not in shown.replace(given, "")


def refusal(use: Callable[[str], object], uri: str) -> MtaskError | None:
    try:
        use(uri)
    except MtaskError as error:
        return error
    return None


def _database_of(uri: str) -> None:
    connect.database_of(uri, None, "mtask")


def _open(uri: str) -> None:
    connect.sync_store(uri, "mtask").close()


@pytest.mark.parametrize("uri", ["", "  ", "nothing", "mongodb://", *[bad.format("p") for bad in BAD_URIS[:8]]])
def test_a_bad_uri_is_an_error_of_ours_that_says_how_to_write_one(uri: str) -> None:
    with pytest.raises(MtaskError, match=r"mongodb://HOST:PORT/\?replicaSet=NAME"):
        connect.database_of(uri, None, "mtask")


def test_an_error_is_told_in_one_short_line() -> None:
    line = first_line(ValueError("first\n   second " + "x" * 1000))
    assert line.startswith("first second x")
    assert len(line) == 300


def test_an_error_that_is_not_the_drivers_comes_back_as_it_is() -> None:
    error = KeyError("a")
    assert translated(error) is error


def test_settings_options_and_places_do_not_show_the_uri() -> None:
    uri = f"mongodb://user:{SECRET}@host/"
    for made in (
        Settings(uri=uri),
        WorkerOptions(uri, "mtask"),
        DemoDatabase(uri, "mtask", "here"),
        Security(Path("key"), password=SECRET),
        LocalServer(folder=Path("/"), uri=uri, port=1, pid=1, replica_set="mtask", version="6"),
    ):
        assert SECRET not in repr(made) + str(made)


def test_a_traceback_that_was_asked_for_does_not_show_a_password(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        try:
            raise RuntimeError(f"cannot use mongodb://user:{SECRET}@host/")
        except RuntimeError as inner:
            raise MtaskError("it failed") from inner
    except MtaskError as error:
        output.report(error, as_json=False, no_color=True, debug=True)
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "RuntimeError: cannot use mongodb://***@host/" in shown
    assert SECRET not in shown
