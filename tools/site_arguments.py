"""For the site: the keywords that `**arguments: Unpack[...]` stands for, each with its type and default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe


class Arguments(griffe.Extension):
    """Expands keywords that a TypedDict declares. griffe's own extension knows no inherited ones, and no `Says`."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Expand the keywords of each function of the package."""
        for function in _functions(pkg):
            for parameter in list(function.parameters):
                if declared := _declared_of(parameter, pkg):
                    del function.parameters[parameter.name]
                    for argument in _arguments(declared):
                        function.parameters.add(argument)


def _functions(owner: griffe.Module | griffe.Class) -> Iterator[griffe.Function]:
    for member in owner.members.values():
        if isinstance(member, griffe.Function):
            yield from [member, *(member.overloads or [])]
        elif isinstance(member, griffe.Module | griffe.Class):
            yield from _functions(member)


def _declared_of(parameter: griffe.Parameter, package: griffe.Module) -> griffe.Class | None:
    told = parameter.annotation
    if parameter.kind is not griffe.ParameterKind.var_keyword or not isinstance(told, griffe.ExprSubscript):
        return None
    found = package.modules_collection[told.slice.canonical_path]
    assert isinstance(found, griffe.Class)
    return found


def _arguments(declared: griffe.Class) -> Iterator[griffe.Parameter]:
    for base in declared.resolved_bases:
        yield from _arguments(base)
    for name, attribute in declared.members.items():  # `attributes` are those of the bases, too
        if not isinstance(attribute, griffe.Attribute):
            continue
        told, said = attribute.annotation, []
        if isinstance(told, griffe.ExprSubscript) and str(told.left) == "Annotated":
            told, *said = told.slice.elements
        given = [part for call in said if isinstance(call, griffe.ExprCall) for part in call.arguments]
        defaults = [str(part.value) for part in given if getattr(part, "name", "") == "default"]
        # Without any, None is meant, or what the handler of the task says.
        default = defaults[0] if defaults else "None" if "None" in str(told) else "..."
        yield griffe.Parameter(name, annotation=told, kind=griffe.ParameterKind.keyword_only, default=default)
