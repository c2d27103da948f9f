"""Mutations of safe rollouts: what is handed on, which tasks a worker leaves to others, and the steps of upcasts."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_RULES = "mtask/features/rollout/rules.py"
_WORKER = "mtask/features/rollout/worker.py"
_HANDLERS = "mtask/kernel/document/handlers.py"
_OUTCOMES = "mtask/kernel/worker/running/outcomes.py"
_PUBLISH = "mtask/arguments/publish.py"
_GATHERING = "mtask/features/gathering/statements.py"
_STATEMENTS = "mtask/kernel/statements/publish.py"

_UNIT = "tests/unit/features/rollout/test_rules.py"
_RUNS = "tests/integration/features/rollout/test_rollout.py"

ROLLOUT_MUTATIONS = (
    Mutation(
        "misfit-of-unregistered-fails",
        "A misfit fails if the workers of its version are still to start.",
        (Edit(_RULES, "may_fit_others", "return True", "return False"),),
        (f"{_UNIT}::test_misfit_of_a_later_version_is_handed_on",
         f"{_RUNS}::test_misfit_of_a_later_version_waits_uncounted_for_its_worker"),
    ),
    Mutation(
        "misfit-of-former-waits",
        "A misfit of a former version waits for an hour, instead of showing the mistake.",
        (Edit(_RULES, "may_fit_others", "return own in started and", "return True or"),),
        (f"{_UNIT}::test_misfit_of_a_later_version_is_handed_on",
         f"{_RUNS}::test_misfit_of_this_version_or_a_former_one_fails_at_once"),
    ),
    Mutation(
        "misfit-waits-for-ever",
        "A misfit that no worker ever fits goes back for ever: each worker counts the hour from its own run.",
        (Edit(_RULES, "misfit_since", "return min", "return max"),),
        (f"{_UNIT}::test_misfit_waits_for_an_hour_from_the_first_one_of_this_round",
         f"{_RUNS}::test_misfit_fails_an_hour_after_the_first_one"),
    ),
    Mutation(
        "misfit-hour-of-former-round",
        "After a retry, the hour of the former round goes on.",
        (Edit(_RULES, "misfit_since", "runs = rules.current_runs(task)", "runs = task.runs"),),
        (f"{_UNIT}::test_misfit_waits_for_an_hour_from_the_first_one_of_this_round",),
    ),
    Mutation(
        "misfit-forgotten",
        "A worker tries a misfit again at once: each task wastes many runs.",
        (Edit(_WORKER, "Rollout._remember", "self._quarantine.leave_alone(run.task_id, LEFT_ALONE)", "pass"),),
        (f"{_RUNS}::test_worker_leaves_a_misfit_alone_for_a_while",),
    ),
    Mutation(
        "misfit-version-forgotten",
        "A worker tries each task of a version of which many did not fit.",
        (Edit(_WORKER, "Rollout._remember", "if count >= MANY:", "if False:"),),
        (f"{_RUNS}::test_worker_leaves_a_version_alone_after_many_misfits",),
    ),
    Mutation(
        "misfit-of-the-handler",
        "A handler that raises InvalidParams itself is taken for a misfit, and its work is done again.",
        (Edit(_OUTCOMES, "failed", "is_misfit=run.is_misfit", "is_misfit=True"),),
        (f"{_RUNS}::test_handler_that_raises_invalid_params_itself_is_no_misfit",),
    ),
    Mutation(
        "later-version-claimed",
        "A worker claims tasks of a later version of its handler.",
        (Edit(_RULES, "of_known_versions", '{"$gt": most}', '{"$gt": most + 1}'),
         Edit(_RULES, "is_known_version", "return not version > versions", "return True or not version > versions"),),
        (f"{_RUNS}::test_tasks_store_the_version_and_lower_workers_never_claim_them",
         f"{_RUNS}::test_the_server_and_python_know_the_same_versions"),
    ),
    Mutation(
        "later-version-of-unversioned-claimed",
        "A worker whose handler says no version claims tasks of any.",
        (Edit(_RULES, "of_known_versions", 'return {"version": {"$not": {"$gt": 1}}}', "return {}"),),
        (f"{_RUNS}::test_the_server_and_python_know_the_same_versions",),
    ),
    Mutation(
        "version-not-stored",
        "A publish by name does not store the version of the params.",
        (Edit(_PUBLISH, "TaskSpec.prepare", "found, found.hash, found.version.version", "found, found.hash, 1"),),
        (f"{_RUNS}::test_tasks_store_the_version_and_lower_workers_never_claim_them",),
    ),
    Mutation(
        "version-kept-by-retry",
        "A retry with new params keeps the version of the former ones, so they are upcast.",
        (Edit(_STATEMENTS, "change_params", '("sealed", "declared", "version")', '("sealed", "declared")'),),
        (f"{_RUNS}::test_retry_stores_for_which_version_its_params_are",),
    ),
    Mutation(
        "version-of-first-call",
        "A call that gathers leaves the version of the call before.",
        (Edit(_GATHERING, "merged", 'name != "params"', 'name not in ("params", "version")'),),
        (f"{_RUNS}::test_what_gathers_and_schedules_has_the_version_of_its_params",),
    ),
    Mutation(
        "upcast-one-step",
        "Params of a version are upcast by one step only.",
        (Edit(_HANDLERS, "Handler.upcast", "range(version, self.version)", "range(version, version + 1)"),),
        (f"{_UNIT}::test_params_of_a_former_version_take_each_step",),
    ),
    Mutation(
        "upcast-gap",
        "A worker starts though a step is missing.",
        (Edit(_RULES, "Upcasts.give", "if missing is not None:", "if False:"),),
        (f"{_UNIT}::test_missing_step_is_an_error_at_the_start",),
    ),
)  # fmt: skip
