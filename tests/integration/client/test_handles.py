"""Handles: what `publish` and `publish_flow` return, with each kind of client, and calls that handlers make."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from mtask import (
    App,
    AsyncFlowHandle,
    AsyncTaskHandle,
    Child,
    Client,
    Context,
    Flow,
    FlowHandle,
    Next,
    Published,
    PublishedFlow,
    TaskCanceled,
    TaskFailed,
    TaskHandle,
    TaskNotFound,
    TaskSpec,
    WaitTimeout,
    call,
)
from mtask.errors import FlowWaitTimeout, InvalidFlow, InvalidParams, ResultMismatch
from mtask.kernel.driver.stores import SyncStore
from mtask.testing.bench import Bench
from tests.clients import AnyClient, claim, fail, succeed
from tests.mongo import Client as Mongo

app = App()


@dataclass
class Receipt:
    number: int
    cents: int


@app.task(queue="mail", max_retries=0)
async def send_email(context: Context, to: str, subject: str = "hi") -> str:
    return f"{subject} to {to}"


@app.task
def charge(order: int, *, cents: int) -> Receipt:
    return Receipt(order, cents)


@app.task
async def split(context: Context, n: int) -> Next:
    added = [await context.add_child(f"part-{i}", call(charge)(i, cents=n)) for i in range(n)]
    added += await context.add_children([Child("last", call(charge)(n, cents=0), priority=3)])
    assert all(one.created for one in added)
    return Next(call(send_email)("a@b.c", subject="split"), returns=len(added))


def done(client: AnyClient, answer: Any) -> Any:
    """Return the answer of a handle, whatever the kind of its client."""
    return client.runner.run(answer) if inspect.iscoroutine(answer) else answer


def end(store: SyncStore, task_id: str, returns: Any = None) -> None:
    succeed(store, task_id, claim(store, task_id), returns)


# --- the handle of a task -------------------------------------------------------------------------------------


def test_by_call_and_by_handler_make_the_same_document(client: AnyClient, mongo: Mongo, database_name: str) -> None:
    by_call = client.publish(call(send_email)("a@b.c", "news"), key="k", priority=5, lookup={"user": 7})
    stored = mongo[database_name]["tasks"]
    document = stored.find_one_and_delete({"_id": "send_email:k"})
    by_handler = client.publish(send_email, {"to": "a@b.c", "subject": "news"}, key="k", priority=5, lookup={"user": 7})
    other = stored.find_one({"_id": "send_email:k"})
    assert document is not None and other is not None  # noqa: PT018
    for one in (document, other):
        for time in ("create_time", "next_preempt_time"):
            del one["task_state"][time]
    assert document == other
    assert by_call == by_handler == Published("send_email:k", created=True, updated=False)


def test_handle_is_a_published_that_waits_for_its_task(client: AnyClient, store: SyncStore) -> None:
    handle = client.publish(call(charge)(42, cents=700), key="order/42")
    assert type(handle) is (TaskHandle if client.kind == "sync" else AsyncTaskHandle)
    assert (handle.task_id, handle.created, handle.updated) == ("charge:order/42", True, False)
    assert (handle.name, handle.key) == ("charge", "order/42")
    assert done(client, handle.task()).status == "INIT"
    with pytest.raises(WaitTimeout):
        done(client, handle.wait(timeout=0.01))
    end(store, handle.task_id, {"number": 42, "cents": 700})
    assert done(client, handle.wait(timeout=30)).status == "SUCCESS"
    assert done(client, handle.result(timeout=30)) == Receipt(42, 700)
    assert client.result("charge", "order/42") == {"number": 42, "cents": 700}
    assert [task.id for task in client.wait_all([handle])] == [handle.task_id]


def test_handle_of_an_untyped_publish_returns_what_is_stored(client: AnyClient, store: SyncStore) -> None:
    for task in (charge, "charge"):
        handle = client.publish(task, {"order": 1, "cents": 2}, key=f"by {task}"[:10])
        end(store, handle.task_id, {"number": 1, "cents": 2})
        assert done(client, handle.result()) == {"number": 1, "cents": 2}


def test_handle_raises_what_the_client_does(client: AnyClient, store: SyncStore) -> None:
    failed, canceled, odd, gone = (client.publish(call(send_email)("a"), key=key) for key in "fcog")
    fail(store, failed.task_id, claim(store, failed.task_id), "no luck")
    with pytest.raises(TaskFailed, match="no luck"):
        done(client, failed.result())
    assert done(client, canceled.cancel()).status == "CANCELED"
    with pytest.raises(TaskCanceled):
        done(client, canceled.result())
    end(store, odd.task_id, {"not": "text"})
    with pytest.raises(ResultMismatch, match=r"send_email:o ended as SUCCESS.*string"):
        done(client, odd.result())
    assert done(client, odd.wait()).returns == {"not": "text"}
    client.remove(gone.name, gone.key)
    with pytest.raises(TaskNotFound):
        done(client, gone.task())


def test_handle_of_a_task_without_a_key_knows_the_key_that_was_made(client: AnyClient) -> None:
    handle = client.publish(call(send_email)("a"))
    assert client.get("send_email", handle.key).id == handle.task_id


def test_handle_of_a_tenants_client_has_the_key_that_the_tenant_gave(client: AnyClient, store: SyncStore) -> None:
    of_acme = client.for_tenant("acme")
    handle = of_acme.publish(call(send_email)("a"), key="k")
    assert (handle.task_id, handle.key) == ("send_email:acme:k", "k")
    end(store, handle.task_id, "sent")
    assert done(client, handle.result(timeout=30)) == "sent"
    by_all = client.publish(call(send_email)("a"), key="k", tenant="acme")
    assert (by_all.created, by_all.key) == (False, "acme:k")
    assert done(client, by_all.result(timeout=30)) == "sent"


def test_copies_of_a_handle_are_plain(client: AnyClient) -> None:
    handle = client.publish(call(send_email)("a"), key="k")
    plain = Published("send_email:k", created=True, updated=False)
    assert handle == plain
    assert plain == handle
    assert {handle, plain} == {plain}
    assert handle != client.publish(call(send_email)("a"), key="k"), "that one was not created"
    assert asdict(handle) == asdict(plain)
    for copied in (copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
        assert type(copied) is Published
        assert copied == handle
    assert replace(handle, created=False) == Published("send_email:k", created=False, updated=False)
    assert repr(handle) == f"{type(handle).__name__}(task_id='send_email:k', created=True, updated=False)"


def test_call_is_published_in_a_transaction(client: AnyClient) -> None:
    [handle] = client.in_transaction(
        lambda session: client.client.publish(call(send_email)("a"), key="k", session=session)
    )
    assert done(client, handle.task()).params == {"to": "a"}


def test_wrong_arguments_publish_nothing(client: AnyClient) -> None:
    wrong: Any = call(send_email)(to=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="send_email"):
        client.publish(wrong)
    with pytest.raises(InvalidParams, match="send_email"):
        client.publish_many([TaskSpec(call(send_email)("a")), TaskSpec(wrong)])
    assert client.count() == 0


def test_middleware_sees_the_function_and_may_change_the_params(mongo_uri: str, database_name: str) -> None:
    seen: list[Any] = []

    def add_subject(spec: TaskSpec) -> Any:
        seen.append((spec.task, spec.params))
        spec.params = {**spec.params, "subject": "of a middleware"}
        seen.append((yield))

    made = call(send_email)("a")
    with Client(mongo_uri, database=database_name, middleware=(add_subject,)) as client:
        handle = client.publish(made, key="k")
        assert seen == [(send_email, {"to": "a"}), handle]
        assert handle.task().params == {"to": "a", "subject": "of a middleware"}
    assert made.params == {"to": "a"}


# --- many, schedules, flows -----------------------------------------------------------------------------------


def test_many_calls_and_a_schedule(client: AnyClient) -> None:
    client.publish_many([TaskSpec(call(charge)(n, cents=1), key=str(n)) for n in range(3)])
    assert sorted(task.params["order"] for task in client.find(name="charge")) == [0, 1, 2]
    added = client.add_schedule("mail", call(send_email)("a", "b"), timedelta(hours=1), priority=3)
    assert (added.name, added.params, added.queue) == ("send_email", {"to": "a", "subject": "b"}, "mail")


def make_flow(key: str) -> tuple[Flow, Any, Any]:
    flow = Flow(key)
    paid = flow.add("pay", call(charge)(42, cents=700))
    mailed = flow.add("mail", send_email, {"to": "a"}, after=[paid])
    return flow, paid, mailed


def test_flow_handle_has_the_handles_of_its_steps(client: AnyClient, store: SyncStore) -> None:
    flow, paid, mailed = make_flow("checkout/42")
    published = client.publish_flow(flow)
    assert type(published) is (FlowHandle if client.kind == "sync" else AsyncFlowHandle)
    ids = ["charge:checkout/42/pay", "send_email:checkout/42/mail"]
    plain = PublishedFlow("checkout/42", ids, created=True)
    assert published == plain == copy.deepcopy(published) == pickle.loads(pickle.dumps(published))
    assert asdict(published) == asdict(plain)
    assert published.step(paid) == Published(ids[0], created=True, updated=False)
    assert published.step("mail") == published.step(mailed)
    end(store, ids[0], {"number": 42, "cents": 700})
    assert done(client, published.step(paid).result(timeout=30)) == Receipt(42, 700)
    assert done(client, published.step("pay").result()) == Receipt(42, 700)
    assert done(client, published.state()).counts == {"SUCCESS": 1, "WAITING": 1}
    assert done(client, published.cancel()).counts["CANCELED"] == 1
    with pytest.raises(FlowWaitTimeout, match="checkout/42"):  # no worker tells the flow of its end
        done(client, published.wait(timeout=0.01))
    assert not client.publish_flow(flow).step(paid).created


def test_flow_handle_of_a_tenant(client: AnyClient) -> None:
    flow, paid, _ = make_flow("checkout/42")
    published = client.for_tenant("acme").publish_flow(flow)
    assert published.key == "acme:checkout/42"
    assert done(client, published.step(paid).task()).id == "charge:acme:checkout/42/pay"
    assert done(client, published.state()).counts == {"INIT": 1, "WAITING": 1}


def test_flow_handle_knows_only_steps_that_it_has_published(client: AnyClient) -> None:
    flow, _, _ = make_flow("checkout/42")
    published = client.publish_flow(flow)
    _, of_other, _ = make_flow("checkout/43")
    later = flow.add("later", call(charge)(1, cents=1))
    for wrong in (of_other, later, "later", "nothing", 7):
        with pytest.raises(InvalidFlow, match="is no step of it: give what add returned, or its name"):
            published.step(wrong)


def test_handlers_add_children_and_go_on_by_calls(mongo_uri: str, database_name: str) -> None:
    bench = Bench(app, mongo_uri, database_name)
    with bench.client as client:
        flow = Flow("f")
        began = flow.add("split", call(split)(2))
        published = client.publish_flow(flow)
        bench.run()
        assert published.wait(timeout=30).counts == {"SUCCESS": 5}
        assert published.step(began).result() == 3, "what Next returns"
        found = {task.key: (task.name, task.params, task.returns) for task in client.find()}
        assert found["f/part-1"] == ("charge", {"order": 1, "cents": 2}, {"number": 1, "cents": 2})
        assert found["f/last"] == ("charge", {"order": 2, "cents": 0}, {"number": 2, "cents": 0})
        assert found["f/split/next-1"][::2] == ("send_email", "split to a@b.c")
