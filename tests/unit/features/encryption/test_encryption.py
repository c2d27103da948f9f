"""Which data key a task has, and what stands for values that cannot be decrypted."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from bson import ObjectId
from bson.binary import Binary
from bson.int64 import Int64
from hypothesis import given
from hypothesis import strategies as st

from mtask import App, Encryption
from mtask.errors import DecryptionFailed, EncryptionError, InvalidInput, InvalidLookup
from mtask.features.callbacks.allowed import CallbackOptions
from mtask.features.encryption.cipher import canonical, parsed
from mtask.features.encryption.settings import key_names, name_of_key, read_encryption, read_key_file, tenant_of
from mtask.kernel.document.parts import Sealed, is_sealed
from mtask.kernel.driver.codec import Codec, Unreadable
from mtask.kernel.driver.extended_json import extended_exactly
from mtask.parts.worker import WorkerOptions, extended

KEY = b"k" * 96
LOCAL: dict[str, Any] = {"local": {"key": KEY}}


@pytest.mark.parametrize(
    ("key", "tenant"), [("acme:1", "acme"), ("acme:a:b", "acme"), ("plain", None), (":x", None), ("a/b", None)]
)
def test_tenant_is_the_text_before_the_first_colon_of_a_key(key: str, tenant: str | None) -> None:
    assert tenant_of(key) == tenant
    assert key_names(["q"], key) == ([f"tenant:{tenant}"] if tenant else []) + ["queue:q"]


def test_tenant_goes_before_queue_and_named_ones_are_required() -> None:
    assert Encryption(LOCAL).wanted("q", "acme:1") == (None, ["tenant:acme", "queue:q"])
    assert Encryption(LOCAL, tenants=()).wanted("q", "acme:1") == (None, ["queue:q"])
    assert Encryption(LOCAL, queues=["q"]).wanted("q", "acme:1") == ("queue:q", ["tenant:acme"])
    assert Encryption(LOCAL, queues=["q"], tenants=["acme"]).wanted("q", "acme:1") == ("tenant:acme", [])
    assert Encryption(LOCAL, queues=["q"], tenants=["acme"]).wanted("other", "other:1") == (None, [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"kms_providers": {}},
        {"kms_providers": {"local": {"key": b"short"}}},
        {"kms_providers": {"local": {}}},
        {"kms_providers": LOCAL, "key_vault": "nodot"},
        {"kms_providers": LOCAL, "queues": "mail"},
        {"kms_providers": LOCAL, "queues": ["a,b"]},
        {"kms_providers": LOCAL, "tenants": ["a:b"]},
    ],
)
def test_wrong_arguments_are_refused_and_show_no_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as raised:
        Encryption(**wrong)
    assert "kkk" not in str(raised.value)
    assert "kkk" not in repr(Encryption(LOCAL))


def test_key_file_holds_96_bytes_or_their_base64(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for content in (KEY, base64.b64encode(KEY), base64.b64encode(KEY) + b"\n"):
        path.write_bytes(content)
        assert read_key_file(path) == KEY
    path.write_bytes(b"secret-but-short")
    with pytest.raises(InvalidInput, match="holds 16 bytes") as raised:
        read_key_file(path)
    assert "secret" not in str(raised.value)
    with pytest.raises(InvalidInput, match="No such file"):
        read_key_file(tmp_path / "none")
    with pytest.raises(InvalidInput, match="give --encryption-key-file"):
        read_encryption(None, None, "mail", None)
    assert read_encryption(None, None, None, None) is None


@pytest.mark.parametrize("wrong", [(None, None), ("q", "t"), (None, "a:b"), ("", None), (None, "")])
def test_name_of_a_data_key_is_that_of_a_queue_or_of_a_tenant(wrong: tuple[Any, Any]) -> None:
    assert (name_of_key("q", None), name_of_key(None, "t")) == ("queue:q", "tenant:t")
    with pytest.raises(InvalidInput):
        name_of_key(*wrong)


VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.integers(-(2**63), 2**63 - 1),
    st.uuids(),
    st.binary(min_size=12, max_size=12).map(ObjectId),
    st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)).map(  # noqa: DTZ001 a zone is added
        lambda moment: moment.replace(microsecond=moment.microsecond // 1000 * 1000, tzinfo=UTC)
    ),
)


@given(VALUES)
def test_lookup_is_encrypted_as_a_text_that_gives_the_value_back(value: Any) -> None:
    assert parsed("n", canonical("n", value)) == value
    with pytest.raises(EncryptionError):
        parsed("other", canonical("n", value))


def test_equal_lookups_of_different_types_have_equal_texts() -> None:
    assert canonical("n", 7) == canonical("n", Int64(7)) != canonical("n", "7")
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert canonical("n", noon) == canonical("n", noon.astimezone(timezone(timedelta(hours=3))))
    assert canonical("n", UUID(int=1)) != canonical("n", str(UUID(int=1)))


@pytest.mark.parametrize("refused", [True, 1.5, {"a": 1}, b"x"])
def test_lookup_that_has_no_canonical_text_is_refused(refused: Any) -> None:
    with pytest.raises(InvalidLookup, match="cannot be looked up encrypted"):
        canonical("n", refused)


def test_sealed_value_is_a_text_to_show_and_an_error_to_use() -> None:
    sealed = Sealed(b"x" * 30, "no key", "a:b", "params")
    assert (str(sealed), json.dumps(extended_exactly({"params": sealed}))) == (
        "(encrypted)",
        '{"params": "(encrypted)"}',
    )
    with pytest.raises(DecryptionFailed, match=r"params of task 'a:b' cannot be decrypted: no key\."):
        sealed["to"]
    with pytest.raises(DecryptionFailed):
        sealed.get("to")
    assert is_sealed(Binary(b"x" * 30, 6))
    assert not any(map(is_sealed, [Binary(b"x" * 30, 0), Binary(b"x", 6), b"x" * 30, "text", None]))


def test_worker_gets_the_keys_of_its_app_unless_it_has_its_own_also_if_it_delivers_callbacks() -> None:
    of_app, own = Encryption(LOCAL), Encryption(LOCAL, key_vault="own.keys")
    callbacks = CallbackOptions([])
    for features in ([], [callbacks]):
        for keys, wanted in ((None, of_app), (own, own)):
            options = WorkerOptions("mongodb://host", "mtask", features=features, encryption=keys)
            assert extended(App(encryption=of_app), options)[1].encryption is wanted
    assert extended(App(), WorkerOptions("mongodb://host", "mtask"))[1].encryption is None


def test_plain_codec_leaves_encrypted_tasks_to_other_workers() -> None:
    codec, heard = Codec(), list[Any]()
    codec.on_unreadable = lambda *told: heard.append(told)
    closed = Sealed(b"x" * 30)
    readable: Any = SimpleNamespace(sealed=None, params={"calls": [1]})
    tasks: list[Any] = [
        SimpleNamespace(sealed="queue:q", params=None),
        SimpleNamespace(sealed=None, params=closed),
        SimpleNamespace(sealed=None, params={"calls": [1, closed]}),
    ]
    with pytest.raises(StopIteration) as ended:
        next(codec.open_claimed([readable, *tasks]))
    assert [type(problem) for problem in ended.value.value] == [type(None), *[Unreadable] * 3]
    assert [task for task, _ in heard] == tasks
