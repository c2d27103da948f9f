"""Every block of docs/queries.md, on known documents: what it prints, what it asks, and which index serves it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtask.kernel.driver.indexes import FINISHED_INDEX
from mtask.kernel.driver.stores import SyncStore
from tests.integration.cli.commands import Commands
from tests.integration.house import known_queue
from tests.integration.house.known_queue import FAR, NOW, OLD

PAGE = (Path(__file__).parents[3] / "docs" / "queries.md").read_text()
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

#: Evaluates each block of JavaScript as mongosh would, where nothing is known but what the page may use; prints the
#: pipelines that were asked for as extended JSON.
EVALUATE = """
const extended = (value) => {
  if (value === null || ["string", "boolean", "number"].includes(typeof value)) return value;
  if (value instanceof Date) return { $date: value.toISOString() };
  if (Array.isArray(value)) return value.map(extended);
  if (Object.getPrototypeOf(value) !== Object.prototype) throw new Error(`no plain value: ${value}`);
  return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, extended(inner)]));
};
const ISODate = (text) => {
  if (!/^\\d{4}-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\dZ$/.test(text)) throw new Error(`no instant: ${text}`);
  return new Date(text);
};
const asked = JSON.parse(require("fs").readFileSync(0, "utf8")).map((code) => {
  const calls = [];
  const db = { tasks: { aggregate: (...given) => { calls.push(given); } } };
  new Function("db", "ISODate", `"use strict";\\n${code}`)(Object.freeze(db), ISODate);
  if (calls.length !== 1 || calls[0].length !== 1) throw new Error(`one query is expected: ${code}`);
  return extended(calls[0][0]);
});
console.log(JSON.stringify(asked));
"""


@dataclass(frozen=True)
class Question:
    """A section of the page: its number and title, the indexes that it names, and its blocks by language."""

    number: int
    title: str
    indexes: frozenset[str]
    blocks: Mapping[str, str]


def questions() -> list[Question]:
    found = []
    for section in re.split(r"^## (?=\d)", PAGE, flags=re.MULTILINE)[1:]:
        number, title = re.match(r"(\d+)\. (.+)", section).groups()  # type: ignore[union-attr]
        named = re.search(r"^Index: (.*?)(?=\n\n)", section, re.MULTILINE | re.DOTALL)
        assert named, f"{title}: which index?"
        blocks = [(language, text) for _, language, text in BLOCK.findall(section)]
        assert len(dict(blocks)) == len(blocks), f"{title}: two blocks of one language"
        found.append(Question(int(number), title, frozenset(re.findall(r"`(\w*_\w*)`", named[1])), dict(blocks)))
    return found


#: `create_time` and the like are no indexes.
ALL = questions()
OF_FLOWS = {"mtask_flow", "mtask_unended", "mtask_owed", "mtask_children"}
#: Where statuses and a bound on create_time are given, the server takes the one of these that leads to fewer tasks.
EITHER = {"mtask_status", "mtask_recent"}
KNOWN_INDEXES = {*EITHER, "mtask_discovery", "mtask_coming", "mtask_lookup", "_id_", *OF_FLOWS}
each = pytest.mark.parametrize("question", ALL, ids=lambda question: str(question.number))


class KnownClock:
    """The collection, with a known instant in the place of the server's clock; it notes what was asked."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        self.asked: list[list[dict[str, Any]]] = []

    def aggregate(self, pipeline: list[dict[str, Any]]) -> Any:
        self.asked.append(pipeline)
        return self._store.tasks.aggregate(at_noon(pipeline))


def at_noon(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: at_noon(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [at_noon(inner) for inner in value]
    return NOW if value == "$$NOW" else value


@pytest.fixture(scope="module")
def known(module_store: SyncStore) -> SyncStore:
    known_queue.fill(module_store)
    return module_store


@dataclass(frozen=True)
class Answer:
    """What the Python of a question asked for, and what it printed."""

    pipeline: list[dict[str, Any]]
    printed: str


@pytest.fixture(scope="module")
def answers(known: SyncStore, mongo_uri: str) -> Mapping[int, Answer]:
    """Run the page's Python, each block behind the one at the top."""
    ((indent, _, first),) = BLOCK.findall(PAGE.split("\n## ")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTASK_URI", mongo_uri)
        patch.setenv("MTASK_DATABASE", known.database.name)
        names: dict[str, Any] = {}
        exec(compile(re.sub(f"^{indent}", "", first, flags=re.MULTILINE), "docs/queries.md", "exec"), names)
    made = {}
    with names["client"] as client:
        assert client.tasks.estimated_document_count() == len(known_queue.tasks()) + OLD + FAR
        for question in ALL:
            tasks = KnownClock(known)
            out = StringIO()
            with redirect_stdout(out):
                code = compile(question.blocks["python"], f"docs/queries.md, question {question.number}", "exec")
                exec(code, {**names, "client": SimpleNamespace(tasks=tasks)})
            (pipeline,) = tasks.asked
            made[question.number] = Answer(pipeline, out.getvalue())
    return made


@cache
def javascript() -> list[Any]:
    """Return the pipelines of all blocks for the shell."""
    blocks = json.dumps([question.blocks["js"] for question in ALL])
    done = subprocess.run(["node", "-e", EVALUATE], input=blocks, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def extended(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: extended(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [extended(inner) for inner in value]
    if isinstance(value, datetime):
        return {"$date": value.strftime("%Y-%m-%dT%H:%M:%S.000Z")}
    assert value is None or isinstance(value, str | bool | int | float), value
    return value


def test_twenty_one_questions_are_numbered_and_each_has_shell_python_and_an_answer() -> None:
    assert [question.number for question in ALL] == list(range(1, 22))
    for question in ALL:
        assert {"js", "python", "text"} <= set(question.blocks) <= {"sh", "js", "python", "text"}, question.title
        assert question.blocks["text"].strip(), question.title


@each
def test_python_prints_what_the_page_says(question: Question, answers: Mapping[int, Answer]) -> None:
    assert answers[question.number].printed == question.blocks["text"]


@each
def test_shell_asks_what_python_asks(question: Question, answers: Mapping[int, Answer]) -> None:
    asked = javascript()[question.number - 1]
    # As text: the order of fields counts, in a $sort and in an _id.
    assert json.dumps(asked) == json.dumps(extended(answers[question.number].pipeline))


@each
def test_index_is_the_one_that_is_named_and_leads_past_what_is_not_asked_for(
    question: Question, answers: Mapping[int, Answer], known: SyncStore
) -> None:
    pipeline = answers[question.number].pipeline
    for asked in (pipeline, at_noon(pipeline)):  # by the server's own clock, and at the known instant
        plan = explained(known, asked)
        assert "COLLSCAN" not in plan.stages
        assert plan.collection_scans == 0
        named = question.indexes & KNOWN_INDEXES
        assert plan.indexes
        assert plan.indexes <= named
        assert named == plan.indexes or named - plan.indexes < EITHER <= named
    assert plan.documents <= len(known_queue.tasks()) + 4, "documents"
    assert plan.keys < FAR * 2 + 150 < OLD, "keys of the index"


@dataclass(frozen=True)
class Plan:
    """How the server answered: stages, indexes, and what it read."""

    stages: frozenset[str]
    indexes: frozenset[str]
    collection_scans: int
    keys: int
    documents: int


def explained(store: SyncStore, pipeline: Sequence[Mapping[str, Any]]) -> Plan:
    command = {"aggregate": "tasks", "pipeline": list(pipeline), "cursor": {}}
    parts = list(_parts(store.database.command("explain", command, verbosity="executionStats")))
    named = [part["indexName"] for part in parts if "indexName" in part]
    looked_up = [name for part in parts for name in part.get("indexesUsed", ())]
    read = [part["executionStats"] for part in parts if "executionStats" in part]
    return Plan(
        stages=frozenset(part["stage"] for part in parts if "stage" in part),
        indexes=frozenset([*named, *looked_up]),
        collection_scans=sum(int(part.get("collectionScans", 0)) for part in parts),
        keys=sum(each["totalKeysExamined"] for each in read),
        documents=sum(each["totalDocsExamined"] for each in read),
    )


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield each document in the plan, but for the plans that were turned down."""
    if isinstance(value, Mapping):
        yield value
        for name, inner in value.items():
            if name not in ("rejectedPlans", "allPlansExecution", "command"):
                yield from _parts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _parts(inner)


def test_plan_without_an_index_would_be_noticed(known: SyncStore) -> None:
    plan = explained(known, [{"$match": {"params.customer": "acme"}}])
    assert "COLLSCAN" in plan.stages
    assert plan.documents > OLD


def test_finish_time_is_in_the_index_of_the_last_finished_tasks(known: SyncStore) -> None:
    asked = {
        "queue": "mail",
        "task_state.status": "SUCCESS",
        "task_state.finish_time": {"$gte": known_queue.at("08:10")},
    }
    plan = explained(known, [{"$match": asked}])
    assert plan.indexes == {FINISHED_INDEX}
    assert plan.documents == 2


#: What a command must show of the known queue.
SHOWN = {
    "mtask list --status FAIL": ["import_file:a.csv", "import_file:b.csv", "send_email:welcome/3"],
    "mtask show import_file a.csv": ["no column 'price'"],
    "mtask stats": ["mail", "reports", "imports"],
    "mtask stats --queue mail --queue reports": ["mail", "reports"],
    "mtask show report monthly/1": ["worker-3", "worker-4"],
    "mtask show report sales/globex": ["worker-3", "worker-2", "TIMEOUT"],
    "mtask workers --all": ["worker-1", "worker-4"],
    "mtask doctor": ["worker-3", "worker-4"],
    "mtask list --status RUNNING --worker worker-2": ["report:sales/initech"],
    "mtask schedule list": ["digest", "nightly"],
    "mtask flow show nightly/1": ["total", "part-2", "WAITING", "added by fetch"],
    "mtask show report nightly/1/total": ["waits for", "part-2"],
    "mtask flow list": ["nightly/1", "nightly/0", "stopped/7"],
    "mtask find --lookup user_id=7": ["report:nightly/1/total", "send_email:welcome/4"],
    "mtask find --lookup user_id=7 --fields status,params": ["STATUS", "PARAMS", "customer"],
    "mtask show send_email news/1": ["gathers"],
}


def test_commands_answer_about_the_known_queue(
    known: SyncStore, mtask: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTASK_DATABASE", known.database.name)
    monkeypatch.setenv("COLUMNS", "200")
    commands = {line for question in ALL for line in question.blocks.get("sh", "").splitlines()}
    assert commands == set(SHOWN)
    for command in sorted(commands):
        ended = mtask(*shlex.split(command)[1:])
        assert ended.code in ((0, 7) if command == "mtask doctor" else (0,)), (command, ended)
        for word in SHOWN[command]:
            assert word in ended.out, (command, ended.out)
    assert "imports" not in mtask.ok("stats", "--queue", "mail", "--queue", "reports").out
