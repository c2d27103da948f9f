"""`mtask pause|resume|limit|keep|controls`, and what stats, doctor and show say of them."""

from __future__ import annotations

import pytest

from mtask.features.controls.rules import Control, Limit
from mtask.features.limits import operations as permits
from mtask.features.limits.operations import PermitPool, PermitRequest, Wanted
from mtask.kernel.driver.stores import SyncStore
from tests.integration.cli.commands import Commands, client_of
from tests.integration.stores import register
from tests.mongo import eventually


def control(commands: Commands, control_id: str = "queue:mail") -> Control:
    with client_of(commands) as client:
        return next(found for found in client.controls() if found.id == control_id)


@pytest.mark.parametrize(("flag", "target"), [("--queue", "mail"), ("--name", "send")])
def test_a_queue_or_a_name_is_paused_and_resumed(mtask: Commands, flag: str, target: str) -> None:
    kind = flag.removeprefix("--")
    paused = mtask.ok("pause", flag, target, "--json").json
    assert (paused["_id"], paused["paused"]) == (f"{kind}:{target}", True)
    assert mtask.ok("pause", flag, target).out == f"paused  {kind} {target}\n"
    (listed,) = mtask.ok("controls", "--json").json
    assert listed == paused
    out = mtask.ok("controls").out
    assert "paused" in out
    assert target in out
    resumed = mtask.ok("resume", flag, target, "--json").json
    assert (resumed["paused"], resumed["revision"]) == (False, paused["revision"] + 1)
    assert "open" in mtask.ok("controls").out


@pytest.mark.parametrize(
    "arguments",
    [
        ["pause"],
        ["pause", "--queue", "a", "--name", "b"],
        ["pause", "--queue", "a", "--timeout", "soon"],
        ["pause", "--queue", "a", "--for", "1h", "--until", "2999-01-01T00:00:00Z"],
        ["pause", "--queue", "a", "--for", "0s"],
        ["breaker", "mail"],
        ["breaker", "mail", "--failures", "0"],
        ["breaker", "mail", "--failures", "3", "--wait", "11m"],
        ["breaker", "mail", "--failures", "3", "--none"],
        ["resume"],
        ["limit", "mail"],
        ["limit", "mail", "--rate", "5"],
        ["limit", "mail", "--rate", "x/1s"],
        ["limit", "mail", "--rate", "5/1ms"],
        ["limit", "mail", "--key-rate", "0/1s"],
        ["limit", "mail", "--concurrency", "0"],
        ["limit", "mail", "--none", "--concurrency", "1"],
        ["keep", "mail"],
        ["keep", "mail", "--success=-1"],
        ["keep", "mail", "--all", "--fail", "1"],
    ],
)
def test_nonsense_is_refused_and_changes_nothing(mtask: Commands, arguments: list[str]) -> None:
    assert mtask(*arguments).code == 2
    assert mtask.ok("controls", "--json").json == []
    assert "nothing is paused or limited" in mtask.ok("controls").err


def test_a_worker_that_does_not_answer_is_named_and_the_pause_stands(mtask: Commands, store: SyncStore) -> None:
    register(store, "w1", queues=["mail"], names=["send"])
    ended = mtask("pause", "--queue", "mail", "--timeout", "100ms", "--json")
    assert (ended.code, ended.error["error"], ended.error["worker_ids"]) == (6, "ControlUnconfirmed", ["w1"])
    assert control(mtask).paused
    assert mtask("keep", "mail", "--success", "5", "--timeout", "100ms").code == 6
    assert control(mtask).keep_success == 5


def test_limits_are_set_listed_and_removed(mtask: Commands) -> None:
    out = mtask.ok("limit", "mail", "--concurrency", "5", "--rate", "100/1s", "--key-rate", "3/500ms").out
    assert out == "queue mail  5 at once, 100 starts in 1 s; each key 3 starts in 0.5 s\n"
    found = control(mtask)
    assert found.limit is not None
    assert found.key_limit is not None
    assert (found.limit.concurrency, found.limit.starts, found.limit.window_ms) == (5, 100, 1000)
    assert (found.key_limit.concurrency, found.key_limit.starts, found.key_limit.window_ms) == (None, 3, 500)
    assert "5 at once" in mtask.ok("controls").out
    mtask.ok("limit", "mail", "--key-concurrency", "1")
    assert control(mtask).limit is None  # what is not given is not bounded
    assert (
        "5 starts in 1 s; each key 2 starts in 0.5 s"
        in mtask.ok("limit", "mail", "--rate", "5/s", "--key-rate", "2/500ms").out
    )
    assert mtask.ok("limit", "mail", "--none").out == "queue mail  no limits\n"
    assert control(mtask).key_limit is None


def test_a_pause_leaves_limits_and_what_is_kept_alone(mtask: Commands) -> None:
    mtask.ok("limit", "mail", "--concurrency", "5")
    mtask.ok("keep", "mail", "--success", "100", "--fail", "0")
    mtask.ok("pause", "--queue", "mail")
    mtask.ok("resume", "--queue", "mail")
    found = control(mtask)
    assert found.limit is not None
    assert (found.limit.concurrency, found.keep_success, found.keep_fail) == (5, 100, 0)


def test_what_is_kept_is_set_listed_and_removed(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    store.tasks.drop_index("mtask_finished")  # as in a database of an earlier mtask
    out = mtask.ok("keep", "mail", "--success", "1000", "--fail", "5").out
    assert out == "queue mail  keeps the newest 1,000 SUCCESS, 5 FAIL and CANCELED\n"
    assert "mtask_finished" in store.tasks.index_information()
    assert "keeps the newest" in mtask.ok("controls").out
    found = mtask.ok("keep", "mail", "--fail", "0", "--json").json
    assert (found["keep_success"], found["keep_fail"]) == (None, 0)
    assert mtask.ok("keep", "mail", "--all").out == "queue mail  keeps all\n"


# --- why tasks wait ---------------------------------------------------------------------------------------------


def stuck(mtask: Commands) -> dict[str, str | None]:
    """Return by name what stats says of waiting tasks."""
    return {row["name"]: row["stuck"] for row in mtask.ok("stats", "--json").json if row["status"] == "INIT"}


def due_findings(mtask: Commands) -> list[tuple[str, str, str | None]]:
    ended = mtask("doctor", "--patience", "1ms", "--json")
    found = [finding for finding in ended.json["findings"] if finding["check"] == "due tasks"]
    return [(finding["level"], finding["message"], finding.get("remedy")) for finding in found]


def reasons(mtask: Commands, task_id: str) -> list[str]:
    with client_of(mtask) as client:
        return [reason.code for reason in client.inspect(task_id).reasons]


def test_each_reason_is_told_by_stats_and_doctor(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    register(store, "w1", queues=["default"], names=["send", "named", "fine"])
    mtask.ok("publish", "send", "--key", "1", "--queue", "mail")
    mtask.ok("publish", "unknown", "--key", "1")
    mtask.ok("publish", "named", "--key", "1", "--specific-worker-ids", "w9")
    mtask.ok("publish", "fine", "--key", "1")
    mtask.ok("publish", "later", "--key", "1", "--delay", "1h")
    expected = {
        "send": "serves the queue",
        "unknown": "no handler for it in w1",
        "named": "no such worker is live",
    }
    found = stuck(mtask)
    assert {name for name, reason in found.items() if reason is None} == {"fine", "later"}
    for name, reason in expected.items():
        assert reason in str(found[name])
    out = mtask.ok("stats").out
    assert "STUCK" in out
    eventually(lambda: len(due_findings(mtask)) >= 4, 20, "all four have waited long enough")
    for name, reason in expected.items():
        level, message, remedy = next(found for found in due_findings(mtask) if repr(name) in found[1])
        assert level == "FAIL"
        assert reason in message
        assert remedy


def test_where_nothing_is_stuck_stats_has_no_column_for_it(mtask: Commands, store: SyncStore) -> None:
    register(store, "w1", queues=["default"], names=["send"])
    mtask.ok("publish", "send", "--key", "1")
    assert stuck(mtask) == {"send": None}
    assert "STUCK" not in mtask.ok("stats").out


@pytest.mark.parametrize(("flag", "target"), [("--queue", "default"), ("--name", "send")])
def test_what_is_paused_says_so_and_how_to_resume_it(mtask: Commands, store: SyncStore, flag: str, target: str) -> None:
    mtask.ok("pause", flag, target)
    register(store, "w1", queues=["default"], names=["send"])
    mtask.ok("publish", "send", "--key", "1")
    said = f"the {flag.removeprefix('--')} {target!r} is paused"
    assert stuck(mtask) == {"send": said}
    assert "paused" in reasons(mtask, "send:1")
    (finding,) = eventually(lambda: [f for f in due_findings(mtask) if f[0] == "FAIL"], 20)
    assert said in finding[1]
    assert f"mtask resume {flag} {target}" in str(finding[2])


def test_a_backlog_behind_a_limit_is_no_worry(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("limit", "default", "--concurrency", "1", "--key-rate", "3/1s")
    register(store, "w1", queues=["default"], names=["send"])
    mtask.ok("publish", "send", "--key", "1")
    full = PermitRequest(PermitPool("default"), Limit(concurrency=1), [Wanted("send:0")])
    store.run(permits.take([full], "w1", "token"))
    assert reasons(mtask, "send:1") == ["limited"]
    assert [level for level, _, _ in due_findings(mtask)] == ["OK"]
    assert stuck(mtask) == {"send": None}
    assert "1 at once" in mtask.ok("show", "send:1").out


def test_what_holds_work_back_for_a_time_is_set_and_shown(mtask: Commands) -> None:
    paused = mtask.ok("pause", "--queue", "mail", "--for", "30m")
    assert paused.out.startswith("paused  queue mail  until ")
    assert "resumes in" in mtask.ok("controls").out
    mtask.ok("pause", "--queue", "mail", "--until", "2999-01-01T00:00:00Z")
    assert control(mtask).until is not None
    assert mtask.ok("breaker", "mail", "--failures", "3", "--wait", "2s").out == (
        "queue mail  breaker: 3 failures in a row, 2 s\n"
    )
    assert "3 failures in a row" in mtask.ok("controls").out
    assert mtask.ok("breaker", "mail", "--none").out == "queue mail  no breaker\n"
    mtask.ok("publish", "send", "--queue", "mail", "--key", "a", "--expires", "5m")
    mtask.ok("publish", "send", "--queue", "mail", "--key", "b", "--expires", "2999-01-01T00:00:00Z")
    assert "not_after" in mtask.ok("show", "send:a").out
    with client_of(mtask) as client:
        stored = client.get("send", "b").task_state.not_after
        assert stored is not None
        assert stored.year == 2999
    mtask.ok("schedule", "add", "s", "send", "--every", "1h", "--expires", "90s")
    assert "90000 ms" in mtask.ok("schedule", "show", "s").out
