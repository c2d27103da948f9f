"""The address that the web server listens on, and the names under which it may be reached."""

from __future__ import annotations

import pytest

from mtask.errors import InvalidInput
from mtask.web.settings import WebSettings, is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org", ""])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_public_address_without_tokens_is_refused(host: str, is_open: bool) -> None:
    with pytest.raises(InvalidInput) as caught:
        WebSettings(host, is_open=is_open).check(has_tokens=False)
    assert caught.value.field == "host"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_the_loopback_interface_needs_no_token_file(host: str) -> None:
    WebSettings(host, is_open=True).check(has_tokens=False)
    assert is_loopback(host)


def test_a_public_address_with_tokens_is_allowed() -> None:
    WebSettings("0.0.0.0").check(has_tokens=True)


def test_tokens_and_no_token_exclude_each_other() -> None:
    with pytest.raises(InvalidInput):
        WebSettings(is_open=True).check(has_tokens=True)


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(InvalidInput):
        WebSettings(port=port).check(has_tokens=True)


@pytest.mark.parametrize(
    ("header", "is_accepted"),
    [
        ("127.0.0.1:8787", True),
        ("localhost:8787", True),
        ("LocalHost:8787", True),
        ("[::1]:8787", True),
        ("mtask.example.org", True),
        ("MTASK.example.org", True),
        ("localhost", False),
        ("localhost:80", False),
        ("evil.example.org:8787", False),
        ("evil.example.org", False),
        ("mtask.example.org:8787", False),
        ("localhost:8787.evil.org", False),
        ("localhost.evil.org:8787", False),
        ("10.0.0.5:8787", False),
        ("", False),
    ],
)
def test_on_loopback_the_host_is_a_loopback_name_with_the_port_or_an_allowed_one(
    header: str, is_accepted: bool
) -> None:
    settings = WebSettings(allowed_hosts=["mtask.example.org"])
    assert settings.accepts_host(header, 8787) is is_accepted


@pytest.mark.parametrize(
    ("header", "is_accepted"),
    [("10.0.0.5:8787", True), ("[fe80::1]:8787", True), ("10.0.0.5", False), ("evil.org:8787", False)],
)
def test_on_all_addresses_the_host_may_be_any_address_which_no_name_server_can_rebind(
    header: str, is_accepted: bool
) -> None:
    assert WebSettings("0.0.0.0").accepts_host(header, 8787) is is_accepted


def test_port_80_may_be_left_out() -> None:
    assert WebSettings().accepts_host("localhost", 80)
    assert WebSettings("0.0.0.0").accepts_host("10.0.0.5", 80)
