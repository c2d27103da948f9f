"""With encryption, nothing that a task holds is readable in files, oplog or events, whatever dies."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.encryption import ClientEncryption

from mtask import Client, TaskFailed
from mtask.local import temporary
from tests.keys import MARKER, MASTER_KEY, encryption_of, everything_in, make_keys
from tests.mongo import PATIENCE, eventually
from tests.workers import Stage, runs_of

_LEASE: Any = {"ping_interval": 1, "worker_timeout": 4}


@pytest.fixture
def key_flags(stage: Stage, tmp_path: Path) -> tuple[str, ...]:
    """Make a data key of the queue "default", and return the flags of workers that have the master key."""
    make_keys(stage.admin_uri, stage.database, "queue:default")
    path = tmp_path / "master.key"
    path.write_bytes(MASTER_KEY)
    return "--encryption-key-file", str(path), "--encryption-key-vault", f"{stage.database}.vault"


def test_a_worker_killed_amid_an_encrypted_run_loses_nothing_and_shows_nothing(
    stage: Stage, key_flags: tuple[str, ...]
) -> None:
    first = stage.start("first", *key_flags)
    with Client(stage.uri, database=stage.database, encryption=encryption_of(stage.database)) as client:
        gate = stage.gate(MARKER)
        client.publish("hold", {"gate": gate}, key="k", lookup={"where": gate}, **_LEASE)
        stage.wait_run("hold:k", "first")
        stage.kill(first)
        stage.start("second", *key_flags)
        stage.wait_run("hold:k", "second")
        stage.open_gate(MARKER)
        assert client.result("hold", "k", timeout=PATIENCE) == "second"
        statuses = [run.status.value for run in client.get("hold", "k").runs]
        assert (statuses[0], statuses[-1]) == ("TIMEOUT", "SUCCESS")
        assert [task.id for task in client.find(lookup={"where": gate})] == ["hold:k"]
        client.publish("fail_for_good", {"reason": MARKER}, key="k")
        with pytest.raises(TaskFailed):
            client.result("fail_for_good", "k", timeout=PATIENCE)
    assert MARKER.encode() not in everything_in(stage.mongo, stage.database)


def test_bare_driver_with_the_key_reads_what_mtask_encrypted(stage: Stage, key_flags: tuple[str, ...]) -> None:
    """As docs/encryption.md shows it for services in other languages."""
    with Client(stage.uri, database=stage.database, encryption=encryption_of(stage.database)) as client:
        client.publish("noop", {"value": MARKER}, key="k")
    stage.start("w", *key_flags)
    document = stage.wait_status("noop:k", "SUCCESS")
    providers = {"local": {"key": MASTER_KEY}}
    with MongoClient[Any](stage.admin_uri) as driver:
        encryption: ClientEncryption[Any] = ClientEncryption(
            providers, f"{stage.database}.vault", driver, driver.codec_options
        )
        sealed = encryption.decrypt(document["params"])
        assert sealed == {"v": {"value": MARKER}, "name": "noop", "key": "k", "field": "params", "lookup": []}
        assert encryption.decrypt(runs_of(document)[-1]["returns"])["v"] == MARKER
        # And the other way round: mtask runs what a bare driver has encrypted.
        content = {"v": {"value": "from elsewhere"}, "name": "noop", "key": "j", "field": "params", "lookup": []}
        name = "AEAD_AES_256_CBC_HMAC_SHA_512-Random"
        params = encryption.encrypt(content, name, key_alt_name="mtask/queue:default")
        with Client(stage.uri, database=stage.database) as plain:
            plain.publish("noop", {"value": 0}, key="j", delay=3600)
        changed = {"$set": {"params": params, "sealed": "queue:default"}, "$unset": {"task_state.start_time": ""}}
        tasks = stage.mongo[stage.database]["tasks"]
        tasks.update_one({"_id": "noop:j"}, changed)
        tasks.update_one({"_id": "noop:j"}, [{"$set": {"task_state.next_preempt_time": "$$NOW"}}])
    with Client(stage.uri, database=stage.database, encryption=encryption_of(stage.database)) as client:
        assert client.result("noop", "j", timeout=PATIENCE) == "from elsewhere"


def test_data_files_of_the_server_hold_no_plaintext() -> None:
    with temporary() as server:
        make_keys(server.uri, "files", "queue:default")
        with Client(server.uri, database="files", encryption=encryption_of("files")) as client:
            client.publish("noop", {"value": MARKER * 20}, key="k", lookup={"who": MARKER})
            client.publish("noop", {"value": "readable-control"}, key="c", queue="other")
        with MongoClient[Any](server.uri) as driver:
            driver.admin.command("fsync")
            folder = Path(driver.admin.command("getCmdLineOpts")["parsed"]["storage"]["dbPath"])
            files = [path for path in folder.rglob("*") if path.is_file()]
            eventually(lambda: _hold(files, b"readable-control"), PATIENCE, "the control is on disk")
            assert not _hold(files, MARKER.encode())


def _hold(files: list[Path], text: bytes) -> bool:
    return any(subprocess.run(["grep", "-qaF", text, path], check=False).returncode == 0 for path in files)
