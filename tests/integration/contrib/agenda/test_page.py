"""The commands and the code of docs/from-agenda.md work, in the order of the page."""

from __future__ import annotations

import re
import shlex
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pymongo.collection import Collection

from mtask.kernel.driver.stores import SyncStore
from mtask.testing.bench import Bench
from tests.integration.cli.commands import Commands
from tests.integration.contrib.agenda.jobs import Document, job
from tests.integration.features.registry.apps import registered

PAGE = (Path(__file__).parents[4] / "docs" / "from-agenda.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


def test_code_and_commands_of_the_page_work(mtask: Commands, store: SyncStore, agenda: Collection[Document]) -> None:
    assert [*map(len, (blocks("sh"), blocks("python")))] == [1, 1] == [PAGE.count("```") // 4] * 2
    assert PAGE.split("\n", 2)[2].startswith("```sh\nmtask migrate agenda")
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(blocks("python")[0], "from-agenda.md", "exec", dont_inherit=True), names)
    registered(store, names["app"])
    daily = job(2, name="report", repeatInterval="1 day", nextRunAt=datetime.now(UTC) + timedelta(days=1))
    agenda.insert_many([job(1, name="send email", data={"to": "a@b.c"}), daily])
    printed = []
    for line in blocks("sh")[0].splitlines():
        program, *arguments = shlex.split(line.replace("shop.agendaJobs", agenda.full_name))
        assert program == "mtask"
        printed.append(mtask.ok(*arguments).out)
    assert "2 jobs" in printed[0]
    assert "would be moved" in printed[0]
    assert "2 jobs" in printed[1]
    bench = Bench(names["app"], mtask.uri, mtask.database)
    with bench.client as client:
        [done] = bench.run()
        assert (done.queue, done.returns) == ("mail", "sent 'hi' to a@b.c")
        assert [one.name for one in client.schedules()] == ["report"]
