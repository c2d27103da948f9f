"""The checker takes nothing for proven that it could not read, or that was not all seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import bson
import pytest

from tests.chaos.history import Call, Fault, History
from tests.chaos.judge import checker
from tests.chaos.judge.checker import check
from tests.chaos.selftests.scenes import verdict_on
from tests.chaos.selftests.story import Story


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
