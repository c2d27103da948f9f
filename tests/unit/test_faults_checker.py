"""The checker of the fault tests: a good history is clean, and each way to be wrong is named as what it is."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import bson
import pytest

from mtask.model.status import RunStatus
from tests.faults import checker
from tests.faults.checker import check
from tests.faults.checks.story import Story
from tests.faults.checks.verdict import Verdict
from tests.faults.history import Call, Fault, History
from tests.mongo import Client

FAIL, CANCELED = RunStatus.FAIL, RunStatus.CANCELED
Scene = Callable[[Story], None]


@pytest.fixture(scope="module")
def database(mongo_session_client: Client) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    yield name
    mongo_session_client.drop_database(name)


@pytest.fixture
def story(mongo_session_client: Client, database: str) -> Story:
    return Story(mongo_session_client[database][uuid.uuid4().hex])


def verdict_on(story: Story, folder: Path) -> Verdict:
    return check(story.write(History(folder / "history")))


# --- what is legal ------------------------------------------------------------------------------------------------


def a_success(story: Story) -> None:
    story.done()


def a_delayed_task(story: Story) -> None:
    task_id = story.publish(delay=2.0)
    story.wait(2.0)
    story.finish(task_id, story.claim(task_id))


def failures_until_a_success(story: Story) -> None:
    task_id = story.publish("flaky", max_unexpected_retries=3, retry_backoff=2.0)
    for _ in range(3):
        story.finish(task_id, story.claim(task_id), FAIL)
        story.wait(2.0)
    story.finish(task_id, story.claim(task_id))


def failures_until_the_limit(story: Story) -> None:
    task_id = story.publish("doomed", max_unexpected_retries=1, retain_fail_ms=3_600_000)
    for _ in range(2):
        story.finish(task_id, story.claim(task_id), FAIL)
        story.wait(0.3)


def a_final_failure(story: Story) -> None:
    task_id = story.publish("doomed")
    story.finish(task_id, story.claim(task_id), FAIL, final=True)


def a_retry_that_the_handler_asked_for(story: Story) -> None:
    task_id = story.publish("flaky")
    story.finish(task_id, story.claim(task_id), CANCELED, note="raised", delay=0.5)
    story.wait(0.5)
    story.finish(task_id, story.claim(task_id, "w2"))


def a_hand_back(story: Story) -> None:
    task_id = story.publish("slow", max_unexpected_retries=0)
    story.finish(task_id, story.claim(task_id), CANCELED)
    story.finish(task_id, story.claim(task_id, "w2"))


def a_rescue_after_pings(story: Story) -> None:
    task_id = story.publish("slow")
    run_id = story.claim(task_id)
    for _ in range(3):
        story.wait(1.0)
        story.ping(task_id, run_id)
    story.wait(4.2)
    story.finish(task_id, story.claim(task_id, "w2"))


def a_task_that_kills_its_worker_every_time(story: Story) -> None:
    task_id = story.publish("killer", max_unexpected_retries=1)
    for worker_id in ("w1", "w2"):
        story.claim(task_id, worker_id)
        story.wait(4.0)
    story.settle(task_id)


def two_places(story: Story) -> None:
    task_id = story.publish("team", concurrent_worker_cnt=2)
    first, second = story.claim(task_id, "w1"), story.claim(task_id, "w2")
    story.finish(task_id, first)
    story.wait(4.5)
    third = story.claim(task_id, "w3")
    story.finish(task_id, third)
    assert story.run(task_id, second) is not None


def a_limit_for_each_worker(story: Story) -> None:
    task_id = story.publish(
        "team",
        concurrent_worker_cnt=2,
        specific_worker_ids=["w1", "w2"],
        retry_scope="worker",
        max_unexpected_retries=1,
    )
    story.finish(task_id, story.claim(task_id, "w1"), FAIL)
    story.finish(task_id, story.claim(task_id, "w2"), FAIL)
    story.wait(0.3)
    story.finish(task_id, story.claim(task_id, "w1"), FAIL)
    story.finish(task_id, story.claim(task_id, "w2"))


def a_cancel_of_what_waits(story: Story) -> None:
    story.cancel(story.publish())


def a_cancel_of_what_runs(story: Story) -> None:
    task_id = story.publish("slow")
    run_id = story.claim(task_id)
    story.wait(1.0)
    story.cancel(task_id)
    story.ping(task_id, run_id)
    story.finish(task_id, run_id, CANCELED)


def a_cancel_that_comes_too_late(story: Story) -> None:
    task_id = story.publish("slow")
    run_id = story.claim(task_id)
    story.cancel(task_id)
    story.finish(task_id, run_id)


def a_cancel_whose_holder_has_died(story: Story) -> None:
    task_id = story.publish("slow")
    story.claim(task_id)
    story.cancel(task_id)
    story.wait(6.0)
    story.settle(task_id)


def a_retry_of_a_failed_task(story: Story) -> None:
    task_id = story.publish("flaky", max_unexpected_retries=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(1.0)
    story.again(task_id)
    story.finish(task_id, story.claim(task_id))


def a_retry_of_a_canceled_task(story: Story) -> None:
    task_id = story.publish()
    story.cancel(task_id)
    story.wait(1.0)
    story.again(task_id)
    story.finish(task_id, story.claim(task_id))


def a_rerun_of_a_success(story: Story) -> None:
    task_id = story.done(retain_success_ms=3_600_000)
    story.again(task_id, "rerun")
    story.finish(task_id, story.claim(task_id))


def many_reruns(story: Story) -> None:
    task_id = story.done()
    for _ in range(25):
        story.again(task_id, "rerun")
        story.finish(task_id, story.claim(task_id))
        story.wait(1.0)


def more_failures_than_a_document_keeps(story: Story) -> None:
    task_id = story.publish("flaky", max_unexpected_retries=-1)
    for _ in range(24):
        story.finish(task_id, story.claim(task_id), FAIL)
        story.wait(0.3)
    story.finish(task_id, story.claim(task_id))


def closed_runs_that_are_cleaned(story: Story) -> None:
    task_id = story.publish("doomed", max_unexpected_retries=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.wait(1.0)
    story.clean(task_id)
    story.finish(task_id, story.claim(task_id))
    story.wait(1.0)
    story.clean(task_id, success=True)
    story.finish(task_id, story.claim(task_id))


def a_lapsed_run_that_is_cleaned(story: Story) -> None:
    task_id = story.publish("slow")
    story.claim(task_id)
    story.wait(5.0)
    story.clean(task_id)
    story.finish(task_id, story.claim(task_id, "w2"))


def options_that_change_while_it_runs(story: Story) -> None:
    task_id = story.publish("slow", concurrent_worker_cnt=2)
    first, second = story.claim(task_id, "w1"), story.claim(task_id, "w2")
    story.update_option(task_id, worker_timeout_ms=8000)
    story.wait(1.0)
    story.ping(task_id, first)
    story.finish(task_id, first)
    story.update_option(task_id, concurrent_worker_cnt=1)
    story.ping(task_id, second)
    story.finish(task_id, second)
    story.wait(1.0)
    story.update_option(task_id, retain_success_ms=3_600_000)


def a_removal_while_it_runs(story: Story) -> None:
    task_id = story.publish("slow", concurrent_worker_cnt=2)
    run_id = story.claim(task_id)
    story.wait(1.0)
    story.remove(task_id)
    story.note("cancelled", task_id, run_id)
    story.wait(1.0)
    story.publish_again(task_id)
    story.finish(task_id, story.claim(task_id))


def a_task_that_expired(story: Story) -> None:
    task_id = story.done(retain_success_ms=1000)
    story.wait(2.0)
    story.remove(task_id, is_asked=False)


def deposits(story: Story) -> None:
    story.done("deposit")
    story.done("deposit_plain")
    task_id = story.publish("deposit")
    story.claim(task_id)
    story.wait(4.1)
    story.deposit(task_id, story.claim(task_id, "w2"))


def a_deposit_whose_worker_died_behind_its_commit(story: Story) -> None:
    task_id = story.publish("deposit")
    run_id = story.claim(task_id)
    story.note("written", task_id, run_id)
    story.effects.append({"task_id": task_id, "run_id": run_id, "worker_id": "w1"})
    story.finish(task_id, run_id, note=None)


def a_publish_that_was_never_answered(story: Story) -> None:
    story.call("publish", "quick:never", "unknown")
    task_id = story.publish(answer=None)
    story.call("publish", task_id, "kept")
    story.finish(task_id, story.claim(task_id))


def a_retry_that_was_never_answered(story: Story) -> None:
    task_id = story.publish("flaky", max_unexpected_retries=0)
    story.finish(task_id, story.claim(task_id), FAIL)
    story.call("retry", task_id, "unknown")
    story.wait(5.0)
    story.again(task_id)
    story.calls[-2:] = []
    story.finish(task_id, story.claim(task_id))


def a_claim_that_was_handed_back_unstarted(story: Story) -> None:
    task_id = story.publish()
    run_id = story.claim(task_id, starts=False)
    story.wait(3.0)
    story.finish(task_id, run_id, CANCELED, note=None)
    story.finish(task_id, story.claim(task_id, "w2"))


LEGAL: tuple[Scene, ...] = (
    a_success,
    a_delayed_task,
    failures_until_a_success,
    failures_until_the_limit,
    a_final_failure,
    a_retry_that_the_handler_asked_for,
    a_hand_back,
    a_rescue_after_pings,
    a_task_that_kills_its_worker_every_time,
    two_places,
    a_limit_for_each_worker,
    a_cancel_of_what_waits,
    a_cancel_of_what_runs,
    a_cancel_that_comes_too_late,
    a_cancel_whose_holder_has_died,
    a_retry_of_a_failed_task,
    a_retry_of_a_canceled_task,
    a_rerun_of_a_success,
    many_reruns,
    more_failures_than_a_document_keeps,
    closed_runs_that_are_cleaned,
    a_lapsed_run_that_is_cleaned,
    options_that_change_while_it_runs,
    a_removal_while_it_runs,
    a_task_that_expired,
    deposits,
    a_deposit_whose_worker_died_behind_its_commit,
    a_publish_that_was_never_answered,
    a_retry_that_was_never_answered,
    a_claim_that_was_handed_back_unstarted,
)


@pytest.mark.parametrize("scene", LEGAL, ids=lambda scene: scene.__name__)
def test_what_the_design_allows_is_clean(scene: Scene, story: Story, tmp_path: Path) -> None:
    scene(story)
    verdict = verdict_on(story, tmp_path)
    assert verdict.is_clean, verdict.describe()


def test_history_of_all_that_is_allowed_is_clean(story: Story, tmp_path: Path) -> None:
    for scene in LEGAL:
        scene(story)
        story.wait(1.0)
    verdict = verdict_on(story, tmp_path)
    assert verdict.is_clean, verdict.describe()
    assert verdict.word == "CLEAN"
    json.dumps(verdict.as_dict())


# --- what proves nothing --------------------------------------------------------------------------------------------


@pytest.fixture
def history(story: Story, tmp_path: Path) -> History:
    """A good history, to be spoiled."""
    story.done("deposit")
    story.done("slow")
    story.faults.append(Fault("kill worker", "w1", 0.5, 1.0))
    return story.write(History(tmp_path / "history"))


def spoil_facts(history: History, **changes: object) -> None:
    facts = history.facts() | changes
    kept = {name: value for name, value in facts.items() if value is not None}
    history.facts_path.write_text(json.dumps(kept))


def cut(path: Path, count: int) -> None:
    """Take so many bytes off the end."""
    path.write_bytes(path.read_bytes()[:-count])


SPOILED: dict[str, tuple[Callable[[History], object], str]] = {
    "no versions": (lambda h: h.versions_path.unlink(), "no version of any task"),
    "empty versions": (lambda h: h.versions_path.write_bytes(b""), "no version of any task"),
    "torn versions": (lambda h: cut(h.versions_path, 7), "versions cannot be read after"),
    "garbled versions": (lambda h: h.versions_path.write_bytes(b"\x00garbage" * 9), "versions cannot be read after 0"),
    "versions without instants": (
        lambda h: h.versions_path.write_bytes(bson.encode({"_id": "quick:k", "at": "noon", "document": None})),
        "versions: record 1 is garbled",
    ),
    "gaps": (lambda h: spoil_facts(h, observer_gaps=2), "2 gaps"),
    "gaps unknown": (lambda h: spoil_facts(h, observer_gaps=None), "did not say whether"),
    "no facts": (lambda h: h.facts_path.unlink(), "facts.json cannot be read"),
    "torn facts": (lambda h: cut(h.facts_path, 5), "facts.json cannot be read"),
    "facts without epoch": (lambda h: spoil_facts(h, epoch=None), "facts.json cannot be read"),
    "facts with another epoch": (lambda h: spoil_facts(h, epoch="now"), "no epoch"),
    "not drained": (lambda h: spoil_facts(h, drained_at=None, not_drained="5 left"), "did not drain: 5 left"),
    "fewer tasks": (lambda h: spoil_facts(h, tasks_expected=100), "2 tasks were seen of 100"),
    "no calls": (lambda h: h.calls_path("p1").unlink(), "nothing was asked for"),
    "torn calls": (lambda h: cut(h.calls_path("p1"), 9), "calls cannot be read after"),
    "garbled call": (lambda h: h.calls_path("p1").write_text('{"call_id": 1}\n'), "calls cannot be read after 0"),
    "call without instant": (
        lambda h: h.calls_path("p2").write_text(json.dumps(asdict(Call("c", "publish", "a:b", "p2", "now"))) + "\n"),  # type: ignore[arg-type]
        "is garbled",
    ),
    "torn notes": (lambda h: cut(h.notes_path(100), 9), "notes cannot be read after"),
    "torn faults": (lambda h: cut(h.faults_path, 9), "faults cannot be read after"),
    "no documents": (lambda h: h.documents_path.unlink(), "documents at the end are missing"),
    "torn documents": (lambda h: cut(h.documents_path, 9), "documents cannot be read after"),
    "no effects": (lambda h: h.effects_path.unlink(), "effects at the end are missing"),
    "torn effects": (lambda h: cut(h.effects_path, 9), "effects cannot be read after 0"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_history_that_was_not_all_seen_proves_nothing(name: str, history: History) -> None:
    assert check(history).is_clean
    spoil, reason = SPOILED[name]
    spoil(history)
    verdict = check(history)
    assert not verdict.is_clean
    assert reason in "; ".join(verdict.not_proven), verdict.describe()
    assert "not proven" in verdict.describe()


def test_empty_folder_proves_nothing(tmp_path: Path) -> None:
    verdict = check(History(tmp_path))
    assert verdict.word == "NOT PROVEN"


def test_version_that_was_missed_at_the_end_is_noticed(story: Story, tmp_path: Path) -> None:
    task_id = story.done()
    story.again(task_id, "rerun")
    story.finish(task_id, story.claim(task_id))
    del story.versions[-3:]
    verdict = verdict_on(story, tmp_path)
    assert any("is not what it was at the end" in reason for reason in verdict.not_proven), verdict.describe()


def test_version_that_was_missed_at_the_beginning_is_noticed(story: Story, tmp_path: Path) -> None:
    story.done()
    del story.versions[0]
    verdict = verdict_on(story, tmp_path)
    assert any("is not that of a new task" in reason for reason in verdict.not_proven), verdict.describe()


def test_version_that_was_missed_in_between_is_noticed(story: Story, tmp_path: Path) -> None:
    story.done()
    del story.versions[1]
    assert verdict_on(story, tmp_path).violations.keys() == {"stale_results"}


# --- figures --------------------------------------------------------------------------------------------------------


def rescue(story: Story, after: float) -> str:
    """Let a lease lapse, and have another worker come so much later; return the task's id."""
    task_id = story.publish("slow")
    story.claim(task_id)
    story.wait(4.0 + after)
    story.finish(task_id, story.claim(task_id, "w2"))
    return task_id


def test_rescue_is_measured_from_the_end_of_the_lease_to_the_next_claim(story: Story, tmp_path: Path) -> None:
    task_id = rescue(story, 0.3)
    figures = verdict_on(story, tmp_path).figures
    assert [(found.task_id, round(found.delay, 3)) for found in figures.rescues] == [(task_id, 0.3)]
    assert figures.rescue_up.count == 1
    assert figures.rescue_up.maximum == pytest.approx(0.3)


def test_rescue_is_measured_from_when_a_settled_task_was_free(story: Story, tmp_path: Path) -> None:
    task_id = story.publish("slow")
    story.claim(task_id)
    story.wait(6.0)
    story.settle(task_id)
    story.wait(1.0)
    story.finish(task_id, story.claim(task_id, "w2"))
    assert [round(found.delay, 3) for found in verdict_on(story, tmp_path).figures.rescues] == [3.0]


def test_rescue_does_not_count_the_delay_of_another_runs_failure(story: Story, tmp_path: Path) -> None:
    task_id = story.publish("team", concurrent_worker_cnt=2, unexpected_retry_delay_ms=5000)
    story.claim(task_id)
    second = story.claim(task_id, "w2")
    story.wait(3.0)
    story.finish(task_id, second, FAIL)  # nobody may come before 5 s from now
    story.wait(5.25)
    third, fourth = story.claim(task_id, "w3"), story.claim(task_id, "w4")
    story.finish(task_id, third)
    story.finish(task_id, fourth)
    verdict = verdict_on(story, tmp_path)
    assert verdict.is_clean, verdict.describe()
    assert [round(found.delay, 3) for found in verdict.figures.rescues] == [0.25]


def test_task_that_nobody_may_take_again_is_no_rescue(story: Story, tmp_path: Path) -> None:
    a_task_that_kills_its_worker_every_time(story)
    assert len(verdict_on(story, tmp_path).figures.rescues) == 1  # the first time


def test_rescue_while_the_database_was_away_is_counted_apart(story: Story, tmp_path: Path) -> None:
    began = story.now + 4.0
    rescue(story, 5.0)
    story.faults.append(Fault("kill primary", "node 1", began - 2.0, began + 3.0, is_database_away=True))
    story.wait(1.0)
    rescue(story, 0.2)
    figures = verdict_on(story, tmp_path).figures
    assert (figures.rescue_away.count, figures.rescue_up.count) == (1, 1)
    assert figures.rescue_away.maximum == pytest.approx(5.0)
    assert figures.rescues[0].faults[0].startswith("kill primary node 1")
    assert [round(found.delay, 3) for found in figures.worst_rescues] == [0.2]


def test_rescue_that_only_named_workers_could_do_is_counted_apart(story: Story, tmp_path: Path) -> None:
    task_id = story.publish("slow", specific_worker_ids=["w1"])
    story.claim(task_id)
    story.wait(9.0)
    story.finish(task_id, story.claim(task_id))
    figures = verdict_on(story, tmp_path).figures
    assert (figures.rescue_named.count, figures.rescue_up.count) == (1, 0)


def test_failover_is_measured_from_the_election_to_the_first_claim(story: Story, tmp_path: Path) -> None:
    story.done()
    story.faults.append(Fault("step down", "node 1", story.now, story.now + 1, True, {"elected_at": story.now + 0.5}))
    story.wait(2.0)
    claimed = story.now + 0.02
    story.done()
    figures = verdict_on(story, tmp_path).figures
    assert figures.failover.count == 1
    assert figures.failover.maximum == pytest.approx(1.5 + 0.02, abs=0.002), claimed


def test_handler_that_goes_on_beyond_its_lease_is_a_figure(story: Story, tmp_path: Path) -> None:
    for worker_id in ("w1", "w2"):
        task_id = story.publish("slow")
        run_id = story.claim(task_id, worker_id)
        story.wait(5.0)
        story.note("raised", task_id, run_id)
        story.finish(task_id, story.claim(task_id, "w3"))
    story.faults.append(Fault("freeze worker", "w1", 3.0, 6.0))
    verdict = verdict_on(story, tmp_path)
    assert verdict.is_clean
    overtime = verdict.figures.overtime
    assert (overtime.excused.count, overtime.others.count) == (1, 1)
    assert overtime.others.maximum == pytest.approx(1.0, abs=0.01)


def test_handler_that_blocks_its_worker_excuses_what_ran_beside_it(story: Story, tmp_path: Path) -> None:
    hog = story.publish("hog")
    hogging = story.claim(hog)
    task_id = story.publish("slow")
    run_id = story.claim(task_id)
    story.wait(6.0)
    story.note("cancelled", task_id, run_id)
    story.note("end", hog, hogging)
    story.finish(hog, story.claim(hog, "w2"))
    story.finish(task_id, story.claim(task_id, "w2"))
    story.faults.append(Fault("hog", "", 1.0, 6.0, detail={"task_id": hog}))
    overtime = verdict_on(story, tmp_path).figures.overtime
    assert (overtime.excused.count, overtime.others.count) == (2, 0)


def test_figures_count_what_happened_second_by_second(story: Story, tmp_path: Path) -> None:
    story.done()
    story.wait(3.0)
    failures_until_the_limit(story)
    verdict = verdict_on(story, tmp_path)
    figures, timeline = verdict.figures, verdict.figures.timeline
    assert sum(timeline.published) == 2
    assert (sum(timeline.claimed), sum(timeline.started)) == (3, 3)
    assert (sum(timeline.succeeded), sum(timeline.failed)) == (1, 2)
    assert timeline.published[:5] == [0, 1, 0, 0, 1]
    assert len({len(timeline.published), len(timeline.claimed), len(timeline.failed)}) == 1
    assert figures.by_name_and_status == {"quick": {"SUCCESS": 1}, "doomed": {"FAIL": 1}}
    assert figures.calls == {"publish": {"created": 2}}
    assert figures.runs_by_status == {"SUCCESS": 1, "FAIL": 2}


# --- the command ----------------------------------------------------------------------------------------------------


def test_command_prints_the_verdict_and_exits_by_it(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    assert checker.main([str(history.folder)]) == 0
    assert "verdict: CLEAN" in capsys.readouterr().out
    history.effects_path.write_bytes(b"")
    assert checker.main([str(history.folder)]) == 1
    assert "succeeded without its effect" in capsys.readouterr().out
    assert checker.main(["--json", str(history.folder)]) == 1
    assert json.loads(capsys.readouterr().out)["wrong_effects"]["count"] == 1


def test_command_says_how_it_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checker.main([]) == 2
    assert checker.main([str(tmp_path / "nowhere")]) == 2
    assert "usage:" in capsys.readouterr().err
