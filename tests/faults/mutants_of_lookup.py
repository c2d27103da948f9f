"""Mutations of lookups, pages of a search, positions, and waits for several tasks."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_FILTERS = "mtask/kernel/statements/filters.py"
_REQUESTS = "mtask/kernel/statements/publish.py"
_SEVERAL = "mtask/features/events/completed.py"
_LOOKUP = "tests/integration/client/test_lookup.py"
_PAIR = '{"lookup": {"$elemMatch": {"k": name, "v": values[0] if len(values) == 1 else {"$in": list(values)}}}}'

LOOKUP_MUTATIONS = (
    Mutation(
        "update-keeps-the-lookups",
        "A task that is published again with other lookups, or none, is still found by the former ones.",
        (Edit(_REQUESTS, "republish", 'name: "$$REMOVE"', 'name: f"${name}"'),),
        (f"{_LOOKUP}::test_update_replaces_the_lookups_and_keep_leaves_them",),
    ),
    Mutation(
        "lookup-by-parts-of-two-pairs",
        "A task is found by the name of one lookup and the value of another.",
        (Edit(_FILTERS, "looked_up",
              '"lookup": {"$elemMatch": {"k": name, "v": values[0] if len(values) == 1 else {"$in": list(values)}}}',
              '"lookup.k": name, "lookup.v": {"$in": list(values)}'),),
        (f"{_LOOKUP}::test_lookups_are_stored_as_pairs_and_lists_are_exploded",),
    ),
    Mutation(
        "page-without-the-rest-of-an-instant",
        "A page leaves out the tasks that were created at the instant of the former page's last task.",
        (Edit(_FILTERS, "after_task", '"$lt": task_id', '"$lt": ""'),),
        (f"{_LOOKUP}::test_pages_follow_each_other_without_gap_or_double",),
    ),
    Mutation(
        "position-without-the-tie",
        "Of tasks that are due at one instant, all count as ahead of each other.",
        (Edit("mtask/doctor/position.py", "_is_better",
              '"$lt": ["$_id", x.literal(standing.task_id)]', '"$ne": ["$_id", x.literal(standing.task_id)]'),),
        ("tests/integration/doctor/test_positions.py::test_count_ahead_is_that_of_the_pure_rule",),
    ),
    Mutation(
        "position-without-interrupted-tasks",
        "A lapsed task of a lower priority does not count as ahead.",
        (Edit("mtask/doctor/position.py", "count_ahead", "yield from counting.lapsed()", ""),),
        ("tests/integration/client/test_position.py::test_interrupted_tasks_go_before_any_priority",),
    ),
    Mutation(
        "reasons-name-tasks-of-other-tenants",
        "A tenant whose task waits for a permit is told the tasks of others that hold it.",
        (Edit("mtask/features/limits/doctor.py", "_reached", "viewer in (None, _tenant(held, bound))", "True"),),
        ("tests/integration/client/test_limits.py::test_tenant_is_told_of_no_task_of_others",),
    ),
    Mutation(
        "wait-goes-on-with-a-later-task",
        "A wait for several tasks goes on with a task that was published under the key of a removed one.",
        (Edit(_SEVERAL, "_check_same", "task_id in waiting.removed or first not in (None, create_time)", "False"),
         Edit(_SEVERAL, "ended", "task_id in waiting.removed", "False")),
        ("tests/integration/client/test_completed.py::test_wait_does_not_go_on_with_a_later_task_of_the_same_key",),
    ),
)  # fmt: skip
