"""The sync client is what the tool makes of the asyncio one, and the two hand-written halves fit each other."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from mtask import AsyncClient, Client
from mtask.client.connection_aio import AsyncConnection
from mtask.client.connection_sync import SyncConnection
from mtask.features.events.events_aio import AsyncCompleted, AsyncEvents
from mtask.features.events.events_sync import Completed, Events
from mtask.features.events.following import AsyncReader, SyncReader
from mtask.features.events.readers import AsyncCursor, SyncCursor
from tools.generate_sync import NAMES, ROOT, SOURCES, CannotGenerate, generated

_AIO = "mtask/client/aio.py"
_PAIRS = [
    (AsyncClient, Client),
    (AsyncConnection, SyncConnection),
    (AsyncCompleted, Completed),
    (AsyncEvents, Events),
    (AsyncReader, SyncReader),
    (AsyncCursor, SyncCursor),
]


@pytest.mark.parametrize("source", SOURCES)
def test_generated_file_is_what_its_source_makes(source: str) -> None:
    target = SOURCES[source]
    found = (ROOT / target).read_text()
    assert found == generated(source, (ROOT / source).read_text()), (
        f"{target} is not what {source} makes: edit that one alone, and run `make generate`"
    )


@pytest.mark.parametrize("source", SOURCES)
def test_generated_file_says_where_it_comes_from(source: str) -> None:
    first = (ROOT / SOURCES[source]).read_text().splitlines()[0]
    assert source in first
    assert "make generate" in first


def test_keywords_go_and_names_change_in_code_and_docstrings() -> None:
    text = (ROOT / _AIO).read_text()
    added = '''
async def example(client: AsyncClient) -> AsyncEvents:
    """Say what `AsyncClient` does; await nothing."""
    async with client as same:
        found = [event async for event in same.events()]
        return await same.call(
            await same.other(),
        )
'''
    with pytest.raises(CannotGenerate, match=r"no rule for line .*await nothing"):
        generated(_AIO, text + added)
    made = generated(_AIO, text + added.replace("; await nothing", ""))
    assert made.endswith('''
def example(client: Client) -> Events:
    """Say what `Client` does."""
    with client as same:
        found = [event for event in same.events()]
        return same.call(
            same.other(),
        )
''')


def test_what_no_rule_covers_is_an_error_and_not_left_as_it_is() -> None:
    text = (ROOT / _AIO).read_text()
    with pytest.raises(CannotGenerate, match=r"asyncio\.gather"):
        generated(_AIO, f"{text}\nboth = asyncio.gather\n")
    with pytest.raises(CannotGenerate, match="session: Any = None"):
        generated(_AIO, text.replace("session: Any = None", "session: object = None"))


@pytest.mark.parametrize(("of_asyncio", "of_sync"), _PAIRS, ids=lambda cls: cls.__name__)
def test_both_halves_have_the_same_members(of_asyncio: type, of_sync: type) -> None:
    assert {NAMES.get(name, name) for name in _members(of_asyncio)} == _members(of_sync)


def _members(cls: type) -> set[str]:
    return {
        name
        for name, member in inspect.getmembers_static(cls)
        if inspect.isfunction(member) or isinstance(member, property | staticmethod | classmethod)
    }


@pytest.mark.parametrize("cls", [AsyncClient, Client, AsyncEvents, Events], ids=lambda cls: cls.__name__)
def test_every_public_member_says_what_it_does(cls: type) -> None:
    public: dict[str, Any] = {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}
    assert {"close", "poll"} <= public.keys() or {"close", "publish", "wait", "init"} <= public.keys()
    assert cls.__doc__
    assert [name for name, member in public.items() if not member.__doc__] == []
