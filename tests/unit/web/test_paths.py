"""Addresses: percent-decoding once, strict UTF-8, and the address by query."""

from __future__ import annotations

import pytest

from mtask.web.paths import by_query, check_query, is_by_query, is_same_origin, path_in, routed_path, with_segments
from mtask.web.problems import BadRequest, InvalidRequest


@pytest.mark.parametrize(
    "path", [b"/v1/tasks/a/%", b"/v1/tasks/a/%zz", b"/v1/tasks/a/%ff", b"/v1/tasks/a/%c3", b"/v1/tasks/a/\xc3\xa9"]
)
def test_a_path_that_is_not_percent_encoded_utf8_is_refused(path: bytes) -> None:
    with pytest.raises(BadRequest):
        routed_path(path)


def test_a_path_stays_encoded_until_a_route_has_taken_its_segments() -> None:
    assert routed_path(b"/v1/tasks/a%2Fb/%252F%3A:cancel") == "/v1/tasks/a%2Fb/%252F%3A:cancel"


@pytest.mark.parametrize("query", [b"a=%ff", b"a=%zz", b"a=\xff"])
def test_a_query_that_is_not_percent_encoded_utf8_is_refused(query: bytes) -> None:
    with pytest.raises(BadRequest):
        check_query(query)


def test_the_address_by_query_is_that_by_path() -> None:
    assert by_query("/v1/task", b"name=a%2Fb&key=..&limit=3") == ("/v1/tasks/a%2Fb/..", b"limit=3")
    assert by_query("/v1/task:cancel", b"name=a&key=x%3Ay+z") == ("/v1/tasks/a/x%3Ay%20z:cancel", b"")
    assert by_query("/v1/task/position", b"key=%25&name=a") == ("/v1/tasks/a/%25/position", b"")


@pytest.mark.parametrize("query", [b"", b"name=a", b"key=a", b"name=&key=a", b"name=a&key=", b"name=a&key=b&key=c"])
def test_the_address_by_query_names_one_task(query: bytes) -> None:
    with pytest.raises(InvalidRequest):
        by_query("/v1/task", query)


@pytest.mark.parametrize(
    ("origin", "is_own"),
    [
        ("http://127.0.0.1:8787", True),
        ("http://LOCALHOST:8787", False),
        ("HTTP://127.0.0.1:8787", True),
        ("null", False),
        ("", False),
        ("https://127.0.0.1:8787", False),
        ("://127.0.0.1:8787", False),
        ("http://[", False),
        ("http://127.0.0.1:8787@evil.example", False),
        ("http://127.0.0.1:8787/path", False),
    ],
)
def test_an_origin_names_this_host_or_not_whatever_it_is(origin: str, is_own: bool) -> None:
    assert is_same_origin(origin, "http", "127.0.0.1:8787") is is_own


@pytest.mark.parametrize(
    ("origin", "scheme", "host", "is_own"),
    [
        ("https://mtask.example.org", "https", "mtask.example.org", True),
        ("https://mtask.example.org", "https", "mtask.example.org:443", True),
        ("http://mtask.example.org:80", "http", "mtask.example.org", True),
        ("http://mtask.example.org", "https", "mtask.example.org", False),
        ("https://mtask.example.org", "http", "mtask.example.org", False),
        ("http://mtask.example.org:443", "https", "mtask.example.org", False),
        ("https://mtask.example.org:80", "https", "mtask.example.org", False),
    ],
)
def test_an_origin_has_a_scheme_and_a_port_as_well(origin: str, scheme: str, host: str, is_own: bool) -> None:
    assert is_same_origin(origin, scheme, host) is is_own


def test_what_is_no_address_has_no_path() -> None:
    assert path_in("http://127.0.0.1:8787/queues?x=1") == "/queues"
    assert path_in("http://[") == path_in("") == ""


def test_segments_of_a_route_are_named_once() -> None:
    assert with_segments("/v1/tasks/{name}/{key}:retry") == "/v1/tasks/{name:segment}/{key:segment}:retry"
    assert with_segments("/v1/flows/{key:segment}") == "/v1/flows/{key:segment}", "FastAPI includes routes anew"


def test_other_addresses_are_not_by_query() -> None:
    assert [is_by_query(path) for path in ("/v1/task", "/v1/task:retry", "/v1/task/position")] == [True] * 3
    assert [is_by_query(path) for path in ("/v1/tasks", "/v1/tasks:batch", "/v1/taskx")] == [False] * 3
