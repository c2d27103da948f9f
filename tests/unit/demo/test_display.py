"""How the demo is seen: fits the terminal, names what matters, and says nothing twice."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from mtask.demo.display import Lines, Picture, abridged, kill_line
from mtask.demo.watch import WORKING, Kill, Look, Rescue, Scene, WorkerRow

KILLED = datetime(2030, 1, 1, 12, 0, 0, 123000, tzinfo=UTC)


def scene_with(rescues: int) -> Scene:
    scene = Scene("mtask demo: 100 files of /usr/lib/python3", 100, has_kill=True)
    for number in range(5):
        scene.finish(f"step {number}, which says at some length what was done, how much of it, and how long it took")
    scene.work_began = 0.0
    scene.begin(WORKING)
    look = Look()
    look.tasks.update({"SUCCESS": 90, "RUNNING": 10})
    scene.see(look)
    scene.workers = [WorkerRow(f"worker-{n}", 1000 + n, "killed" if n == 2 else "running", 3, 30) for n in (1, 2, 3)]
    scene.kill = Kill("worker-2", 1002, KILLED)
    lapse = KILLED + timedelta(seconds=2)
    scene.rescues = [
        Rescue(
            f"count:folder/{n}.py",
            f"folder/{'deep/' * 20}{n}.py",
            lapse,
            lapse + timedelta(milliseconds=25),
            "worker-1",
        )
        if n % 2
        else Rescue(f"count:folder/{n}.py", f"folder/{n}.py", lapse)
        for n in range(rescues)
    ]
    return scene


def drawn(scene: Scene, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(Picture(scene))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
@pytest.mark.parametrize("rescues", [0, 3, 40])
def test_picture_fits_the_terminal(width: int, height: int, rescues: int) -> None:
    lines = drawn(scene_with(rescues), width, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width


def test_picture_shows_progress_workers_and_what_became_of_the_killed_workers_tasks() -> None:
    shown = "\n".join(drawn(scene_with(3), 120, 40))
    assert "90 of 100 finished" in shown
    assert "1 of 3 tasks of worker-2 preempted" in shown
    assert "worker-2 killed with SIGKILL at 12:00:00.123 UTC, holding the leases of 3 tasks" in shown
    assert "12:00:02.123  12:00:02.148  25 ms  worker-1" in shown
    assert "waiting" in shown


def test_picture_says_how_many_tasks_it_has_no_room_for_and_shows_all_in_the_end() -> None:
    scene = scene_with(40)
    assert drawn(scene, 80, 24)[-1].startswith("and ")
    scene.begin("")
    assert sum("12:00:02.123" in line for line in drawn(scene, 80, 24)) == 40


def test_lines_tell_each_step_and_the_kill_once() -> None:
    scene = scene_with(2)
    stream = io.StringIO()
    lines = Lines(scene, Console(file=stream, width=4000))
    lines.notify()
    lines.notify()
    said = stream.getvalue()
    assert said.count("step 3") == 1
    assert said.count(kill_line(scene)) == 1


def test_a_long_path_keeps_its_end_and_steers_no_terminal() -> None:
    assert abridged("a/b.py", 10) == "a/b.py"
    assert abridged("folder/deep/name.py", 10) == "…p/name.py"
    assert abridged("a\x1b[2J\n.py", 20) == "a?[2J?.py"
