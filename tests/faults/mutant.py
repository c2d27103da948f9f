"""What a mutation is: a wrong line put into the engine, and the tests that must notice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL, TokenInfo, generate_tokens

_LAYOUT = {COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL}


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one place in a function, a class or a constant: the tokens of `old` stand there exactly once.

    What a formatter may change does not count: comments, lines, indents, and commas before a closing bracket.
    """

    path: str
    name: str  #: qualified, such as "Runner.run"; empty for a place of the file that is in none
    old: str
    new: str

    def applied(self, root: Path) -> str:
        """Return the file's text with the change made; raise ValueError where it does not apply."""
        text = (root / self.path).read_text()
        lines = text.splitlines(keepends=True)
        sought = [token.string for token in _tokens(self.old)]
        found = []
        for above, end in _places(text, self.name):
            tokens = _tokens("".join(lines[above:end]))
            runs = (tokens[at : at + len(sought)] for at in range(len(tokens)))
            found += [(above, run) for run in runs if [token.string for token in run] == sought]
        if len(found) != 1:
            raise ValueError(f"{self.path}: found {len(found)} times, not once, in {self.name or 'it'}: {self.old!r}")
        above, run = found[0]
        first, last = above + run[0].start[0] - 1, above + run[-1].end[0] - 1
        before, after = lines[first][: run[0].start[1]], lines[last][run[-1].end[1] :]
        indent = before[: len(before) - len(before.lstrip())]
        lines[first : last + 1] = [before + self.new.replace("\n", "\n" + indent) + after]
        return "".join(lines)


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


def _tokens(code: str) -> list[TokenInfo]:
    """Return the tokens that count."""
    tokens = [token for token in generate_tokens(StringIO(code).readline) if token.type not in _LAYOUT]
    closed = {first.start for first, then in pairwise(tokens) if first.string == "," and then.string in (")", "]", "}")}
    return [token for token in tokens if token.start not in closed]


def _places(text: str, name: str) -> list[tuple[int, int]]:
    """Return where what has this qualified name begins and ends: the lines above it, and those down to its end."""
    if not name:
        return [(0, text.count("\n") + 1)]
    nodes: list[ast.AST] = [ast.parse(text)]
    for part in name.split("."):
        nodes = [found for node in nodes for found in _named(node, part)]
    places = []
    for node in nodes:
        assert isinstance(node, ast.stmt)
        lines = [each.lineno for each in (node, *getattr(node, "decorator_list", ()))]
        places.append((min(lines) - 1, node.end_lineno or 0))
    return places


def _named(node: ast.AST, name: str) -> Iterator[ast.stmt]:
    """Find what is defined by this name in a node, and not in another definition."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names = [child.name]
            case ast.Assign():
                names = [each.id for target in child.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=target)):
                names = [target]
            case _:
                yield from _named(child, name)
                continue
        if name in names:
            yield child
