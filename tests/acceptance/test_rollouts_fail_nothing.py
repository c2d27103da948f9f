"""A rolling deploy: workers of the former code meet tasks of the new one. None fails, and few runs are wasted."""

from __future__ import annotations

import time
from collections import Counter

from mtask import TaskSpec
from tests.acceptance import rollout_new_app, rollout_old_app
from tests.acceptance.conftest import Report
from tests.mongo import eventually
from tests.workers import Stage

OLD, NEW = "tests.acceptance.rollout_old_app:app", "tests.acceptance.rollout_new_app:app"
COUNT = 500
#: Per worker: after so many misfits it leaves the version alone, but for the runs that are under way by then.
MOST_WASTED = 100 + 2 * 100


def test_rolling_deploy_fails_no_task_and_wastes_few_runs(stage: Stage, report: Report) -> None:
    """The publisher is deployed first, the worker last. All that was published runs soon after its start."""
    old = [stage.launch(f"old-{number}", app=OLD) for number in range(2)]
    for worker in old:
        stage.wait_running(worker)
    tasks, client = stage.mongo[stage.database]["tasks"], stage.client
    new_send, new_bill = rollout_new_app.app.handlers["send"], rollout_new_app.app.handlers["bill"]
    old_bill = rollout_old_app.app.handlers["bill"]
    client.publish_many([TaskSpec(new_send, {"to": "a", "subject": str(n)}, key=f"{n}") for n in range(COUNT)])
    client.publish_many([TaskSpec(new_bill, {"cents": n}, key=f"new-{n}") for n in range(COUNT)])
    client.publish(old_bill, {"euros": 7}, key="old")
    # The old workers go on with what fits them.
    assert client.wait(old_bill, "old", timeout=30).returns == "7 EUR"
    misfits = {"name": "send", "task_state.worker_states.misfit_since": {"$exists": True}}
    eventually(lambda: tasks.count_documents(misfits) >= 100, 30, "misfits were handed on")
    waiting = client.inspect("bill:new-0").reasons
    assert [reason.code for reason in waiting] == ["version_needed"]
    assert "version 2 of 'bill'" in waiting[0].message
    assert tasks.count_documents({"task_state.status": "FAIL"}) == 0
    client.publish(old_bill, {"euros": 8}, key="late")
    new, begun = stage.launch("new", app=NEW), time.monotonic()
    stage.wait_running(new)
    started = time.monotonic()
    done = {"task_state.status": "SUCCESS"}
    eventually(lambda: tasks.count_documents(done) == 2 * COUNT + 2, 60, "all have run")
    report("rollout: from the new worker's start to the last of 1000 tasks, s", round(time.monotonic() - started, 2))
    report("rollout: the start of the worker itself, s", round(started - begun, 2))
    runs = Counter[str]()
    for document in tasks.find({"name": "send"}):
        *handed_on, last = document["task_state"]["worker_states"]
        assert (last["worker_id"], last["status"]) == ("new", "SUCCESS")
        assert all(run["fail_reason"].startswith("handed on: the params do not fit") for run in handed_on)
        assert document["task_state"]["failed_cnt"] == 0
        runs.update(run["worker_id"] for run in handed_on)
    assert set(runs) <= {"old-0", "old-1"}
    assert sum(runs.values()) <= 2 * MOST_WASTED, runs
    report("rollout: wasted runs of 500 tasks and two old workers", sum(runs.values()))
    new_bills = list(tasks.find({"name": "bill", "key": {"$regex": "^new-"}}))
    assert {run["worker_id"] for task in new_bills for run in task["task_state"]["worker_states"]} == {"new"}
    assert all(len(task["task_state"]["worker_states"]) == 1 for task in new_bills), "no old worker ever claimed one"
    # A task of the former version runs on either: the new worker turns its params into those of its version.
    late = client.get(old_bill, "late")
    assert late.returns in ("8 EUR", "800 cents")
