"""Mutations of children and next tasks: each leaves out one guard."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_OWING = "mtask/features/flows/statements.py"
_OUTBOX = "mtask/kernel/statements/outbox.py"
_CHILDREN = "mtask/features/flows/publish.py"
_SETTLING = "mtask/features/flows/settle.py"
_FINDING = "mtask/features/flows/read.py"
_STEPWISE = "tests/integration/features/flows/test_children.py"
_CHILDREN_RUN = "tests/integration/features/flows/test_children_under_a_worker.py"
_NEXT_RUN = "tests/integration/features/flows/test_next.py"
_PARITY = "tests/parity/test_changes_parity.py"

CHILD_MUTATIONS = (
    Mutation(
        "child-without-a-lease",
        "A run that has lost its lease still adds children.",
        (Edit(_OWING, "may_add", "held = held_runs([task_id], [run_id])", 'held: Filter = {"_id": task_id}'),),
        (f"{_STEPWISE}::test_a_run_that_has_lost_its_lease_adds_none",
         f"{_CHILDREN_RUN}::test_a_run_that_loses_its_lease_adds_no_child"),
    ),
    Mutation(
        "child-of-a-canceled-task",
        "A run whose task is to be canceled still adds children.",
        (Edit(_OWING, "may_add", '"task_state.cancel_requested": False,', ""),),
        (f"{_STEPWISE}::test_a_run_that_is_to_be_canceled_adds_none",),
    ),
    Mutation(
        "child-forgets-the-mark-of-its-parent",
        "Children are added while the parent's last change is unsettled, and the mark of that change is lost.",
        (Edit(_OWING, "may_add", ', "$or": is_free', ""),),
        (f"{_STEPWISE}::test_a_change_that_is_still_to_be_settled_is_settled_first",),
    ),
    Mutation(
        "children-take-out-the-mark-of-others",
        "What is still owed loses its mark when other children are taken out.",
        (Edit(_OWING, "added",
              '{"$and": [{"$not": [OWED_TASKS]}, {"$eq": [x.OWED_SINCE, mark]}, {"$eq": [x.OWED_VALUES, []]}]}',
              "True"),),
        (f"{_STEPWISE}::test_children_added_at_once_lose_no_mark",),
    ),
    Mutation(
        "children-take-out-the-mark-of-a-value",
        "A task that owes its value loses its mark when its children are taken out, and nobody finds it.",
        (Edit(_OWING, "added", ', {"$eq": [x.OWED_VALUES, []]}', ""),),
        ("tests/integration/kernel/worker/running/test_returns.py"
         "::test_value_of_one_seat_is_waited_for_when_the_other_seat_has_ended_the_task",),
    ),
    Mutation(
        "parent-without-has-children",
        "Nobody waits for a child, because its parent is not known to have children.",
        (Edit(_OWING, "add", '"flow.has_children": True,', ""),),
        (f"{_STEPWISE}::test_a_dependent_waits_for_the_children_and_their_children",
         f"{_PARITY}::test_children_that_are_added_are_owed"),
    ),
    Mutation(
        "child-of-another-parent-is-taken",
        "A parent takes the child of another one, or any task of that id, for its own.",
        (Edit(_CHILDREN, "_present", "!= [parent_id]", "== [None]"),),
        (f"{_STEPWISE}::test_the_same_parent_finds_its_children_and_another_parent_does_not",
         f"{_STEPWISE}::test_two_parents_that_add_one_step_at_once_leave_one_child"),
    ),
    Mutation(
        "late-child-of-a-failed-flow",
        "A child that is published after the failure of its flow misses the cancel of fail_fast.",
        (Edit(_SETTLING, "_publish_owed", "failed is not None", "False"),),
        (f"{_STEPWISE}::test_a_child_that_is_published_after_the_failure_of_its_flow_is_canceled",),
    ),
    Mutation(
        "ends-by-a-handler-told-later",
        "What ends because of a handler that adds children is told by a later scan alone.",
        (Edit(_CHILDREN, "_append", "settle(relays, [parent_id])", "settle(relays[:1], [parent_id])"),),
        (f"{_STEPWISE}::test_ends_that_follow_while_children_are_added_are_told_at_once",),
    ),
    Mutation(
        "next-in-the-short-statement",
        "A short statement finishes a task, and its next task is lost.",
        (Edit("mtask/kernel/operations/claim.py", "finish", "and not goes_on", ""),),
        (f"{_NEXT_RUN}::test_a_short_statement_serves_no_task_that_goes_on",),
    ),
    Mutation(
        "next-after-a-rerun",
        "A task that is run again goes on a second time.",
        (Edit(_OUTBOX, "go_on", '{"$not": [f"{x.STATE}.next_id"]},', ""),),
        (f"{_NEXT_RUN}::test_a_rerun_does_not_go_on_again",
         f"{_PARITY}::test_a_finish_closes_its_own_run_with_its_own_outcome"),
    ),
    Mutation(
        "next-before-the-task-is-final",
        "With several workers, the task goes on with the first success.",
        (Edit(_OUTBOX, "go_on",
              '{"$eq": [x.STATUS, TaskStatus.SUCCESS.value]}, {"$eq": [f"{x.STATE}.finish_time", now]},', ""),),
        (f"{_NEXT_RUN}::test_of_several_workers_the_one_that_makes_the_task_final_goes_on",),
    ),
    Mutation(
        "next-lost-to-retention",
        "The task that owes the next one expires before the next one is published.",
        (Edit(_OUTBOX, "go_on", '"expire_time": if_going_on("$$REMOVE", "$expire_time"),', ""),),
        (f"{_NEXT_RUN}::test_what_a_worker_that_died_after_its_finish_owes_is_published_by_another",
         f"{_PARITY}::test_a_finish_closes_its_own_run_with_its_own_outcome"),
    ),
    Mutation(
        "next-lost-to-a-purge",
        "A purge removes a task that is still to publish its next one.",
        (Edit("mtask/kernel/operations/change.py", "NEEDED_BY_NONE", '"owed_since": None,', ""),),
        (f"{_NEXT_RUN}::test_what_a_worker_that_died_after_its_finish_owes_is_published_by_another",),
    ),
    Mutation(
        "next-lost-to-a-removal",
        "A removal takes a task away that is still to publish its next one.",
        (Edit("mtask/kernel/operations/change.py", "remove", "**NEEDED_BY_NONE", '"flow": None'),),
        (f"{_NEXT_RUN}::test_a_task_that_owes_its_next_one_is_removed_after_it_is_published",),
    ),
    Mutation(
        "next-unseen-by-scans",
        "Where there are no flows, no scan finds the next task that a dead worker owes.",
        (Edit(_FINDING, "is_any_owed", "not None", "..."),
         Edit("mtask/kernel/worker/running/finisher.py", "Finisher.submit", 'self._ledger.owing.add("chain")', "pass")),
        (f"{_NEXT_RUN}::test_what_a_worker_that_died_after_its_finish_owes_is_published_by_another",),
    ),
    Mutation(
        "dependents-do-not-wait-for-the-next",
        "The steps that depend on a task do not wait for the task as which it goes on.",
        (Edit(_OUTBOX, "go_on", 'if_going_on({"has_children": True}, {})', "{}"),),
        (f"{_NEXT_RUN}::test_the_outbox_gap_of_a_flow",),
    ),
    Mutation(
        "transaction-without-its-result",
        "What a handler sets as its result is not in the commit of its transaction.",
        (Edit("mtask/kernel/worker/running/transactions.py", "RunTransactions._outcome", "run.result", "None"),),
        (f"{_NEXT_RUN}::test_in_a_transaction_the_result_and_the_next_task_are_in_the_commit",),
    ),
)  # fmt: skip
