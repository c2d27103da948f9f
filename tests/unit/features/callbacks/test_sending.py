"""A message goes to an address that was checked, within its time limit, and nowhere else."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import trustme

from mtask.features.callbacks.allowed import CallbackOptions, NotAllowed, read_options
from mtask.features.callbacks.sending import NotTaken, resolved, send
from mtask.features.callbacks.signatures import headers_of, read_secret
from mtask.testing import CallbackReceiver, NotGenuine, verify

LOCAL = "127.0.0.0/8"


def options_for(
    port: int, *, networks: str | None = LOCAL, timeout: float = 20.0, scheme: str = "http"
) -> CallbackOptions:
    read = read_options(f"{scheme}://localhost:{port},{scheme}://127.0.0.1:{port}", networks)
    return CallbackOptions(read.hosts, read.networks, read.secrets, timeout)


def posted(port: int, options: CallbackOptions, *addresses: Sequence[str]) -> int:
    """Post a message to localhost. `addresses` are the answers of the resolver, one after the other."""
    answers = iter(addresses or [["127.0.0.1"]])
    scheme = options.hosts[0].scheme
    target = options.target(f"{scheme}://localhost:{port}/callback")
    return send(target, b"{}", {"webhook-id": "msg_1"}, options, lambda host, port: next(answers))


def test_a_message_arrives_as_it_was_signed() -> None:
    with CallbackReceiver() as receiver:
        body = json.dumps({"type": "task.success"}).encode()
        headers = headers_of(read_secret(receiver.secret), "msg_1", int(time.time()), body)
        options = options_for(receiver.port)
        assert send(options.target(receiver.url), body, headers, options) == 204
        (got,) = receiver.received
        assert (got.webhook_id, got.is_genuine, got.body) == ("msg_1", True, body)
        assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
        assert verify(got.headers, got.body, receiver.secret) == {"type": "task.success"}
        with pytest.raises(NotGenuine):
            verify(got.headers, got.body + b" ", receiver.secret)


@pytest.mark.parametrize("networks", [None, "10.0.0.0/8", "::1/128"])
def test_a_private_address_is_not_called(networks: str | None) -> None:
    with CallbackReceiver() as receiver:
        with pytest.raises(NotAllowed, match=r"leads to 127\.0\.0\.1, which is not public"):
            posted(receiver.port, options_for(receiver.port, networks=networks))
        assert receiver.received == []


def test_a_host_with_one_address_that_may_not_be_called_is_not_called_at_all() -> None:
    with CallbackReceiver() as receiver:
        for second in ("169.254.169.254", "::ffff:10.0.0.1", "fe80::1%lo", "garbage"):
            with pytest.raises(NotAllowed):
                posted(receiver.port, options_for(receiver.port), ["127.0.0.1", second])
        assert receiver.received == []


def test_a_resolver_that_changes_its_mind_leads_nowhere_else() -> None:
    """The host is resolved once; the connection goes to the address that was checked."""
    with CallbackReceiver() as receiver:
        # A second question would get an address that nobody answers at, or fail.
        assert posted(receiver.port, options_for(receiver.port), ["127.0.0.1"], ["10.255.255.1"]) == 204
        assert len(receiver.received) == 1


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """The name means another address here, as it would after a rebinding: nobody listens at it."""
    with CallbackReceiver() as receiver:
        read = read_options(f"http://rebound.invalid:{receiver.port}", LOCAL)
        target = read.target(f"http://rebound.invalid:{receiver.port}/")
        assert send(target, b"{}", {}, read, lambda host, port: ["127.0.0.1"]) == 204
        assert receiver.received[0].headers["host"] == f"rebound.invalid:{receiver.port}"


def test_the_next_address_is_tried_if_one_refuses_the_connection() -> None:
    with CallbackReceiver() as receiver:
        assert posted(receiver.port, options_for(receiver.port), ["127.0.0.2", "127.0.0.1"]) == 204


def test_a_redirect_is_not_followed() -> None:
    with CallbackReceiver() as elsewhere, CallbackReceiver(answer=302) as receiver:
        receiver.answer_headers["Location"] = elsewhere.url
        assert posted(receiver.port, options_for(receiver.port)) == 302
        assert elsewhere.received == []


def test_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with CallbackReceiver() as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        assert posted(receiver.port, options_for(receiver.port)) == 204


def test_a_host_that_nobody_knows_or_that_is_down_takes_nothing() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    with pytest.raises(NotTaken, match="refused"):
        posted(port, options_for(port))
    with pytest.raises(NotTaken, match="cannot be resolved"):
        posted(port, options_for(port), [])
    with pytest.raises(socket.gaierror):
        resolved("no-such-host.invalid", 443)


@contextmanager
def raw_server(answer: bytes, *, pause: float = 0.0) -> Iterator[int]:
    """Answer each connection with these bytes, one after the other with a pause, and keep it open."""
    stopping = threading.Event()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(0.05)

        def serve() -> None:
            kept = []
            while not stopping.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                kept.append(connection)
                for index in range(len(answer)):
                    if stopping.wait(pause):
                        break
                    try:
                        connection.sendall(answer[index : index + 1])
                    except OSError:
                        break
            for connection in kept:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stopping.set()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "pause"),
    [
        (b"", 0.0),  # no answer at all
        (b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 80, 0.05),  # headers that drip
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 100, 0.01),
    ],
)
def test_a_slow_receiver_ends_at_the_time_limit(answer: bytes, pause: float) -> None:
    with raw_server(answer, pause=pause) as port:
        begun = time.monotonic()
        with pytest.raises(NotTaken, match="in time"):
            posted(port, options_for(port, timeout=0.5))
        assert 0.4 < time.monotonic() - begun < 20


def test_a_slow_handshake_ends_at_the_time_limit() -> None:
    with raw_server(b"") as port, pytest.raises(NotTaken, match="in time"):
        posted(port, options_for(port, timeout=0.5, scheme="https"))


def test_a_slow_resolver_ends_at_the_time_limit() -> None:
    release = threading.Event()
    options = options_for(9, timeout=0.3)
    try:
        with pytest.raises(NotTaken, match="cannot be resolved"):
            send(options.target("http://localhost:9/"), b"", {}, options, lambda host, port: [str(release.wait(60))])
    finally:
        release.set()


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500 + b"\r\n", b"\0" * 70_000]
)
def test_what_is_no_answer_is_not_quoted(answer: bytes) -> None:
    with raw_server(answer) as port:
        with pytest.raises(NotTaken) as failed:
            posted(port, options_for(port, timeout=5.0))
        assert "SSH" not in str(failed.value)


def test_a_long_answer_is_not_read_to_its_end() -> None:
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 20_000) as port:
        assert posted(port, options_for(port, timeout=10.0)) == 200


@pytest.mark.parametrize(("name", "is_taken"), [("localhost", True), ("other.example", False)])
def test_the_certificate_must_be_that_of_the_host(
    name: str, *, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    with CallbackReceiver() as receiver:
        receiver._server.socket = context.wrap_socket(receiver._server.socket, server_side=True)
        options = options_for(receiver.port, scheme="https")
        if is_taken:
            assert posted(receiver.port, options) == 204
        else:
            with pytest.raises(NotTaken, match="certificate was refused"):
                posted(receiver.port, options)
            assert receiver.received == []
