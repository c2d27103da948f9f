"""Mutations of what users do with flows that exist: read, wait, cancel, retry, remove, and the doctor's checks."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_OPERATING = "mtask/features/flows/change.py"
_READING = "mtask/features/flows/read.py"
_STATEMENTS = "mtask/features/flows/statements.py"
_REQUESTS = "mtask/features/flows/requests.py"
_STATES = "mtask/features/flows/views.py"
_TEST = "tests/integration/client/test_flow_state.py"
_DOCTOR = "tests/integration/cli/test_doctor_flows.py"

FLOW_REQUEST_MUTATIONS = (
    Mutation(
        "cancel-flow-takes-the-clean-up",
        "A cancel of a flow cancels its clean-up, too.",
        (Edit(_STATEMENTS, "cancelable", 'matched["$nor"]', "_"),),
        (f"{_TEST}::test_cancel_ends_all_but_the_clean_up",),
    ),
    Mutation(
        "cancel-flow-spares-first-steps",
        "A cancel of a flow leaves a first step that says on_failed run, although it cleans nothing up.",
        (Edit(_STATEMENTS, "cancelable", ', "flow.after": {"$nin": [None, []]}', ""),),
        (f"{_TEST}::test_a_first_step_is_no_clean_up",),
    ),
    Mutation(
        "cancel-flow-leaves-causes",
        "A step that another process ended during a cancel of the flow is opened again by a retry of its dependency.",
        (Edit(_OPERATING, "cancel", "changed |= dict.fromkeys((yield from _own(ids)))", "pass"),),
        (f"{_TEST}::test_cancel_owns_the_ends_that_others_settled_meanwhile",),
    ),
    Mutation(
        "cancel-flow-leaves-causes-of-causes",
        "A cancel of a flow makes only the ends its own that it caused directly.",
        (Edit(_OPERATING, "_own", "pending += ids", ""),),
        (f"{_TEST}::test_cancel_owns_the_ends_that_others_settled_meanwhile",),
    ),
    Mutation(
        "cancel-flow-passes-over-fail-fast",
        "A run that a fail-fast end has asked to stop is opened again by a retry, although the user canceled the flow.",
        (Edit(_STATEMENTS, "cancelable", ', {"flow.held_by": {"$exists": True}}', ""),),
        (f"{_TEST}::test_cancel_owns_a_step_that_fail_fast_has_asked_to_stop",),
    ),
    Mutation(
        "retry-flow-tells-nobody",
        "A retry of a flow opens steps and does not settle that, so a step whose dependency has just ended waits.",
        (Edit(_OPERATING, "_reopen", "yield from settle(relays, [*steps])", ""),),
        (f"{_TEST}::test_dependency_that_ends_while_a_step_is_retried_releases_it",),
    ),
    Mutation(
        "retry-beside-an-open-dependency",
        "A step that is retried or rerun starts beside a dependency that runs again.",
        (Edit(_OPERATING, "_gone_and_waiting", "any(is_open.get(each) for each in ids)", "False"),),
        (f"{_TEST}::test_step_that_runs_again_waits_for_a_dependency_that_runs_now",),
    ),
    Mutation(
        "retry-beside-what-a-dependency-has-added",
        "A step that is retried waits for its dependency, and not for the tasks that this has added to the flow.",
        (Edit("mtask/features/flows/read.py", "open_by_id", ", *below.get(task_id, ())", ""),),
        (f"{_TEST}::test_step_that_runs_again_waits_for_what_its_dependency_has_added",),
    ),
    Mutation(
        "flow-has-ended-before-ends-are-told",
        "A flow counts as ended although its last end is still to be told.",
        (Edit(_STATES, "state_of", 'and not any(row.get("owes") for row in rows)', ""),
         Edit(_READING, "first_open", '"flow.key": key, **flows.owed_steps()', '"_id": 0, **flows.owed_steps()')),
        (f"{_TEST}::test_a_flow_has_not_ended_before_all_ends_are_told",),
    ),
    Mutation(
        "wait-looks-at-every-end",
        "A wait for a flow reads an open step again whenever any step ends.",
        (Edit(_REQUESTS, "WaitForFlow.note", "== self.watched[0]", "!= ''"),),
        (f"{_TEST}::test_a_wait_looks_again_only_when_the_watched_step_has_ended",),
    ),
    Mutation(
        "wait-does-not-look-after-the-watched-end",
        "A wait for a flow goes on watching a step that has ended.",
        (Edit(_REQUESTS, "WaitForFlow.note", "or has_ended", ""),),
        ("tests/unit/features/flows/test_wait_for_flow.py::test_only_the_end_of_the_watched_step_counts",),
    ),
    Mutation(
        "step-is-removed-while-it-owes",
        "A step is deleted before its dependents were told of its end.",
        (Edit("mtask/kernel/operations/change.py", "remove_step", '"owed_since": None,', ""),),
        (f"{_TEST}::test_a_step_is_not_removed_while_it_owes_others_something",),
    ),
    Mutation(
        "keep-takes-steps",
        "Keeping the newest tasks of a queue, or a purge, deletes steps that others depend on.",
        (Edit("mtask/kernel/operations/change.py", "NEEDED_BY_NONE", '"flow": None,', ""),),
        (f"{_TEST}::test_keep_leaves_the_steps_of_flows",),
    ),
    Mutation(
        "no-head-after-a-removal",
        "A flow whose first step is removed is never noticed as ended.",
        (Edit("mtask/client/requests.py", "_removed", "head is not None", "head is canceled"),),
        (f"{_TEST}::test_a_flow_whose_first_step_is_removed_gets_another_first_step",),
    ),
    Mutation(
        "no-head-after-an-expiry",
        "A flow whose first step has expired is never noticed as ended when another step runs again.",
        (Edit("mtask/features/flows/retention.py", "revive", "yield from appoint_head(key)", "pass"),),
        (f"{_TEST}::test_a_flow_whose_first_step_has_expired_gets_another_when_a_step_runs_again",),
    ),
    Mutation(
        "doctor-reports-what-has-passed",
        "The doctor reports a step that was released between its reads of the step and of the holder.",
        (Edit("mtask/features/flows/doctor.py", "with_ended_holder", "return again", "return found"),),
        (f"{_DOCTOR}::test_a_finding_that_has_passed_is_not_reported",),
    ),
    Mutation(
        "doctor-misses-a-deaf-holder",
        "The doctor does not see that the holder of a waiting step has ended and tells nobody.",
        (Edit("mtask/features/flows/doctor.py", "find_ended_holders", '"it.owed": {"$ne": True}', '"it.owed": True'),),
        (f"{_DOCTOR}::test_a_waiting_step_whose_holder_has_ended_and_tells_nobody",),
    ),
)  # fmt: skip
