"""`mtask flow show|list|cancel|retry|wait`, and the commands on tasks when tasks wait for others."""

from __future__ import annotations

import json

import pytest

from mtask import Flow
from mtask.features.flows import settle as settling
from mtask.kernel.driver.stores import SyncStore
from tests.clients import claim, fail, succeed
from tests.integration.cli.commands import Commands, client_of
from tests.integration.stores import register

HOSTILE = "\x1b[2J日本 [bold]x\n" + "y" * 180


def published(mtask: Commands, key: str = "f", parts: int = 3) -> None:
    """Publish a first step, parts after it, a total of the parts, and a clean-up."""
    flow = Flow(key, max_retries=0)
    first = flow.add("first", "work")
    steps = [flow.add(f"part-{number}", "work", after=[first]) for number in range(parts)]
    flow.add("total", "work", after=steps)
    flow.add("clean", "work", after=steps, on_failed="run")
    with client_of(mtask) as client:
        client.publish_flow(flow)


def end(store: SyncStore, step: str, *, fails: str | None = None) -> None:
    task_id = f"work:f/{step}"
    run_id = claim(store, task_id)
    if fails is None:
        succeed(store, task_id, run_id)
    else:
        fail(store, task_id, run_id, fails)
    store.run(settling.settle_all([task_id]))


def failed(store: SyncStore) -> None:
    """Let one of the parts fail, and all others end."""
    end(store, "first")
    end(store, "part-0")
    end(store, "part-1", fails="no luck\x1b[31m")
    end(store, "part-2")
    end(store, "clean")


def without_times(out: str) -> list[list[str]]:
    return [[word for word in line.split() if not word[0].isdigit()] for line in out.splitlines()]


# --- show -----------------------------------------------------------------------------------------------------


def test_show_draws_the_graph(mtask: Commands, store: SyncStore) -> None:
    published(mtask)
    end(store, "first")
    claim(store, "work:f/part-0")
    out = mtask.ok("flow", "show", "f").out
    assert out.startswith("f  1 of 6 steps ended\n2 WAITING, 2 INIT, 1 RUNNING, 1 SUCCESS\ncreated 20")
    drawn = without_times(out.partition("\n\n")[2])
    assert drawn == [
        ["STEP", "STATUS", "TIME", "NOTE"],
        ["first", "SUCCESS"],
        ["├─", "part-0", "RUNNING"],
        ["├─", "part-1", "INIT", "due"],
        ["└─", "part-2", "INIT", "due"],
        ["├─", "clean", "WAITING", "after", "part-0,", "part-1,", "part-2,", "on_failed", "run"],
        ["└─", "total", "WAITING", "after", "part-0,", "part-1,", "part-2"],
    ]
    mtask.ok("flow", "cancel", "f")
    assert "asked to stop" in mtask.ok("flow", "show", "f").out


def test_show_tells_a_next_task_from_a_child(mtask: Commands, store: SyncStore) -> None:
    published(mtask)
    end(store, "first")
    first = store.tasks.find_one({"_id": "work:f/first"})
    assert first is not None
    for name, chain in (
        ("first/next-1", {"before": first["_id"], "first": first["_id"], "number": 1}),
        ("child", None),
    ):
        flow = {"key": "f", "step": name, "after": [], "on_failed": "cancel", "ancestors": [first["_id"]]}
        added = {**first, "_id": f"work:f/{name}", "key": f"f/{name}", "flow": flow}
        store.tasks.insert_one(added if chain is None else {**added, "chain": chain})
    out = mtask.ok("flow", "show", "f").out
    (of_next,) = [line for line in out.splitlines() if "first/next-1" in line]
    (of_child,) = [line for line in out.splitlines() if "child" in line]
    assert of_next.endswith("  next task of first")
    assert of_child.endswith("  added by first")
    steps = {step["step"]: step for step in mtask.ok("flow", "show", "f", "--json").json["steps"]}
    assert [steps[name]["continues"] for name in ("first/next-1", "child")] == ["work:f/first", None]


def test_show_tells_why_steps_failed(mtask: Commands, store: SyncStore) -> None:
    published(mtask)
    failed(store)
    out = mtask.ok("flow", "show", "f").out
    assert "f  6 of 6 steps ended\n4 SUCCESS, 1 FAIL, 1 CANCELED\n" in out
    assert "\nended 20" in out
    assert "because of part-1, after part-0" in out
    assert out.endswith("failed\n  part-1  no luck\\x1b[31m\n")


@pytest.mark.parametrize("width", ["60", "120"])
def test_show_folds_steps_and_fits_into_the_terminal(
    mtask: Commands, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Flow(HOSTILE)
    first = flow.add("first", "work")
    flow.add("total", "work", after=[flow.add(f"{HOSTILE}{n}", "work", after=[first]) for n in range(1_000)])
    with client_of(mtask) as client:
        client.publish_flow(flow)
    monkeypatch.setenv("COLUMNS", width)
    drawn = mtask.ok("flow", "show", HOSTILE).out.partition("\n\n")[2].splitlines()
    assert len(drawn) == 4
    assert drawn[2].startswith("1000x \\x1b[2J日本")
    whole = mtask.ok("flow", "show", HOSTILE, "--full").out
    assert "902 lines more" in whole
    assert len(mtask.ok("flow", "show", HOSTILE, "--full", "--limit", "0").out.splitlines()) > 1_002
    for line in [*drawn, *whole.partition("\n\n")[2].splitlines()]:
        assert len(line) + line.count("日") + line.count("本") <= int(width)
        assert line.isprintable()


def test_show_as_json(mtask: Commands, store: SyncStore) -> None:
    published(mtask)
    failed(store)
    document = mtask.ok("flow", "show", "f", "--json").json
    assert (document["key"], document["is_ended"], document["progress"], document["head"]) == (
        "f", True, 1.0, "work:f/first",
    )  # fmt: skip
    assert document["counts"] == {"SUCCESS": 4, "FAIL": 1, "CANCELED": 1}
    by_step = {step["step"]: step for step in document["steps"]}
    assert by_step["total"]["held_by"] == "work:f/part-1"
    assert by_step["part-1"]["after"] == ["work:f/first"]
    assert by_step["part-1"]["run"]["claim_time"].endswith("Z")
    assert {"server_time", "create_time", "end_time"} <= document.keys()


@pytest.mark.parametrize("command", ["show", "cancel", "retry", "wait"])
def test_a_flow_that_is_not_there(mtask: Commands, command: str) -> None:
    mtask.ok("init")
    ended = mtask("flow", command, "gone")
    assert (ended.code, "there is no flow 'gone'" in ended.err) == (4, True)
    ended = mtask("flow", command, "gone", "--json")
    assert (ended.error["error"], ended.error["key"], ended.error["exit_code"]) == ("FlowNotFound", "gone", 4)
    assert mtask("flow", command, "").code == 2


# --- list, cancel, retry, wait --------------------------------------------------------------------------------


def test_list_shows_the_newest_first(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    assert "holds no flow" in mtask.ok("flow", "list").err
    for key in ("f", "g/1", "g/2"):
        published(mtask, key)
    heading, *lines = mtask.ok("flow", "list").out.splitlines()
    assert heading.split() == ["FLOW", "ENDED", "CREATED", "STEPS"]
    assert [line.split()[0] for line in lines] == ["g/2", "g/1", "f"]
    assert "0/6" in lines[0]
    assert "5 WAITING, 1 INIT" in lines[0]
    assert "more: --limit 2" in mtask.ok("flow", "list", "--limit", "1").err
    rows = mtask.ok("flow", "list", "--prefix", "g/", "--json").json
    assert [(row["key"], row["counts"], row["is_ended"]) for row in rows] == [
        ("g/2", {"WAITING": 5, "INIT": 1}, False),
        ("g/1", {"WAITING": 5, "INIT": 1}, False),
    ]
    assert "begins with 'x'" in mtask.ok("flow", "list", "--prefix", "x").err


def test_cancel_and_retry_tell_what_they_changed(mtask: Commands, store: SyncStore) -> None:
    published(mtask)
    end(store, "first")
    claim(store, "work:f/part-0")
    ended = mtask.ok("flow", "cancel", "f")
    assert ended.out == "f  canceled, or asked to stop: 4 steps\n1 WAITING, 1 RUNNING, 1 SUCCESS, 3 CANCELED\n"
    assert "the clean-up stays: --everything" in ended.err
    again = mtask.ok("flow", "cancel", "f", "--everything", "--json").json
    assert (again["key"], again["task_ids"]) == ("f", ["work:f/clean"])
    assert "no step was open to cancel" in mtask.ok("flow", "cancel", "f").out
    assert mtask.ok("flow", "retry", "f").out.startswith("f  opened again: 4 steps\n2 WAITING, 2 INIT, 1 RUNNING, 1 S")
    assert "no step is FAIL or CANCELED" in mtask.ok("flow", "retry", "f").out


def test_wait_ends_with_the_code_of_the_worst_step(mtask: Commands, store: SyncStore) -> None:
    published(mtask)
    ended = mtask("flow", "wait", "f", "--timeout", "0")
    assert (ended.code, "flow 'f' has not ended after 0 s" in ended.err) == (6, True)
    failed(store)
    ended = mtask("flow", "wait", "f")
    assert (ended.code, "no luck" in ended.out) == (8, True)
    mtask.ok("flow", "retry", "f")
    mtask.ok("flow", "cancel", "f")
    ended = mtask("flow", "wait", "f", "--json")
    assert (ended.code, ended.json["counts"]) == (9, {"SUCCESS": 4, "CANCELED": 2})
    mtask.ok("flow", "retry", "f")
    end(store, "part-1")
    end(store, "total")
    assert mtask.ok("flow", "wait", "f").out.startswith("f  6 of 6 steps ended\n6 SUCCESS\n")


# --- the commands on tasks ------------------------------------------------------------------------------------


def test_a_waiting_task_tells_for_whom_it_waits(mtask: Commands, store: SyncStore) -> None:
    published(mtask, parts=8)
    out = mtask.ok("show", "work", "f/total").out
    assert "flow       f, step total\n" in out
    assert "after      work:f/part-0, work:f/part-1" in out
    assert "waits for 8 of its 8 dependencies: work:f/part-" in out
    assert "and 3 more" in out
    assert "waits for work:f/first (INIT)\n" in mtask.ok("show", "work:f/part-0").out
    told = mtask.ok("show", "work", "f/total", "--json").json["waits_for"]
    assert [reason["reason"] for reason in told] == ["waits"]
    out = mtask.ok("position", "work", "f/part-0").out
    assert out == (
        "work:f/part-0  WAITING\n"
        "waits for other tasks of its flow: it has no place in its queue before they have ended\n"
        "waits for work:f/first (INIT)\n"
    )
    document = mtask.ok("position", "work", "f/part-0", "--json").json
    assert (document["status"], document["ahead"], document["due_time"], document["is_due"]) == (
        "WAITING", None, None, False,
    )  # fmt: skip
    assert document["reasons"][0]["reason"] == "waits"


def test_long_ids_are_shortened(mtask: Commands) -> None:
    flow = Flow("f")
    flow.add("b", "work", after=[flow.add("a" * 400, "work")])
    with client_of(mtask) as client:
        client.publish_flow(flow)
    (reason,) = mtask.ok("show", "work:f/b", "--json").json["waits_for"]
    assert reason["message"] == f"waits for work:f/{'a' * 92}… (INIT)"


def test_a_waiting_task_tells_that_it_is_about_to_start_or_lost(mtask: Commands, store: SyncStore) -> None:
    published(mtask)
    succeed(store, "work:f/first", claim(store, "work:f/first"))
    assert "a worker is about to release it" in mtask.ok("show", "work", "f/part-0").out
    store.tasks.update_one({"_id": "work:f/first"}, {"$unset": {"owed_since": 1}})
    store.tasks.update_one({"_id": "work:f/part-0"}, {"$unset": {"flow.held_by": 1}})
    assert "nobody was told: `mtask doctor`" in mtask.ok("show", "work", "f/part-0").out


def test_an_end_without_a_run_shows_its_reason(mtask: Commands, store: SyncStore) -> None:
    published(mtask)
    failed(store)
    reason = "work:f/part-1 failed, was canceled or was removed"
    assert reason in mtask.ok("show", "work", "f/total").out
    assert reason in mtask.ok("list", "--status", "canceled").out
    found = mtask.ok("find", "--status", "canceled", "--fields", "fail_reason", "--json").json
    assert found[0]["fail_reason"].startswith(reason)
    ended = mtask("result", "work", "f/total")
    assert (ended.code, reason in ended.err) == (9, True)


def test_every_other_command_takes_waiting_tasks(mtask: Commands, store: SyncStore) -> None:
    published(mtask)
    register(store, "w1", ["work"])
    line = next(line for line in mtask.ok("list").out.splitlines() if "f/total" in line)
    assert line.split()[0] == "WAITING"
    assert "after others" in line
    heading, counts = mtask.ok("stats").out.splitlines()
    assert dict(zip(heading.split(), counts.split(), strict=False))["WAITING"] == "5"
    rows = {row["status"]: row for row in mtask.ok("stats", "--json").json}
    assert (rows["WAITING"]["count"], rows["WAITING"]["stuck"], rows["WAITING"]["oldest_waiting_ms"]) == (5, None, None)
    assert [row["_id"] for row in mtask.ok("find", "--status", "waiting", "--name", "work", "--json").json]
    ended = mtask("wait", "work", "f/total", "--timeout", "0")
    assert (ended.code, "is still WAITING" in ended.err) == (6, True)
    assert mtask("retry", "work", "f/total").code == 5
    assert mtask("rerun", "work", "f/total").code == 5
    assert "priority 7" in mtask.ok("update", "work", "f/total", "--priority", "7").out
    assert mtask("purge", "--status", "WAITING", "--yes").code == 2
    assert mtask.ok("purge", "--status", "INIT", "--yes", "--json").json["removed"] == 0
    mtask.ok("workers")
    document = json.loads(mtask.ok("publish", "work", "-k", "f/total", "--json").out)
    assert document["created"] is False
    mtask.ok("publish", "work", '{"n": 2}', "-k", "f/total", "--if-exists", "update")
    shown = mtask.ok("show", "work", "f/total", "--json").json["task"]
    assert (shown["task_state"]["status"], shown["params"]) == ("WAITING", {"n": 2})
    assert "canceled" in mtask.ok("cancel", "work", "f/total").out
    mtask.ok("remove", "work", "f/total", "--yes")
    assert mtask("show", "work", "f/total").code == 4
    assert mtask.ok("doctor").code == 0
