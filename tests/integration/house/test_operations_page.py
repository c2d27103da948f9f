"""The commands of docs/operations.md work, in the order of the page, on a database with a queue that is stuck."""

from __future__ import annotations

import re
import shlex
from datetime import timedelta
from pathlib import Path

from mtask import Client, Flow
from tests.integration.cli.commands import Commands, client_of

PAGE = (Path(__file__).parents[3] / "docs/operations.md").read_text(encoding="utf-8")
#: The doctor finds that nobody serves the queue.
_CODES = {"doctor": {0, 7}}


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [shlex.split(line.removeprefix("$ ")) for block in blocks for line in block.splitlines()]


def test_commands_of_the_page_work(mtask: Commands) -> None:
    with client_of(mtask) as client:
        _fill(client)
        ran = []
        for program, *arguments in commands():
            assert program == "mtask"
            ended = mtask(*arguments)
            assert ended.code in _CODES.get(arguments[0], {0}), (arguments, ended)
            assert ended.out or ended.err, arguments
            ran.append(arguments[0])
        assert len(ran) > 20
        assert client.count(queue="mail", status="FAIL") == 0, "the runbook has retried them"
        assert client.controls()[0].target == "mail"


def _fill(client: Client) -> None:
    client.publish("send_email", {"to": "a@b.c"}, key="welcome/42", queue="mail")
    client.publish("send_email", {"to": "a@b.c"}, key="welcome/43", queue="mail", delay=timedelta(days=1))
    failed = client.publish("send_email", {}, key="welcome/44", queue="mail").task_id
    client.tasks.update_one({"_id": failed}, {"$set": {"task_state.status": "FAIL", "task_state.worker_states": []}})
    client.cancel("send_email", "welcome/43")
    flow = Flow("order/7")
    flow.add("ship", "ship", queue="mail", after=[flow.add("pack", "pack", queue="mail")])
    client.publish_flow(flow)
