"""Scenes for tests of the checker: what happens in a story, and the kinds of violation that it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mtask.features.flows import statements as flows
from mtask.kernel.document.status import RunStatus
from tests.chaos.history import History
from tests.chaos.judge.checker import check
from tests.chaos.judge.record.verdict import Kind, Verdict
from tests.chaos.selftests.story import Story, instant

Scene = Callable[[Story], None]


class Scenes(dict[Scene, set[Kind]]):
    """Scenes by what they do, each with the kinds of its violations: these, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.legal: list[Scene] = []

    def allow(self, scene: Scene) -> Scene:
        """Take in a scene with which nothing is wrong."""
        self.legal.append(scene)
        return scene

    def violate(self, *kinds: Kind) -> Callable[[Scene], Scene]:
        """Take in a scene that is wrong in these ways."""

        def take_in(scene: Scene) -> Scene:
            self[scene] = set(kinds)
            return scene

        return take_in

    def tests(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the tests of all scenes, each played beside a task that is well.

        In the first, what is wrong is named as what it is; in the second, nothing is named.
        """

        @pytest.mark.parametrize("scene", self, ids=lambda scene: scene.__name__)
        def is_named(scene: Scene, story: Story, tmp_path: Path) -> None:
            story.done()
            scene(story)
            verdict = verdict_on(story, tmp_path)
            assert set(verdict.violations) == self[scene], verdict.describe()
            assert not verdict.not_proven, verdict.describe()
            assert not verdict.is_clean
            for kind in self[scene]:
                assert verdict.findings[kind].examples[0].what in verdict.describe()

        @pytest.mark.parametrize("scene", self.legal, ids=lambda scene: scene.__name__)
        def passes(scene: Scene, story: Story, tmp_path: Path) -> None:
            story.done()
            scene(story)
            verdict = verdict_on(story, tmp_path)
            assert verdict.is_clean, verdict.describe()

        return is_named, passes


def run(story: Story, task_id: str, *, fails: bool = False) -> None:
    """Run a step to its end."""
    story.wait(0.1)
    run_id = story.claim(task_id)
    story.wait(0.1)
    if fails:
        story.finish(task_id, run_id, RunStatus.FAIL)
    else:
        story.finish(task_id, run_id)
    story.wait(0.01)


def told(story: Story, *task_ids: str) -> None:
    """Remove the marks: others have been told."""
    for task_id in task_ids:
        story.apply(task_id, [{"$unset": "owed_since"}])


def release(story: Story, task_id: str) -> None:
    """Let a step start."""
    story.apply(task_id, flows.release(instant(story.now)))
    story.wait(0.01)


def verdict_on(story: Story, folder: Path) -> Verdict:
    """Write the story down in a folder, and check it."""
    return check(story.write(History(folder)))
