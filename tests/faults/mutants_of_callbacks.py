"""Mutations of callbacks: each leaves out one step between the end of a task and the receiver, or one check of it."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_ADDRESSES = "mtask/features/callbacks/allowed.py"
_BULK = "mtask/features/bulk/operations.py"
_DERIVE = "mtask/kernel/statements/derive.py"
_FLOWS = "mtask/features/flows/statements.py"
_OPERATION = "mtask/features/callbacks/operations.py"
_OUTBOX = "mtask/kernel/statements/outbox.py"
_PIPELINES = "mtask/kernel/statements/claim.py"
_QUERIES = "mtask/kernel/operations/change.py"
_RULES = "mtask/features/callbacks/rules.py"
_SENDING = "mtask/features/callbacks/sending.py"
_SHORT = "mtask/kernel/statements/claim.py"
_TWINS = "mtask/features/callbacks/statements.py"

_STORE = "tests/integration/features/callbacks/test_operations.py"
_WAYS = f"{_STORE}::test_each_way_to_an_end_owes_one_callback_and_the_next_process_publishes_it"
_SEND = "tests/unit/features/callbacks/test_sending.py"

CALLBACK_MUTATIONS = (
    Mutation(
        "end-without-a-callback",
        "A task ends and nobody is owed anything.",
        (Edit(_DERIVE, "_derive", '**outbox.owe_end(f"{derived}.tells", f"{derived}.status", now),', ""),),
        (_WAYS,),
    ),
    Mutation(
        "quarantine-without-a-callback",
        "A malformed task is marked FAIL, and its callback is forgotten.",
        (Edit(_PIPELINES, "quarantine", ", **told", ""),),
        (f"{_WAYS}[quarantine]",),
    ),
    Mutation(
        "short-finish-of-a-task-with-a-callback",
        "The short finish ends a task with a callback and owes nothing.",
        (Edit(_SHORT, "held_alone", "_TELLS_NONE,", ""),),
        (f"{_WAYS}[succeed]", "tests/parity/test_simple_parity.py::test_simple_task_is_taken_as_one"),
    ),
    Mutation(
        "end-is-told-at-each-change",
        "Each further change of a task that has ended tells its end again.",
        (Edit(_OUTBOX, "tells", '{"$not": [was_final]},', ""),),
        (f"{_STORE}::test_a_client_tells_at_once_what_it_has_ended",),
    ),
    Mutation(
        "callback-crossed-off-first",
        "The mark is removed before the delivery is published: a death in between loses it.",
        (
            Edit(_OPERATION, "settle", 'if made:\n    yield tasks("insert_new", made)', ""),
            Edit(
                _OPERATION,
                "settle",
                "for row in unreadable:",
                'if made:\n    yield tasks("insert_new", made)\nfor row in unreadable:',
            ),
        ),
        (f"{_STORE}::test_a_death_at_any_point_leaves_the_mark_or_has_done_all",),
    ),
    Mutation(
        "callback-is-not-crossed-off",
        "The mark stays for ever, and with it the task.",
        (
            Edit(
                _TWINS,
                "cross_off",
                '{"$cond": [{"$and": [is_same, {"$isArray": [OWED_ENDS]}]}, left, OWED_ENDS]}',
                "OWED_ENDS",
            ),
        ),
        (_WAYS,),
    ),
    Mutation(
        "cross-off-takes-all",
        "A process that read before a retry crosses off the end that came after it.",
        (Edit(_TWINS, "cross_off", '{"$not": [{"$in": ["$$one.number", numbers]}]}', "False"),),
        (f"{_STORE}::test_each_end_has_a_number_of_its_own_also_between_two_looks",),
    ),
    Mutation(
        "cross-off-of-the-next-task",
        "The mark of a removed task is crossed off the task that was published after it.",
        (Edit(_TWINS, "cross_off", '"$and": [is_same, {"$isArray": [OWED_ENDS]}]', '"$isArray": [OWED_ENDS]'),),
        (f"{_STORE}::test_a_mark_of_the_task_that_was_there_before_is_not_crossed_off_the_next_one",),
    ),
    Mutation(
        "id-without-the-create-time",
        "A task that is published again after its removal has the ids of the former one: nobody hears of it.",
        (Edit(_RULES, "webhook_id", 'f"{task.task_id}\\0{created}\\0{number}"', 'f"{task.task_id}\\0{number}"'),),
        (f"{_STORE}::test_a_task_that_is_published_again_after_its_removal_has_other_ids",),
    ),
    Mutation(
        "expires-before-it-is-told",
        "The TTL index removes a task whose end is still to be told.",
        (Edit(_DERIVE, "_derive", '{"$or": [x.OWED_SINCE, outbox.OWED_ENDS, f"{derived}.tells"]}', "x.OWED_SINCE"),),
        (f"{_STORE}::test_retention_begins_when_the_end_is_told",),
    ),
    Mutation(
        "never-expires-after-it-is-told",
        "The retention of a task with a callback never begins.",
        (Edit(_TWINS, "begin_retention", '"expire_time": begun,', ""),),
        (f"{_STORE}::test_retention_begins_when_the_end_is_told",),
    ),
    Mutation(
        "removed-before-it-is-told",
        "A removal, a purge and the keep of a queue take the end with them.",
        (Edit(_QUERIES, "NEEDED_BY_NONE", ', "callback_owed": None', ""),),
        (
            f"{_STORE}::test_a_removal_tells_the_end_first",
            f"{_STORE}::test_neither_a_purge_nor_the_keep_of_a_queue_removes_a_task_whose_end_is_to_be_told",
        ),
    ),
    Mutation(
        "bulk-removal-leaves-what-is-owed",
        "A bulk removal does not tell the ends first, so it leaves these tasks.",
        (
            Edit(
                _BULK,
                "step",
                'if ids and bulk.action == "remove":\n    yield from settle_all(relays, ids)',
                'if ids and bulk.action == "remove":\n    pass',
            ),
        ),
        (f"{_STORE}::test_a_bulk_removal_tells_the_ends_first",),
    ),
    Mutation(
        "flow-ends-before-it-is-told",
        "The retention of a flow begins while the end of a step is still to be told.",
        (
            Edit(
                _FLOWS,
                "owed_steps",
                '"$or": [{"owed_since": {"$exists": True}}, outbox.owing_ends()]',
                '"owed_since": {"$exists": True}',
            ),
        ),
        (f"{_STORE}::test_the_retention_of_a_flow_waits_for_its_callbacks",),
    ),
    Mutation(
        "ends-are-told-by-a-scan-alone",
        "Callbacks are missing in the list of relays: whoever ends a task leaves them to a scan.",
        (Edit("mtask/parts/relays.py", "RELAYS", "callbacks.RELAY", ""),),
        (
            "tests/unit/house/test_parts.py::test_each_relay_of_a_feature_is_listed",
            f"{_STORE}::test_a_client_tells_at_once_what_it_has_ended",
        ),
    ),
    Mutation(
        "ends-that-follow-wait-for-a-scan",
        "Who settles an end leaves the callbacks of the ends that follow from it to a scan.",
        (Edit("mtask/kernel/operations/relays.py", "settle", "if following:", "if False:"),),
        (
            f"{_STORE}::test_a_client_tells_at_once_what_ends_because_of_its_cancel[a step]",
            "tests/integration/features/flows/test_flows.py::"
            "test_the_end_of_a_step_that_waits_for_a_failed_one_is_told_without_a_scan",
        ),
    ),
    Mutation(
        "canceled-flow-tells-nobody",
        "The callbacks of the steps of a canceled flow wait for a scan.",
        (Edit("mtask/features/flows/change.py", "cancel", "relays,", "relays[:1],"),),
        (f"{_STORE}::test_a_client_tells_at_once_what_ends_because_of_its_cancel[a flow]",),
    ),
    Mutation(
        "marks-of-dead-workers-stay",
        "No part of a feature looks after what dead processes have left: what they still owed is told by nobody.",
        (Edit("mtask/parts/worker.py", "collected", '_overridden(parts, "upkeep")', "()"),),
        ("tests/unit/house/test_parts.py::test_each_hook_that_a_part_overrides_is_collected",),
    ),
    Mutation(
        "parts-of-the-list-do-nothing",
        "The parts that need nothing but the scope are built, and no hook of them is called.",
        (Edit("mtask/parts/worker.py", "Features.hooks", "part or ()", "()"),),
        ("tests/unit/house/test_parts.py::test_the_hooks_of_all_parts_are_collected_in_order",),
    ),
    Mutation(
        "parts-of-the-list-are-not-built",
        "A worker leaves out the parts that need nothing but the scope.",
        (Edit("mtask/parts/assembly.py", "Assembly.build", "make(scope) for make in PARTS", ""),),
        ("tests/integration/house/test_feature_walkthrough.py::test_feature_passes_its_tests_and_those_of_the_lists",),
    ),
    # --- what may be called ---------------------------------------------------------------------------------
    Mutation(
        "only-the-first-address-is-checked",
        "A host with a public and a private address is called at the private one.",
        (Edit(_SENDING, "_checked", "in texts", "in texts[:1]"),),
        (f"{_SEND}::test_a_host_with_one_address_that_may_not_be_called_is_not_called_at_all",),
    ),
    Mutation(
        "host-is-resolved-again",
        "The connection goes to the name, so to whatever it means a moment after the check.",
        (Edit(_SENDING, "_Pinned.connect", "str(self._address)", "self._target.host"),),
        (f"{_SEND}::test_the_connection_goes_to_the_address_that_was_checked",),
    ),
    Mutation(
        "address-stays-wrapped",
        "An IPv4 address inside an IPv6 one is taken for a public address.",
        (Edit(_ADDRESSES, "is_public", "unwrapped(address)", "address"),),
        ("tests/unit/features/callbacks/test_addresses.py::test_public_addresses_may_be_called",),
    ),
    Mutation(
        "message-without-a-deadline",
        "A receiver that sends a byte now and then holds a message for ever.",
        (Edit(_SENDING, "_Pinned.post", "self._timer.start()", ""),),
        (f"{_SEND}::test_a_slow_receiver_ends_at_the_time_limit",),
    ),
)
