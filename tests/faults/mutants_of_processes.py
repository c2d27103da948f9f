"""Mutations of what a process has that runs handlers: signals, logging, the thread that pings, and transactions."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_PROCESS = "mtask/kernel/worker/process/runtime.py"
_PULSE = "mtask/kernel/worker/process/health.py"
_SIGNALS = "tests/acceptance/test_signals_end_processes.py"
_LOGS = "tests/acceptance/test_broken_logs_disturb_nothing.py"
_TRANSACTIONS = "tests/integration/kernel/worker/running/test_transactions.py"
_RETURNS = "tests/integration/kernel/worker/running/test_returns.py"
_FORKED = f"{_SIGNALS}::test_process_that_a_handler_forks_has_default_signals_from_its_first_instant[in_a_thread]"
_GONE_WRONG = "tests/acceptance/test_bad_handlers_and_documents_disturb_nobody.py"
_WORKER = "mtask/kernel/worker/process/worker.py"
_RELOADER = "mtask/cli/workers/reloader.py"
_BURST = "tests/integration/kernel/worker/test_burst.py"
_RELOAD = "tests/acceptance/test_workers_follow_their_code.py"

PROCESS_MUTATIONS = (
    Mutation(
        "forked-processes-keep-signals",
        "A process that a handler forks takes SIGTERM for its parent.",
        (Edit(_PROCESS, "handle_ends.in_child", "signal.getsignal(number) is take", "False"),),
        (_FORKED,),
    ),
    Mutation(
        "early-signals-are-lost",
        "A signal that reaches a forked process before it has signals of its own is lost.",
        (Edit(_PROCESS, "handle_ends.before", ", former", ", ()"),),
        (_FORKED,),
    ),
    Mutation(
        "second-hang-up-is-a-second-request",
        "A closed terminal, which sends SIGHUP twice, cuts the time for running tasks short.",
        (Edit(_PROCESS, "handle_ends.take", "number == signal.SIGHUP and has_hung_up", "False"),),
        ("tests/unit/kernel/worker/process/test_process.py::test_terminal_that_sends_sighup_twice_asks_once",),
    ),
    Mutation(
        "nohup-is-forgotten",
        "A worker under nohup ends with its terminal.",
        (Edit(_PROCESS, "handle_ends",
              "if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN", ""),),
        (f"{_SIGNALS}::test_worker_under_nohup_goes_on_without_its_terminal",),
    ),
    Mutation(
        "logging-of-the-app-raises",
        "A log handler of the app that raises ends the engine's step.",
        (Edit("mtask/logs.py", "SureLogger.log", "KeyboardInterrupt", "BaseException"),),
        (f"{_LOGS}::test_logging_of_the_app_that_raises_disturbs_no_run_no_executor_and_no_ping[the handler]",),
    ),
    Mutation(
        "dead-pinger-is-not-noticed",
        "A worker whose pinger has ended goes on, and loses all its leases.",
        (Edit("mtask/kernel/worker/running/leases.py", "Pinger._live", "not self._is_stopped", "False"),),
        (f"{_LOGS}::test_worker_whose_pinger_has_ended_hands_its_runs_back_and_ends",),
    ),
    Mutation(
        "callbacks-of-transactions-wait-for-a-scan",
        "The end that a transaction writes is told to nobody.",
        (Edit("mtask/kernel/worker/running/runner.py", "Runner._finish_committed",
              "self._finisher.tell_of_end(run, goes_on=run.goes_on)", ""),),
        (f"{_TRANSACTIONS}::test_callback_of_a_run_that_a_transaction_has_ended_waits_for_no_scan[plain]",),
    ),
    Mutation(
        "aborted-transaction-succeeds",
        "A handler that aborts its transaction is SUCCESS without its writes.",
        (Edit("mtask/kernel/worker/running/transactions.py", "RunTransactions._check_open",
              "not session.in_transaction or", ""),),
        (f"{_TRANSACTIONS}::test_handler_that_ends_its_transaction_itself_fails[abort_transaction-plain]",),
    ),
    Mutation(
        "open-transaction-succeeds",
        "A handler that returns inside of its transaction's block is SUCCESS without its writes.",
        (Edit("mtask/kernel/worker/running/call.py", "Caller._end_transaction", "called.raised is None", "False"),),
        (f"{_TRANSACTIONS}::test_handler_that_does_not_leave_its_transaction_fails_and_holds_up_nobody[plain]",),
    ),
    Mutation(
        "open-transaction-stays-open",
        "A transaction that a handler has left open keeps what it has written locked.",
        (Edit("mtask/kernel/worker/running/transactions.py", "RunTransactions.leave", "await abandon()", "pass"),),
        (f"{_TRANSACTIONS}::test_handler_that_does_not_leave_its_transaction_fails_and_holds_up_nobody[plain]",),
    ),
    Mutation(
        "another-transaction-succeeds",
        "A handler that begins another transaction on its session is SUCCESS without the writes of the first.",
        (Edit("mtask/kernel/worker/running/transactions.py", "RunTransactions._check_open",
              "or transactions.number_of(session) != number", ""),),
        (f"{_TRANSACTIONS}::test_handler_that_begins_another_transaction_on_its_session_fails[abort_transaction-plain]",),
    ),
    Mutation(
        "readers-take-a-missing-value-for-null",
        "Who waits for a task gets None for a value that its handler is still to return.",
        (Edit("mtask/kernel/document/task.py", "Task.is_complete", "any", "False and any"),),
        (f"{_RETURNS}::test_readers_wait_for_a_value_that_comes_after_the_commit[plain]",),
    ),
    Mutation(
        "dependents-start-without-the-value",
        "A step starts before the handler of its dependency has returned the value.",
        (Edit("mtask/features/flows/settle.py", "settle", 'not row.get("owed_by")', "True"),
         Edit("mtask/features/flows/statements.py", "owes", '{"$ifNull": [x.OWED_VALUES, []]}', "[]")),
        (f"{_RETURNS}::test_dependents_callbacks_and_the_next_task_wait_for_the_value",),
    ),
    Mutation(
        "callbacks-tell-of-a-result-that-is-not-there",
        "A receiver is told of an end before the result can be read.",
        (Edit("mtask/features/callbacks/statements.py", "tellable", ', OWES_VALUE: {"$exists": False}', ""),),
        (f"{_RETURNS}::test_dependents_callbacks_and_the_next_task_wait_for_the_value",),
    ),
    Mutation(
        "value-of-a-live-worker-is-told-to-be-lost",
        "A value is told to be lost although its handler goes on.",
        (Edit("mtask/kernel/operations/transactions.py", "gone", 'elif not row["is_live"]', "else"),),
        (f"{_RETURNS}::test_value_of_a_dead_worker_is_told_to_be_lost_and_that_of_a_live_one_is_not",),
    ),
    Mutation(
        "outage-makes-values-lost",
        "After the database was away, the workers that have not beaten yet count as dead.",
        (Edit("mtask/kernel/worker/discovery/reaper.py", "Silence.dead_among",
              "now - self._looked_at > SILENCE", "False"),),
        ("tests/unit/kernel/worker/discovery/test_silence.py::test_time_in_which_nobody_could_look_does_not_count",),
    ),
    Mutation(
        "long-failures-are-logged-whole",
        "A failure of 10 MB is one line of the log.",
        (Edit("mtask/logs.py", "traceback_of", 'isinstance(texts.get("_str"), str)', "False"),
         Edit("mtask/kernel/worker/process/log.py", "exception_of",
              "f\"{'...' if len(text) > _MAX_EXCEPTION else ''}{last_of(text, _MAX_EXCEPTION)}\"",
              "f\"{'...' if len(text) > _MAX_EXCEPTION else ''}{text}\"")),
        (f"{_GONE_WRONG}::test_handler_that_raises_anything_at_all_fails_with_the_reason_and_the_worker_goes_on",),
    ),
    Mutation(
        "blocked-loop-is-not-told",
        "Nothing tells which handler blocks the event loop.",
        (Edit(_PULSE, "Pulse._run", "self._tell_of_block()", "pass"),),
        (f"{_GONE_WRONG}::test_handler_that_blocks_the_event_loop_is_named_in_the_log_while_it_blocks",),
    ),
    Mutation(
        "burst-ends-amid-a-run",
        "A worker with --burst ends while its tasks run: a running task is not due.",
        (Edit(_WORKER, "_is_busy", "bool(parts.scope.ledger.held) or ", ""),),
        (f"{_BURST}::test_burst_does_not_end_while_a_task_runs_or_its_end_is_unwritten",),
    ),
    Mutation(
        "burst-ends-before-an-end-is-written",
        "A worker with --burst ends while the end of a run is unwritten: what follows from the end is left.",
        (Edit(_WORKER, "_is_busy", " or parts.finisher.pending > 0", ""),),
        (f"{_BURST}::test_burst_does_not_end_while_a_task_runs_or_its_end_is_unwritten",),
    ),
    Mutation(
        "burst-waits-for-paused-tenants",
        "A worker with --burst waits for the tasks of a paused tenant.",
        (Edit("mtask/kernel/worker/discovery/fetch.py", "Batches.is_any_due",
              ", *without_tenants({None: self._served.paused_tenants})", ""),),
        (f"{_BURST}::test_burst_runs_what_is_due_and_leaves_what_is_later_or_paused_or_of_others",),
    ),
    Mutation(
        "reloaded-worker-outlives-its-parent",
        "A worker goes on when the process is killed that restarts it.",
        (Edit("mtask/cli/workers/serving.py", "start", "parent is not None", "False"),),
        (f"{_RELOAD}::test_worker_ends_with_its_parent_and_hands_its_runs_back[kill]",),
    ),
    Mutation(
        "reload-waits-for-each-run",
        "A worker whose code has changed waits for its runs.",
        (Edit(_RELOADER, "_stop", "(signal.SIGTERM, _GRACE), ", ""),),
        (f"{_RELOAD}::test_saved_code_runs_and_what_cannot_be_imported_waits_for_the_next_save",),
    ),
    Mutation(
        "reload-runs-old-bytecode",
        "Code that is saved twice within a second is not run.",
        (Edit(_RELOADER, "Sources.forget_bytecode", "os.unlink(cache_from_source(str(self.folder / name)))", "pass"),),
        ("tests/unit/cli/workers/test_reloader.py::test_bytecode_of_changed_files_is_forgotten",),
    ),
)  # fmt: skip
