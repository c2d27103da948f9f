"""Scenes for tests of the checker: what happens in a story, and the kinds of violation that it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.faults.checker import check
from tests.faults.checks.story import Story
from tests.faults.checks.verdict import Kind, Verdict
from tests.faults.history import History

Scene = Callable[[Story], None]


class Scenes(dict[Scene, set[Kind]]):
    """Scenes by what they do, each with the kinds of its violations: these, and no others."""

    def violate(self, *kinds: Kind) -> Callable[[Scene], Scene]:
        """Take in a scene that is wrong in these ways."""

        def take_in(scene: Scene) -> Scene:
            self[scene] = set(kinds)
            return scene

        return take_in

    def judge(self, scene: Scene, story: Story, folder: Path) -> None:
        """Play the scene beside a task that is well, and see it named as what it is."""
        story.done()
        scene(story)
        verdict = verdict_on(story, folder)
        assert set(verdict.violations) == self[scene], verdict.describe()
        assert not verdict.not_proven, verdict.describe()
        assert not verdict.is_clean
        for kind in self[scene]:
            assert verdict.findings[kind].examples[0].what in verdict.describe()


def verdict_on(story: Story, folder: Path) -> Verdict:
    """Write the story down in a folder, and check it."""
    return check(story.write(History(folder)))
