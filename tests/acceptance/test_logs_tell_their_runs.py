"""Lines of worker processes tell their runs, outlive a kill, and hold no password and no token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.mongo import eventually
from tests.tracing import SPANS_VARIABLE, chosen, spans_in
from tests.workers import Stage

APP = "tests.integration.app.traced:app"


def lines_of(log: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.splitlines()]


def test_each_line_of_a_worker_and_its_executors_is_json_and_tells_its_run_and_trace(stage: Stage) -> None:
    spans = stage.folder / "spans.jsonl"
    flags = ("--log-format", "json", "--keep-logs", "3", "--executors", "1")
    worker = stage.launch("A", *flags, app=APP, environment={SPANS_VARIABLE: str(spans)})
    stage.wait_running(worker)
    stage.client.publish("greet", {"who": "two\nlines \x1b[2J"}, key="1")
    stage.client.publish("apart", {"how": "raise"}, key="2", max_retries=0)
    eventually(lambda: len(chosen(spans_in(spans), "settle")) == 2, message="both are settled")
    runs = {task_id: stage.client.get(*task_id.split(":")).runs[-1] for task_id in ("greet:1", "apart:2")}
    traces = {
        str(span.attributes["messaging.message.id"]): span.trace_id for span in chosen(spans_in(spans), "process")
    }
    found = {
        f"{line['task']}:{line['key']}": line
        for line in eventually(
            lambda: [one for one in lines_of(worker.log) if one["logger"] == "shop"], message="lines"
        )
    }
    for task_id, run in runs.items():
        line = found[task_id]
        assert (line["run_id"], line["attempt"], line["trace_id"]) == (run.run_id, 1, traces[task_id])
        [kept] = eventually(lambda name=task_id: stage.client.logs(*name.split(":")))  # type: ignore[misc]
        assert kept.trace_id == traces[task_id]
        assert kept.lines[0].message == line["message"]
    assert found["greet:1"]["message"] == "greeting two\nlines \x1b[2J"
    worker.terminate()
    assert worker.wait() == 0
    assert lines_of(worker.log)[-1]["message"] == "worker stopped"
    assert "secret" not in worker.log, "the handler's exception names a URI with a password"


def test_lines_from_before_the_last_write_outlive_a_killed_worker(stage: Stage) -> None:
    worker = stage.launch("A", "--keep-logs", "100", "--executors", "1", app=APP)
    stage.wait_running(worker)
    stage.client.publish("chatter", {"lines": 7, "folder": str(stage.folder)}, key="1")
    eventually(lambda: [log for log in stage.client.logs("chatter", "1") if len(log.lines) == 7], message="written")
    worker.kill()
    [kept] = stage.client.logs("chatter", "1")
    assert [line.message for line in kept.lines] == [f"line {number}" for number in range(7)]
    assert not kept.is_over


def test_web_server_logs_json_without_tokens_and_passwords(stage: Stage, tmp_path: Path) -> None:
    log = tmp_path / "web.log"
    command = [sys.executable, "-m", "mtask.cli.main", "web", "--port", "0", "--log-format", "json", "--otel", "--json"]
    environment = {**os.environ, "MTASK_URI": stage.uri, "MTASK_DATABASE": stage.database}
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, env=environment, text=True) as server,
    ):
        assert server.stdout is not None
        told = ""
        while not told.rstrip().endswith("}"):
            told += server.stdout.readline()
        at = json.loads(told)
        token = str(at["token"])
        sent = {"Authorization": f"Bearer {token}", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        with httpx.Client(base_url=str(at["url"]), trust_env=False) as http:
            assert http.post("/v1/tasks", json={"name": "mail", "key": "1"}, headers=sent).status_code == 201
            http.get(f"/login?token={token}&x=1")
            http.get("/v1/tasks/%zz", headers=sent)
        trace = stage.client.get("mail", "1").trace
        assert trace is not None, "without an SDK, --otel passes the caller's span on"
        assert trace.traceparent == sent["traceparent"]
        server.terminate()
        assert server.wait(30) == 0
    text = log.read_text()
    lines_of(text)
    assert token not in text
    password = urlsplit(stage.uri).password
    assert password is None or password not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--log-format", "xml"), "--log-format 'xml': use text or json."),
        (("--keep-logs", "-1"), "--keep-logs -1: use 1 to 10000, or 0 for none."),
        (("--keep-logs-days", "nan"), "--keep-logs-days"),
        (("--keep-logs-days", "1e99"), "--keep-logs-days"),
        (("--keep-logs-days", "0"), "--keep-logs-days 0: use 0.001 to 3650."),
    ],
)
def test_wrong_flags_are_told(stage: Stage, flags: tuple[str, ...], message: str) -> None:
    worker = stage.launch("A", *flags, app=APP)
    assert worker.wait() == 2
    assert message in worker.log
    assert "Traceback" not in worker.log
