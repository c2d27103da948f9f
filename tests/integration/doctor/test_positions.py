"""The count of due tasks ahead is that of the pure rule, and examines a bounded number of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtask.doctor import position as positions
from mtask.doctor.position import Ahead, Standing
from mtask.kernel.document import rules
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import Task
from mtask.kernel.driver.stores import SyncStore
from tests import build
from tests.explaining import examined_by
from tests.oracles.rules import is_ahead

Document = dict[str, Any]
NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
OPTION = TaskOption().stored()


def document(
    number: int,
    *,
    queue: str = "mail",
    name: str = "send",
    workers: tuple[str, ...] = (),
    priority: int = 0,
    due: int | None = 0,
    status: str = "INIT",
    tenant: str | None = None,
    runs: str = "",
) -> Document:
    """Return a task; `due`: the seconds from now until it is due. None: it has finished.

    `runs`: letters for its runs, the oldest first; see `run`.
    """
    key = f"{number:06}" if tenant is None else f"{tenant}:{number:06}"
    made = build.task(
        f"{name}:{key}",
        *(run(letter, place) for place, letter in enumerate(runs)),
        time=NOW + timedelta(seconds=due or 0),
        option={"priority": priority, "specific_worker_ids": list(workers)},
        state={"status": "SUCCESS" if due is None else status, "create_time": NOW - timedelta(hours=1)},
        queue=queue,
        **({} if tenant is None else {"tenant": tenant}),
    )
    if due is None:
        del made["task_state"]["next_preempt_time"]
    return made


def run(letter: str, place: int) -> Document:
    """Return a run: live (R), lapsed (L), closed as TIMEOUT (T), handed back (H), tried again later (C), failed (F).

    A small letter is a run of an earlier round. Each run was claimed after the end of the one before.
    """
    claimed = NOW - timedelta(seconds=600 - 10 * place)
    states = {"R": "RUNNING", "L": "RUNNING", "T": "TIMEOUT", "H": "CANCELED", "C": "CANCELED", "F": "FAIL"}
    lease_end = NOW + timedelta(seconds=60 if letter == "R" else -30)
    made = build.run(states[letter.upper()], claimed, lease_end, place + 1, run_id=f"r-{place}")
    if letter.upper() not in "RL":
        made["fail_time"] = claimed + timedelta(seconds=5)
    if letter.upper() in "CF":
        made["retry_time"] = claimed + timedelta(seconds=6)
    return made | ({"past": True} if letter.islower() else {})


def standing_of(subject: Mapping[str, Any], names: list[str] | None = None, *, is_fair: bool = False) -> Standing:
    task = Task.model_validate(subject)
    workers = task.task_option.specific_worker_ids
    return Standing(task.id, task.queue, workers, rules.rank(task, NOW), names, task.tenant, is_fair)


def brute_force(
    backlog: list[Document], subject: Document, names: list[str] | None = None, *, is_fair: bool = False
) -> int:
    task = Task.model_validate(subject)
    return sum(is_ahead(Task.model_validate(other), task, names, NOW, is_fair=is_fair) for other in backlog)


def fill(store: SyncStore, backlog: list[Document]) -> None:
    store.tasks.delete_many({})
    if backlog:
        store.database.get_collection("tasks").insert_many(backlog, bypass_document_validation=True)


_WORKERS = st.sampled_from([(), (), (), ("w1",), ("w2",), ("w1", "w2"), ("w3", "w1", "w2")])
_TASK: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "queue": st.sampled_from(["mail", "mail", "mail", "other"]),
        "name": st.sampled_from(["send", "send", "index"]),
        "workers": _WORKERS,
        "priority": st.sampled_from([-5, 0, 0, 1, 2, 30, 100_000]),
        "due": st.sampled_from([-60, -60, -60, -1, 0, 1, 60, None]),
        "status": st.sampled_from(["INIT", "INIT", "RUNNING"]),
        "runs": st.sampled_from(["", "", "", "H", "L", "T", "C", "F", "h", "t", "HR", "TF", "TH", "FL"]),
        "tenant": st.sampled_from([None, None, "a", "b"]),
    }
)
_BACKLOG = st.lists(_TASK, min_size=1, max_size=40).map(
    lambda drawn: [document(number, **fields) for number, fields in enumerate(drawn)]
)
_NAMES = st.sampled_from([None, None, ["send"], ["index", "send"]])
_real = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@_real
@given(backlog=_BACKLOG, names=_NAMES, is_fair=st.booleans())
def test_count_ahead_is_that_of_the_pure_rule(
    module_store: SyncStore, backlog: list[Document], names: list[str] | None, is_fair: bool
) -> None:
    fill(module_store, backlog)
    for subject in [one for one in backlog if "next_preempt_time" in one["task_state"]][:8]:
        standing = standing_of(subject, names, is_fair=is_fair)
        found = module_store.run(positions.count_ahead(standing, NOW))
        assert (found.count, found.is_more) == (brute_force(backlog, subject, names, is_fair=is_fair), False)


@_real
@given(backlog=_BACKLOG, names=_NAMES, keys=st.sampled_from([60, 80, 120]))
def test_count_that_stops_says_so_and_never_counts_too_many_or_examines_more(
    module_store: SyncStore, backlog: list[Document], names: list[str] | None, keys: int
) -> None:
    fill(module_store, backlog)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"KEYS": keys, "_SEEKS": keys // 3, "_RESERVE": 0}.items():
            patch.setattr(positions, name, value)
        for subject in [one for one in backlog if "next_preempt_time" in one["task_state"]][:4]:
            operation = positions.count_ahead(standing_of(subject, names), NOW)
            found, examined = examined_by(module_store, operation)
            wanted = brute_force(backlog, subject, names)
            assert found.count <= wanted
            if not found.is_more:  # but for what was handed back, and lies far behind in the order of priorities
                assert found.count >= wanted - sum(is_handed_back(other) for other in backlog)
            assert sum(each.keys for each in examined) <= keys


def is_handed_back(task: Document) -> bool:
    made = Task.model_validate(task)
    return made.status is TaskStatus.INIT and rules.is_interrupted(made, NOW)


MANY, LAST = 12_000, 1_000_000
TEN = tuple(f"w{number}" for number in range(10))
Backlog = Callable[[int], Document]
#: How the many tasks of a backlog look, the task whose position is asked, and what is found; None: nearly the limit.
BACKLOGS: dict[str, tuple[Backlog, Document, Ahead | None]] = {
    "due longer": (lambda n: document(n, due=-60), document(LAST, due=-1), None),
    "due at the same instant": (lambda n: document(n, due=-1), document(LAST, due=-1), None),
    "of a higher priority": (lambda n: document(n, priority=n % 7 + 1), document(LAST), None),
    "of a higher priority, most due later": (
        lambda n: document(n, priority=n % 7 + 1, due=-5 if n % 10 == 0 else 60),
        document(LAST),
        Ahead(MANY // 100, False, frozenset({"send"})),
    ),
    "each of a priority of its own": (lambda n: document(n, priority=n * 1_000 + 1), document(LAST), None),
    "each of a priority of its own, due later": (
        lambda n: document(n, priority=n + 1, due=60),
        document(LAST),
        Ahead(0, True, frozenset()),
    ),
    "of another name": (lambda n: document(n, name="index", priority=1), document(LAST), Ahead(0, True, frozenset())),
    "for other workers": (
        lambda n: document(n, workers=("w9", "w8"), priority=1),
        document(LAST),
        Ahead(0, False, frozenset()),
    ),
    "for the same ten workers": (
        lambda n: document(n, workers=TEN, priority=1),
        document(LAST, workers=TEN),
        Ahead(800, True, frozenset({"send"})),
    ),
    "whose runs have lapsed, of a lower priority": (
        lambda n: document(n, priority=-1, status="RUNNING", runs="L"),
        document(LAST),
        Ahead(1, True, frozenset({"send"})),
    ),
    "of which the oldest were handed back, of a lower priority": (
        lambda n: document(n, priority=-1, due=-60 if n < 5 else -1, runs="H" if n < 5 else ""),
        document(LAST),
        Ahead(5, False, frozenset({"send"})),
    ),
    "of which one was handed back, before an interrupted task": (
        lambda n: document(n, priority=1, runs="H" if n == 5 else ""),
        document(LAST, runs="H"),
        Ahead(1, True, frozenset({"send"})),
    ),
    "of a lower priority, due later, or in another queue": (
        lambda n: [
            document(n, priority=-1, due=-60),
            document(n, due=60),
            document(n, queue="other", priority=5, due=-60),
        ][n % 3],
        document(LAST),
        Ahead(0, False, frozenset()),
    ),
}


@pytest.mark.parametrize("kind", ["due longer", "each of a priority of its own, due later", "for the same ten workers"])
def test_position_in_a_long_backlog_examines_at_most_ten_thousand_keys(module_store: SyncStore, kind: str) -> None:
    assert positions.KEYS == 10_000
    check_position(module_store, kind, 1)


# With ten workers most of a tenth of the limit goes into seeks.
@pytest.mark.parametrize("kind", [kind for kind in BACKLOGS if "ten workers" not in kind])
def test_position_in_a_backlog_beyond_the_limit_examines_at_most_that_many_keys(
    module_store: SyncStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in ("KEYS", "_SEEKS", "_RESERVE"):
        monkeypatch.setattr(positions, name, getattr(positions, name) // 10)
    check_position(module_store, kind, 10)


def check_position(store: SyncStore, kind: str, part: int) -> None:
    """Ask for a position in this part of a backlog, with this part of the limit."""
    made, subject, expected = BACKLOGS[kind]
    limit = 10_000 // part
    fill(store, [*map(made, range(MANY // part)), subject])
    names = ["send"] if made(0)["name"] == "index" else None
    operation = positions.count_ahead(standing_of(subject, names), NOW)
    found, examined = examined_by(store, operation)
    _, lately = examined_by(store, positions.finished_lately("mail", ["send", "index"]))
    assert sum(each.keys for each in [*examined, *lately]) <= limit
    assert not {"COLLSCAN", "SORT"} & set().union(*(each.stages for each in [*examined, *lately]))
    if expected is None:
        assert found.is_more
        assert 0.9 * limit <= found.count <= limit
    elif expected.is_more:
        assert found.is_more
        assert expected.count <= found.count <= limit
    else:
        assert found == expected


def test_tenants_that_wait_are_found_with_their_first_tasks(module_store: SyncStore) -> None:
    backlog = [document(n, tenant="flood", due=-1) for n in range(500)]
    backlog += [document(500 + n, tenant=f"t{n:03}", priority=n, due=-n) for n in range(120)]
    backlog += [document(700, tenant="later", due=5), document(701, tenant="over", due=None), document(702)]
    backlog += [document(703, tenant="t001", priority=7), document(704, tenant="elsewhere", queue="other")]
    fill(module_store, backlog)
    found, examined = examined_by(module_store, positions.first_of_tenants("mail", NOW))
    first = {f"t{n:03}": (-n, NOW - timedelta(seconds=n)) for n in range(120)}
    assert found == first | {"flood": (0, NOW - timedelta(seconds=1)), "t001": (-7, NOW)}
    assert sum(each.keys for each in examined) <= 300


def test_tenants_that_are_too_many_are_not_counted(module_store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "TENANT_QUERIES", 3)
    monkeypatch.setattr(positions, "TENANT_KEYS", 5)
    fill(module_store, [document(n, tenant=f"t{n:03}", due=-n) for n in range(15)])
    assert module_store.run(positions.first_of_tenants("mail", NOW)) is None
    fill(module_store, [document(n, tenant=f"t{n:03}", due=-n) for n in range(14)])
    assert len(module_store.run(positions.first_of_tenants("mail", NOW)) or ()) == 14


def test_finishes_of_a_queue_are_read_from_the_newest_tasks_only(module_store: SyncStore) -> None:
    backlog = [document(n, due=None, queue="mail" if n % 2 else "other") for n in range(2_000)]
    for n, one in enumerate(backlog):
        one["task_state"] |= {"create_time": NOW + timedelta(seconds=n), "finish_time": NOW + timedelta(seconds=n + 5)}
    fill(module_store, backlog)
    times, (examined,) = examined_by(
        module_store, positions.finished_lately("mail", ["send", *(f"other-{n}" for n in range(50))])
    )
    assert len(times) == 100
    assert min(times) == NOW + timedelta(seconds=1_801 + 5)
    assert examined.keys <= 400
    assert examined.documents <= 200
