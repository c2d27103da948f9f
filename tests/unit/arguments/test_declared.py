"""What is declared once reaches the command line and the REST API, and nothing else is taken."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from mtask import Client
from mtask.arguments.criteria import CountCriteria, PageCriteria, TaskCriteria, checked
from mtask.arguments.publish import PublishArguments, TaskSpec, published_by
from mtask.cli.commands import app
from mtask.cli.values import flag_of
from mtask.errors import UnknownOption
from mtask.features.bulk.rest import BulkFilter
from mtask.kernel.document.options import STORED_NAMES
from mtask.says import hints_of
from mtask.web.models.publishing import PutTask

#: Arguments that bodies have under another name, or take from the address.
_NOT_IN_BODIES = {"key", *STORED_NAMES}


@pytest.mark.parametrize(("command", "declared"), [("publish", PublishArguments), ("find", PageCriteria)])
def test_each_declared_argument_has_its_flag(command: str, declared: Any) -> None:
    commands: Any = typer.main.get_command(app)
    flags = {flag for each in commands.get_command(None, command).params for flag in each.opts}
    for name, hint in hints_of(declared):
        said = hint.__metadata__[0]
        assert said.help, name
        if said.flag != "":
            assert set(said.flag.split() if said.flag else [flag_of(name)]) <= flags


def test_bodies_have_the_declared_arguments_and_their_defaults() -> None:
    declared = {name: hint.__metadata__[0].default for name, hint in hints_of(PublishArguments)}
    body = PutTask()
    assert {name: getattr(body, name) for name in declared.keys() - _NOT_IN_BODIES} == {
        name: default for name, default in declared.items() if name not in _NOT_IN_BODIES
    }
    assert set(BulkFilter.model_fields) == {name for name, _ in hints_of(PageCriteria)}


@pytest.mark.parametrize(("declared", "name"), [(CountCriteria, "key"), (TaskCriteria, "lookup"), (PageCriteria, "no")])
def test_name_of_no_criterion_is_refused(declared: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': use status, name, queue"):
        checked(declared, {name: None})


def test_name_of_no_argument_of_publish_is_refused() -> None:
    with pytest.raises(UnknownOption, match="did you mean 'priority'"):
        published_by("a", None, {"prioritty": 1})[0].prepare()
    with pytest.raises(UnknownOption):
        TaskSpec("a", if_exists="keep").prepare()  # type: ignore[call-overload]
    with Client("mongodb://127.0.0.1:1/", check=False) as client, pytest.raises(TypeError, match="'call_id'"):
        client.publish_many([TaskSpec("a")], call_id="b")  # type: ignore[call-arg]
