"""Signatures of Standard Webhooks."""

from __future__ import annotations

import pytest

from mtask.errors import InvalidInput
from mtask.features.callbacks.signatures import headers_of, is_genuine, read_secret, signature, write_secret

#: The example of the specification's own libraries.
SECRET, ID, TIMESTAMP = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_signature_is_that_of_the_specification() -> None:
    assert signature(read_secret(SECRET), ID, TIMESTAMP, BODY) == SIGNATURE
    assert write_secret(read_secret(SECRET)) == SECRET


def test_a_message_is_genuine_if_it_was_signed_with_the_secret_and_lately() -> None:
    secret = read_secret(SECRET)
    headers = headers_of(secret, ID, TIMESTAMP, BODY)
    assert is_genuine(secret, headers, BODY, TIMESTAMP + 299)
    several = {**headers, "webhook-signature": f"v1,AAAA {SIGNATURE} v1a,BBBB"}
    assert is_genuine(secret, several, BODY, TIMESTAMP)
    assert not is_genuine(secret, headers, BODY, TIMESTAMP + 301)
    assert not is_genuine(secret, headers, BODY, TIMESTAMP - 301)
    assert not is_genuine(secret, headers, BODY + b" ", TIMESTAMP)
    assert not is_genuine(b"x" * 24, headers, BODY, TIMESTAMP)
    for name, value in (("webhook-id", "msg_other"), ("webhook-timestamp", str(TIMESTAMP + 1))):
        assert not is_genuine(secret, {**headers, name: value}, BODY, TIMESTAMP)
        assert not is_genuine(secret, {n: v for n, v in headers.items() if n != name}, BODY, TIMESTAMP)
    assert not is_genuine(secret, {**headers, "webhook-timestamp": "soon"}, BODY, TIMESTAMP)
    assert not is_genuine(secret, {**headers, "webhook-signature": "v1,é"}, BODY, TIMESTAMP)


@pytest.mark.parametrize(
    "wrong", ["", "c2VjcmV0", "whsec_", "whsec_c2hvcnQ=", "whsec_!!!!", "whsec_é", "whsec_" + "A" * 200]
)
def test_what_is_no_secret_is_refused_and_not_quoted(wrong: str) -> None:
    with pytest.raises(InvalidInput, match="whsec_ and 24 to 64") as refused:
        read_secret(wrong)
    assert len(wrong) <= len("whsec_") or wrong not in str(refused.value)
