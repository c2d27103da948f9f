"""Which addresses a worker may call."""

from __future__ import annotations

import pytest

from mtask.errors import InvalidInput
from mtask.features.callbacks.allowed import check_networks, is_public, may_call, parsed

PUBLIC = [
    "1.1.1.1",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "192.167.1.1",
    "223.255.255.255",
    "2606:4700:4700::1111",
    "2003::1",
    "2000::1",
    "3fff:ffff::1",
    "::ffff:1.1.1.1",
    "64:ff9b::101:101",
]
NOT_PUBLIC = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.255",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:1ff::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:101:101::1",
    "4000::1",
    "fc00::1",
    "fd00::1",
    "fe80::1",
    "fe80::1%eth0",
    "ff02::1",
]


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_may_be_called(text: str) -> None:
    assert is_public(parsed(text))
    assert may_call(parsed(text))


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_addresses_that_lead_into_a_private_network_may_not(text: str) -> None:
    assert not is_public(parsed(text))
    assert not may_call(parsed(text))


@pytest.mark.parametrize(
    ("text", "network", "may"),
    [
        ("10.0.0.5", "10.0.0.0/8", True),
        ("11.0.0.5", "11.0.0.0/8", True),
        ("127.0.0.1", "10.0.0.0/8", False),
        ("::ffff:10.0.0.5", "10.0.0.0/8", True),
        ("64:ff9b::a00:5", "10.0.0.0/8", True),
        ("fd00::5", "fd00::/8", True),
        ("fd00::5", "10.0.0.0/8", False),
        ("::1", "::1/128", True),
    ],
)
def test_an_operator_allows_networks(text: str, network: str, *, may: bool) -> None:
    assert may_call(parsed(text), check_networks([network])) is may


@pytest.mark.parametrize("wrong", ["", "10.0.0.0/33", "10.0.0.1/8", "example.com"])
def test_what_is_no_network_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidInput, match=r"10\.0\.0\.0/8"):
        check_networks([wrong])
