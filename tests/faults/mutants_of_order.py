"""Mutations of the order in which tasks with limits start: their ranks, windows and turns, and who gets a permit."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_LIMITS = "mtask/features/limits/worker.py"
_PERMITS = "mtask/features/limits/operations.py"
_POOLS = "mtask/features/limits/pools.py"
_QUEUE = "mtask/kernel/worker/discovery/buffer.py"
_READY = "mtask/kernel/worker/discovery/ready.py"
_RULES = "mtask/kernel/document/rules.py"
_SENDER = "mtask/kernel/worker/running/claim.py"
_STATEMENTS = "mtask/features/limits/statements.py"
_BATCHES = "mtask/kernel/worker/discovery/fetch.py"
_WINDOWS = "mtask/features/limits/windows.py"

_LIMITS_TESTS = "tests/integration/features/limits/test_limits.py"
_PERMITS_TESTS = "tests/integration/features/limits/test_permits.py"
_LANDINGS_TESTS = "tests/unit/kernel/worker/running/test_landings.py"
_RANKS_TESTS = "tests/unit/kernel/document/test_ranks.py"
_WINDOWS_TESTS = "tests/unit/features/limits/test_windows.py"

ORDER_MUTATIONS = (
    # --- ranks ----------------------------------------------------------------------------------------------
    Mutation(
        "place-kept-after-a-run-elsewhere",
        "A task that another worker has run, and that is to be tried again, keeps its old place in this worker.",
        (Edit(_SENDER, "Sender._claim_gated", "gate.has_fallen_back(task, now)", "False"),),
        (f"{_LIMITS_TESTS}::test_task_that_others_have_run_meanwhile_loses_its_place",),
    ),
    Mutation(
        "rank-by-when-it-was-read",
        "A task that asks for a permit ranks by the time at which it was read.",
        (Edit(_RULES, "rank", ", stored", ", now"),),
        (f"{_RANKS_TESTS}::test_tasks_go_by_their_stored_times_whenever_they_are_seen",),
    ),
    Mutation(
        "rank-by-when-it-was-seen",
        "Waiting tasks are offered in the order in which this worker may try them, and not in that of their documents.",
        (Edit(_QUEUE, "PreemptionQueue.push", "limit_key, moment", "limit_key, due"),),
        (f"{_WINDOWS_TESTS}::test_tasks_go_in_the_order_of_their_documents_whenever_they_were_seen",),
    ),
    Mutation(
        "permit-for-a-former-place",
        "A task is claimed that another worker has run since it was read, as if it still had its former place.",
        (Edit(_LIMITS, "Admitted.guard", ", due_by(self.read_at)", ""),),
        (f"{_LIMITS_TESTS}::test_task_that_others_run_while_it_gets_its_permit_is_not_claimed",),
    ),
    Mutation(
        "requests-overtake-each-other",
        "Of two requests of a worker, that with the later tasks may get the permit.",
        (Edit(_SENDER, "Sender._claim_gated", "await self._requests.wait_for_earlier(place, took)", "pass"),),
        (f"{_LIMITS_TESTS}::test_requests_for_permits_are_made_in_the_order_of_their_tasks",),
    ),
    Mutation(
        "scan-of-some-names-for-all",
        "After a scan for the tasks of executors, a worker believes that it knows all that waits behind a limit.",
        (Edit(_BATCHES, "Batches._scan_target", "names != self._served.names", "False"),),
        (f"{_LIMITS_TESTS}::test_scan_for_tasks_of_executors_does_not_tell_what_else_waits_behind_a_limit",),
    ),
    Mutation(
        "interrupted-task-asks-like-any-other",
        "An interrupted task has no precedence when it asks for a permit.",
        (Edit(_RULES, "rank", "0 if is_interrupted(task, now) else 1", "1"),),
        (f"{_RANKS_TESTS}::test_interrupted_task_goes_before_any_priority",),
    ),
    Mutation(
        "interrupted-task-waits-like-any-other",
        "An interrupted task has no precedence among those that wait for permits.",
        (
            Edit(
                _READY,
                "Entry.order",
                "(not self.is_begun, -self.priority, self.moment)",
                "(True, -self.priority, self.moment)",
            ),
        ),
        (f"{_WINDOWS_TESTS}::test_interrupted_tasks_go_before_any_priority",),
    ),
    Mutation(
        "groups-land-in-any-order",
        "Runs of a group that was claimed later start first if its reply comes first.",
        (Edit("mtask/kernel/worker/running/claim.py", "Landings.wait_for_earlier", "if earlier:", "if False:"),),
        (f"{_LANDINGS_TESTS}::test_a_claim_lands_after_those_that_began_earlier",),
    ),
    # --- permits --------------------------------------------------------------------------------------------
    Mutation(
        "call-before-the-answer-is-forgotten",
        "A call that comes while a request is under way changes nothing.",
        (Edit(_LIMITS, "Limits._take_answer", "or state.news > news", ""),),
        (f"{_LIMITS_TESTS}::test_call_that_comes_before_the_answer_to_an_older_request_is_not_forgotten",),
    ),
    Mutation(
        "full-pool-hears-of-no-better-task",
        "A task that is more urgent than those that are listed waits for the worker's next look at the pool.",
        (Edit(_POOLS, "Pools.is_news", "shown is None or order < shown", "False"),),
        (f"{_LIMITS_TESTS}::test_task_that_goes_before_those_that_are_listed_is_listed_at_once",),
    ),
    Mutation(
        "entry-ends-before-the-next-start",
        "What waits for a start of a long window is listed for 5 s only.",
        (
            Edit(
                _LIMITS, "Limits._take_answer", "<= now + POLL or (next_start < inf and not answer.is_listed)", "< inf"
            ),
        ),
        (f"{_LIMITS_TESTS}::test_what_waits_for_a_start_stays_listed_until_the_next_one_is_free",),
    ),
    Mutation(
        "task-of-two-limits-is-not-listed",
        "A task is listed nowhere while its queue is full, though its own worker will return both permits.",
        (Edit("mtask/features/limits/requests.py", "Requests._waiting", "(pool), self._shared", ""),),
        (f"{_LIMITS_TESTS}::test_what_waits_is_listed_when_a_permit_is_taken_though_it_waits_for_its_queue_too",),
    ),
    Mutation(
        "tenant-takes-all-permits-in-its-turn",
        "All tasks of the tenant whose turn it is go before those of the others.",
        (
            Edit(
                _STATEMENTS,
                "_in_turns",
                '{"$subtract": ["$$place", {"$indexOfArray": ["$$tenants", "$$each.of"]}]}',
                "0",
            ),
        ),
        (f"{_PERMITS_TESTS}::test_one_request_takes_equal_turns_of_its_tenants",),
    ),
    Mutation(
        "holder-takes-the-permit-again",
        "Who returns a permit takes it again, though a better task waits in another worker.",
        (
            Edit(
                _STATEMENTS,
                "_granted_cnt",
                '_in_order({"$concatArrays": [keys("$_open", is_rival=0), keys("$_rivals", is_rival=1)]})',
                'keys("$_open", is_rival=0)',
            ),
        ),
        (f"{_PERMITS_TESTS}::test_who_returns_a_permit_takes_it_again_only_if_no_better_task_waits_elsewhere",),
    ),
    Mutation(
        "dead-worker-waits-for-ever",
        "A permit is left for the tasks of a worker that has died.",
        (Edit(_STATEMENTS, "_waiting", '{"$gt": ["$$worker.until", x.NOW]},', ""),),
        (f"{_PERMITS_TESTS}::test_a_waiting_worker_that_has_died_keeps_permits_for_a_while_only",),
    ),
    Mutation(
        "nobody-is-called",
        "A permit is left for a better task, whose worker hears nothing of it.",
        (Edit(_STATEMENTS, "_calling", '{"$cond": [is_called, text, "$call"]}', '"$call"'),),
        (f"{_PERMITS_TESTS}::test_a_worker_without_room_withdraws_and_the_next_one_is_called",),
    ),
    Mutation(
        "worker-that-has-run-out-is-not-called",
        "A worker of whose listed tasks others have taken the last one hears nothing of permits for its further tasks.",
        (Edit(_STATEMENTS, "take", "_run_out()", "[]"),),
        (f"{_PERMITS_TESTS}::test_worker_is_called_when_others_have_taken_all_of_its_tasks_that_are_listed",),
    ),
    Mutation(
        "task-that-comes-later-is-not-listed",
        "A task that comes behind those that its worker has listed waits for the next poll.",
        (
            Edit(
                "mtask/features/limits/windows.py",
                "Windows.push",
                "self._pools.arrived(lane, entry.task_id, entry.order)",
                "",
            ),
        ),
        (f"{_LIMITS_TESTS}::test_task_that_comes_later_and_goes_behind_those_that_are_listed_is_listed_soon",),
    ),
    Mutation(
        "all-that-list-a-task-are-called",
        "All workers that list a task are called for its permit, so that all but one ask in vain.",
        (Edit(_STATEMENTS, "_calling", '{"$setDifference": ["$$value.first", theirs]}', '"$$value.first"'),),
        (f"{_PERMITS_TESTS}::test_of_the_workers_that_list_a_task_one_is_called_that_has_room_and_has_asked_last",),
    ),
    Mutation(
        "holder-is-trusted-for-ever",
        "A worker that said that it asks for its tasks itself keeps them listed though it does not ask.",
        (Edit(_LIMITS, "Limits._see_to", "state.withdraw_at = min(state.withdraw_at, monotonic() + _ANSWER)", ""),),
        (f"{_LIMITS_TESTS}::test_worker_that_does_not_ask_for_what_it_returned_withdraws_and_the_other_is_called",),
    ),
    Mutation(
        "start-is-told-before-it-is",
        "A start is counted before the first line of its handler, which the system may run much later.",
        (
            Edit(
                "mtask/kernel/worker/running/call.py",
                "Beginning.send",
                "return self._step(self._coroutine.send, value)",
                "pass",
            ),
            Edit(
                "mtask/kernel/worker/running/call.py",
                "Beginning.send",
                "try:\n"
                "    pass\n"
                "finally:\n"
                "    if self._on_begin is not None:\n        self._on_begin()\n        self._on_begin = None",
                "try:\n"
                "    pass\n"
                "finally:\n"
                "    if self._on_begin is not None:\n"
                "        self._on_begin()\n"
                "        self._on_begin = None\nreturn self._step(self._coroutine.send, value)",
            ),
        ),
        (
            "tests/unit/kernel/worker/running/test_beginnings.py::test_start_is_told_once_after_the_first_lines_of_the_handler",
        ),
    ),
    Mutation(
        "limit-keys-of-all-tenants-are-one",
        "Tasks with a limit_key wait for those of another tenant.",
        (Edit(_PERMITS, "PermitPool.of_task", "key, tenant", "key"),),
        (f"{_WINDOWS_TESTS}::test_equal_limit_keys_of_two_tenants_are_two_keys",),
    ),
    Mutation(
        "pool-of-a-queue-without-its-limit",
        "The limit of a queue is looked for among those of its limit_keys, and none is found.",
        (Edit(_PERMITS, "PermitPool.limited_by", '"limit"', '"key_limit"'),),
        (f"{_WINDOWS_TESTS}::test_each_kind_of_pool_has_its_limit",),
    ),
    Mutation(
        "start-counts-from-its-claim",
        "A start counts from the claim, and not from the time at which the handler begins.",
        (Edit(_LIMITS, "Limits.time_begin", "run.on_begin = begin", "self._begin(name)"),),
        (f"{_LIMITS_TESTS}::test_no_window_has_more_starts_than_the_limit",),
    ),
    Mutation(
        "failed-request-is-the-last-one",
        "After a request for permits that failed, its pool is not asked again.",
        (Edit(_LIMITS, "Limits.admit", "raise", "self._answered(wanted.values())\nraise"),),
        (f"{_LIMITS_TESTS}::test_request_for_permits_that_fails_is_made_again",),
    ),
    Mutation(
        "refused-tasks-close-the-queue",
        "Tasks that get no permit of their limit_key use up what may be asked of their queue.",
        (Edit(_POOLS, "Pools.wider", "pools[pools.index(pool) + 1 :] if pool in pools else", ""),),
        (f"{_LIMITS_TESTS}::test_tasks_that_their_key_refuses_use_up_no_permit_of_the_queue",),
    ),
    # --- windows --------------------------------------------------------------------------------------------
    Mutation(
        "bound-ignored",
        "A worker offers tasks behind those that it does not know yet.",
        (
            Edit(_WINDOWS, "Windows._first_of", "or (first.order > row.bound and not first.is_begun)", ""),
            Edit(
                _WINDOWS,
                "Windows.push",
                "(entry.order > row.bound or self._is_beyond_need(row, entry))",
                "self._is_beyond_need(row, entry)",
            ),
        ),
        (f"{_WINDOWS_TESTS}::test_nothing_behind_the_bound_is_offered_before_a_scan_has_brought_all_before_it",),
    ),
    Mutation(
        "dropped-tasks-bound-nothing",
        "After tasks were dropped for lack of room, worse ones are offered.",
        (Edit(_WINDOWS, "Windows.cut", "row.bound = min(row.bound, entry.order)", "pass"),),
        (f"{_WINDOWS_TESTS}::test_what_was_dropped_for_lack_of_room_bounds_what_is_offered",),
    ),
    Mutation(
        "dropped-queue-counts-as-read",
        "A queue whose tasks were all dropped right after a scan is not scanned again.",
        (Edit(_WINDOWS, "Windows._runs_low", "max(row.count, 1)", "row.count"),),
        (f"{_WINDOWS_TESTS}::test_more_is_wanted_of_a_queue_whose_tasks_were_all_dropped_for_lack_of_room",),
    ),
    Mutation(
        "scan-of-tenants-bounds-no-new-row",
        "A fair queue offers the first tasks of a limit_key, though a scan has not come to those before them.",
        (Edit(_WINDOWS, "Windows.push", "bounds.get(lane.tenant, window.bound)", "bound"),),
        (f"{_WINDOWS_TESTS}::test_nothing_of_a_tenant_is_offered_that_lies_behind_the_bound_of_its_scan",),
    ),
    Mutation(
        "all-of-a-key-dropped-while-one-asks",
        "While a task asks for the permit of its limit_key, the others of this limit_key are dropped.",
        (Edit(_POOLS, "Pools.retry_at", "or state.retry_at == inf", ""),),
        (f"{_WINDOWS_TESTS}::test_tasks_stay_while_another_one_asks_for_the_permit_that_they_need",),
    ),
    Mutation(
        "full-key-hides-the-others",
        "Tasks behind one whose limit_key is at its limit are not offered.",
        (Edit(_WINDOWS, "Windows._first_of", "_take_out(window, row)\nrow.closed_by = closed_by", "return None"),),
        (f"{_WINDOWS_TESTS}::test_pool_without_permits_keeps_no_other_tasks_waiting",),
    ),
    Mutation(
        "start-later-than-it-is-counted",
        "A handler begins though its permit is over, for which its start is counted.",
        (Edit("mtask/kernel/worker/running/call.py", "Caller.call", "monotonic() > run.begin_by", "False"),),
        (f"{_LIMITS_TESTS}::test_run_that_cannot_begin_before_the_end_of_its_permit_is_handed_back",),
    ),
    Mutation(
        "rescue-returns-the-permit-of-a-live-run",
        "A rescue returns the permit of a run that a ping has revived before the run was closed.",
        (Edit(_SENDER, "Sender._close", "[run for run in dead if run in closed]", "list(dead)"),),
        (f"{_LIMITS_TESTS}::test_permit_of_a_run_that_a_ping_revives_amid_its_rescue_is_not_returned",),
    ),
    # --- turns ----------------------------------------------------------------------------------------------
    Mutation(
        "turns-of-each-worker-alone",
        "A worker goes by the turns that it has taken itself.",
        (Edit(_POOLS, "Pools.note_turns", "[queue] = _Turns(count, dict(last))", ".setdefault(queue, _Turns())"),),
        (f"{_WINDOWS_TESTS}::test_turns_that_other_workers_have_granted_count",),
    ),
    Mutation(
        "turns-not-counted-by-the-pool",
        "The pool does not count the turns, so the tenant that is asked for more often gets more.",
        (Edit(_STATEMENTS, "_in_turns", "last,", ""),),
        (f"{_PERMITS_TESTS}::test_tenants_take_turns_over_all_workers",),
    ),
    Mutation(
        "turn-in-vain-is-a-turn",
        "A tenant that asked in vain goes behind those that came after it.",
        (Edit(_WINDOWS, "Windows.advance", '(row.lane.tenant or "") in tenants', "False"),),
        (f"{_WINDOWS_TESTS}::test_tenant_that_asked_in_vain_has_its_turn_again",),
    ),
)
