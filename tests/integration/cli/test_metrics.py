"""`mtask metrics` and `mtask top`: what they print, what they refuse, and how they end."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families

from mtask import Client
from mtask.cli import worker
from mtask.cli.commands import app
from mtask.cli.workers import command as worker_command
from mtask.cli.workers import serving as worker_start
from mtask.errors import DatabaseUnavailable, InvalidInput
from mtask.features.metrics import operations as tallies
from mtask.features.metrics.serving import serving
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.worker.process.counts import Tally
from mtask.parts.worker import WorkerOptions
from mtask.settings import Settings
from tests.integration.cli.commands import Commands
from tests.integration.stores import register
from tests.mongo import PATIENCE, eventually
from tests.workers import ROOT

HOSTILE = 'a\x1b[31m"queue\\ \u202e' + "x" * 200


@pytest.fixture
def loaded(mtask: Commands, store: SyncStore) -> Commands:
    """Give a database with tasks in two queues, a worker, and what the worker has counted."""
    with Client(mtask.uri, database=mtask.database) as client:
        for number in range(3):
            client.publish("send", key=str(number))
        client.publish("send", key="later", queue="later", delay=timedelta(days=1))
    register(store, "w1", names=["send"], running_cnt=2)
    made = Tally()
    send = made.of("default", "send")
    send.runs |= {"SUCCESS": 40, "FAIL": 2, "TIMEOUT": 1}
    for _ in range(43):
        send.run.observe(0.3)
        send.wait.observe(0.001)
    made.of(HOSTILE, "n" * 300).runs["SUCCESS"] = 7
    made.leases_lapsed, made.claims_lost = 1, 4
    fields = {**made.document(), "incarnation": "incarnation-w1", "recent_runs": 20, "recent_seconds": 10.0}
    assert store.run(tallies.record("incarnation-w1", fields, is_first=True))
    return mtask


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(text for name, text in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_prints_what_prometheus_reads(loaded: Commands) -> None:
    found = samples(loaded.ok("metrics").out)
    assert found["mtask_tasks", "default", "INIT"] == 3
    assert found["mtask_tasks", "later", "INIT"] == 1
    assert found["mtask_queue_oldest_due_age_seconds", "default"] > 0
    assert found["mtask_queue_oldest_due_age_seconds", "later"] == 0, "it is not due"
    assert found["mtask_runs_total", "send", "FAIL", "default"] == 2
    assert found["mtask_runs_total", "n" * 300, "SUCCESS", HOSTILE] == 7
    assert found["mtask_task_run_seconds_bucket", "0.25", "send", "default"] == 0
    assert found["mtask_task_run_seconds_bucket", "0.5", "send", "default"] == 43
    assert found["mtask_task_run_seconds_count", "send", "default"] == 43
    assert found["mtask_slots", "busy", "w1"] == 2
    assert found["mtask_slots", "free", "w1"] == 8
    assert (found["mtask_leases_lapsed_total",], found["mtask_claims_lost_total",]) == (1, 4)


@contextmanager
def started(mtask: Commands, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "mtask.cli.main", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_metrics_are_served_until_sigterm(loaded: Commands) -> None:
    with started(loaded, "metrics", "--port", "0") as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        for _ in range(2):
            with urlopen(url, timeout=PATIENCE) as answer:
                assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
                assert samples(answer.read().decode())["mtask_tasks", "default", "INIT"] == 3
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{url}/x", timeout=PATIENCE)
        taken = loaded("metrics", "--port", url.rsplit(":", 1)[1].partition("/")[0])
        assert (taken.code, "in use" in taken.err) == (2, True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["metrics", "--port", "70000"],
        ["metrics", "--port", "-1"],
        ["metrics", "--host", "0.0.0.0"],
        ["metrics", "--port", "0", "--host", ""],
        ["metrics", "--port", "0", "--host", "no such host"],
        ["top", "--interval", "0"],
        ["top", "--interval", "nan"],
    ],
)
def test_nonsense_is_refused_with_what_to_do(mtask: Commands, arguments: list[str]) -> None:
    ended = mtask(*arguments)
    assert ended.code == 2
    assert "use" in ended.err.lower() or "needs" in ended.err
    assert "Traceback" not in ended.err


def test_a_database_that_is_away_makes_a_scrape_fail_and_not_the_server() -> None:
    answers: list[bytes] = []

    def make() -> bytes:
        if not answers:
            raise DatabaseUnavailable("it is away: mongodb://user:secret@host")
        return answers[0]

    with serving("127.0.0.1", 0, make, "text/plain") as port:
        url = f"http://127.0.0.1:{port}/metrics"
        with pytest.raises(HTTPError) as refused:
            urlopen(url, timeout=PATIENCE)
        assert (refused.value.code, b"secret" in refused.value.read()) == (503, False)
        answers.append(b"x 1\n")
        with urlopen(url, timeout=PATIENCE) as answer:
            assert answer.read() == b"x 1\n"
    with pytest.raises(InvalidInput, match="65535"), serving("127.0.0.1", 65_536, make, "text/plain"):
        pass


def test_top_prints_once_for_scripts(loaded: Commands) -> None:
    document = loaded.ok("top", "--json").json
    [later, first] = sorted(document["queues"], key=lambda queue: str(queue["queue"]), reverse=True)
    assert (first["queue"], first["counts"]["INIT"], first["oldest_due_age"] > 0) == ("default", 3, True)
    assert (later["queue"], later["oldest_due_age"]) == ("later", None)
    [worker] = document["workers"]
    assert (worker["worker_id"], worker["busy"], worker["free"], worker["runs"]) == ("w1", 2, 8, 50)
    assert worker["rate"] == document["rate"] == 2.0
    assert [(name["name"], name["runs"].get("FAIL")) for name in document["names"]] == [("send", 2), ("n" * 300, None)]
    assert document["names"][0]["run"] == {"count": 43, "mean": pytest.approx(0.3), "95%": 0.5}


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_top_fits_into_any_width_whatever_the_names(
    loaded: Commands, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = loaded.ok("top", "--once").out
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in out, "no colour in a pipe, and no escape from a name"
    assert "\u202e" not in out
    assert lines[0].startswith("mtask top ")
    if width >= 80:
        assert next(line.split() for line in lines if line.startswith("default"))[1] == "3"
        assert ["w1", "running", "2", "10", "2.0", "50"] in [line.split() for line in lines]
        [send] = [line.split() for line in lines if line.startswith("send")]
        assert send == ["send", "default", "43", "2", "1", "300ms", "500ms", "5ms"]


def test_top_of_an_empty_database_says_so(mtask: Commands) -> None:
    out = mtask.ok("top", "--once").out
    assert "0 workers, 0 of 0 slots busy" in out
    assert [line for line in out.splitlines() if line.endswith("none")] == [
        "queues: none",
        "workers: none",
        "names, since counting began: none",
    ]


@pytest.mark.parametrize("way", ["q", "SIGINT"])
def test_top_is_live_on_a_terminal_and_ends_in_order(loaded: Commands, store: SyncStore, way: str) -> None:
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    # A shell that starts the tests in the background has made them ignore SIGINT, and children inherit that.
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    runs = "from mtask.cli.main import run; run()"
    command = [sys.executable, "-c", listens + runs, "top", "--interval", "0.5"]
    process = subprocess.Popen(
        command, stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True, close_fds=True
    )
    os.close(side)
    seen = bytearray()
    try:
        _read_until(main, seen, b"default")
        with Client(loaded.uri, database=loaded.database) as client:
            client.publish("send", key="new", queue="appears")
        store.collections["metrics"].update_one({"_id": "counts"}, {"$unset": {"fresh_until": 1}})
        _read_until(main, seen, b"appears")
        if way == "SIGINT":
            process.send_signal(signal.SIGINT)
        else:
            os.write(main, b"q")
        eventually(lambda: _drained(main, seen) and process.poll() is not None, PATIENCE, "ended")
        assert process.returncode == 0, bytes(seen)[-500:]
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert b"\x1b[?1049l" in seen, "the screen of before is back"
    assert b"Traceback" not in seen


def _read_until(stream: int, seen: bytearray, text: bytes) -> None:
    end = time.monotonic() + PATIENCE
    while text not in seen:
        assert time.monotonic() < end, bytes(seen)[-2000:]
        _drained(stream, seen)


def _drained(stream: int, seen: bytearray) -> bool:
    while select.select([stream], [], [], 0.05)[0]:
        try:
            read = os.read(stream, 65_536)
        except OSError:  # the process has closed its side
            return True
        if not read:
            return True
        seen += read
    return True


@pytest.mark.parametrize(
    "flags",
    [
        ["--metrics-port", "70000"],
        ["--metrics-port", "-1"],
        ["--metrics-port", "65535", "--processes", "2"],
        ["--metrics-port", "0", "--metrics-host", " "],
    ],
)
def test_a_worker_refuses_nonsense_before_it_starts(
    bare_environment: None, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mtask-worker", "tests.acceptance.app:app", *flags])
    monkeypatch.setattr(worker_start, "start_logging", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        worker.run()
    assert ended.value.code == 2
    assert "use " in capsys.readouterr().err


def test_processes_of_one_supervisor_take_the_ports_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Supervised:
        def __init__(self, given: list[list[str]], *_: object) -> None:
            commands.extend(given)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(worker_start, "Supervisor", Supervised)
    for port in (9465, 0):
        settings = Settings(app="a:b", processes=3, metrics_port=port, metrics_host="::1")
        worker_start._supervise(settings, WorkerOptions("mongodb://127.0.0.1/", "d"))
    assert [[flag for flag in command if flag.startswith("--metrics")] for command in commands] == [
        ["--metrics-host=::1", f"--metrics-port={port}"] for port in (9465, 9466, 9467, 0, 0, 0)
    ]


def test_the_page_shows_commands_that_exist() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    known = typer.main.get_command(app)
    shown = re.findall(r"^mtask (\w+)(.*?)(?:#.*)?$", page.partition("```bash")[2].partition("```")[0], re.MULTILINE)
    assert [name for name, _ in shown] == ["metrics", "metrics", "top"]
    for name, flags in shown:
        command = known.get_command(None, name)  # type: ignore[attr-defined]
        assert set(re.findall(r"--[\w-]+", flags)) <= {flag for each in command.params for flag in each.opts}
    of_worker = {flag for each in typer.main.get_command(worker_command.cli).params for flag in each.opts}
    assert {"--metrics-port", "--metrics-host"} <= of_worker
