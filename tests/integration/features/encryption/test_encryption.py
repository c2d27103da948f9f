"""What a reader refuses, what the schema takes, and what the key vault costs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from bson.binary import Binary
from pymongo import AsyncMongoClient, MongoClient
from pymongo.encryption import ClientEncryption
from pymongo.monitoring import CommandListener

from mtask import AsyncClient, Client, Encryption, TaskSpec
from mtask.errors import DataKeyNotFound, DecryptionFailed, InvalidInput, WorkersTooOld, WrongMasterKey
from mtask.features.encryption import vault
from mtask.features.encryption.cipher import Cipher
from mtask.kernel.document.parts import Sealed
from mtask.kernel.driver.codec import Owner
from mtask.kernel.operations.encode import PARAMS
from tests import build
from tests.clients import KINDS, AnyClient, Kind, open_client
from tests.keys import MARKER, MASTER_KEY, encryption_of, make_keys
from tests.mongo import Client as Mongo

NAMES = ("queue:mail", "tenant:acme", "tenant:other")


@pytest.fixture
def client(mongo_uri: str, database_name: str) -> Any:
    make_keys(mongo_uri, database_name, *NAMES)
    with Client(mongo_uri, database=database_name, encryption=encryption_of(database_name)) as opened:
        yield opened


def _cipher(client: Client) -> Cipher:
    cipher = client._codec
    assert isinstance(cipher, Cipher)
    cipher.vault.load(NAMES)
    return cipher


def _encrypted(key_name: str, name: str, key: str, field: str = PARAMS, value: Any = 1) -> Callable[[Cipher, Any], Any]:
    """Return what encrypts a value of a task."""
    return lambda cipher, _: cipher.encrypt(key_name, Owner(name, key, ()), field, value)


def _of_schedule(schedule: str) -> Callable[[Cipher, Any], Any]:
    """Return what encrypts params of a schedule."""
    owner = Owner("a", f"{schedule}/", (), schedule=schedule)
    return lambda cipher, _: cipher.encrypt_params("tenant:acme", owner, 1, None)


class Sent(CommandListener):
    """Counts the commands that a client sends."""

    def __init__(self) -> None:
        self.count = 0

    def started(self, event: Any) -> None:
        self.count += 1

    def succeeded(self, event: Any) -> None: ...

    def failed(self, event: Any) -> None: ...


def _changed(value: Any) -> Binary:
    return Binary(bytes(value[:-1]) + bytes([value[-1] ^ 1]), 6)


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (_encrypted("tenant:acme", "a", "acme:2"), "another task or field"),
        (_encrypted("tenant:acme", "b", "acme:1"), "another task or field"),
        (_encrypted("tenant:acme", "a", "acme:1", "returns"), "another task or field"),
        (_encrypted("tenant:other", "a", "acme:1"), "not that of the task's queue"),
        (lambda cipher, _: cipher.vault.encrypt("tenant:acme", {"x": 1}), "no value of mtask"),
        (_of_schedule("acme:1"), "another task or field"),
        (_of_schedule("acme"), "another task or field"),
        (lambda *_: {"x": "forged"}, "stored readable"),
        (lambda *_: None, "stored readable"),
        (lambda _, stored: {"calls": [stored], "x": "forged"}, "stored readable"),
        (lambda _, stored: _changed(stored), "its bytes are not what was encrypted"),
        (lambda _, stored: Binary(b"\x02" + b"n" * 16 + bytes(stored[17:]), 6), "not in the key vault"),
    ],
)
def test_value_that_does_not_belong_to_the_task_is_refused(
    client: Client, forge: Callable[[Cipher, Any], Any], said: str
) -> None:
    client.publish("a", {"x": 1}, key="acme:1", queue="mail")
    assert client.get("a", "acme:1").params == {"x": 1}
    stored = client.tasks.find_one({"_id": "a:acme:1"})
    assert stored is not None
    client.tasks.update_one({"_id": "a:acme:1"}, {"$set": {"params": forge(_cipher(client), stored["params"])}})
    seen = client.get("a", "acme:1").params
    assert isinstance(seen, Sealed)
    assert said in seen.why
    with pytest.raises(DecryptionFailed, match=said):
        seen["x"]
    for field in ("params", "params.x"):
        assert isinstance(client.find(fields=[field])[0][field], Sealed), field


def test_what_a_writer_puts_readable_or_copied_into_an_encrypted_task_is_refused(
    client: Client, mongo_uri: str, database_name: str
) -> None:
    client.publish("a", {"x": 1}, key="acme:1", lookup={"user": "mine"})
    client.publish("a", {"x": 2}, key="acme:2", lookup={"user": "other", "shop": "mine"})
    first, second = (client.tasks.find_one({"_id": f"a:acme:{key}"}) for key in (1, 2))
    assert first is not None
    assert second is not None
    made = first["task_state"]["create_time"]
    progress = {"message": "forged", "time": made}
    run = build.run("SUCCESS", made, made, success_time=made, returns="forged", progress=progress)
    forged = {
        "lookup": [{"k": "user", "v": second["lookup"][0]["v"]}],
        "task_state.worker_states": [run],
        "task_state.status": "SUCCESS",
        "task_state.finish_time": run["success_time"],
        "again": {
            "params": {"x": "forged"},
            "sealed": "tenant:acme",
            "queue": "default",
            "task_option": first["task_option"],
            "gather": {
                "kind": "latest",
                "newest": {"asked_time": run["claim_time"], "call_id": "c"},
                "first_time": run["claim_time"],
            },
        },
        "former_params": [{"params": {"x": "forged"}, "until": first["task_state"]["create_time"]}],
    }
    client.tasks.update_one({"_id": "a:acme:1"}, {"$set": forged})
    task = client.get("a", "acme:1")
    assert task.params == {"x": 1}
    assert task.lookup is not None
    assert "it was copied here" in task.lookup[0].v.why
    assert isinstance(task.returns, Sealed)
    with pytest.raises(DecryptionFailed, match=r"returns of task 'a:acme:1'.*stored readable"):
        client.result("a", "acme:1")
    assert isinstance(task.former_params[0].params, Sealed)
    assert isinstance(task.again.params, Sealed)  # type: ignore[union-attr]
    assert isinstance(task.runs[0].progress.message, Sealed)  # type: ignore[union-attr]
    fields = ["lookup", "lookup.v", "returns", "runs", "task_state.worker_states.returns", "former_params", "again"]
    seen = dict(client.find(key="acme:1", fields=fields)[0])
    assert isinstance(seen["lookup"], Sealed)
    assert isinstance(seen["lookup.v"], Sealed)
    assert isinstance(seen["returns"], Sealed)
    assert "forged" not in str(seen)
    # Without keys, a client refuses what is readable all the same.
    with Client(mongo_uri, database=database_name) as plain:
        assert "stored readable" in plain.get("a", "acme:1").returns.why
    for lookup, said in (
        ([{"k": "user", "v": "mine"}], "stored readable"),
        ([{"k": "user", "v": second["lookup"][1]["v"]}], "another lookup"),
        ([*first["lookup"], {"k": "user", "v": second["lookup"][0]["v"]}], "copied here"),
    ):
        client.tasks.update_one({"_id": "a:acme:1"}, {"$set": {"lookup": lookup}})
        copied = client.get("a", "acme:1").lookup
        assert copied is not None
        assert said in copied[-1].v.why


def test_readable_task_is_refused_where_encryption_is_prescribed_and_nowhere_else(
    mongo_uri: str, database_name: str
) -> None:
    make_keys(mongo_uri, database_name, *NAMES)
    with (
        Client(mongo_uri, database=database_name) as plain,
        Client(mongo_uri, database=database_name, encryption=encryption_of(database_name)) as lenient,
        Client(mongo_uri, database=database_name, encryption=encryption_of(database_name, queues=["mail"])) as strict,
    ):
        plain.publish("a", {"x": 1}, key="1", queue="mail")
        plain.publish("a", {"x": 1}, key="2", queue="open")
        assert [lenient.get("a", key).params for key in ("1", "2")] == [{"x": 1}] * 2
        assert strict.get("a", "2").params == {"x": 1}
        assert "stored readable" in strict.get("a", "1").params.why
        assert isinstance(strict.find(key="1", fields=["params.x"])[0]["params.x"], Sealed)
        # What is given anew is encrypted, and the task is as good as new.
        strict.cancel("a", "1")
        strict.retry("a", "1", params={"x": 2})
        assert strict.get("a", "1").params == {"x": 2}


def test_retry_with_params_encrypts_the_lookups_of_a_readable_task_and_believes_no_copied_one(
    client: Client, mongo_uri: str, database_name: str
) -> None:
    with Client(mongo_uri, database=database_name) as plain:
        plain.publish("a", {"x": 1}, key="1", queue="mail", lookup={"user": 7})
    client.cancel("a", "1")
    client.retry("a", "1", params={"x": 2})
    assert client.get("a", "1").lookups == {"user": [7]}
    assert [task.id for task in client.find(lookup={"user": 7})] == ["a:1"]
    client.publish("a", {"x": 1}, key="2", queue="mail", lookup={"user": 8})
    other = client.tasks.find_one({"_id": "a:2"})
    assert other is not None
    client.cancel("a", "1")
    client.tasks.update_one({"_id": "a:1"}, {"$set": {"lookup": other["lookup"]}})
    with pytest.raises(DecryptionFailed, match=r"lookup user of task 'a:1'.*copied here"):
        client.retry("a", "1", params={"x": 3})


def test_values_of_a_schedule_and_of_a_task_do_not_stand_for_each_other(client: Client) -> None:
    client.add_schedule("s", "a", timedelta(days=1), {"x": 1}, queue="mail", lookup={"user": 7})
    client.publish("a", {"x": 2}, key="s/", queue="mail", lookup={"user": 7})
    client.publish("a", {"x": 2}, key="s/1", queue="mail", lookup={"user": 7})
    schedules, tasks = client.tasks.database["schedules"], client.tasks
    stored, task = schedules.find_one({"_id": "s"}), tasks.find_one({"_id": "a:s/"})
    assert stored is not None
    assert task is not None
    for key in ("s/", "s/1"):
        tasks.update_one({"_id": f"a:{key}"}, {"$set": {"params": stored["params"]}})
        assert "another task or field" in client.get("a", key).params.why
    for params, said in ((task["params"], "another task or field"), ({"x": "forged"}, "stored readable")):
        schedules.update_one({"_id": "s"}, {"$set": {"params": params}})
        assert said in client.schedules()[0].params.why
    # A declaration writes them anew.
    mended = client.add_schedule("s", "a", timedelta(days=1), {"x": 1}, queue="mail", lookup={"user": 7})
    assert mended.params == {"x": 1}


def test_value_of_mtask_0_2_is_read_although_it_does_not_tell_its_lookups(client: Client) -> None:
    client.publish("a", {"x": 1}, key="1", queue="mail", lookup={"user": 7})
    former = _encrypted("queue:mail", "a", "1", value={"x": 0})(_cipher(client), None)
    client.tasks.update_one({"_id": "a:1"}, {"$set": {"params": former}})
    task = client.get("a", "1")
    assert (task.params, task.lookups) == ({"x": 0}, {"user": [7]})


def test_params_of_a_bulk_change_are_encrypted_while_they_are_stored(
    client: Client, mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    with Client(mongo_uri, database=database_name) as plain:
        plain.publish("a", {"x": MARKER}, key="readable", queue="plain")
        plain.publish("a", {"x": "other"}, key="other", queue="plain")
        # Somebody with the keys begins the change, and somebody without them cannot carry it out.
        begun = client.begin_bulk(client.plan_bulk("cancel", params={"x": MARKER}).plan)
        assert begun.criteria["params"] == {"x": MARKER}
        assert plain.bulk(begun.bulk_id).criteria["params"] == "(encrypted)"
        with pytest.raises(DecryptionFailed, match=f"params of the bulk change {begun.bulk_id}.*no keys are given"):
            plain.carry_bulk(begun.bulk_id)
        bulks = mongo[database_name]["bulks"]
        stored = bulks.find_one({"_id": begun.bulk_id})
        assert stored is not None
        assert MARKER not in str(stored)
        # The lease of the first one has ended.
        bulks.update_one({"_id": begun.bulk_id}, {"$unset": {"holder": "", "lease_expire_time": ""}})
        assert client.carry_bulk(begun.bulk_id).done_cnt == 1
        assert plain.get("a", "readable").status.value == "CANCELED"
        copied = client.begin_bulk(client.plan_bulk("cancel", params={"x": "other"}).plan)
        bulks.update_one({"_id": copied.bulk_id}, {"$set": {"criteria": stored["criteria"]}})
        with pytest.raises(DecryptionFailed, match="another bulk change"):
            client.carry_bulk(copied.bulk_id)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_client_encrypts_and_decrypts(kind: Kind, mongo_uri: str, database_name: str) -> None:
    make_keys(mongo_uri, database_name, *NAMES)
    given = {"encryption": encryption_of(database_name, uri=mongo_uri)}
    with open_client(kind, mongo_uri, database_name) as plain:
        opened = AnyClient(kind, type(plain.client)(plain.source, database=database_name, **given), None, plain.runner)
        opened.publish("a", {"x": MARKER}, key="1", queue="mail", lookup={"n": [7, "t"]})
        opened.publish_many([TaskSpec("a", {"x": i}, key=f"many-{i}", queue="mail") for i in range(3)])
        assert opened.get("a", "1").params == {"x": MARKER}
        assert [task.key for task in opened.find(lookup={"n": 7}, queue="mail")] == ["1"]
        assert opened.count(lookup={"n": "t"}) == 1
        page = opened.find_page(lookup={"n": 7}, fields=["params.x", "lookup", "queue"])
        assert dict(page.tasks[0]) == {
            "params.x": MARKER,
            "lookup": [{"k": "n", "v": 7}, {"k": "n", "v": "t"}],
            "queue": "mail",
        }
        # Also with all that tells whose they are.
        owning = ["queue", "task_state.former_queues", "sealed"]
        assert opened.find(key="1", fields=["params", *owning])[0]["params"] == {"x": MARKER}
        opened.publish("a", {"x": "new"}, key="1", queue="mail", if_exists="update")
        assert opened.get_many(["a:1"]).tasks["a:1"].params == {"x": "new"}
        assert str(plain.get("a", "1").params) == "(encrypted)"
        assert plain.find(lookup={"n": 7}) == []
        opened.cancel("a", "1")
        task = opened.get("a", "1")
        opened.retry("a", "1", params={"x": "again"}, if_match=opened.etag(task))
        assert opened.get("a", "1").params == {"x": "again"}
        opened.client._codec.close()


def test_new_master_key_reads_what_was_encrypted_before_the_rotation(
    client: Client, mongo_uri: str, database_name: str
) -> None:
    client.publish("a", {"x": MARKER}, key="1", queue="mail")
    new_key = b"n" * 96
    providers: Any = {"local": {"key": MASTER_KEY}, "local:new": {"key": new_key}}
    with MongoClient[Any](mongo_uri) as driver:
        rotation: ClientEncryption[Any] = ClientEncryption(
            providers, f"{database_name}.vault", driver, driver.codec_options
        )
        rotation.rewrap_many_data_key({}, provider="local:new")
    rotated = Encryption({"local:new": {"key": new_key}}, key_vault=f"{database_name}.vault")
    with Client(mongo_uri, database=database_name, encryption=rotated) as after:
        assert after.get("a", "1").params == {"x": MARKER}
        assert {row.provider for row in after.data_keys()} == {"local:new"}
    with Client(mongo_uri, database=database_name, encryption=encryption_of(database_name)) as before:
        assert "another master key" in before.get("a", "1").params.why


def test_key_that_is_made_again_encrypts_although_old_tasks_are_read(client: Client) -> None:
    client.publish("a", {"x": 1}, key="old", queue="mail")
    client.remove_data_key(queue="mail")
    with pytest.raises(DataKeyNotFound):
        client.publish("a", {"x": 2}, key="new", queue="mail")
    client.create_data_key(queue="mail")
    client.publish("a", {"x": 2}, key="new", queue="mail")
    assert "was removed" in client.get("a", "old").params.why
    client.publish("a", {"x": 3}, key="newest", queue="mail")
    assert [client.get("a", key).params["x"] for key in ("new", "newest")] == [2, 3]
    states = [(row.name, row.remove_time is None) for row in client.data_keys() if row.name == "queue:mail"]
    assert states == [("queue:mail", True), ("queue:mail", False)]


def test_what_must_be_encrypted_is_never_stored_readable(mongo_uri: str, database_name: str) -> None:
    make_keys(mongo_uri, database_name, "queue:mail")
    must = encryption_of(database_name, queues=["mail", "bank"])
    wrong = encryption_of(database_name, key=b"w" * 96)
    with (
        Client(mongo_uri, database=database_name, encryption=must) as strict,
        Client(mongo_uri, database=database_name, encryption=wrong) as other,
    ):
        strict.publish("a", {"x": 1}, key="1", queue="mail")
        with pytest.raises(DataKeyNotFound, match="mtask keys create --queue bank"):
            strict.publish("a", {"x": 1}, key="2", queue="bank")
        with pytest.raises(WrongMasterKey):
            other.publish("a", {"x": 1}, key="2", queue="mail")
        assert "another master key" in other.get("a", "1").params.why
        assert strict.count() == 1


def test_data_key_is_read_once_a_minute_and_readable_tasks_ask_nothing(
    mongo_uri: str, database_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(mongo_uri, database_name, *NAMES)
    sent = Sent()
    with MongoClient[Any](mongo_uri, event_listeners=[sent]) as source:
        client = Client(source, database=database_name, encryption=encryption_of(database_name))
        client.publish("a", {"x": 1}, key="warm", queue="mail")
        now = monotonic()
        monkeypatch.setattr(vault, "monotonic", lambda: now)  # the machine may be slow
        before = sent.count
        for number in range(5):
            client.publish("a", {"x": 1}, key=f"m{number}", queue="mail")
            client.publish("a", {"x": 1}, key=f"p{number}", queue="plain")
        assert sent.count - before == 10, "one round trip each"
        client._codec.close()


def test_worker_that_knows_no_encryption_holds_up_publishing(client: Client, mongo: Mongo) -> None:
    old = {"_id": "old", "status": "running", "schema_revision": 6, "incarnation": "x", "host": "h", "pid": 1}
    registry = mongo[client.database_name]["workers"]
    client.init()
    made = {**old, "queues": ["mail"], "names": ["a"], "heartbeat_expire_time": client.server_time().replace(year=2100)}
    registry.insert_one(made)
    with pytest.raises(WorkersTooOld, match="encrypted tasks"):
        client.publish("a", {"x": 1}, key="1", queue="mail")
    client.publish("a", {"x": 1}, key="1", queue="plain")
    registry.delete_one({"_id": "old"})


async def test_client_without_access_to_the_key_vault_says_what_to_give(database_name: str) -> None:
    async with AsyncMongoClient[Any](connect=False) as source:
        with pytest.raises(InvalidInput, match=r"Encryption\(uri="):
            AsyncClient(source, database=database_name, encryption=encryption_of(database_name))
    with pytest.raises(InvalidInput, match="Encryption"):
        Client("mongodb://127.0.0.1:1", encryption={"local": {}})  # type: ignore[arg-type]
