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
        (Edit(_SENDER, "if gate.has_fallen_back(task, now)]", "if False]"),),
        (f"{_LIMITS_TESTS}::test_task_that_others_have_run_meanwhile_loses_its_place",),
    ),
    Mutation(
        "rank-by-when-it-was-read",
        "A task that asks for a permit ranks by the time at which it was read.",
        (Edit(_RULES, "-task.task_option.priority, stored)", "-task.task_option.priority, now)"),),
        (f"{_RANKS_TESTS}::test_tasks_go_by_their_stored_times_whenever_they_are_seen",),
    ),
    Mutation(
        "rank-by-when-it-was-seen",
        "Waiting tasks are offered in the order in which this worker may try them, and not in that of their documents.",
        (
            Edit(
                _QUEUE,
                "entry.limit_key, entry.moment, entry.is_lapsed = limit_key, moment, is_lapsed",
                "entry.limit_key, entry.moment, entry.is_lapsed = limit_key, due, is_lapsed",
            ),
        ),
        (f"{_WINDOWS_TESTS}::test_tasks_go_in_the_order_of_their_documents_whenever_they_were_seen",),
    ),
    Mutation(
        "permit-for-a-former-place",
        "A task is claimed that another worker has run since it was read, as if it still had its former place.",
        (Edit(_LIMITS, ", due_by(self.read_at)]", "]"),),
        (f"{_LIMITS_TESTS}::test_task_that_others_run_while_it_gets_its_permit_is_not_claimed",),
    ),
    Mutation(
        "requests-overtake-each-other",
        "Of two requests of a worker, that with the later tasks may get the permit.",
        (Edit(_SENDER, "await self._requests.wait_for_earlier(place, took)", "pass"),),
        (f"{_LIMITS_TESTS}::test_requests_for_permits_are_made_in_the_order_of_their_tasks",),
    ),
    Mutation(
        "scan-of-some-names-for-all",
        "After a scan for the tasks of executors, a worker believes that it knows all that waits behind a limit.",
        (Edit(_BATCHES, "        if names != self._served.names:\n", "        if False:\n"),),
        (f"{_LIMITS_TESTS}::test_scan_for_tasks_of_executors_does_not_tell_what_else_waits_behind_a_limit",),
    ),
    Mutation(
        "interrupted-task-asks-like-any-other",
        "An interrupted task has no precedence when it asks for a permit.",
        (Edit(_RULES, "return (0 if is_interrupted(task, now) else 1, ", "return (1, "),),
        (f"{_RANKS_TESTS}::test_interrupted_task_goes_before_any_priority",),
    ),
    Mutation(
        "interrupted-task-waits-like-any-other",
        "An interrupted task has no precedence among those that wait for permits.",
        (
            Edit(
                _READY,
                "            return (not self.is_begun, -self.priority, self.moment)\n",
                "            return (True, -self.priority, self.moment)\n",
            ),
        ),
        (f"{_WINDOWS_TESTS}::test_interrupted_tasks_go_before_any_priority",),
    ),
    Mutation(
        "groups-land-in-any-order",
        "Runs of a group that was claimed later start first if its reply comes first.",
        (Edit("mtask/kernel/worker/running/claim.py", "        if earlier:\n", "        if False:\n"),),
        (f"{_LANDINGS_TESTS}::test_a_claim_lands_after_those_that_began_earlier",),
    ),
    # --- permits --------------------------------------------------------------------------------------------
    Mutation(
        "call-before-the-answer-is-forgotten",
        "A call that comes while a request is under way changes nothing.",
        (Edit(_LIMITS, "if is_turn_known or state.news > news:", "if is_turn_known:"),),
        (f"{_LIMITS_TESTS}::test_call_that_comes_before_the_answer_to_an_older_request_is_not_forgotten",),
    ),
    Mutation(
        "full-pool-hears-of-no-better-task",
        "A task that is more urgent than those that are listed waits for the worker's next look at the pool.",
        (Edit(_POOLS, "return shown is None or order < shown", "return False"),),
        (f"{_LIMITS_TESTS}::test_task_that_goes_before_those_that_are_listed_is_listed_at_once",),
    ),
    Mutation(
        "entry-ends-before-the-next-start",
        "What waits for a start of a long window is listed for 5 s only.",
        (
            Edit(
                _LIMITS,
                "if next_start <= now + _POLL or (next_start < inf and not answer.is_listed):",
                "if next_start < inf:",
            ),
        ),
        (f"{_LIMITS_TESTS}::test_what_waits_for_a_start_stays_listed_until_the_next_one_is_free",),
    ),
    Mutation(
        "task-of-two-limits-is-not-listed",
        "A task is listed nowhere while its queue is full, though its own worker will return both permits.",
        (Edit("mtask/features/limits/requests.py", "(pool), self._shared(pool))", "(pool))"),),
        (f"{_LIMITS_TESTS}::test_what_waits_is_listed_when_a_permit_is_taken_though_it_waits_for_its_queue_too",),
    ),
    Mutation(
        "tenant-takes-all-permits-in-its-turn",
        "All tasks of the tenant whose turn it is go before those of the others.",
        (
            Edit(
                _STATEMENTS,
                'index = {"$subtract": ["$$place", {"$indexOfArray": ["$$tenants", "$$each.of"]}]}',
                "index = 0",
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
                'line = _in_order({"$concatArrays": [keys("$_open", is_rival=0), keys("$_rivals", is_rival=1)]})',
                'line = keys("$_open", is_rival=0)',
            ),
        ),
        (f"{_PERMITS_TESTS}::test_who_returns_a_permit_takes_it_again_only_if_no_better_task_waits_elsewhere",),
    ),
    Mutation(
        "dead-worker-waits-for-ever",
        "A permit is left for the tasks of a worker that has died.",
        (Edit(_STATEMENTS, '            {"$gt": ["$$worker.until", x.NOW]},\n', ""),),
        (f"{_PERMITS_TESTS}::test_a_waiting_worker_that_has_died_keeps_permits_for_a_while_only",),
    ),
    Mutation(
        "nobody-is-called",
        "A permit is left for a better task, whose worker hears nothing of it.",
        (Edit(_STATEMENTS, '{"$cond": [is_called, text, "$call"]}', '"$call"'),),
        (f"{_PERMITS_TESTS}::test_a_worker_without_room_withdraws_and_the_next_one_is_called",),
    ),
    Mutation(
        "worker-that-has-run-out-is-not-called",
        "A worker of whose listed tasks others have taken the last one hears nothing of permits for its further tasks.",
        (Edit(_STATEMENTS, '"_run_out": _run_out(),', '"_run_out": [],'),),
        (f"{_PERMITS_TESTS}::test_worker_is_called_when_others_have_taken_all_of_its_tasks_that_are_listed",),
    ),
    Mutation(
        "task-that-comes-later-is-not-listed",
        "A task that comes behind those that its worker has listed waits for the next poll.",
        (
            Edit(
                "mtask/features/limits/windows.py",
                "        self._pools.arrived(lane, entry.task_id, entry.order)\n",
                "",
            ),
        ),
        (f"{_LIMITS_TESTS}::test_task_that_comes_later_and_goes_behind_those_that_are_listed_is_listed_soon",),
    ),
    Mutation(
        "all-that-list-a-task-are-called",
        "All workers that list a task are called for its permit, so that all but one ask in vain.",
        (Edit(_STATEMENTS, '"first": {"$setDifference": ["$$value.first", theirs]}', '"first": "$$value.first"'),),
        (f"{_PERMITS_TESTS}::test_of_the_workers_that_list_a_task_one_is_called_that_has_room_and_has_asked_last",),
    ),
    Mutation(
        "holder-is-trusted-for-ever",
        "A worker that said that it asks for its tasks itself keeps them listed though it does not ask.",
        (
            Edit(
                _LIMITS,
                "state.withdraw_at = min(state.withdraw_at, monotonic() + _ANSWER)\n            self._wake",
                "self._wake",
            ),
        ),
        (f"{_LIMITS_TESTS}::test_worker_that_does_not_ask_for_what_it_returned_withdraws_and_the_other_is_called",),
    ),
    Mutation(
        "start-is-told-before-it-is",
        "A start is counted before the first line of its handler, which the system may run much later.",
        (
            Edit(
                "mtask/kernel/worker/running/call.py",
                "        try:\n            return self._step(self._coroutine.send, value)\n        finally:\n",
                "        try:\n            pass\n        finally:\n",
            ),
            Edit(
                "mtask/kernel/worker/running/call.py",
                "                self._on_begin = None\n",
                "                self._on_begin = None\n        return self._step(self._coroutine.send, value)\n",
            ),
        ),
        (
            "tests/unit/kernel/worker/running/test_beginnings.py::test_start_is_told_once_after_the_first_lines_of_the_handler",
        ),
    ),
    Mutation(
        "limit-keys-of-all-tenants-are-one",
        "Tasks with a limit_key wait for those of another tenant.",
        (
            Edit(
                _PERMITS, "None if key is None else cls(queue, key, tenant)", "None if key is None else cls(queue, key)"
            ),
        ),
        (f"{_WINDOWS_TESTS}::test_equal_limit_keys_of_two_tenants_are_two_keys",),
    ),
    Mutation(
        "pool-of-a-queue-without-its-limit",
        "The limit of a queue is looked for among those of its limit_keys, and none is found.",
        (Edit(_PERMITS, '        return "limit" if self.queue', '        return "key_limit" if self.queue'),),
        (f"{_WINDOWS_TESTS}::test_each_kind_of_pool_has_its_limit",),
    ),
    Mutation(
        "start-counts-from-its-claim",
        "A start counts from the claim, and not from the time at which the handler begins.",
        (
            Edit(
                _LIMITS,
                "run.on_begin = begin",
                "self._begin(name)",
            ),
        ),
        (f"{_LIMITS_TESTS}::test_no_window_has_more_starts_than_the_limit",),
    ),
    Mutation(
        "failed-request-is-the-last-one",
        "After a request for permits that failed, its pool is not asked again.",
        (
            Edit(
                _LIMITS,
                "            raise  # the tasks without an answer",
                "            self._answered(wanted.values())\n            raise  # the tasks without an answer",
            ),
        ),
        (f"{_LIMITS_TESTS}::test_request_for_permits_that_fails_is_made_again",),
    ),
    Mutation(
        "refused-tasks-close-the-queue",
        "Tasks that get no permit of their limit_key use up what may be asked of their queue.",
        (Edit(_POOLS, "return pools[pools.index(pool) + 1 :] if pool in pools else ()", "return ()"),),
        (f"{_LIMITS_TESTS}::test_tasks_that_their_key_refuses_use_up_no_permit_of_the_queue",),
    ),
    # --- windows --------------------------------------------------------------------------------------------
    Mutation(
        "bound-ignored",
        "A worker offers tasks behind those that it does not know yet.",
        (
            Edit(
                _WINDOWS, "if first is None or (first.order > row.bound and not first.is_begun):", "if first is None:"
            ),
            Edit(
                _WINDOWS,
                "(entry.order > row.bound or self._is_beyond_need(row, entry))",
                "self._is_beyond_need(row, entry)",
            ),
        ),
        (f"{_WINDOWS_TESTS}::test_nothing_behind_the_bound_is_offered_before_a_scan_has_brought_all_before_it",),
    ),
    Mutation(
        "dropped-tasks-bound-nothing",
        "After tasks were dropped for lack of room, worse ones are offered.",
        (Edit(_WINDOWS, "        row.bound = min(row.bound, entry.order)\n\n", "        pass\n\n"),),
        (f"{_WINDOWS_TESTS}::test_what_was_dropped_for_lack_of_room_bounds_what_is_offered",),
    ),
    Mutation(
        "scan-of-tenants-bounds-no-new-row",
        "A fair queue offers the first tasks of a limit_key, though a scan has not come to those before them.",
        (Edit(_WINDOWS, "window.bounds.get(lane.tenant, window.bound)", "window.bound"),),
        (f"{_WINDOWS_TESTS}::test_nothing_of_a_tenant_is_offered_that_lies_behind_the_bound_of_its_scan",),
    ),
    Mutation(
        "all-of-a-key-dropped-while-one-asks",
        "While a task asks for the permit of its limit_key, the others of this limit_key are dropped.",
        (Edit(_POOLS, " or state.retry_at == inf else", " else"),),
        (f"{_WINDOWS_TESTS}::test_tasks_stay_while_another_one_asks_for_the_permit_that_they_need",),
    ),
    Mutation(
        "full-key-hides-the-others",
        "Tasks behind one whose limit_key is at its limit are not offered.",
        (
            Edit(
                _WINDOWS,
                "                _take_out(window, row)\n                row.closed_by = closed_by\n",
                "                return None\n",
            ),
        ),
        (f"{_WINDOWS_TESTS}::test_pool_without_permits_keeps_no_other_tasks_waiting",),
    ),
    Mutation(
        "start-later-than-it-is-counted",
        "A handler begins though its permit is over, for which its start is counted.",
        (Edit("mtask/kernel/worker/running/call.py", "if monotonic() > run.begin_by:", "if False:"),),
        (f"{_LIMITS_TESTS}::test_run_that_cannot_begin_before_the_end_of_its_permit_is_handed_back",),
    ),
    Mutation(
        "rescue-returns-the-permit-of-a-live-run",
        "A rescue returns the permit of a run that a ping has revived before the run was closed.",
        (Edit(_SENDER, "[run for run in dead if run in closed]", "list(dead)"),),
        (f"{_LIMITS_TESTS}::test_permit_of_a_run_that_a_ping_revives_amid_its_rescue_is_not_returned",),
    ),
    # --- turns ----------------------------------------------------------------------------------------------
    Mutation(
        "turns-of-each-worker-alone",
        "A worker goes by the turns that it has taken itself.",
        (Edit(_POOLS, "self._turns[queue] = _Turns(count, dict(last))", "self._turns.setdefault(queue, _Turns())"),),
        (f"{_WINDOWS_TESTS}::test_turns_that_other_workers_have_granted_count",),
    ),
    Mutation(
        "turns-not-counted-by-the-pool",
        "The pool does not count the turns, so the tenant that is asked for more often gets more.",
        (Edit(_STATEMENTS, "[begins, index, last, priority, time]", "[begins, index, priority, time]"),),
        (f"{_PERMITS_TESTS}::test_tenants_take_turns_over_all_workers",),
    ),
    Mutation(
        "turn-in-vain-is-a-turn",
        "A tenant that asked in vain goes behind those that came after it.",
        (Edit(_WINDOWS, 'if (row.lane.tenant or "") in tenants:', "if False:"),),
        (f"{_WINDOWS_TESTS}::test_tenant_that_asked_in_vain_has_its_turn_again",),
    ),
)
