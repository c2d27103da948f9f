"""The report and the picture of a run under faults: they tell what was measured, and first what went wrong."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest

from tests.chaos import report
from tests.chaos.history import Call, Fault, History, Ledger, Note, Sample
from tests.chaos.judge.record.verdict import KINDS, MAX_EXAMPLES, Distribution, Figures, Rescue, Timeline, Verdict
from tests.chaos.markdown import Outcome, markdown
from tests.chaos.measures import Memory, leftovers, memory_of, recoveries, slope
from tests.chaos.picture import AWAY, NAMED, UP, Scene, Span, draw, groups_of, smoothed

FACTS = {
    "seed": 4711,
    "minutes": 15.0,
    "rate": 160.0,
    "cores": 2,
    "nodes": 3,
    "versions": {"mtask": "0.1.0", "pymongo": "4.15.1", "mongod": "7.0.2"},
    "worker_kinds": {"w1": "plain", "w2": "proxied"},
    "publishers": {"p1": 0, "p2": 0},
    "exit_codes": {"w1": 0, "w2": 0},
    "connections_after": {},
    "cursors_after": 0,
    "processes_left": 0,
    "drain_s": 12.5,
}
RESCUES = [Rescue(f"slow:p1/{n}", 10.0 + n, 10.02 + n + n / 1000, False, False) for n in range(99)]
RESCUES += [
    Rescue("slow:p1/late", 300.0, 300.9, False, False, faults=("hog 299.0 to 302.0 s", "killer | task")),
    Rescue("slow:p2/away", 400.0, 407.5, True, False),
    Rescue("team:p2/named", 500.0, 503.0, True, True),
]


def verdict() -> Verdict:
    figures = Figures(
        tasks=6000,
        versions=20_000,
        runs=6100,
        handler_starts=6090,
        effects=50,
        by_name_and_status={"quick": {"SUCCESS": 5300, "CANCELED": 100}, "doomed": {"FAIL": 600}},
        calls={"publish": {"created": 6000, "unknown": 40}, "cancel": {"done": 77}},
        faults={"kill worker": 20, "kill primary": 4},
        first_claim=Distribution.of([0.004, 0.006, 3.0]),
        rescues=RESCUES,
        failovers=[
            {"nemesis": "kill primary", "target": "n1", "elected": 20.0 * n, "first_claim_after": after}
            for n, after in enumerate([1.5, 2.5, 11.0, None])
        ],
        failover=Distribution.of([1.5, 2.5, 11.0]),
        executors={"handlers": 1200, "killed": 3},
        deaths=Distribution.of([0.03, 0.04, 2.0]),
        timeline=Timeline([100] * 60, [101] * 60, [101] * 60, [90] * 60, [10] * 60),
    )
    groups = groups_of(RESCUES)
    figures.rescue_up, figures.rescue_away, figures.rescue_named = (
        Distribution.of(rescue.delay for rescue in groups[name]) for name in (UP, AWAY, NAMED)
    )
    return Verdict(figures=figures)


def violated() -> Verdict:
    found = verdict()
    for n in range(12):
        found.report("lost", f"quick:p1/{n}", "was never\nfinished | ever", worker="w1")
    return found


FAULTS = [Span("kill worker", "w1", 5, 6), Span("kill primary", "n1", 20, 29, True), Span("hog", "", 40, 45)]
LINE = verdict().figures.timeline
SCENE = Scene(
    "mtask under faults: 1 min, seed 4711",
    "CLEAN: 0 violations",
    True,
    60.0,
    LINE.published,
    LINE.succeeded,
    LINE.failed,
    FAULTS,
    [(float(second), 20.0 + second) for second in range(60)],
    [(float(second), 10.0) for second in range(60)],
    [replace(rescue, free=rescue.free % 50, claimed=rescue.free % 50 + rescue.delay) for rescue in RESCUES],
    {"w1": [[(0.0, 50.0), (20.0, 60.0)], [(24.0, 50.0), (60.0, 61.0)]], "w2": [[(0.0, 50.0), (60.0, 60.0)]]},
)
OUTCOME = Outcome(
    FACTS,
    verdict(),
    SCENE,
    recoveries([Fault("kill worker", "w1", 5.0, 6.0), Fault("kill primary", "n1", 20.0, 29.5, True)], [7.25, 31.0]),
    [Memory("w1", "plain", 4, 61.2, 62.3, 70.4, 0.11, 12, 40)],
    leftovers(FACTS),
    {"w1, exit code -9": 3},
)
EMPTY = Outcome({}, Verdict(), Scene("nothing", "CLEAN: 0 violations", True, 0.0))
LOST = "tasks or changes that were acknowledged and lost"


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


# --- report -------------------------------------------------------------------------------------------------------


def test_report_says_what_was_run_and_how_to_run_it_again() -> None:
    text = markdown(OUTCOME)
    assert text.startswith("# mtask under faults: 15 min, seed 4711, 3 nodes, 2 workers\n")
    assert "make chaos MINUTES=15 SEED=4711\n" in text
    assert "--once\n```" in markdown(replace(OUTCOME, facts={**FACTS, "command": "python -m tests.chaos --once"}))
    assert ["versions", "mtask 0.1.0, pymongo 4.15.1, mongod 7.0.2"] in rows_of(text)
    assert ["workers", "1 plain, 1 proxied"] in rows_of(text)
    assert "](picture.png)" in text


def test_clean_report_shows_each_zero_right_after_its_title() -> None:
    parts = markdown(OUTCOME).split("\n\n")
    line = "**CLEAN: 0 violations in 6,000 tasks, 24 faults, 102 rescues (p99 900 ms with the database up).**"
    assert parts[1] == line
    assert [cells[1] for cells in rows_of(parts[2])] == ["times", "---:", *["0"] * len(KINDS)]
    assert [LOST, "0"] in rows_of(parts[2])
    assert "## Violations" not in "\n\n".join(parts)


def test_violation_is_told_first_and_loudly_with_its_cases() -> None:
    text = markdown(replace(OUTCOME, verdict=violated()))
    assert text.split("\n\n")[1] == "**VIOLATED: 12 violations in 6,000 tasks.** The evidence is below."
    assert [LOST, "**12**"] in rows_of(text)
    assert text.index(f"### 12 {LOST}") < text.index("](picture.png)")
    assert "- `quick:p1/0`: was never finished \\| ever (worker w1)\n" in text
    assert text.count("was never finished") == MAX_EXAMPLES
    assert f"And {12 - MAX_EXAMPLES} more" in text


def test_history_that_proves_nothing_is_not_called_clean() -> None:
    doubted = verdict()
    doubted.doubt("the observer missed versions")
    line = markdown(replace(OUTCOME, verdict=doubted)).split("\n\n")[1]
    assert line == "**NOT PROVEN: the observer missed versions.** The zeros below are no proof."


def test_violation_is_told_before_that_the_rest_proves_nothing() -> None:
    found = violated()
    found.doubt("the observer missed versions")
    parts = markdown(replace(OUTCOME, verdict=found)).split("\n\n")
    assert parts[1].startswith("**VIOLATED, and not all of it seen: 12 violations in 6,000 tasks.**")
    assert parts[2] == "- not proven: the observer missed versions"


def test_report_holds_the_figures_of_rescues_failovers_and_work() -> None:
    text = markdown(OUTCOME)
    rows = rows_of(text)
    assert "With the database up, 99 of 100 (99.00 %) came within 500 ms." in text
    assert [UP, "100", "70 ms", "110 ms", "900 ms", "900 ms"] in rows
    assert [AWAY, "1", *["7.50 s"] * 4] in rows
    assert [NAMED, "1", *["3.00 s"] * 4] in rows
    assert ["`slow:p1/late`", "5:00.0", "900 ms", "hog 299.0 to 302.0 s; killer \\| task"] in rows
    assert "slow:p2/away" not in text
    assert ["kill primary", "3", "2.50 s", "11.00 s", "11.00 s", "11.00 s"] in rows
    assert ["runs succeeded", "5,400", "90.0", "90"] in rows
    assert ["from due to the first claim", "3", "6 ms", "3.00 s", "3.00 s", "3.00 s"] in rows
    assert ["quick", "5,300", "", "100", "5,400"] in rows
    assert ["all", "5,300", "600", "100", "6,000"] in rows
    assert ["publish", "6,000", "", "40", "6,040"] in rows


def test_report_tells_how_soon_the_deaths_of_executors_were_told() -> None:
    rows = rows_of(markdown(OUTCOME))
    assert ["handlers", "1,200"] in rows
    assert ["killed", "3"] in rows
    assert ["from the death of an executor to the FAIL of its run", "3", "40 ms", "2.00 s", "2.00 s", "2.00 s"] in rows


def test_report_tells_of_each_kind_of_fault_and_how_soon_work_went_on() -> None:
    rows = rows_of(markdown(OUTCOME))
    assert ["kill worker", "1", "1.0 s", "", "1.25 s", "1.25 s"] in rows
    assert ["kill primary", "1", "9.5 s", "1", "1.50 s", "1.50 s"] in rows


def test_report_tells_what_was_left_over() -> None:
    rows = rows_of(markdown(OUTCOME))
    assert ["connections of workers still open on the servers", "none"] in rows
    assert ["backlog after the faults", "drained within 12.5 s"] in rows
    assert ["w1, exit code -9", "3"] in rows
    assert ["cursors still open that were used after the last fault", "none"] in rows
    assert ["processes that workers started and left behind", "none"] in rows
    bad = {
        **FACTS,
        "processes_left": 5,
        "cursors_after": 2,
        "connections_after": {"mtask-worker w1": 4},
        "exit_codes": {"w1": -9, "w2": 0},
    }
    rows = rows_of(markdown(replace(OUTCOME, leftovers=leftovers(bad))))
    assert ["connections of workers still open on the servers", "**mtask-worker w1: 4**"] in rows
    assert ["cursors still open that were used after the last fault", "**2**"] in rows
    assert ["processes that workers started and left behind", "**5**"] in rows
    assert ["workers that ended otherwise than in good order", "**w1 with -9**"] in rows


def test_report_of_an_empty_run_says_what_there_was_not() -> None:
    text = markdown(EMPTY)
    for words in ("No task had to be rescued.", "There were none.", "It was not measured.", "It was not looked at."):
        assert words in text
    assert "## Failovers" not in text
    assert "## Executors" not in text


# --- measures -----------------------------------------------------------------------------------------------------


def samples(
    per_minute: float, *, seconds: int = 400, place: str = "w1", pid: int = 1, since: float = 0
) -> list[Sample]:
    return [
        Sample(since + at, place, pid, {"memory_mib": 60 + per_minute * at / 60, "threads": 9.0, "files": 30.0})
        for at in range(0, seconds, 2)
    ]


@pytest.mark.parametrize(
    ("per_minute", "judgement"), [(0.0, "flat"), (0.4, "flat"), (-3.0, "flat"), (0.6, "**grows**"), (5.0, "**grows**")]
)
def test_memory_is_flat_unless_it_grows_while_the_process_lives(per_minute: float, judgement: str) -> None:
    memory = memory_of(samples(per_minute), {"w1": "plain"}, 0.0)
    assert [(place.kind, place.judgement) for place in memory] == [("plain", judgement)]
    assert memory[0].slope == pytest.approx(per_minute)


def test_memory_that_steps_up_from_process_to_process_is_not_flat() -> None:
    low = samples(0.0, seconds=300)
    high = [replace(sample, pid=2, values={**sample.values, "memory_mib": 70.0}) for sample in samples(0, since=310)]
    (memory,) = memory_of([*low, *high], {}, 0.0)
    assert (memory.processes, memory.first, memory.last, memory.slope) == (2, 60.0, 70.0, 0.0)
    assert memory.judgement == "**grows**"


def test_memory_of_a_process_that_was_seen_briefly_is_not_judged() -> None:
    (memory,) = memory_of(samples(9.0, seconds=200), {}, 0.0)
    assert (memory.first, memory.slope, memory.judgement) == (None, None, "lived too briefly")


def test_memory_of_processes_that_were_ended_early_says_nothing_of_the_one_that_lived() -> None:
    early = [sample for n in range(5) for sample in samples(9.0, seconds=100, pid=n, since=n * 100)]
    (memory,) = memory_of([*early, *samples(0.0, pid=9, since=600)], {}, 0.0)
    assert (memory.processes, memory.slope, memory.judgement) == (6, 0.0, "flat")


def test_slope_is_taken_within_processes_not_between_them() -> None:
    assert slope([[(0.0, 10.0), (60.0, 11.0)], [(120.0, 1.0), (180.0, 2.0)]]) == pytest.approx(1.0)
    assert slope([[(0.0, 10.0)]]) is None


def test_fault_after_which_nothing_started_any_more_has_no_recovery() -> None:
    (kind,) = recoveries([Fault("hog", "", 1.0, 2.0), Fault("hog", "", 8.0, 9.0)], [2.5, 1.0])
    assert (kind.count, kind.seconds, kind.waits) == (2, 2.0, [0.5])


# --- picture ------------------------------------------------------------------------------------------------------


def size_of(path: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


def colours_of(path: Path) -> set[str]:
    pixels = (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype("uint32")
    numbers = {int(value) for value in ((pixels[:, :, 0] << 16) + (pixels[:, :, 1] << 8) + pixels[:, :, 2]).flat}
    return {f"#{number:06x}" for number in numbers}


@pytest.mark.long
def test_picture_shows_flow_faults_rescues_and_memory(tmp_path: Path) -> None:
    path, empty = tmp_path / "picture.png", tmp_path / "empty.png"
    draw(SCENE, path)
    draw(replace(SCENE, is_clean=False, faults=(), rescues=(), memory={}), empty)
    assert size_of(path)[0] == size_of(empty)[0] == 1600
    assert 900 < size_of(empty)[1] < size_of(path)[1] < 2400
    only_full = colours_of(path) - colours_of(empty)
    assert len(only_full) > 100
    assert "#bc6c00" in only_full  # the quantiles of rescues with the database away


def test_picture_of_an_empty_run_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    draw(EMPTY.scene, path)
    assert size_of(path)[0] == 1600


def test_smoothing_keeps_the_mean_of_neighbours_and_the_length() -> None:
    assert smoothed([0.0, 3.0, 6.0, 3.0]) == [1.5, 3.0, 4.0, 4.5]
    assert smoothed([]) == []


# --- all of it ----------------------------------------------------------------------------------------------------


def run_of(folder: Path) -> History:
    """Leave the traces of a run that published one task, and saw no version of it."""
    history = History(folder)
    history.facts_path.write_text(json.dumps({**FACTS, "epoch": 1.9e9, "started": 100.0, "stopped_at": 130.0}))
    records: list[tuple[Path, Call | Note | Fault | Sample]] = [
        (history.calls_path("p1"), Call("c1", "publish", "quick:p1/0", "p1", 101.0, 101.1, "created")),
        (history.notes_path(7), Note("start", "quick:p1/0", "r1", "w1", 1, 7, 107.0)),
        (history.faults_path, Fault("kill worker", "w1", 103.0, 106.5)),
        (history.samples_path, Sample(104.0, "w1", 7, {"memory_mib": 61.5, "threads": 9.0, "files": 30.0})),
        (history.samples_path, Sample(104.0, "tasks", None, {"INIT": 3.0, "RUNNING": 1.0})),
    ]
    for path, record in records:
        ledger = Ledger(path)
        ledger.write(record)
        ledger.close()
    return history


def test_command_makes_report_picture_and_verdict_from_a_stored_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = run_of(tmp_path)
    assert report.main([str(tmp_path)]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "no version of any task was seen" in text
    assert ["kill worker", "1", "3.5 s", "", "500 ms", "500 ms"] in rows_of(text)
    assert json.loads((tmp_path / "verdict.json").read_text())["is_clean"] is False
    assert size_of(tmp_path / "picture.png")[0] == 1600
    assert f"report: {tmp_path / 'report.md'}" in capsys.readouterr().out
    scene = report.outcome_of(history, Verdict()).scene
    assert (scene.seconds, scene.backlog, scene.running) == (30.0, [(4.0, 3.0)], [(4.0, 1.0)])
    assert (scene.faults, scene.memory) == ([Span("kill worker", "w1", 3.0, 6.5)], {"w1": [[(4.0, 61.5)]]})


def test_run_that_broke_off_still_has_a_report(tmp_path: Path) -> None:
    history = run_of(tmp_path)
    history.facts_path.unlink()
    with history.samples_path.open("a") as file:
        file.write('{"at": 105.0, "subj')
    assert report.main([str(tmp_path)]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "NOT PROVEN: facts.json cannot be read" in text
    assert ["w1", "publisher", "1", "", "", "61.5", "", "9", "30", "lived too briefly"] in rows_of(text)
