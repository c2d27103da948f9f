"""Mutations of what holds work back: expiry, pauses that end, rate limits and breakers."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_RULES = "mtask/kernel/document/rules.py"
_TWINS = "mtask/kernel/statements/rules.py"
_CLAIM = "mtask/kernel/statements/claim.py"
_PUBLISH = "mtask/kernel/statements/publish.py"
_CONTROLS = "mtask/features/controls/worker.py"
_CONTROL_WRITES = "mtask/features/controls/operations.py"
_BREAKER = "mtask/features/breaker/worker.py"
_BREAKER_RULES = "mtask/features/breaker/rules.py"
_BREAKER_WRITES = "mtask/features/breaker/operations.py"

_EXPIRY_TESTS = "tests/integration/kernel/worker/running/test_expiry.py"
_PARITY = "tests/parity/test_rules_parity.py::test_every_rule_and_its_twin_agree"
_PAUSES = "tests/integration/features/controls/test_pauses.py"
_BREAKERS = "tests/integration/features/breaker/test_breakers.py"
_BETWEEN = f"{_EXPIRY_TESTS}::test_task_that_expires_between_its_discovery_and_its_claim_never_starts"
_LATE_FAIL = f"{_EXPIRY_TESTS}::test_task_that_expires_in_its_retry_delay_ends_as_fail_with_its_reason"
_LIMITED = f"{_PAUSES}::test_rate_limited_run_goes_back_uncounted_and_holds_back_its_scope"
_PROBES = f"{_BREAKERS}::test_breaker_opens_for_all_probes_one_task_at_a_time_and_closes_with_a_success"
_DIED = f"{_BREAKERS}::test_another_worker_makes_the_probe_of_one_that_has_died"
_ITSELF = f"{_BREAKERS}::test_what_lies_in_the_task_itself_opens_no_breaker_and_resume_closes_one"

HOLDING_MUTATIONS = (
    # --- expiry ---------------------------------------------------------------------------------------------
    Mutation(
        "expired-task-claimed-as-simple",
        "A task that has expired since it was found starts by the short statement.",
        (Edit(_CLAIM, "unbegun", '{"$not": [rules.is_expired(now)]},', ""),),
        (_BETWEEN,),
    ),
    Mutation(
        "expired-task-taken",
        "The server takes a task that has expired.",
        (Edit(_TWINS, "may_take", '{"$not": [is_expired(now)]},', ""),),
        (_PARITY,),
    ),
    Mutation(
        "expired-task-forgotten",
        "A task that has expired is left to nobody: it stays INIT.",
        (Edit(_RULES, "is_claimable", "is_over = is_expired(task, now) and", "is_over = False and"),),
        (_LATE_FAIL,),
    ),
    Mutation(
        "expiry-waits-for-the-retry",
        "A task that expires in its retry delay ends only after the delay.",
        (Edit(_TWINS, "derived", '[f"{STATE}.not_after"]', "[]"),),
        (_LATE_FAIL, _PARITY),
    ),
    Mutation(
        "retry-of-an-expired-task-expires",
        "Who retries an expired task gets it back expired.",
        (Edit(_PUBLISH, "run_again", '"task_state.not_after": "$$REMOVE",', ""),),
        (_BETWEEN,),
    ),
    # --- pauses and rates -----------------------------------------------------------------------------------
    Mutation(
        "pause-never-ends",
        "Nobody notices that a pause is over.",
        (Edit(_CONTROLS, "Controls._time_ends", "max(0.0, wait) + _TICK", "86_400.0"),),
        (f"{_PAUSES}::test_pause_that_ends_by_itself_ends_without_a_write_and_not_before",),
    ),
    Mutation(
        "pause-ends-at-once",
        "A pause that ends holds nothing.",
        (Edit("mtask/features/controls/rules.py", "Control.at", "self.until <= now", "True"),),
        (f"{_PAUSES}::test_pause_that_ends_by_itself_ends_without_a_write_and_not_before",),
    ),
    Mutation(
        "rate-limit-of-a-key-holds-nothing",
        "The tasks of a limit_key that waits are claimed.",
        (Edit(_CONTROLS, "Controls.guard", "self._limited_keys.items()", "()"),
         Edit(_CONTROLS, "Controls.skips", "keys is not None", "False")),
        (_LIMITED,),
    ),
    Mutation(
        "rate-limit-never-written",
        "A RateLimited holds back its own task alone.",
        (Edit(_CONTROLS, "Controls.ended", "self._ask.set()", ""),),
        (_LIMITED,),
    ),
    # --- breakers -------------------------------------------------------------------------------------------
    Mutation(
        "breaker-lets-all-pass",
        "An open breaker holds nothing back.",
        (Edit(_BREAKER, "Breakers.guard", "self._controls.opened.values()", "()"),
         Edit(_BREAKER, "Breakers.skips", "self._controls.opened.items()", "()")),
        (_PROBES,),
    ),
    Mutation(
        "breaker-wait-not-doubled",
        "A probe that fails is repeated after the same wait.",
        (Edit(_BREAKER_WRITES, "reopen", '["$opened.wait_ms", 2]', '["$opened.wait_ms", 1]'),),
        (_PROBES,),
    ),
    Mutation(
        "breaker-of-a-dead-worker-stays",
        "If the worker that opened a breaker has died, nobody makes a probe.",
        (Edit(_BREAKER_RULES, "may_probe", "or now >= opened.held_until", ""),),
        (_DIED,),
    ),
    Mutation(
        "probe-taken-from-a-live-worker",
        "Another worker makes the probe at once, although the one that opened the breaker lives.",
        (Edit(_BREAKER_RULES, "may_probe", "or now >= opened.held_until", "or True"),
         Edit(_BREAKER_RULES, "probe_time", "max(opened.until, opened.held_until)", "opened.until"),
         Edit(_BREAKER_WRITES, "take_probe", '{"$lte": ["$opened.held_until", x.NOW]}', "True")),
        (_DIED,),
    ),
    Mutation(
        "fail-opens-a-breaker",
        "Tasks that are wrong themselves hold back all others.",
        (Edit(_BREAKER_RULES, "verdict", "and not outcome.is_verdict", ""),),
        (_ITSELF,),
    ),
)  # fmt: skip
