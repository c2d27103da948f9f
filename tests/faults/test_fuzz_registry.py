"""Rubbish in the registry of workers, and in what is asked of one: workers work on, and commands tell what is wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtask import App, Client
from mtask.cli.failures import EXIT_CODES
from mtask.errors import MtaskError, WorkerIdInUse
from mtask.kernel.driver.stores import SyncStore
from tests.faults import fuzzing
from tests.faults.fuzzing import LIMIT, PATIENCE, Lab, fuzz
from tests.faults.malformed import good
from tests.faults.test_fuzz_cli import check
from tests.integration.cli.commands import Commands
from tests.mongo import Client as Mongo
from tests.mongo import Document, until

pytestmark = pytest.mark.timeout(LIMIT)
app = App()
_numbers = itertools.count()
_FIELDS = (
    "incarnation", "host", "pid", "pid_scope", "status", "started_time", "heartbeat_time", "heartbeat_expire_time",
    "queues", "names", "unserved_names", "concurrency", "running_cnt", "version", "control",
)  # fmt: skip


@app.task
async def noop() -> None:
    """Do nothing."""


@pytest.fixture
def lab(mongo_uri: str, database_name: str, mongo: Mongo) -> Iterator[Lab]:
    with Lab(mongo_uri, database_name, mongo, app) as made:
        yield made


@pytest.fixture
def commands(
    lab: Lab, mongo_uri: str, database_name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Commands:
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    return Commands(mongo_uri, database_name, capsys)


async def _works(lab: Lab) -> None:
    """See that the worker takes a task, and answers what is asked of it."""
    task = good(f"after-{next(_numbers)}")
    lab.insert([task])

    def is_done() -> bool:
        lab.assert_well()
        found = lab.find(task["_id"])
        return found is not None and found["task_state"]["status"] == "SUCCESS"

    await until(is_done, PATIENCE, "a task done")


async def _answers(lab: Lab) -> None:
    """See that the worker's next heartbeat is written; ask for it along the stream."""
    before = lab.registry.find_one({"_id": "w1"})
    lab.bench.worker.parts.pinger.beat_now()

    def is_heard() -> bool:
        lab.assert_well()
        found = lab.registry.find_one({"_id": "w1"})
        return found is not None and found.get("heartbeat_time") != (before or {}).get("heartbeat_time")

    await until(is_heard, PATIENCE, "a heartbeat")


def _write(lab: Lab, document_id: Any, change: Document) -> None:
    lab.registry.update_one({"_id": document_id}, change, upsert=True, bypass_document_validation=True)


# --- what is asked of this worker -------------------------------------------------------------------------

_controls = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "stop": st.one_of(
                st.sampled_from(["yes", "no", "true", 1, 0, None, [], {}, "", float("nan")]),
                fuzzing.values.filter(lambda value: value is not True),
            ),
            "concurrency": st.one_of(
                st.sampled_from([-1, 0.5, "NaN", float("nan"), 1e99, None, {}, 10_001, "5", True, 7.0, 3]),
                fuzzing.values,
            ),
            "nonsense": fuzzing.values,
        },
    ),
    fuzzing.values,
)


@fuzz(10)
@given(control=_controls)
def test_control_of_any_kind_stops_no_worker_unless_it_says_so(lab: Lab, control: Any) -> None:
    async def example() -> None:
        _write(lab, "w1", {"$set": {"control": control}})
        await _answers(lab)
        asked = control.get("concurrency") if isinstance(control, dict) else None
        is_number = isinstance(asked, int | float) and not isinstance(asked, bool)
        wanted = next((number for number in range(10_001) if is_number and asked == number), 10)
        await until(
            lambda: lab.bench.worker.parts.scope.vitals.concurrency == wanted, PATIENCE, f"concurrency {wanted}"
        )
        _write(lab, "w1", {"$set": {"control": {"stop": False, "concurrency": None}}})
        await _answers(lab)
        await until(lambda: lab.bench.worker.parts.scope.vitals.concurrency == 10, PATIENCE, "concurrency as it was")
        await _works(lab)

    lab.run(example())


# --- documents of this worker, of others and of nobody ----------------------------------------------------

_rubbish = st.dictionaries(st.sampled_from(_FIELDS), fuzzing.values, min_size=1, max_size=4)


@fuzz(5)
@given(
    changes=st.dictionaries(
        st.sampled_from([field for field in _FIELDS if field not in ("incarnation", "control")]),
        fuzzing.values,
        min_size=1,
        max_size=4,
    )
)
def test_worker_gets_over_rubbish_in_its_own_document(lab: Lab, changes: Document) -> None:
    async def example() -> None:
        _write(lab, "w1", {"$set": changes})
        await _answers(lab)
        await _works(lab)

    lab.run(example())


@fuzz(3)
@given(
    others=st.lists(
        st.tuples(st.sampled_from(["other", "\x1b[2J", 5, None, {"a": 1}, "$x"]), _rubbish, st.booleans()), max_size=4
    ),
    is_live=st.booleans(),
)
def test_worker_and_commands_get_over_rubbish_of_others(
    lab: Lab, commands: Commands, others: list[tuple[Any, Document, bool]], is_live: bool
) -> None:
    async def example() -> None:
        own = lab.registry.find_one({"_id": "w1"})
        for document_id, rubbish, is_whole in others:
            made = {**(own or {}), **rubbish} if is_whole else rubbish
            made.pop("_id", None)
            lab.registry.replace_one({"_id": {"$eq": document_id}}, made, upsert=True, bypass_document_validation=True)
        await _works(lab)
        lab.scan()
        await _works(lab)

    lab.run(example())
    wrong = [document["_id"] for document in lab.registry.find({"_id": {"$ne": "w1"}})]
    for line in (["workers"], ["workers", "--all"], ["doctor"], ["stats"], ["list"], ["show", "noop:after-0"]):
        for flags in ([], ["--json"]):
            ended = commands(*line, *flags)
            assert ended.code in EXIT_CODES
            check_rubbish(ended.out + ended.err)
            if flags and ended.out:
                json.loads(ended.out)
    with Client(commands.uri, database=commands.database, check=False) as client:
        for document_id in (found for found in wrong if isinstance(found, str)):
            for ask in (client.stop_worker, lambda worker_id: client.set_worker(worker_id, concurrency=1)):
                with suppress(MtaskError):
                    ask(document_id)
    lab.registry.delete_many({"_id": {"$ne": "w1"}})


def check_rubbish(text: str) -> None:
    assert "Traceback" not in text
    assert "bug in mtask" not in text, text
    assert not [letter for letter in text if letter != "\n" and not letter.isprintable()]


def test_rubbish_in_the_registry_is_named(lab: Lab, commands: Commands) -> None:
    lab.registry.insert_one({"_id": "odd", "heartbeat_expire_time": "soon"}, bypass_document_validation=True)
    for line in (["workers", "--all"], ["doctor"]):
        ended = commands(*line)
        check(ended)
        assert "odd" in ended.out + ended.err, line


# --- starting beside rubbish ------------------------------------------------------------------------------


@fuzz(3)
@given(rubbish=_rubbish)
def test_worker_whose_id_rubbish_holds_starts_or_says_why(
    mongo_uri: str, database_name: str, mongo: Mongo, rubbish: Document
) -> None:
    registry = SyncStore(mongo, database_name).collections["workers"]
    with Client(mongo_uri, database=database_name) as client:
        client.init()
    registry.replace_one({"_id": "w1"}, rubbish, upsert=True, bypass_document_validation=True)
    with suppress(WorkerIdInUse), Lab(mongo_uri, database_name, mongo, app) as lab:
        lab.run(_works(lab))
    registry.delete_many({})
