"""Mutations of what a process has that runs handlers: signals, logging, the thread that pings, and transactions."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_PROCESS = "mtask/worker/process.py"
_PULSE = "mtask/worker/upkeep/pulse.py"
_SIGNALS = "tests/acceptance/test_36_signals.py"
_LOGS = "tests/acceptance/test_37_broken_logs.py"
_TRANSACTIONS = "tests/integration/worker/running/test_transactions.py"
_FORKED = f"{_SIGNALS}::test_process_that_a_handler_forks_has_default_signals_from_its_first_instant[in_a_thread]"
_GONE_WRONG = "tests/acceptance/test_12_handlers_and_documents_gone_wrong.py"

PROCESS_MUTATIONS = (
    Mutation(
        "forked-processes-keep-signals",
        "A process that a handler forks takes SIGTERM for its parent.",
        (Edit(_PROCESS, "if signal.getsignal(number) is take:", "if False:"),),
        (_FORKED,),
    ),
    Mutation(
        "early-signals-are-lost",
        "A signal that reaches a forked process before it has signals of its own is lost.",
        (Edit(_PROCESS, "(signal.SIG_BLOCK, former)", "(signal.SIG_BLOCK, ())"),),
        (_FORKED,),
    ),
    Mutation(
        "second-hang-up-is-a-second-request",
        "A closed terminal, which sends SIGHUP twice, cuts the time for running tasks short.",
        (Edit(_PROCESS, "if number == signal.SIGHUP and has_hung_up:", "if False:"),),
        ("tests/unit/worker/test_process.py::test_terminal_that_sends_sighup_twice_asks_once",),
    ),
    Mutation(
        "nohup-is-forgotten",
        "A worker under nohup ends with its terminal.",
        (Edit(_PROCESS, "if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]", "]"),),
        (f"{_SIGNALS}::test_worker_under_nohup_goes_on_without_its_terminal",),
    ),
    Mutation(
        "logging-of-the-app-raises",
        "A log handler of the app that raises ends the engine's step.",
        (Edit("mtask/logs.py", "        except KeyboardInterrupt:\n", "        except BaseException:\n"),),
        (f"{_LOGS}::test_logging_of_the_app_that_raises_disturbs_no_run_no_executor_and_no_ping[the handler]",),
    ),
    Mutation(
        "dead-pinger-is-not-noticed",
        "A worker whose pinger has ended goes on, and loses all its leases.",
        (Edit("mtask/worker/leases/pinger.py", "            if not self._is_stopped:\n                with suppress",
              "            if False:\n                with suppress"),),
        (f"{_LOGS}::test_worker_whose_pinger_has_ended_hands_its_runs_back_and_ends",),
    ),
    Mutation(
        "callbacks-of-transactions-wait-for-a-scan",
        "The end that a transaction writes is told to nobody.",
        (Edit("mtask/worker/running/runner.py", "        self._finisher.tell_of_end(run, goes_on=run.goes_on)\n", ""),),
        (f"{_TRANSACTIONS}::test_callback_of_a_run_that_a_transaction_has_ended_waits_for_no_scan[plain]",),
    ),
    Mutation(
        "aborted-transaction-succeeds",
        "A handler that aborts its transaction is SUCCESS without its writes.",
        (Edit("mtask/worker/running/transactions.py", "if not session.in_transaction:", "if False:"),),
        (f"{_TRANSACTIONS}::test_handler_that_ends_its_transaction_itself_fails[abort_transaction-plain]",),
    ),
    Mutation(
        "long-failures-are-logged-whole",
        "A failure of 10 MB is one line of the log.",
        (Edit("mtask/logs.py", '        if isinstance(texts.get("_str"), str):\n', "        if False:\n"),
         Edit("mtask/worker/log.py", "{last_of(text, _MAX_EXCEPTION)}", "{text}")),
        (f"{_GONE_WRONG}::test_handler_that_raises_anything_at_all_fails_with_the_reason_and_the_worker_goes_on[raises]",),
    ),
    Mutation(
        "blocked-loop-is-not-told",
        "Nothing tells which handler blocks the event loop.",
        (Edit(_PULSE, "                self._tell_of_block()\n", "                pass\n"),),
        (f"{_GONE_WRONG}::test_handler_that_blocks_the_event_loop_is_named_in_the_log_while_it_blocks"
         "[hold_blocking-in hold_blocking]",),
    ),
)  # fmt: skip
