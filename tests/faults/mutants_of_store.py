"""Mutations of the store: fences, guards, counts, rules and concerns of what is asked of MongoDB."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_CLAIMS = "mtask/kernel/operations/claim.py"
_DRIVER = "mtask/kernel/driver/stores.py"
_AWAITING = "mtask/kernel/driver/failover.py"
_AWAITING_TESTS = "tests/unit/kernel/driver/test_awaiting.py"
_CANCELLING = "mtask/kernel/driver/failover.py"
_MENDING = "mtask/kernel/driver/failover.py"
_EXPRESSIONS = "mtask/kernel/statements/expressions.py"
_FILTERS = "mtask/kernel/statements/filters.py"
_DERIVE = "mtask/kernel/statements/derive.py"
_PIPELINES = "mtask/kernel/statements/claim.py"
_FINISH = "mtask/kernel/statements/finish.py"
_SHORT = "mtask/kernel/statements/claim.py"
_PUBLISHING = "mtask/kernel/operations/publish.py"
_REQUESTS = "mtask/kernel/statements/publish.py"
_RULES = "mtask/kernel/document/rules.py"
_OPTIONS = "mtask/kernel/document/options.py"
_OPTION_NAMES = "tests/unit/kernel/document/test_option_names.py"
_TWINS = "mtask/kernel/statements/rules.py"
_CONCERNS = "mtask/kernel/operations/stream_filter.py"
_WATCH = "mtask/kernel/operations/change_stream.py"
_WORKERS = "mtask/kernel/operations/workers.py"

_STORE_CLAIMS = "tests/integration/kernel/operations/test_claims.py"
_CAUGHT = "tests/integration/kernel/worker/test_mutants_caught.py"
_INSTANTS = "tests/unit/kernel/operations/test_requests_hold_no_instant.py"
_CLOCKS = "tests/acceptance/test_wrong_clocks_change_nothing.py"
_PLACES = "tests/integration/kernel/operations/test_index_of_id.py"
_SIMPLE_PARITY = "tests/parity/test_simple_parity.py"

_LOCAL_NOW = '__import__("datetime").datetime.now(__import__("datetime").UTC)'
_FINISH_GUARD = "guard = filters.held_runs(task_ids, run_ids)\n        general"
_OF_ITS_RUN = '{"$eq": [f"{x.RUNS}.run_id", [_of_task(outcomes, run_ids)]]},'
_CLOSES = (
    'closes = {"$and": [{"$eq": ["$$run.run_id", "$$runId"]}, {"$eq": ["$$run.status", RunStatus.RUNNING.value]}]}'
)
_CLOSES_ANY = 'closes = {"$eq": ["$$run.status", RunStatus.RUNNING.value]}'

STORE_MUTATIONS = (
    # --- fences ---------------------------------------------------------------------------------------------
    Mutation(
        "finish-by-task-alone",
        "A worker that lost its lease ends whatever run its task has now.",
        (
            Edit(_CLAIMS, "finish", "filters.held_runs(task_ids, run_ids)", "filters.by_ids(task_ids)"),
            Edit(_FINISH, "finish",
                 '"$and": [{"$eq": ["$$run.run_id", "$$runId"]}, {"$eq": ["$$run.status", RunStatus.RUNNING.value]}]',
                 '"$eq": ["$$run.status", RunStatus.RUNNING.value]'),
        ),
        (f"{_STORE_CLAIMS}::test_a_run_that_lost_its_lease_finishes_nothing",),
    ),
    Mutation(
        "short-finish-after-the-lease",
        "A run of a simple task whose lease has lapsed still writes its result.",
        (Edit(_SHORT, "held_alone", '{"$gt": [{"$arrayElemAt": [f"{x.RUNS}.ping_expire_time", 0]}, now]},', ""),),
        (f"{_SIMPLE_PARITY}::test_simple_task_is_taken_as_one",),
    ),
    Mutation(
        "short-finish-by-any-run",
        "A result is written into whichever task of the group holds one of the group's runs.",
        (Edit(_SHORT, "held_alone", 'f"{x.RUNS}.run_id", [_of_task(outcomes, run_ids)]', '{"$size": x.RUNS}, 1'),),
        (f"{_SIMPLE_PARITY}::test_success_under_the_name_of_another_task_finishes_neither",),
    ),
    Mutation(
        "place-of-an-id-that-begins-so",
        "A task gets the outcome of another task of its group, whose key begins with its own.",
        (Edit(_EXPRESSIONS, "_place_of_id", ", _END", ""),),
        (f"{_PLACES}::test_server_finds_each_id_in_its_own_place",),
    ),
    Mutation(
        "place-of-an-id-that-ends-so",
        "A task gets the outcome of another task of its group, whose key ends with its own, or the claim fails.",
        (Edit(_EXPRESSIONS, "_place_of_id", "_BEGIN,", ""),),
        (f"{_PLACES}::test_server_finds_each_id_in_its_own_place",),
    ),
    Mutation(
        "place-of-an-id-in-an-id",
        "A task gets the outcome of another task, as a key holds the characters that stand between two keys.",
        (Edit(_EXPRESSIONS, "_room_for", "_BEGIN not in joined and _END not in joined and", ""),),
        (f"{_PLACES}::test_server_finds_each_id_in_its_own_place",),
    ),
    Mutation(
        "place-of-an-id-that-is-no-text",
        "A malformed task whose `_id` is no text keeps the other tasks of its group from being changed.",
        (Edit(_EXPRESSIONS, "_room_for", "all(type(task_id) is str for task_id in task_ids)", "task_ids"),),
        (f"{_PLACES}::test_server_finds_each_id_in_its_own_place",),
    ),
    Mutation(
        "place-of-an-id-that-is-a-symbol",
        "A malformed task whose `_id` is a symbol, which the driver reads as a text, holds up its group.",
        (Edit(_EXPRESSIONS, "_place_of_id", '{"$substrBytes": ["$_id", 0, -1]}', '"$_id"'),),
        (f"{_PLACES}::test_server_finds_an_id_that_is_a_symbol",),
    ),
    Mutation(
        "place-of-an-id-by-letters",
        "Where the keys of a group are not ASCII, tasks get the outcomes of others.",
        (Edit(_EXPRESSIONS, "_size", "if text.isascii() else len(text.encode())", ""),),
        (f"{_PLACES}::test_server_finds_each_id_in_its_own_place",),
    ),
    Mutation(
        "values-lost-in-a-group",
        "Of a group of successes with values, all get the fields of the first one.",
        (Edit(_SHORT, "succeed", "outcomes if any(outcome.returns is not None for outcome in outcomes) else", ""),),
        (f"{_SIMPLE_PARITY}::test_short_success_is_the_success",),
    ),
    Mutation(
        "cancel-once",
        "A reading whose cancellation the driver drops goes on to its time limit, and its stop waits for it.",
        (
            Edit(_CANCELLING, "cancel", "while", "if"),
            Edit(_CANCELLING, "cancel", ", timeout=AGAIN", ""),
        ),
        ("tests/unit/kernel/driver/test_cancelling.py::test_call_that_is_cancelled_at_any_step_of_the_end_of_a_wait_ends",),
    ),
    Mutation(
        "cancel-a-call-once",
        "An operation whose cancellation the driver drops goes on to its time limit, and its caller waits for it.",
        (Edit(_AWAITING, "WhilePrimary._cancel_again", "self._awaited.cancel()", "pass"),),
        (f"{_AWAITING_TESTS}::test_cancelled_caller_ends_a_call_that_drops_a_cancellation",),
    ),
    Mutation(
        "cancel-at-each-turn",
        "Each cancellation of a caller reaches the driver, also while it puts its locks and counts in order.",
        (Edit(_AWAITING, "WhilePrimary._shielded",
              "try:\n"
              "    yield from asyncio.wait((self._awaited,)).__await__()\n"
              "except asyncio.CancelledError as error:\n    self._received = self._received or error.args",
              "try:\n"
              "    yield from asyncio.wait((self._awaited,)).__await__()\n"
              "except KeyError as error:\n    self._received = self._received or error.args"),),
        (f"{_AWAITING_TESTS}::test_call_gets_one_cancellation_however_often_its_caller_is_cancelled",),
    ),
    Mutation(
        "time-limit-of-the-driver-cancels-its-caller",
        "A time limit within the driver that is noticed late is taken for a cancellation of the caller.",
        (Edit(_AWAITING, "WhilePrimary._go_on", "_is_cancelled()", "_caller is not None"),),
        (f"{_AWAITING_TESTS}::test_new_primary_is_noticed_after_a_time_limit_within_the_call",),
    ),
    Mutation(
        "driver-waits-as-before",
        "A call that is given up while the database is away locks the driver for ever.",
        (Edit(_MENDING, "mend_waits", "setattr(module, _NAME, wait_for_condition)", "pass"),),
        ("tests/unit/kernel/driver/test_mending.py::"
         "test_lock_is_free_if_a_call_is_cancelled_after_its_time_limit_while_another_holds_the_lock",),
    ),
    Mutation(
        "monitor-waits-for-a-change",
        "A client that is told of no primary waits for two minutes, until its monitor hears of the server again.",
        (Edit(_MENDING, "_check_at_once", "server._monitor.cancel_check()", "pass"),),
        ("tests/integration/kernel/driver/test_checks.py::"
         "test_sync_client_that_was_told_of_no_change_writes_again",),
    ),
    Mutation(
        "woken-for-nothing",
        "A call that is cancelled when it gets a connection leaves the next one waiting, though a connection is free.",
        (Edit(_MENDING, "wait_for_condition", "condition.notify()", "pass"),),
        ("tests/unit/kernel/driver/test_mending.py::test_call_that_is_cancelled_when_it_is_woken_wakes_another",),
    ),
    Mutation(
        "rest-of-a-call-interrupts-its-caller",
        "A call within one that was given up looks for a new primary, and cancels what its former caller does by then.",
        (Edit(_AWAITING, "WhilePrimary._is_given_up", "in _GIVING_UP", "is None"),),
        (f"{_AWAITING_TESTS}::test_call_within_a_call_that_is_given_up_interrupts_nobody",),
    ),
    Mutation(
        "limit-of-what-was-given-up",
        "After a stream is given up because of a new primary, its worker can open no other.",
        (Edit(_DRIVER, "AsyncStore.while_primary", "with pymongo.timeout(None):", "if True:"),),
        (f"{_AWAITING_TESTS}::test_time_limit_of_what_is_given_up_does_not_stay_with_the_caller",),
    ),
    Mutation(
        "wait-ends-before-the-lock-is-taken",
        "A call that is cancelled twice gives back a lock of the driver that it does not hold.",
        (Edit(_MENDING, "wait_for_condition", "while", "if"),),
        ("tests/unit/kernel/driver/test_mending.py::test_lock_is_free_whenever_a_call_is_cancelled_that_was_woken",),
    ),
    Mutation(
        "long-claim-of-what-the-short-one-took",
        "A process that stood still between the two statements of a claim preempts itself, under the same run_id.",
        (Edit(_CLAIMS, "claim", 'guard[f"{filters.RUNS}.run_id"]', "_"),),
        (f"{_STORE_CLAIMS}::test_process_that_stands_still_between_the_two_statements_of_a_claim_preempts_nothing_of_its_own",),
    ),
    Mutation(
        "short-claim-of-what-is-begun",
        "The short claim takes a task that was begun before, and forgets its runs.",
        (Edit(_SHORT, "unbegun", '{"$eq": [x.RUNS, []]},', ""),),
        (f"{_SIMPLE_PARITY}::test_simple_task_is_taken_as_one",),
    ),
    Mutation(
        "finish-closes-every-run",
        "A finish closes the runs of all workers that hold the task.",
        (Edit(_FINISH, "finish",
              '"$and": [{"$eq": ["$$run.run_id", "$$runId"]}, {"$eq": ["$$run.status", RunStatus.RUNNING.value]}]',
              '"$eq": ["$$run.status", RunStatus.RUNNING.value]'),),
        (f"{_STORE_CLAIMS}::test_two_workers_at_once_where_two_must_succeed_and_no_third",),
    ),
    Mutation(
        "finish-after-the-lease",
        "A run whose lease has lapsed still writes its result, as long as nobody has preempted it.",
        (
            Edit(_FILTERS, "held_runs",
                 '{**fence_of(task_ids, run_ids), "$expr": {"$gt": [{"$size": held}, 0]}}',
                 "fence_of(task_ids, run_ids)"),
            Edit(_FINISH, "finish", "*close_lapsed(now),", ""),
        ),
        (
            f"{_STORE_CLAIMS}::test_a_run_that_lost_its_lease_finishes_nothing",
            f"{_STORE_CLAIMS}::test_a_lapsed_run_finishes_nothing_in_a_transaction",
        ),
    ),
    Mutation(
        "ping-without-fence",
        "A ping brings a lapsed lease back to life.",
        (
            Edit(_CLAIMS, "ping", "filters.held_runs(task_ids, run_ids)", "filters.by_ids(task_ids)"),
            Edit(_PIPELINES, "ping",
                 '"$and": [{"$in": ["$$run.run_id", x.literal(list(run_ids))]}, rules.is_run_live(now)]',
                 '"$in": ["$$run.run_id", x.literal(list(run_ids))]'),
        ),
        (f"{_STORE_CLAIMS}::test_a_run_that_lost_its_lease_pings_nothing",),
    ),
    Mutation(
        "hand-back-without-fence",
        "A worker that stops hands back a run that another worker holds by now.",
        (
            Edit(_CLAIMS, "finish",
                 "guard = filters.held_runs(task_ids, run_ids)",
                 "guard = filters.held_runs(task_ids, run_ids)\n"
                 "guard = filters.by_ids(task_ids) if outcomes[0].status is RunStatus.CANCELED else guard"),
            Edit(_FINISH, "finish",
                 "if are_successes:",
                 "if outcomes[0].status is RunStatus.CANCELED:\n"
                 '    closes = {"$eq": ["$$run.status", RunStatus.RUNNING.value]}\nif are_successes:'),
        ),
        (f"{_STORE_CLAIMS}::test_a_run_that_lost_its_lease_finishes_nothing",),
    ),
    Mutation(
        "commit-though-the-fence-missed",
        "A handler's transaction commits after its lease was lost: its effect happens twice.",
        (
            Edit("mtask/kernel/operations/transactions.py", "commit",
                 "if not is_lease_valid() or not (yield from claims.finish_in_transaction(outcome)):",
                 "yield from claims.finish_in_transaction(outcome)\nif not is_lease_valid():"),
        ),
        (f"{_CAUGHT}::test_commit_of_a_run_whose_lease_lapsed_is_refused_and_its_write_is_not_there",),
    ),
    Mutation(
        "session-of-a-live-run-ended",
        "A rescue ends the transaction of a run whose lease still holds.",
        (Edit("mtask/kernel/operations/sessions.py", "_lapsed_in", 'and lease <= document["now"]', ""),),
        ("tests/integration/kernel/operations/test_sessions.py::test_session_of_a_live_run_is_left_alone",),
    ),
    Mutation(
        "session-of-a-closed-run-ended",
        "The transaction of a run is ended since another, which is closed, had the session before it.",
        (
            Edit("mtask/kernel/statements/filters.py", "naming_sessions", '"status": "RUNNING",', ""),
            Edit("mtask/kernel/operations/sessions.py", "_lapsed_in",
                 'run.get("status") == RunStatus.RUNNING', "isinstance(run, dict)"),
        ),
        ("tests/integration/kernel/operations/test_sessions.py::test_session_that_a_closed_run_named_is_left_alone",),
    ),
    Mutation(
        "success-beside-the-transaction",
        "The SUCCESS stands though the handler's transaction did not commit.",
        (
            Edit(_DRIVER, "_arguments", '!= "session"', '== "database"'),
        ),
        (f"{_CAUGHT}::test_transaction_that_the_server_ended_leaves_neither_effect_nor_success_and_the_next_leaves_both",),
    ),
    Mutation(
        "heartbeat-without-fence",
        "Two live processes share a worker_id: the older one never learns that its registration was taken over.",
        (
            Edit(_WORKERS, "heartbeat", ', "incarnation": me.incarnation', ""),
        ),
        ("tests/integration/kernel/worker/discovery/test_discovery.py::test_process_whose_worker_id_was_taken_over_exits_with_code_5",),
    ),
    Mutation(
        "worker-id-never-in-use",
        "A second process takes a worker_id while its owner lives.",
        (Edit(_WORKERS, "register", '{"$eq": [{"$type": "$incarnation"}, "missing"]}', "True"),),
        ("tests/acceptance/test_worker_processes_are_kept.py"
         "::test_worker_id_of_a_live_process_is_refused_to_another_with_a_clear_error",),
    ),
    # --- clocks ---------------------------------------------------------------------------------------------
    Mutation(
        "guard-by-the-workers-clock",
        "What is due is decided by the claiming worker's own clock.",
        (
            Edit(_FILTERS, "due_tasks", "x.NOW", '__import__("datetime").datetime.now(__import__("datetime").UTC)'),
        ),
        (f"{_INSTANTS}::test_request_of_the_engine_holds_no_instant_of_this_process",),
    ),
    Mutation(
        "claim-by-the-workers-clock",
        "Leases, delays and lapses are reckoned by the claiming worker's own clock.",
        (
            Edit(_CLAIMS, "_claim_by_all_rules",
                 "worker_id, run_id",
                 'worker_id, run_id, __import__("datetime").datetime.now(__import__("datetime").UTC)'),
            Edit(_CLAIMS, "claim",
                 "(worker_id, run_id)",
                 '(worker_id, run_id, __import__("datetime").datetime.now(__import__("datetime").UTC))'),
        ),
        (
            f"{_INSTANTS}::test_request_of_the_engine_holds_no_instant_of_this_process",
            f"{_CLOCKS}::test_worker_with_a_wrong_clock_takes_nothing_from_a_live_lease_and_a_lapsed_one_soon",
        ),
    ),
    Mutation(
        "scan-by-the-workers-clock",
        "The batch query asks for what is due by the worker's own clock.",
        (
            Edit(_FILTERS, "claimable", "x.NOW", '__import__("datetime").datetime.now(__import__("datetime").UTC)'),
        ),
        (f"{_INSTANTS}::test_request_of_the_engine_holds_no_instant_of_this_process",),
    ),
    Mutation(
        "stream-with-a-frozen-time",
        "The change stream's filter holds the time of its opening, and hides ever more as it ages.",
        (
            Edit(_CONCERNS, "_is_soon",
                 '"$wallTime"', '__import__("datetime").datetime.now(__import__("datetime").UTC)'),
        ),
        (f"{_INSTANTS}::test_change_streams_filter_holds_no_instant_that_would_age",),
    ),
    # --- counts and rules: where rule and twin are changed alike, the tests that compare them see nothing --------
    Mutation(
        "timeouts-not-counted",
        "A task that kills its worker every time is tried for ever.",
        (
            Edit(_DERIVE, "_close_lapsed", ', "task_state.failed_cnt": rules.failures(now)', ""),
        ),
        (
            f"{_STORE_CLAIMS}::test_a_lapsed_run_is_marked_by_whoever_preempts_and_counts",
            f"{_STORE_CLAIMS}::test_a_task_that_kills_every_worker_ends_as_fail_at_the_limit",
        ),
    ),
    Mutation(
        "failures-not-counted",
        "A task that always fails is tried for ever.",
        (
            Edit(_FINISH, "finish", ", one", ', {"$multiply": [one, 0]}'),
        ),
        (f"{_STORE_CLAIMS}::test_a_group_of_failures_and_runs_handed_back_gives_each_its_own_end",),
    ),
    Mutation(
        "hand-back-counted",
        "A worker that stops uses up the retries of what it hands back.",
        (
            Edit(_FINISH, "finish",
                 "any(outcome.status is RunStatus.FAIL for outcome in outcomes)",
                 "outcomes[0].status is not RunStatus.SUCCESS"),
            Edit(_FINISH, "finish", "int(outcome.status is RunStatus.FAIL)", "1"),
        ),
        (f"{_STORE_CLAIMS}::test_a_run_handed_back_is_not_counted_and_claimable_at_once",),
    ),
    Mutation(
        "one-retry-too-many",
        "The limit lets one run more through, in the rule and in its twin.",
        (
            Edit(_TWINS, "_is_exhausted",
                 'f"{OPTION}.max_unexpected_retries"', '{"$add": [f"{OPTION}.max_unexpected_retries", 1]}'),
            Edit(_RULES, "is_exhausted", "option.max_unexpected_retries", "option.max_unexpected_retries + 1"),
        ),
        (f"{_STORE_CLAIMS}::test_a_task_that_kills_every_worker_ends_as_fail_at_the_limit",),
    ),
    Mutation(
        "option-in-seconds-stored-as-such",
        "Seconds that are given in code are stored as if they were milliseconds.",
        (Edit(_OPTIONS, "_milliseconds", "value * 1000", "value"),),
        (f"{_OPTION_NAMES}::test_seconds_and_timedeltas_are_stored_as_milliseconds",),
    ),
    Mutation(
        "old-option-name-in-seconds",
        "A number under the old name of an option, which was milliseconds, is taken for seconds.",
        (Edit(_OPTIONS, "with_new_names", "AsStored(value) if new in DURATIONS else value", "value"),),
        (f"{_OPTION_NAMES}::test_an_old_name_warns_once_where_it_is_given_and_means_the_same",),
    ),
    Mutation(
        "both-option-names-taken",
        "Where an option is given by both of its names, one of the two values is dropped in silence.",
        (Edit(_OPTIONS, "with_new_names", "elif new in given:", "elif False:"),),
        (f"{_OPTION_NAMES}::test_both_names_at_once_are_refused",),
    ),
    Mutation(
        "twin-one-retry-too-few",
        "The server's limit differs by one from the rule that the worker goes by.",
        (
            Edit(_TWINS, "_is_exhausted", '"$gt"', '"$gte"'),
        ),
        ("tests/parity/test_rules_parity.py::test_every_rule_and_its_twin_agree",),
    ),
    Mutation(
        "holder-takes-a-second-seat",
        "A worker that holds a task takes another of its seats too, in the rule and in its twin.",
        (
            Edit(_TWINS, "is_candidate",
                 '{"$or": [is_run_live(now), has_status(RunStatus.SUCCESS)]}', "has_status(RunStatus.SUCCESS)"),
            Edit(_RULES, "is_candidate",
                 "return False\nif any(run.worker_id == worker_id for run in live_runs(task, now)):", ""),
        ),
        (f"{_STORE_CLAIMS}::test_two_workers_at_once_where_two_must_succeed_and_no_third",),
    ),
    Mutation(
        "running-takes-no-seat",
        "S < k in place of S + R < k, in the rule and in its twin: any number of workers run a task at once.",
        (
            Edit(_TWINS, "_has_free_seat",
                 '"$add": [{"$size": "$$succeeded"}, {"$size": "$$live"}]', '"$size": "$$succeeded"'),
            Edit(_RULES, "has_free_seat", "+ len(live_runs(task, now))", ""),
        ),
        (
            f"{_STORE_CLAIMS}::test_a_task_that_is_held_is_not_claimed_again",
            f"{_STORE_CLAIMS}::test_fifty_claims_at_once_give_a_task_to_one_worker",
        ),
    ),
    Mutation(
        "named-workers-ignored",
        "specific_worker_ids keeps nobody out, in the rule and in its twin.",
        (
            Edit(_TWINS, "is_admitted",
                 '{"$or": [{"$not": [_names_workers()]}, {"$in": [worker_id, f"{OPTION}.specific_worker_ids"]}]}',
                 "True"),
            Edit(_RULES, "is_admitted", "not allowed or worker_id in allowed", "True"),
        ),
        (f"{_STORE_CLAIMS}::test_only_named_workers_get_a_task",),
    ),
    Mutation(
        "retry-delay-ignored",
        "A failed task is tried again at once, by the rule and by its twin.",
        (
            Edit(_TWINS, "ready_time", '{"$max": [due_time(), retry_time(worker_id)]}', "due_time()"),
            Edit(_RULES, "may_take",
                 "max(due_time(task), retry_time(task, worker_id) or due_time(task))", "due_time(task)"),
        ),
        (f"{_STORE_CLAIMS}::test_a_failure_waits_for_its_delay_and_then_is_tried_again",),
    ),
    Mutation(
        "ping-leaves-the-preemption-time",
        "next_preempt_time stays behind the lease: every worker tries the held task, again and again.",
        (
            Edit(_PIPELINES, "ping", ", *derive_routinely(now)", ""),
        ),
        (f"{_STORE_CLAIMS}::test_a_ping_moves_the_lease_and_the_preemption_time_with_it",),
    ),
    Mutation(
        "everything-is-quiet",
        "A claim, ping or finish is no news even where it brings the task within the horizon of others.",
        (Edit(_DERIVE, "_derive_quietly", '{"$cond": [has_moved, {"$not": [is_near]}, has_new_status]}', "True"),),
        ("tests/integration/kernel/operations/test_wakeups.py::test_claims",),
    ),
    # --- replies, races and concerns ------------------------------------------------------------------------
    Mutation(
        "finish-not-read-back",
        "A finish sent again after a lost reply is taken for a lost lease.",
        (Edit(_CLAIMS, "finish", "return (yield from finished(outcomes, timeout))", "return set()"),),
        (f"{_STORE_CLAIMS}::test_a_finish_repeated_after_a_lost_reply_stands_once_and_says_so",),
    ),
    Mutation(
        "publish-looks-then-writes",
        "Publishing is two steps: of many who publish one key at once, several create it.",
        (
            Edit(_PUBLISHING, "_insert",
                 'result = yield tasks("update_one", {"_id": task.task_id}, pipeline, upsert=True)',
                 'if (yield tasks("find_one", {"_id": task.task_id})) is not None:\n'
                 "    return False\n"
                 'yield tasks("update_one", {"_id": task.task_id}, pipeline, upsert=True)\nreturn True'),
            Edit(_PUBLISHING, "_insert", "return result.upserted_id is not None", ""),
            Edit(_REQUESTS, "publish", 'made, "$$ROOT"', "made, made"),
        ),
        ("tests/integration/kernel/operations/test_publishing.py::test_fifty_threads_publish_one_key_and_one_of_them_creates_it",),
    ),
    Mutation(
        "stream-resumed-where-it-ended",
        "A stream that cannot be resumed is resumed for ever.",
        (
            Edit(_WATCH, "Stream",
                 '"""An open change stream. After any error, the caller must close it, open a new stream and '
                 'scan again."""',
                 '"""An open change stream. After any error, the caller must close it, open a new stream and '
                 'scan again."""\nlast_token: Any = None'),
            Edit(_WATCH, "Stream.open", "stream._watch()", "stream._watch(cls.last_token)"),
            Edit(_WATCH, "Stream.next",
                 "written = self._session.operation_time",
                 "Stream.last_token = self._cursor.resume_token\nwritten = self._session.operation_time"),
        ),
        (f"{_CAUGHT}::test_stream_is_opened_anew_and_not_where_the_old_one_ended",),
    ),
    Mutation(
        "stream-turned-from-now-on",
        "A stream that is read another way from now on begins anew there: what came in between is not told.",
        (Edit(_WATCH, "Stream._reopen", "token, begin", ""),),
        ("tests/integration/kernel/operations/test_wakeups.py::test_what_changes_while_it_turns_to_dense_writes_is_told",),
    ),
    Mutation(
        "weak-writes",
        "What the engine writes can be rolled back: a write is done when one node has it.",
        (Edit(_DRIVER, "_GUARANTEES", 'w="majority", j=True', "w=1"),),
        ("tests/integration/client/test_connections.py"
         "::test_weak_concerns_in_the_uri_of_mtasks_own_client_do_not_weaken_it",),
    ),
)  # fmt: skip
