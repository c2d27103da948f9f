"""Publishing from JavaScript with nothing but the npm driver: the example of docs/other-languages.md, executed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from examples.app import app
from mtask import Client, Task, TaskStatus
from mtask.kernel.document.options import OPTION_NAMES
from tests import faketime
from tests.clients import claim, open_store, server_now, succeed
from tests.integration.features.registry.apps import params_of, registered, thirty
from tests.mongo import Client as Mongo

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "publish_from_node"
PAGE = ROOT / "docs" / "other-languages.md"
PARAMS = {"to": "ada@example.com", "subject": "$9.99 off"}
_BOTH = ("of-javascript", "of-python")
INSTANTS = ("create_time", "next_preempt_time", "start_time")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the example and install its one dependency."""
    for program in ("node", "npm"):
        assert shutil.which(program), f"{program} is not installed: run tools/setup.sh dev"
    copied = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(EXAMPLE, copied, ignore=shutil.ignore_patterns("node_modules"))
    arguments = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
    installed = subprocess.run(arguments, cwd=copied, capture_output=True, text=True, timeout=100, check=False)
    assert installed.returncode == 0, installed.stderr
    return copied


@pytest.fixture
def client(client: Client) -> Client:
    client.init()
    return client


def node(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the example; return the lines that it prints."""
    command = ["node", "publish.mjs", *arguments]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def without_instants(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with every instant as the text "an instant"."""
    state = dict(document["task_state"])
    for field in INSTANTS:
        if field in state:
            assert isinstance(state[field], datetime)
            state[field] = "an instant"
    return {**document, "task_state": state}


def same_in_order(document: Any) -> Any:
    """Return the document so that two are equal only if their fields have the same order."""
    if isinstance(document, dict):
        return [(name, same_in_order(value)) for name, value in document.items()]
    return [same_in_order(item) for item in document] if isinstance(document, list) else document


def test_task_published_twice_from_javascript_is_one_document(
    folder: Path, client: Client, mongo_uri: str, database_name: str
) -> None:
    told = [node(folder, mongo_uri, database_name)[0] for _ in range(2)]

    assert [(each["taskId"], each["created"]) for each in told] == [
        ("send_email:welcome/42", True),
        ("send_email:welcome/42", False),
    ]
    assert client.tasks.count_documents({}) == 1


def test_javascript_writes_the_document_that_python_writes(
    folder: Path, client: Client, mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    before = server_now(mongo)
    node(folder, mongo_uri, database_name)
    after = server_now(mongo)
    written = client.tasks.find_one()
    assert written is not None
    client.remove("send_email", "welcome/42")
    client.publish("send_email", PARAMS, key="welcome/42", queue="mail", priority=5)
    expected = client.tasks.find_one()
    assert expected is not None

    assert same_in_order(without_instants(written)) == same_in_order(without_instants(expected))
    task = Task.model_validate(written)
    assert task.params == PARAMS
    handler = app.handlers["send_email"]
    assert (handler.bind(task.params), handler.queue) == (PARAMS, task.queue)
    assert before <= task.task_state.create_time <= after
    assert task.task_state.next_preempt_time == task.task_state.create_time


def test_javascript_leaves_a_task_alone_that_python_published_and_the_other_way_round(
    folder: Path, client: Client, mongo_uri: str, database_name: str
) -> None:
    client.publish("send_email", {"from": "python"}, key="first")
    before = client.tasks.find_one()
    assert not node(folder, mongo_uri, database_name, "first")[0]["created"]
    assert client.tasks.find_one() == before

    assert node(folder, mongo_uri, database_name, "second")[0]["created"]
    assert not client.publish("send_email", {"from": "python"}, key="second").created
    assert client.get("send_email", "second").params == PARAMS


def test_javascript_waits_for_a_task_and_reads_what_it_returned(
    folder: Path, client: Client, mongo_uri: str, database_name: str
) -> None:
    node(folder, mongo_uri, database_name)
    command = ["node", "publish.mjs", mongo_uri, database_name, "welcome/42", "60"]
    with open_store(mongo_uri, database_name) as store:
        run_id = claim(store, "send_email:welcome/42")
        waiting = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        with waiting:
            assert waiting.stdout is not None
            waiting.stdout.readline()  # it has connected and published
            succeed(store, "send_email:welcome/42", run_id, {"message_id": 7})
            rest, _ = waiting.communicate(timeout=60)
    assert json.loads(rest.splitlines()[-1]) == {"status": "SUCCESS", "returns": {"message_id": 7}}
    assert client.get("send_email", "welcome/42").status is TaskStatus.SUCCESS


def test_malformed_task_from_javascript_is_refused_with_error_121_that_names_the_field(
    folder: Path, client: Client, mongo_uri: str, database_name: str
) -> None:
    refusal = node(folder, mongo_uri, database_name)[1]

    assert (refusal["code"], refusal["message"]) == (121, "Document failed validation")
    details = json.dumps(refusal["details"])
    assert '"propertyName": "worker_timeout_ms"' in details
    assert '"reason": "type did not match"' in details
    assert client.tasks.count_documents({"key": {"$regex": "malformed"}}) == 0


@pytest.mark.parametrize("minutes", [-10, 10])
def test_javascript_publisher_whose_clock_is_wrong_neither_delays_nor_hastens_a_task(
    minutes: int, folder: Path, client: Client, mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    before = server_now(mongo)
    clock = 'console.log(JSON.stringify(Date.now())); process.argv[1] = "publish.mjs"; await import("./publish.mjs");'
    command = ["node", "--input-type=module", "-e", clock, "publish.mjs", mongo_uri, database_name]
    printed = faketime.run(command, timedelta(minutes=minutes), cwd=folder).splitlines()
    after = server_now(mongo)

    believed = int(printed[0]) / 1000 - before.timestamp()
    assert abs(believed - minutes * 60) < 60, "the process's clock is wrong as intended"
    state = client.get("send_email", "welcome/42").task_state
    assert before <= state.create_time <= after
    assert state.next_preempt_time == state.create_time


def test_javascript_and_python_find_each_others_tasks_by_their_lookups(
    folder: Path, client: Client, mongo_uri: str, database_name: str
) -> None:
    client.publish("send_email", key="of-python", lookup={"user_id": 7, "tags": ["a", "b"]})
    script = """
        import { MongoClient } from "mongodb";
        import { find, publish } from "./publish.mjs";
        const [uri, database] = process.argv.slice(1);
        const client = new MongoClient(uri);
        const tasks = client.db(database).collection("tasks", { writeConcern: { w: "majority" } });
        await publish(tasks, "send_email", "of-javascript", {}, { lookup: { user_id: 7, tags: ["a", "$b"] } });
        await publish(tasks, "send_email", "plain", {});
        for (const values of [{ user_id: 7 }, { user_id: 7, tags: "$b" }, { tags: "b" }]) {
          console.log(JSON.stringify((await find(tasks, values)).map((task) => task.key)));
        }
        await client.close();
    """
    command = ["node", "--input-type=module", "-e", script, mongo_uri, database_name]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert found == [["of-javascript", "of-python"], ["of-javascript"], ["of-python"]]
    assert [task.key for task in client.find(lookup={"user_id": 7, "tags": "a"})] == found[0]
    assert client.get("send_email", "of-javascript").lookups == {"user_id": [7], "tags": ["a", "$b"]}
    assert client.get("send_email", "plain").lookup is None


def test_javascript_publishes_by_name_what_the_handlers_declare(
    folder: Path, client: Client, mongo: Mongo, mongo_uri: str, database_name: str
) -> None:
    known = thirty()
    with open_store(mongo_uri, database_name) as store:
        registered(store, known)
    names = list(known.handlers)
    script = """
        import { MongoClient } from "mongodb";
        import { declaredBy, publish } from "./publish.mjs";
        const [uri, database, given] = process.argv.slice(1);
        const client = new MongoClient(uri);
        const tasks = client.db(database).collection("tasks", { writeConcern: { w: "majority" } });
        for (const [name, params] of JSON.parse(given)) {
          const declared = await declaredBy(client.db(database).collection("handlers"), name);
          await publish(tasks, name, "of-javascript", params, { declared });
        }
        await client.close();
    """
    given = json.dumps([(name, params_of(index)) for index, name in enumerate(names)])
    command = ["node", "--input-type=module", "-e", script, mongo_uri, database_name, given]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    for index, name in enumerate(names):
        client.publish(known.handlers[name].function, params_of(index), key="of-python")
        made, expected = (mongo[database_name]["tasks"].find_one({"_id": f"{name}:{key}"}) for key in _BOTH)
        assert made is not None
        assert expected is not None
        assert list(made) == list(expected)
        for document in (made, expected):
            del document["_id"], document["key"]
        assert without_instants(made) == without_instants(expected), name


def test_the_code_on_the_page_is_the_code_that_is_executed() -> None:
    page, program = PAGE.read_text(encoding="utf-8"), (EXAMPLE / "publish.mjs").read_text(encoding="utf-8")
    blocks = re.findall(r"^```js\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    for block in blocks:
        assert block.strip() in program


def test_the_page_names_each_field_of_the_document_a_publisher_writes(client: Client) -> None:
    client.publish("send_email", key="k", delay=60)
    written = client.tasks.find_one()
    assert written is not None
    page = PAGE.read_text(encoding="utf-8")
    fields = [name for name in written if name not in ("task_option", "task_state")]
    fields += [f"task_option.{name}" for name in OPTION_NAMES]
    fields += [f"task_state.{name}" for name in written["task_state"]]
    assert [field for field in fields if f"| `{field}` |" not in page] == []


def test_the_page_gives_the_options_their_defaults(client: Client) -> None:
    client.publish("send_email", key="k")
    option = client.get("send_email", "k").task_option.model_dump()
    rows = dict(
        re.findall(r"^\| `task_option\.(\w+)` \| `?([^`|]*?)`? \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {name: json.loads(value) for name, value in rows.items()} == option


def test_the_example_needs_nothing_but_the_driver() -> None:
    package = json.loads((EXAMPLE / "package.json").read_text(encoding="utf-8"))
    assert list(package["dependencies"]) == ["mongodb"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", package["dependencies"]["mongodb"])
    imports = re.findall(r'^import .* from "(.*)";$', (EXAMPLE / "publish.mjs").read_text("utf-8"), re.MULTILINE)
    assert imports == ["mongodb"]
