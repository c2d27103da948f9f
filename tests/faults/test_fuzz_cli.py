"""Command lines, files and environments of every kind: never a traceback, always a clear word and a known exit code."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from mtask import Client
from mtask.cli import worker as worker_cli
from mtask.cli.commands import app
from mtask.cli.failures import EXIT_CODES, USAGE
from mtask.settings import Settings
from tests.faults import fuzzing
from tests.faults.fuzzing import LIMIT, fuzz
from tests.faults.malformed import good
from tests.integration.cli.commands import Commands, Ended

pytestmark = pytest.mark.timeout(LIMIT)
_KEYS = ["k", "\x1b[31mred", "a\nb", "‮txt"]
_SECRET = "s3cr3t"
_URIS = [
    "", " ", "mongodb", "mongodb:", "mongodb:/", "mongodb://", "mongodb:///", "mongodb://@", "mongodb+srv://",
    "mongodb+srv://a:1", "mongodb+srv://a,b", f"mongodb://u:{_SECRET}@", f"mongodb://u:{_SECRET}@h:port",
    f"mongodb://u:{_SECRET}@x@h:99999", f"mongodb://u:/{_SECRET}@h", f"mongodb://:{_SECRET}@h", "mongodb://[::1",
    "mongodb://h:0", "mongodb://h:-1", "mongodb://h/?replicaSet", "mongodb://h/?a=b=c",
    "mongodb://h/?authMechanism=NOPE", "mongodb://h/?readPreference=nearby", "http://h", "LOCAL", "local://", "\x1b[2J",
    f"http://u:{_SECRET}@h", "mongodb://h/?tlsCAFile=/nowhere&tls=true", "mongodb://%00",
]  # fmt: skip


@pytest.fixture
def mtask(
    mongo_uri: str,
    database_name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Commands:
    """Give the command line on a database with odd tasks in it, where no embedded mongod can be started."""
    for name in (*(f"MTASK_{field.upper()}" for field in Settings.model_fields), "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    monkeypatch.setenv("MTASK_MONGOD", str(tmp_path / "none"))
    monkeypatch.setenv("MTASK_LOCAL_FOLDER", str(tmp_path / "local"))
    monkeypatch.chdir(tmp_path)
    with Client(mongo_uri, database=database_name) as client:
        for key in _KEYS:
            client.publish("fuzz", {"text": "\x1b]0;title\a\x9b"}, key=key, priority=1)
        client.publish("fuzz", key="done", queue="q", delay=5)
        client.cancel("fuzz", "done")
        wrong = good("\x1b[2J", name="wrong")
        wrong["task_state"]["status"] = "\x1b[31mNEW"
        client.tasks.insert_one(wrong, bypass_document_validation=True)
    return Commands(mongo_uri, database_name, capsys)


def _steers(text: str) -> list[str]:
    """Return what in the text would steer a terminal."""
    return [letter for letter in text if letter != "\n" and not letter.isprintable()]


def check(ended: Ended, *, is_json: bool = False) -> None:
    """See that a command ended as commands do."""
    assert ended.code in EXIT_CODES, ended
    assert "Traceback" not in ended.out + ended.err
    assert "bug in mtask" not in ended.err, ended.err
    assert not _steers(ended.out + ended.err), ended
    assert _SECRET not in ended.out + ended.err
    if is_json and (ended.out or ended.code == 0):
        json.loads(ended.out)
    elif ended.code == 0:
        assert "error: " not in ended.err
    if not is_json and not ended.out and ended.code != 0:
        assert "error: " in ended.err, ended
    if is_json and not ended.out:
        told = json.loads(ended.err)
        assert told["exit_code"] == ended.code
        assert told["message"]


# --- command lines ----------------------------------------------------------------------------------------

#: These start processes or serve until they are stopped, and are tried apart.
_APART = frozenset({"demo", "local", "tail", "web"})
_NEVER = frozenset(
    {"--help", "-h", "--version", "--debug", "--json", "--install-completion", "--show-completion", "--uri"}
)
_arguments = st.one_of(
    st.sampled_from(
        ["fuzz", "fuzz:k", "k", "wrong:\x1b[2J", "fuzz:a\nb", "tasks", "{}", '{"a": 1}', "[", "--", "-", "-1"]
    ),
    st.sampled_from(["0", "5", "-5", "1e9", "NaN", "inf", "9" * 25, "9" * 5000, "1h30m", "-5s", "none", "[" * 5000]),
    st.sampled_from(
        ["priority=5", "priority=NaN", "priority", "=", "x=1", "retry_backoff=1e999", "reset", "keep", "INIT"]
    ),
    st.sampled_from(["2030-01-31T08:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2030-01-31"]),
    st.sampled_from(['{"$date": 1e30}', '{"$oid": 1}', '{"$binary": {}}', '{"a": NaN}', '{"\\u0000": 1}', '"\\ud800"']),
    st.sampled_from(["--nonsense", "-z", "--json=1", "--limit=x", "--no-kill", "-s", "\udc80", "."]),
    fuzzing.texts.filter(lambda text: "\0" not in text),
)


def _commands() -> dict[str, list[tuple[str, bool]]]:
    """Return each command's flags, and whether they take a value. A group gives its commands, such as "flow show"."""
    group: Any = typer.main.get_command(app)
    every: dict[str, Any] = {}
    for name in group.list_commands(None):
        found = group.get_command(None, name)
        inner = getattr(found, "commands", None)
        every |= {f"{name} {one}": each for one, each in inner.items()} if inner else {name: found}
    return {
        name: [
            (flag, not getattr(parameter, "is_flag", False))
            for parameter in found.params
            for flag in (parameter.opts if parameter.param_type_name == "option" else ())
            if flag not in _NEVER
        ]
        for name, found in every.items()
        if name.split()[0] not in _APART
    }


_COMMANDS = _commands()


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Draw a command with flags and arguments that may or may not be its own."""
    name = draw(st.sampled_from(sorted(_COMMANDS)))
    parts = [[argument] for argument in draw(st.lists(_arguments, max_size=3))]
    for flag, takes_value in draw(st.lists(st.sampled_from(_COMMANDS[name]), max_size=4)):
        parts.append([flag, draw(_arguments)] if takes_value else [flag])
    if draw(st.integers(0, 9)) == 0:
        parts.append(["--uri", draw(st.sampled_from(_URIS))])
    line = [*name.split(), *(word for part in draw(st.permutations(parts)) for word in part)]
    return [*line, "--timeout", "0"] if name.endswith("wait") else line  # else it waits for ever, as asked


@fuzz(50)
@given(line=command_lines(), is_json=st.booleans())
def test_command_line_of_any_kind_ends_in_order(mtask: Commands, line: list[str], is_json: bool) -> None:
    check(mtask(*["--json"] * is_json, *line), is_json=is_json)


def test_uri_that_cannot_be_used_is_wrong_usage_and_shows_no_password(mtask: Commands) -> None:
    for uri in _URIS:
        ended = mtask("list", "--uri", uri)
        check(ended)
        assert ended.code == USAGE, (uri, ended)


def test_server_that_is_not_there_is_told_and_no_password(mtask: Commands) -> None:
    ended = mtask("list", "--json", "--uri", f"mongodb://u:{_SECRET}@127.0.0.1:9/?authSource=admin")
    check(ended, is_json=True)
    assert ended.code == 3


def test_commands_that_start_processes_or_serve_refuse_what_they_cannot_use(mtask: Commands) -> None:
    for line in (
        ["demo", "/nowhere"], ["demo", "--workers", "0"], ["demo", "--workers", "9" * 30], ["demo", "--limit", "-1"],
        ["demo", "--limit", "x"], ["demo", "\x1b[2J"], ["local", "nonsense"], ["local", "start", "--folder", ""],
        ["local", "start"], ["local", "status", "-z"], ["web", "--port", "70000"], ["web", "--port", "x"],
        ["web", "--host", ""], ["web", "--token-file", "\x1b[2J"], ["web", "-z"], ["web", "nonsense"],
        ["tail", "--count", "-1"], ["tail", "--count", "x"], ["tail", "--since", "x"], ["tail", "--since", "9" * 30],
        ["tail", "--after", "x"], ["tail", "--after", "\x1b[2J"], ["tail", "-z"], ["tail", "nonsense"],
        ["nonsense"], ["\x1b[2J"], ["--nonsense"], ["-"],
    ):  # fmt: skip
        ended = mtask(*line)
        check(ended)
        assert ended.code != 0, line


def test_key_that_would_steer_a_terminal_is_shown_safely_and_told_exactly(mtask: Commands) -> None:
    for key in _KEYS:
        shows = [["show", "fuzz", key], ["show", f"fuzz:{key}", "--full"], ["list"], ["cancel", "fuzz", key]]
        for line in shows:
            ended = mtask.ok(*line)
            check(ended)
            assert key.encode("unicode_escape").decode() in ended.out
        assert mtask.ok("show", "fuzz", key, "--json").json["task"]["key"] == key
        assert key in [task["key"] for task in mtask.ok("list", "--json").json]
        for command in ("retry", "remove"):
            check(mtask.ok(command, "fuzz", key, "--json"), is_json=True)
        gone = mtask("show", "fuzz", key)
        check(gone)
        assert gone.code == 4


# --- files ------------------------------------------------------------------------------------------------

_json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), fuzzing.any_texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(fuzzing.any_texts, inner, max_size=3)),
    max_leaves=5,
)
_lines = st.one_of(
    st.fixed_dictionaries(
        {"name": st.one_of(st.just("fuzz"), _json_values)},
        optional={
            "key": st.one_of(st.just("k"), _json_values),
            "params": _json_values,
            "queue": _json_values,
            "delay": st.one_of(st.sampled_from(["5m", 5, -1, "soon"]), _json_values),
            "start_time": st.one_of(st.sampled_from(["2030-01-31T08:00:00Z", {"$date": 0}]), _json_values),
            "task_option": st.one_of(st.just({"priority": 5}), st.just({"priority": "5"}), _json_values),
        },
    ).map(json.dumps),
    _json_values.map(json.dumps),
    st.sampled_from(["{", "[]", "{'name': 1}", "{}", '{"name": "fuzz", "nonsense": 1}', '{"name": "fuzz", "name": 5}']),
)


@fuzz(16)
@given(
    lines=st.lists(_lines, max_size=3), rubbish=st.one_of(st.just(b""), st.binary(max_size=20)), is_json=st.booleans()
)
def test_file_of_any_kind_is_published_or_the_line_is_told(
    mtask: Commands, tmp_path: Path, lines: list[str], rubbish: bytes, is_json: bool
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes("\n".join(lines).encode() + rubbish)
    ended = mtask(*["--json"] * is_json, "publish", "--many", str(path))
    check(ended, is_json=is_json)
    if ended.code == USAGE:
        assert "line" in ended.err or "UTF-8" in ended.err
    check(mtask("publish", "fuzz", "--params-file", str(path)))


# --- the worker's command line, and the environment -------------------------------------------------------


@pytest.fixture
def mtask_worker(mtask: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give `mtask-worker` in this process, which leaves logging as it was."""
    root, own = logging.getLogger(), logging.getLogger("mtask")
    kept = (root.handlers[:], root.level, own.level)

    def call(*arguments: str) -> Ended:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["mtask-worker", *arguments])
        try:
            worker_cli.run()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code
        finally:
            root.handlers[:] = kept[0]
            root.setLevel(kept[1])
            own.setLevel(kept[2])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return call


_APP = "tests.acceptance.app:app"
_refused_flags = st.one_of(
    st.tuples(st.just("--shutdown-timeout"), st.sampled_from(["nan", "inf", "-1", "1e300", "x", "", "1e15"])),
    st.tuples(st.just("--concurrency"), st.sampled_from(["-1", "10001", "NaN", "1e3", "", "9" * 30])),
    st.tuples(st.just("--processes"), st.sampled_from(["0", "-1", "9" * 30, "100000", "x"])),
    st.tuples(st.just("--log-level"), st.sampled_from(["", "LOUD", "\x1b[2J", "5"])),
    st.tuples(st.just("--queues"), st.sampled_from(["", ",", "a,,b", "\x1b", "a\nb", "x" * 300])),
    st.tuples(st.just("--worker-id"), st.sampled_from(["", " ", "a,b", "\x1b[2J", "x" * 300, "\udc80"])),
    st.tuples(st.just("--database"), st.sampled_from(["a.b", "$", "x" * 64, "a b", "\x1b", "\udc80"])),
    st.tuples(st.just("--uri"), st.sampled_from(_URIS)),
    st.tuples(st.just("--nonsense"), st.just("x")),
)
_apps = st.one_of(
    st.sampled_from(["", ":", "os:path", "os:", ":app", "nowhere:app", "mtask:App", "..:app"]),
    st.sampled_from(["os.path:join.x", "a b:c", "os"]),
    fuzzing.texts.filter(lambda text: "\0" not in text and not text.startswith("-")),
)  # fmt: skip


def check_worker(ended: Ended) -> None:
    """See that a worker refused to start, and said why."""
    assert ended.code == USAGE, ended
    assert "Traceback" not in ended.err
    assert ended.err.strip()
    assert _SECRET not in ended.err
    assert not _steers(ended.err), ended.err


@fuzz(16)
@given(refused=_refused_flags)
def test_worker_with_a_flag_that_cannot_be_used_says_so(mtask_worker: Any, refused: tuple[str, str]) -> None:
    check_worker(mtask_worker(_APP, "=".join(refused)))


@fuzz(12)
@given(path=_apps)
def test_worker_without_an_app_says_so(mtask_worker: Any, path: str) -> None:
    check_worker(mtask_worker(path))


_variables = st.dictionaries(
    st.sampled_from([f"MTASK_{name.upper()}" for name in Settings.model_fields]),
    st.one_of(st.sampled_from(["", " ", "NaN", "inf", "-1", "1e999", "{}", "\udc80", *_URIS]), fuzzing.texts).filter(
        lambda text: "\0" not in text and text.strip() != "local"
    ),
    min_size=1,
    max_size=4,
).filter(lambda drawn: drawn.get("MTASK_URI") != "")  # which is none at all: a server here is looked for, at length


@fuzz(12)
@given(variables=_variables)
def test_environment_of_any_kind_is_used_or_refused_by_name(
    mtask: Commands, mtask_worker: Any, variables: dict[str, str]
) -> None:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        for line in (["list"], ["local", "status"]):
            check(mtask(*line))
        check_worker(mtask_worker("nowhere:app"))


@fuzz(12)
@given(
    text=st.one_of(
        st.binary(max_size=40),
        _variables.map(
            lambda found: "\n".join(f"{name}={value}" for name, value in found.items()).encode("utf-8", "replace")
        ),
        st.sampled_from(
            [b"\xff\xfe", b"MTASK_URI", b"=", b"MTASK_CONCURRENCY='", b"export", b"\0", b"MTASK_URI=${MTASK_URI}"]
        ),
    )
)
def test_env_file_of_any_kind_is_used_or_refused(mtask: Commands, mtask_worker: Any, text: bytes) -> None:
    Path(".env").write_bytes(text)
    check(mtask("list"))
    check_worker(mtask_worker("nowhere:app"))


def test_entry_points_tell_wrong_usage_in_one_line(mtask: Commands) -> None:
    Path(".env").write_bytes(b"MTASK_CONCURRENCY=\xff\xfe")
    ended = mtask.entry("list", "\udc80\x1b[2J")
    check(ended)
    assert ended.code == USAGE
