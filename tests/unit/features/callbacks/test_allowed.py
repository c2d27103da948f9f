"""What a worker may call, by the texts of its flags and its file of secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtask.errors import InvalidInput
from mtask.features.callbacks.allowed import NotAllowed, read_options
from mtask.features.callbacks.signatures import write_secret

SECRET = write_secret(b"s" * 32)


@pytest.mark.parametrize(
    ("hosts", "url", "may"),
    [
        ("hooks.example.com", "https://hooks.example.com/a?b", True),
        ("hooks.example.com", "https://HOOKS.example.com./", True),
        ("hooks.example.com", "http://hooks.example.com/", False),
        ("hooks.example.com", "https://hooks.example.com:8443/", False),
        ("hooks.example.com", "https://a.hooks.example.com/", False),
        ("hooks.example.com", "https://hooks.example.com.evil.org/", False),
        ("a, *.example.com:8443", "https://hooks.example.com:8443", True),
        ("*.example.com", "https://example.com", False),
        ("*.example.com", "https://.example.com", False),
        ("*.example.com", "https://evilexample.com", False),
        ("http://10.0.0.5:8080", "http://10.0.0.5:8080/x", True),
        ("http://10.0.0.5:8080", "https://10.0.0.5:8080/x", False),
        ("*", "https://anything.org/", True),
        ("*", "http://anything.org/", False),
        ("*", "https://user@anything.org/", False),
        ("*", "gopher://anything.org/", False),
        ("*", "https://[::1/", False),
        ("http://[::1]:80", "http://[::1]/", True),
    ],
)
def test_only_listed_hosts_are_called(hosts: str, url: str, *, may: bool) -> None:
    options = read_options(hosts)
    if may:
        assert options.target(url).path.startswith("/")
    else:
        with pytest.raises(NotAllowed):
            options.target(url)


@pytest.mark.parametrize("wrong", ["", "a,,b", "https://a/path", "a*b", "*.*", "ftp://a", "a:0x", "u@a"])
def test_what_is_no_list_of_hosts_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidInput, match="--callbacks"):
        read_options(wrong)


def test_secrets_come_from_a_file_or_the_environment_and_may_be_bound_to_hosts(tmp_path: Path) -> None:
    path = tmp_path / "secrets.json"
    path.write_text(json.dumps({"default": SECRET, "shop": {"secret": SECRET, "hosts": ["shop.example"]}}))
    path.chmod(0o600)
    options = read_options("*", None, json.dumps({"more": write_secret(b"m" * 24)}), path)
    shop, other = options.target("https://shop.example"), options.target("https://other.example")
    assert options.key(None, other) == options.key("default", other) == options.key("shop", shop) == b"s" * 32
    assert options.key("more", other) == b"m" * 24
    with pytest.raises(NotAllowed, match="not for other"):
        options.key("shop", other)
    with pytest.raises(NotAllowed, match="no secret 'none'"):
        options.key("none", other)
    assert SECRET not in repr(options)
    assert "ssss" not in repr(options)


def test_a_file_of_secrets_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secrets.json"
    path.write_text(json.dumps({"default": SECRET}))
    path.chmod(0o640)
    with pytest.raises(InvalidInput, match="chmod 600"):
        read_options("*", None, None, path)
    with pytest.raises(InvalidInput, match="No such file"):
        read_options("*", None, None, tmp_path / "none")


@pytest.mark.parametrize(
    "wrong",
    ["", "[]", "7", json.dumps({"a": 1}), json.dumps({"a": {"secret": SECRET}}), json.dumps({"a": SECRET[:-9]})],
)
def test_secrets_that_cannot_be_read_are_refused_and_not_quoted(wrong: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_options("*", None, wrong)
    assert SECRET[10:30] not in str(refused.value)
