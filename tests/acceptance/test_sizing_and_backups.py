"""What docs/operations.md says of sizing, and of what comes back with a backup."""

from __future__ import annotations

from datetime import timedelta

from tests.acceptance.conftest import Report
from tests.mongo import Document, eventually
from tests.workers import ROOT, Stage, runs_of

PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def test_worker_has_as_many_connections_and_streams_as_the_page_says(stage: Stage, report: Report) -> None:
    stage.start("counted")

    def connections() -> int:
        pipeline = [{"$currentOp": {"allUsers": True, "idleConnections": True}}]
        found = stage.mongo.admin.aggregate([*pipeline, {"$match": {"appName": "mtask-worker:counted"}}])
        return len({operation["connectionId"] for operation in found if "connectionId" in operation})

    for number in range(200):
        stage.client.publish("noop", key=str(number))
    eventually(lambda: stage.client.count(status="SUCCESS") == 200, message="all done")
    counted = connections()
    report("connections of a worker", counted)
    assert "has 11 to 15 connections to the primary" in PAGE
    assert 5 <= counted <= 16  # a monitor may connect anew just now
    size = stage.mongo[stage.database].command("collStats", "tasks")["avgObjSize"]
    assert "0.7 KB when it has ended" in PAGE
    assert size < 800
    streams = {
        "appName": "mtask-worker:counted",
        "cursor.originatingCommand.pipeline.0.$changeStream": {"$exists": True},
    }
    pipeline: list[Document] = [{"$currentOp": {"allUsers": True, "idleCursors": True}}, {"$match": streams}]

    def open_streams() -> int:
        return len({operation["cursor"]["cursorId"] for operation in stage.mongo.admin.aggregate(pipeline)})

    # At the instant at which a read of the stream begins or ends, the server shows none.
    eventually(lambda: open_streams() == 1, message="one stream")


def test_backup_brings_the_past_back_and_workers_go_on_from_there(stage: Stage) -> None:
    lease = {"ping_interval": 0.5, "worker_timeout": 2, "retry_delay": 0}
    worker = stage.start("A")
    done = stage.client.publish("noop", key="done before").task_id
    stage.wait_status(done, "SUCCESS")
    held = stage.client.publish("hold", {"gate": stage.gate()}, key="held", **lease).task_id  # type: ignore[call-overload]
    stage.wait_run(held, "A")
    frail = stage.client.publish(  # type: ignore[call-overload]
        "hold",
        {"gate": stage.gate()},
        key="frail",
        max_retries=0,
        **lease,
    ).task_id
    stage.wait_run(frail, "A")
    later = stage.client.publish("noop", key="done later", delay=timedelta(hours=1)).task_id
    stage.client.add_schedule("every", "noop", timedelta(seconds=1), catch_up="all")
    eventually(lambda: stage.client.get_schedule("every").schedule_state.fired_cnt >= 2, message="fired twice")
    backup = {
        name: list(stage.mongo[stage.database][name].find())
        for name in ("tasks", "workers", "schedules", "controls", "places")
    }
    fired = stage.client.get_schedule("every").schedule_state.fired_cnt

    # After the backup: one task is published, and one ends.
    lost = stage.client.publish("noop", key="lost").task_id
    stage.client.publish("noop", key="done later", if_exists="update")
    stage.wait_status(later, "SUCCESS")
    stage.wait_status(lost, "SUCCESS")
    worker.kill()
    for name, documents in backup.items():
        stage.mongo[stage.database][name].delete_many({})
        if documents:
            stage.mongo[stage.database][name].insert_many(documents)
    stage.open_gate()
    began = stage.server_now()
    stage.start("B")

    first, second = runs_of(stage.wait_status(held, "SUCCESS"))
    assert (first["status"], second["status"]) == ("TIMEOUT", "SUCCESS")
    assert stage.wait_status(frail, "FAIL")
    assert stage.client.retry("hold", "frail")
    stage.wait_status(frail, "SUCCESS")
    assert len(runs_of(stage.wait_status(done, "SUCCESS"))) == 1, "what had ended before the backup did not run again"
    assert stage.document(later)["task_state"]["status"] == "INIT", "what has ended after it is as it was"
    assert stage.client.publish("noop", key="lost").created, "what was published after it is gone"

    def has_caught_up() -> bool:
        state = stage.client.get_schedule("every").schedule_state
        return state.fired_cnt > fired and state.last_fire_time is not None and state.last_fire_time >= began

    eventually(has_caught_up, message="the schedule has caught up")
    schedule = stage.client.get_schedule("every")
    stage.client.pause_schedule("every")
    keys = [task.key for task in stage.client.find(name="noop", limit=0) if task.key.startswith("every/")]
    last = schedule.schedule_state.last_fire_time
    assert last is not None
    seconds = range(int((last - schedule.anchor) / timedelta(seconds=1)))
    wanted = {schedule.key_of(schedule.anchor + timedelta(seconds=second + 1)) for second in seconds}
    assert wanted <= set(keys), "each firing, once"
    assert len(keys) == len(set(keys))
