"""Mutations of what controls ask for: the limits and pauses of queues and names, and what a queue keeps."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_CLIENT = "mtask/features/controls/client.py"
_LIMITS = "mtask/features/limits/worker.py"
_PERMITS = "mtask/features/limits/operations.py"
_STATEMENTS = "mtask/features/limits/statements.py"
_RETENTION = "mtask/kernel/operations/change.py"
_WORKER_CONTROLS = "mtask/features/controls/worker.py"
_STATE = "mtask/kernel/worker/process/state.py"

_INTERRUPTS_TESTS = "tests/unit/cli/test_interrupts.py"
_KEEP_TESTS = "tests/integration/features/controls/test_keep.py"
_LIMITS_TESTS = "tests/integration/features/limits/test_limits.py"
_PAUSES_TESTS = "tests/integration/features/controls/test_pauses.py"
_PERMITS_TESTS = "tests/integration/features/limits/test_permits.py"
_INSTANTS = "tests/unit/kernel/operations/test_requests_hold_no_instant.py"


CONTROL_MUTATIONS = (
    # --- limits ---------------------------------------------------------------------------------------------
    Mutation(
        "permits-read-and-then-written",
        "Of two that ask for a permit at once the later writes down what it read before, and both get the last one.",
        (
            Edit(_PERMITS, "_take_one",
                 "try:",
                 "try:\n"
                 '    read = (yield places("find_one", {"_id": pool_id})) or {}\n'
                 '    was = {kind: x.literal(read.get(kind, [])) for kind in ("starts", "running")}\n'
                 '    pipeline = [{"$set": was}, *pipeline]'),
        ),
        (f"{_PERMITS_TESTS}::test_of_any_number_that_ask_at_once_no_more_than_the_limit_get_one",),
    ),
    Mutation(
        "lapsed-run-keeps-its-permit",
        "The permits of a worker that died are never free again.",
        (Edit(_PERMITS, "reclaim", "if lapsed:", "if False:"),),
        (f"{_PERMITS_TESTS}::test_a_permit_whose_run_is_closed_or_lapsed_is_given_back_by_whoever_looks",),
    ),
    Mutation(
        "lapsed-run-not-closed",
        "The permit of a lapsed run is given back, and a ping that was under way revives the run.",
        (
            Edit(_PERMITS, "reclaim",
                 "closed_cnt = yield from _settle_each(lapsed)\nruns |= yield from _runs_of(lapsed)",
                 "runs = {key: run for key, run in runs.items() if run.task_id not in lapsed}"),
            Edit(_PERMITS, "reclaim", 'entry["claim_by"] + _LATEST < now if run is None else', "run is None or"),
        ),
        (f"{_PERMITS_TESTS}::test_a_permit_whose_run_is_closed_or_lapsed_is_given_back_by_whoever_looks",),
    ),
    Mutation(
        "permit-of-a-rescue-given-away",
        "The permit of a lapsed run goes to whoever waits, before its own task could be rescued.",
        (Edit(_PERMITS, "_Run.until_given_up", "+ RESCUE", ""),),
        (f"{_PERMITS_TESTS}::test_the_permit_of_a_lapsed_run_is_left_to_its_own_task_for_a_while",),
    ),
    Mutation(
        "permit-given-back-by-task",
        "Who did not get a task, or whose run of it is over, gives back the permit of another run.",
        (
            Edit(_STATEMENTS, "name_of", 'f"{token} {task_id}"', "task_id"),
            Edit(_STATEMENTS, "_NAME", '{"$concat": ["$$entry.token", " ", "$$entry.task_id"]}', '"$$entry.task_id"'),
        ),
        (f"{_PERMITS_TESTS}::test_a_permit_is_given_back_by_nobody_but_its_own_claim",),
    ),
    Mutation(
        "permit-of-a-slow-claim-given-back",
        "A permit is given back as soon as its claim may not begin any more: one that has begun is written later.",
        (Edit(_PERMITS, "reclaim", "+ _LATEST", ""),),
        (f"{_PERMITS_TESTS}::test_a_permit_whose_claim_never_came_is_given_back_after_a_while",),
    ),
    Mutation(
        "window-by-the-local-clock",
        "Which starts still count is read from the wall clock of the worker's machine.",
        (Edit(_STATEMENTS, "_in_window",
              'x.NOW, f"{_REQUEST}.window_ms"',
              '__import__("datetime").datetime.now(__import__("datetime").UTC), f"{_REQUEST}.window_ms"'),),
        (f"{_INSTANTS}::test_request_of_the_engine_holds_no_instant_of_this_process",),
    ),
    Mutation(
        "claim-after-its-permit",
        "A claim is valid though its permit may have been given to another.",
        (Edit(_LIMITS, "Admitted.guard", "if self.claim_by is None else [*guards, in_time(self.claim_by)]", ""),),
        (f"{_LIMITS_TESTS}::test_a_claim_that_comes_too_late_for_its_permit_is_not_valid",),
    ),
    Mutation(
        "moved-into-a-limited-queue",
        "A task that was moved into a limited queue amid its claim runs without a permit.",
        (Edit(_LIMITS, "Limits.guard_of_free",
              "of_others(sorted(self._controls.limits), sorted(self._controls.tenant_limits))", ""),),
        (f"{_LIMITS_TESTS}::test_a_task_that_comes_under_another_limit_amid_its_claim_needs_its_permit_there",),
    ),
    Mutation(
        "moved-to-another-key",
        "A task whose limit_key was changed amid its claim runs on a permit of the former key.",
        (
            Edit(_LIMITS, "Admitted.guard", "of_queues_and_keys(sorted(self.of, key=str)),", ""),
        ),
        (f"{_LIMITS_TESTS}::test_a_task_that_comes_under_another_limit_amid_its_claim_needs_its_permit_there",),
    ),
    Mutation(
        "permit-of-a-live-run-given-back",
        "A worker that trusts a lease no longer gives back its permit, though the run is live in the document.",
        (Edit(_LIMITS, "Limits.release", "and is_closed", ""),),
        (f"{_LIMITS_TESTS}::test_a_run_that_its_worker_lets_go_of_keeps_its_permit_until_it_is_closed",),
    ),
    # --- pauses ---------------------------------------------------------------------------------------------
    Mutation(
        "pause-not-in-the-guard",
        "What was queued here before a pause is claimed after it.",
        (
            Edit(_STATE, "Served.guard", "self.paused_queues, self.paused_names", "(), ()"),
        ),
        (f"{_PAUSES_TESTS}::test_what_was_queued_here_before_a_pause_is_not_claimed_after_it",),
    ),
    Mutation(
        "pause-confirmed-amid-a-claim",
        "A worker says that it goes by a pause while a claim is under way that does not.",
        (Edit("mtask/parts/assembly.py", "_connect", "parts.claimer.until_landed,", ""),),
        (f"{_PAUSES_TESTS}::test_a_pause_returns_when_what_was_under_way_has_landed",),
    ),
    Mutation(
        "pause-confirmed-amid-a-recovery",
        "A worker says that it goes by a pause while a claim whose reply was lost may still come true.",
        (Edit("mtask/kernel/worker/running/claim.py", "Sender.under_way", "self._recovery.jobs", ""),),
        (f"{_PAUSES_TESTS}::test_a_pause_returns_when_what_was_under_way_has_landed",),
    ),
    Mutation(
        "pause-confirmed-by-an-older-revision",
        "A pause returns because a worker goes by what was said before.",
        (Edit(_CLIENT, "_confirms", "control.revision", "1"),),
        (f"{_PAUSES_TESTS}::test_a_live_worker_that_goes_by_what_was_said_before_is_named",),
    ),
    Mutation(
        "silent-worker-claims-on",
        "A worker whose heartbeat has run out goes on claiming what was paused since.",
        (Edit(_STATE, "Served.guard", "valid_until,", "None,"),),
        (f"{_PAUSES_TESTS}::test_a_claim_that_comes_when_the_heartbeat_has_run_out_is_not_valid",),
    ),
    Mutation(
        "silence-ended-by-an-older-read",
        "A worker goes by what it read before it fell silent, and nobody waited for it since.",
        (Edit(_STATE, "Validity.caught_up", "and silence_cnt == self.silence_cnt", ""),),
        ("tests/unit/features/controls/test_controls.py::test_read_that_was_begun_before_a_silence_ends_none",),
    ),
    Mutation(
        "malformed-control-lifts-the-limit",
        "Where a control cannot be read any more, what it last bounded is bounded no longer.",
        (Edit(_WORKER_CONTROLS, "Controls.refresh",
              "[*sound, *(self._good[id_] for id_ in malformed if id_ in self._good)]", "sound"),),
        (f"{_PAUSES_TESTS}::test_what_a_malformed_control_last_said_holds_but_nothing_is_removed_by_it",),
    ),
    # --- what is kept ---------------------------------------------------------------------------------------
    Mutation(
        "keep-counts-every-ending",
        "Newer successes take the places of the failures that are to be kept.",
        (Edit(_RETENTION, "remove_older",
              '**finished, "task_state.finish_time"', '"queue": queue, "task_state.finish_time"'),),
        (f"{_KEEP_TESTS}::test_the_newest_by_their_ends_are_kept",),
    ),
    Mutation(
        "keep-by-the-tasks-age",
        "Of the finished tasks those are kept that were published last.",
        (Edit(_RETENTION, "remove_older", '"task_state.finish_time", -1', '"task_state.create_time", -1'),),
        (f"{_KEEP_TESTS}::test_the_newest_by_their_ends_are_kept",),
    ),
    Mutation(
        "keep-removes-what-was-run-again",
        "A task that was run again and finished amid a batch is removed, though it is the newest.",
        (Edit(_RETENTION, "remove_older", ', "task_state.finish_time": {"$lte": max(times)}', ""),),
        (f"{_KEEP_TESTS}::test_a_task_that_was_run_again_amid_a_batch_stays",),
    ),
    Mutation(
        "keep-when-out-of-touch",
        "A worker whose heartbeat has run out removes what is to be kept by now.",
        (Edit("mtask/features/controls/keep.py", "Retention._remove_batch", ", self._validity.guard()", ""),),
        (f"{_KEEP_TESTS}::test_a_batch_that_comes_when_the_heartbeat_has_run_out_removes_nothing",),
    ),
    Mutation(
        "permits-given-back-everywhere",
        "On a sharded cluster every shard looks through all its permits for those that are given back.",
        (Edit(_PERMITS, "_give_back", '"_id": {"$in": sorted(set(pool_ids))}', ""),),
        ("tests/integration/kernel/operations/test_writes_are_targeted.py"
         "::test_every_write_of_workers_and_clients_names_its_documents_by_id",),
    ),
    Mutation(
        "interrupt-inside-the-driver",
        "Ctrl-C ends the demo in the middle of the driver, which then waits for its own lock.",
        (Edit("mtask/cli/interrupts.py", "Interruption._handle", "not _takes_locks(frame)", "True"),),
        (f"{_INTERRUPTS_TESTS}::test_interruption_waits_for_the_driver_and_ends_the_block_at_the_next_check",),
    ),
    Mutation(
        "interrupted-command-hangs",
        "A command that waits for a lock after Ctrl-C waits forever.",
        (Edit("mtask/cli/interrupts.py", "ending.interrupt",
              "signal.setitimer(signal.ITIMER_REAL, patience.total_seconds())", "str(patience.total_seconds())"),),
        (f"{_INTERRUPTS_TESTS}::test_command_that_cannot_end_after_an_interrupt_is_ended",),
    ),
)  # fmt: skip
