"""Which tenant and key belong together: the model and the server agree."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from pymongo.errors import WriteError

from mtask.database import setup
from mtask.database.schema import misfits
from mtask.errors import MtaskError
from mtask.kernel.document.identity import check_tenant, is_key_of, own_key, stored_key
from mtask.kernel.document.task import Task
from mtask.kernel.driver.stores import SyncStore
from tests import build
from tests.mongo import Client as Mongo

_NOW = datetime(2026, 1, 1, tzinfo=UTC)
_WORDS = st.text("ab.-_: \né\x00", max_size=4)
_TENANTS: st.SearchStrategy[Any] = st.one_of(
    st.none(), _WORDS, st.sampled_from(["acme", "a" * 64, "a" * 65, "a\n"]), st.integers(0, 1), st.just(["a"])
)


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[Any, str]:
    tenant = draw(_TENANTS)
    prefix = draw(st.sampled_from([f"{tenant}:", f"{tenant}", "", "b:"])) if isinstance(tenant, str) else ""
    return tenant, (prefix + draw(_WORDS)) or "k"


def document(tenant: Any, key: str) -> dict[str, Any]:
    return build.task(f"task:{key}", time=_NOW, **({} if tenant is None else {"tenant": tenant}))


def test_server_and_model_take_the_same_tenants_and_keys(store: SyncStore, mongo: Mongo, database_name: str) -> None:
    store.run(setup.ensure())
    tasks = mongo[database_name]["tasks"]

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(_pairs())
    def check(pair: tuple[Any, str]) -> None:
        made = document(*pair)
        tasks.delete_many({})
        try:
            tasks.insert_one(made)
        except WriteError:
            is_taken = False
        else:
            # What JSON Schema cannot say, the doctor finds: a line break at the end, for example.
            is_taken = tasks.count_documents(misfits()) == 0
        try:
            Task.model_validate(made)
        except ValidationError:
            is_read = False
        else:
            is_read = True
        assert is_taken == is_read, pair

    check()


@given(_WORDS, _WORDS)
def test_stored_key_tells_the_tenant_and_the_own_key(tenant: str, key: str) -> None:
    try:
        stored = stored_key(check_tenant(tenant), key)
    except MtaskError:
        return
    assert is_key_of(tenant, stored)
    assert own_key(tenant, stored) == key
    assert stored.partition(":")[0] == tenant


@pytest.mark.parametrize("tenant", ["", "a:b", "a b", "é", "a\n", "a" * 65, None, 7, b"a"])
def test_wrong_tenant_is_refused_with_advice(tenant: Any) -> None:
    with pytest.raises(MtaskError, match="use 1 to 64 letters"):
        check_tenant(tenant)
