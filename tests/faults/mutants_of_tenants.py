"""Mutations of tenants: whose a task is, their turns, their limits, and what they may see."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_ACCESS = "mtask/web/access.py"
_FLOWS = "mtask/features/flows/publish.py"
_LIMITS = "mtask/features/limits/worker.py"
_OPERATION = "mtask/kernel/driver/operation.py"
_PERMITS = "mtask/features/limits/operations.py"
_BATCHES = "mtask/kernel/worker/discovery/fetch.py"
_TARGETS = "mtask/features/limits/targets.py"
_MEMORY = "mtask/features/controls/fair_turns.py"
_GATHERING = "mtask/features/gathering/publish.py"
_NEXT = "mtask/features/flows/next.py"
_QUEUE = "mtask/kernel/worker/discovery/buffer.py"
_READERS = "mtask/features/events/readers.py"
_SCANS = "mtask/features/controls/fair_scans.py"
_SCHEDULES = "mtask/features/schedules/operations.py"
_SCHEMA = "mtask/database/schema.py"
_STATE = "mtask/kernel/worker/process/state.py"
_WALKS = "mtask/search/walks.py"
_TENANTS = "mtask/kernel/document/identity.py"

_CLIENT_TESTS = "tests/integration/client/test_tenants.py"
_LIMITS_TESTS = "tests/integration/features/limits/test_tenant_limits.py"
_MEMORY_TESTS = "tests/unit/features/controls/test_turns.py"
_PARITY = "tests/parity/test_tenants_parity.py"
_TURNS_TESTS = "tests/integration/features/controls/test_turns.py"
_WEB_TESTS = "tests/integration/web/test_tenants.py"

TENANT_MUTATIONS = (
    Mutation(
        "tenant-without-its-key",
        "The server takes a task whose key is not one of its tenant.",
        (
            Edit(_SCHEMA, "task_rules", '{"$not": [_is_of_another()]},', ""),
            Edit(_SCHEMA, "misfits", "_is_of_another(),", ""),
        ),
        (f"{_PARITY}::test_server_and_model_take_the_same_tenants_and_keys",),
    ),
    Mutation(
        "tenant-with-a-colon",
        "A tenant may hold a colon, so the tasks of one look like those of another.",
        (Edit(_TENANTS, "TENANT_PATTERN", 'r"^[A-Za-z0-9_.-]{1,64}$"', 'r"^[A-Za-z0-9_.:-]{1,64}$"'),),
        (f"{_PARITY}::test_wrong_tenant_is_refused_with_advice",),
    ),
    Mutation(
        "next-task-of-nobody",
        "The task as which another goes on belongs to no tenant.",
        (Edit(_NEXT, "Next.prepare", "tenant=before.tenant,", ""),),
        (f"{_CLIENT_TESTS}::test_flow_its_children_and_next_tasks_are_of_one_tenant",),
    ),
    Mutation(
        "events-of-everybody",
        "A tenant hears of the tasks of others.",
        (Edit(_READERS, "Wanted.pipeline", "if self.tenant is None else re.escape(prefix_of(self.tenant))", ""),),
        (f"{_CLIENT_TESTS}::test_events_of_a_tenant_tell_also_of_removed_tasks",),
    ),
    Mutation(
        "key-decides-whose-a-task-is",
        "A client of a tenant reads and changes each task whose key begins like those of the tenant.",
        (Edit(_OPERATION, "_of_tenant", ', "tenant": tenant', ""),),
        (f"{_WEB_TESTS}::test_task_of_no_tenant_is_nobodys_whatever_its_key",),
    ),
    Mutation(
        "place-of-a-stream-names-others",
        "The ids of a tenant's stream of events hold the id of the last changed task, whosever it is.",
        (Edit("mtask/features/events/rest.py", "_told_place", "[:_INSTANT] + _BEGINNING", ""),),
        (f"{_WEB_TESTS}::test_id_of_a_stream_tells_a_tenant_nothing_of_others_and_leaves_no_event_out",),
    ),
    Mutation(
        "removed-task-tells-its-reason",
        "The events of a removed task tell a tenant all that is known, whosever the task was.",
        (
            Edit(
                "mtask/features/events/task_events.py",
                "as_told_to",
                "if event.tenant == tenant:\n    return event",
                "return event",
            ),
        ),
        (f"{_WEB_TESTS}::test_of_a_removed_task_of_nobody_a_tenant_learns_nothing_but_its_key",),
    ),
    Mutation(
        "logs-by-the-key",
        "A tenant reads all logs under a key that begins like its own.",
        (Edit("mtask/features/logs/client.py", "of_task.operation", "owner is None", "True"),),
        (f"{_WEB_TESTS}::test_of_a_removed_task_of_nobody_a_tenant_learns_nothing_but_its_key",),
    ),
    Mutation(
        "calls-that-gather-remove-tasks",
        "Who may only publish sets the retention of a task that exists, by a call that gathers.",
        (
            Edit(_GATHERING, "GatherPolicy.replaces_options", "True", "False"),
            Edit(_GATHERING, "WindowPolicy.replaces_options", "True", "False"),
        ),
        (
            "tests/integration/web/test_admission.py::"
            "test_retention_of_a_task_that_exists_is_for_those_who_may_remove_it",
        ),
    ),
    Mutation(
        "flow-into-one-of-nobody",
        "A tenant publishes a flow into one of nobody with the same key.",
        (Edit(_FLOWS, "publish", "(_LONG).for_everybody()", "(_LONG)"),),
        (f"{_CLIENT_TESTS}::test_flow_of_a_tenant_leaves_tasks_of_nobody_alone_and_says_so",),
    ),
    Mutation(
        "schedule-of-another-tenant",
        "A client of a tenant finds and removes the schedules of others.",
        (Edit(_OPERATION, "_owned", 'not in ("tasks", "schedules")', '!= "tasks"'),),
        (f"{_CLIENT_TESTS}::test_schedule_is_seen_and_changed_by_its_tenant_alone",),
    ),
    Mutation(
        "declared-schedule-takes-over",
        "A schedule that an app declares takes the place of a tenant's.",
        (Edit(_SCHEDULES, "put", '_must_be_of(document.get("tenant"), former)', "pass"),),
        (f"{_CLIENT_TESTS}::test_declared_schedule_takes_over_none_of_a_tenant",),
    ),
    Mutation(
        "token-names-another-tenant",
        "A token of a tenant reads the stored keys that it is given.",
        (Edit(_ACCESS, "Caller.stored_key", "if self.tenant is None else stored_key(self.tenant, key)", ""),),
        (f"{_WEB_TESTS}::test_one_name_and_key_through_every_verb",),
    ),
    Mutation(
        "turn-stays",
        "After a task of a tenant, the next task is of the same tenant.",
        (Edit(_MEMORY, "Turns.pop", "ring.move_to_end(lane)", "pass"),),
        (f"{_MEMORY_TESTS}::test_tenants_take_turns_whatever_the_age_and_the_priority_of_their_tasks",),
    ),
    Mutation(
        "turn-of-another-worker-never-comes",
        "A task that another worker ranks first for waits until this worker has none of its own.",
        (Edit(_MEMORY, "Turns.head", "is_late and", "False and"),),
        (f"{_MEMORY_TESTS}::test_task_that_another_worker_ranks_first_for_gets_the_turn_of_its_tenant_after_a_while",),
    ),
    Mutation(
        "flood-pushes-out-others",
        "If the memory is full, the oldest tasks stay: those of the tenant with the longest backlog.",
        (Edit(_QUEUE, "PreemptionQueue._in_turns", "in_equal_parts([*ready, *waiting])", "[*ready, *waiting]"),),
        (f"{_MEMORY_TESTS}::test_hints_of_a_flooding_tenant_push_out_only_its_own",),
    ),
    Mutation(
        "ring-begins-anew",
        "Each scan begins with the first tenants, and the last ones never have their turn.",
        (Edit(_SCANS, "TurnScans._scan_ring", "ring.after = last", 'ring.after = ""'),),
        (f"{_TURNS_TESTS}::test_scans_go_round_all_tenants_and_take_equal_parts",),
    ),
    Mutation(
        "cut-part-counts-as-whole",
        "The part of the last tenant in a batch is taken for all that it has.",
        (Edit(_SCANS, "_Round.take", "documents = documents[: names.index(names[-1])]", "pass"),),
        (f"{_TURNS_TESTS}::test_scan_brings_whole_parts_though_a_batch_ends_within_one",),
    ),
    Mutation(
        "tenant-without-a-permit",
        "A claim without permits takes tasks of a tenant with a limit.",
        (
            Edit(_LIMITS, "Limits.needs", "task.tenant in self._controls.tenant_limits", "False"),
            Edit(
                _LIMITS,
                "Limits.guard_of_free",
                "of_others(sorted(self._controls.limits), sorted(self._controls.tenant_limits))",
                "",
            ),
        ),
        (f"{_LIMITS_TESTS}::test_the_limit_of_one_tenant_holds_over_its_queues_and_binds_no_other",),
    ),
    Mutation(
        "tenant-at-its-limit-hides-others",
        "Scans bring the tasks of a tenant that has to wait, and no others.",
        (
            Edit(
                _TARGETS,
                "_Narrow.conditions",
                "tenants.setdefault((pool.queue, level), []).append(pool.tenant)",
                "pass",
            ),
        ),
        (f"{_LIMITS_TESTS}::test_tasks_of_a_tenant_at_its_limit_hide_no_tasks_of_others_from_scans",),
    ),
    Mutation(
        "cursor-names-a-task-of-others",
        "The cursor of a tenant holds the place at which the list has stopped, whosever task that is.",
        (Edit(_WALKS, "Walk.key_at", 'Place(place.time, "")', "place"),),
        (f"{_CLIENT_TESTS}::test_cursors_of_a_tenant_tell_nothing_of_others_in_a_database_of_many_names",),
    ),
    Mutation(
        "tenants-share-a-pool",
        "The tenants of a queue share the limit that each of them has.",
        (Edit(_PERMITS, "PermitPool.of_task", "cls(queue, tenant=tenant)", 'cls(queue, tenant="all")'),),
        (f"{_LIMITS_TESTS}::test_each_tenant_of_a_queue_has_a_limit_that_holds_over_two_workers",),
    ),
    Mutation(
        "paused-tenant-runs",
        "The pause of a tenant is confirmed and not applied.",
        (
            Edit(_STATE, "Served.guard", ", self.paused_tenants", ""),
            Edit(_STATE, "Served.is_paused", "or tenant in self.paused_tenants", ""),
            Edit(_BATCHES, "Batches._scan_target", "self._served.paused_tenants", "()"),
        ),
        (f"{_LIMITS_TESTS}::test_paused_tenant_waits_and_the_others_go_on",),
    ),
)
