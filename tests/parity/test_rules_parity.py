"""Every pure rule and its server-side twin say the same of every document."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtask.kernel.document import rules
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.task import Task
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import rules as twins
from tests.mongo import Client
from tests.oracles import rules as oracle
from tests.parity.cases import NOW, SCALE, WORKERS, Document, instant, many, option, parsed, task, whole

_WORKER, _NOW = "$probe.worker_id", "$probe.now"
#: The same rules on both sides: (of the task, worker_id and now; as an expression).
Rule = tuple[Callable[[Task, str, Any], Any], Any]


def _run_ids(runs: Any) -> Any:
    return {"$map": {"input": runs, "as": "run", "in": "$$run.run_id"}}


RULES: dict[str, Rule] = {
    "is_waiting": (lambda t, w, now: rules.is_waiting(t), x.is_waiting()),
    "succeeded_workers": (lambda t, w, now: sorted(rules.succeeded_workers(t)), twins.succeeded_workers()),
    "live_runs": (lambda t, w, now: [r.run_id for r in rules.live_runs(t, now)], _run_ids(twins.live_runs(_NOW))),
    "failures": (lambda t, w, now: rules.failures(t, now), twins.failures(_NOW)),
    "worker_failures": (rules.worker_failures, twins.worker_failures(_WORKER, _NOW)),
    "is_worker_exhausted": (rules.is_worker_exhausted, twins.is_worker_exhausted(_WORKER, _NOW)),
    "is_exhausted": (lambda t, w, now: rules.is_exhausted(t, now), twins.is_exhausted(_NOW)),
    "status": (lambda t, w, now: rules.status(t, now).value, twins.status(_NOW)),
    "has_free_seat": (lambda t, w, now: rules.has_free_seat(t, now), twins.has_free_seat(_NOW)),
    "is_admitted": (lambda t, w, now: rules.is_admitted(t, w), twins.is_admitted(_WORKER)),
    "due_time": (lambda t, w, now: rules.due_time(t), twins.due_time()),
    "retry_time": (lambda t, w, now: rules.retry_time(t, w), twins.retry_time(_WORKER)),
    "is_candidate": (rules.is_candidate, twins.is_candidate(_WORKER, _NOW)),
    "may_take": (rules.may_take, twins.may_take(_WORKER, _NOW)),
    "is_expired": (lambda t, w, now: rules.is_expired(t, now), twins.is_expired(_NOW)),
    "next_preempt_time": (lambda t, w, now: oracle.next_preempt_time(t, now), twins.next_preempt_time(_NOW)),
    "free_seat_times": (lambda t, w, now: oracle.free_seat_times(t, now), twins.free_seat_times(_NOW)),
    "is_interrupted": (lambda t, w, now: rules.is_interrupted(t, now), twins.is_interrupted(_NOW)),
    "kept_runs": (lambda t, w, now: oracle.kept_runs(t), twins.kept_runs()),
}

_properties = settings(max_examples=12 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
#: A task, who looks at it, and when.
Case = tuple[Document, str, datetime]


def case(random: Random) -> Case:
    return task(random), random.choice([*WORKERS, "stranger"]), instant(random)


def evaluated(client: Client, documents: list[Document], expressions: dict[str, Any]) -> list[Document]:
    """Return the expressions' values for each document, in order, in one round trip."""
    computed = {"_id": 0, **{name: {"value": expression} for name, expression in expressions.items()}}
    with client.admin.aggregate([{"$documents": {"$literal": documents}}, {"$project": computed}]) as cursor:
        return cursor.to_list()


@_properties
@given(many(case, 150))
def test_every_rule_and_its_twin_agree(mongo_session_client: Client, cases: list[Case]) -> None:
    probes = [document | {"probe": {"worker_id": worker, "now": now}} for document, worker, now in cases]
    answers = evaluated(mongo_session_client, probes, {name: twin for name, (_, twin) in RULES.items()})
    assert len(answers) == len(cases)
    for (document, worker, now), answer in zip(cases, answers, strict=True):
        parsed_task = parsed(document)
        for name, (rule, _) in RULES.items():
            said = answer[name].get("value")
            if name == "succeeded_workers":
                said = sorted(said)
            expected = rule(parsed_task, worker, now)
            told = f"{name}, for {worker} at {now}: the server says {said!r}, the rule {expected!r}, of {document}"
            assert said == expected, told
            assert type(said) is type(expected), told


def delay_case(random: Random) -> tuple[Document, int, float]:
    failures = random.choice([random.randint(0, 70), random.randint(0, 70), 1000, 2**31, 2**40])
    jitter = random.choice([0.0, 0.5, 1.0, random.random(), random.random(), random.random()])
    return option(random, is_ordinary=False), failures, jitter


@_properties
@given(many(delay_case, 150))
def test_retry_delay_is_the_same_to_the_millisecond_on_both_sides(
    mongo_session_client: Client, cases: list[tuple[Document, int, float]]
) -> None:
    probes = [{"task_option": given, "probe": {"failures": f, "jitter": j}} for given, f, j in cases]
    twin = twins.retry_delay_ms("$probe.failures", "$probe.jitter")
    answers = evaluated(mongo_session_client, probes, {"delay": twin})
    for (given_option, failures, jitter), answer in zip(cases, answers, strict=True):
        expected = oracle.retry_delay_ms(TaskOption.model_validate(given_option), failures, jitter)
        assert answer["delay"]["value"] == expected, f"after {failures} failures, jitter {jitter}, {given_option}"


@settings(max_examples=200 * SCALE, deadline=None)
@given(st.floats(1, 1000), st.integers(0, 10**9), st.integers(1, 12), st.floats(0, 1))
def test_retry_delay_grows_up_to_its_limit(backed: float, base: int, failures: int, jitter: float) -> None:
    bounded = TaskOption(unexpected_retry_delay_ms=base, retry_backoff=backed, retry_max_delay_ms=10**8)
    delay = oracle.retry_delay_ms(bounded, failures, jitter)
    assert 0 <= delay <= 10**8
    assert oracle.retry_delay_ms(bounded, failures + 1, jitter) >= delay


def probed(random: Random) -> tuple[Document, str, list[datetime]]:
    moments = [NOW + timedelta(milliseconds=whole(random, 0, 130_000)) for _ in range(random.randint(0, 5))]
    return task(random), random.choice([*WORKERS, "stranger"]), moments


@_properties
@given(many(probed, 60))
def test_preemptable_at_is_the_first_moment_at_which_a_claim_succeeds(
    cases: list[tuple[Document, str, list[datetime]]],
) -> None:
    millisecond = timedelta(milliseconds=1)
    for document, worker, moments in cases:
        parsed_task = parsed(document)
        state = parsed_task.task_state
        edges = [NOW, state.start_time or NOW, *(r.ping_expire_time for r in parsed_task.runs)]
        edges += [] if state.not_after is None else [state.not_after]
        edges += [r.retry_time for r in parsed_task.runs if r.retry_time is not None]
        around = [m for edge in [*edges, *moments] for m in (edge - millisecond, edge, edge + millisecond) if m >= NOW]
        first = rules.preemptable_at(parsed_task, worker, NOW)
        if first is not None:
            assert first >= NOW, document
            assert rules.is_claimable(parsed_task, worker, first), document
        for moment in around:
            if rules.is_claimable(parsed_task, worker, moment):
                assert first is not None, document
                assert first <= moment, document


@_properties
@given(many(case, 60))
def test_next_preempt_time_never_hides_a_task_that_someone_may_take(cases: list[Case]) -> None:
    for document, worker, moment in cases:
        later = max(moment, NOW + (NOW - moment))
        parsed_task = parsed(document)
        written = oracle.next_preempt_time(parsed_task, NOW)
        if rules.may_take(parsed_task, worker, later):
            assert written is not None, document
            assert written <= later, document
