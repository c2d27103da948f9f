"""What a mutation is: a wrong line put into the engine, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one place of one file: `old` stands there exactly once."""

    path: str
    old: str
    new: str

    def applied(self, root: Path) -> str:
        """Return the file's text with the change made; raise ValueError where it does not apply."""
        text = (root / self.path).read_text()
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.path}: found {found} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mutation and its tests: each of these must fail under it."""

    name: str
    breaks: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Change the sources under this folder."""
        for edit in self.edits:
            (root / edit.path).write_text(edit.applied(root))
