"""What a declared argument says of itself, beside its name and its type."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True)
class Says:
    """Stands in `Annotated[..., Says(...)]`, where an argument is declared once for clients, commands and requests.

    `flag`: the flag of the command line, or several with spaces between; None: made from the name; "": none.
    """

    help: str
    metavar: str | None = None
    flag: str | None = None
    panel: str | None = None
    default: Any = None


def check_names(declared: Any, given: Collection[str]) -> None:
    """Raise TypeError for a name that the TypedDict does not declare, as Python does for one that no signature has."""
    for name in given:
        if name not in declared.__annotations__:
            raise TypeError(f"unexpected keyword argument {name!r}: use {', '.join(declared.__annotations__)}")


def split(declared: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments that the TypedDict declares, and the others."""
    own = {name: value for name, value in given.items() if name in declared.__annotations__}
    return own, {name: value for name, value in given.items() if name not in own}


def hints_of(declared: Any) -> list[tuple[str, Any]]:
    """Return the names and the annotated types of the arguments that a TypedDict declares."""
    return list(get_type_hints(declared, include_extras=True).items())
