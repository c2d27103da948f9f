"""Mutations of publishing that gathers: the order of calls, the rounds, and what begins the next one."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_DERIVE = "mtask/kernel/statements/derive.py"
_EVENTS = "mtask/features/events/task_events.py"
_OPERATION = "mtask/features/gathering/publish.py"
_PIPELINES = "mtask/kernel/statements/claim.py"
_FINISH = "mtask/kernel/statements/finish.py"
_REQUESTS = "mtask/kernel/statements/publish.py"
_SHORT = "mtask/kernel/statements/claim.py"
_TWINS = "mtask/features/gathering/statements.py"
_ROUNDS = "mtask/kernel/statements/rounds.py"

_CALLS = "tests/integration/client/test_gathering.py"
_HISTORIES = (
    "tests/integration/features/gathering/test_gathering_interleavings.py::test_no_call_is_lost_and_none_counts_twice"
)
_ENDS = f"{_CALLS}::test_whatever_leaves_no_live_run_begins_the_next_round"

GATHERING_MUTATIONS = (
    # --- what begins the next round -------------------------------------------------------------------------
    Mutation(
        "finish-without-the-next-round",
        "What was published during a run is lost when the run ends.",
        (Edit(_FINISH, "finish", ", *open_next(now)", ""),),
        (f"{_CALLS}::test_a_live_run_goes_on_and_the_task_runs_once_more",),
    ),
    Mutation(
        "claim-without-the-next-round",
        "A claim that closes the last lapsed run leaves the next round behind.",
        (Edit(_PIPELINES, "claim", "(now), *open_next", ""),),
        (_ENDS,),
    ),
    Mutation(
        "settle-without-the-next-round",
        "A settlement of a lapsed run leaves the next round behind.",
        (Edit(_DERIVE, "derive", ", *open_next(now)", ""),),
        (_ENDS,),
    ),
    Mutation(
        "claim-of-the-former-round",
        "A claim that closes the last lapsed run tries the old params again, though newer ones wait.",
        (Edit(_PIPELINES, "_take", '{"$not": [is_ready(now)]},', ""),),
        (_ENDS,),
    ),
    Mutation(
        "short-finish-of-a-task-published-again",
        "The short finish ends a task although it is to run once more.",
        (Edit(_SHORT, "_WANTS_ONE", '{"$not": [x.AGAIN]},', ""),),
        (f"{_CALLS}::test_a_worker_that_took_the_task_for_simple_begins_the_next_round",
         "tests/parity/test_simple_parity.py::test_simple_task_is_taken_as_one"),
    ),
    Mutation(
        "next-round-during-a-live-run",
        "The next round begins while a run still holds the task.",
        (Edit(_ROUNDS, "is_ready", '{"$not": [has_live(now)]},', ""),),
        (_HISTORIES, f"{_CALLS}::test_a_live_run_goes_on_and_the_task_runs_once_more"),
    ),
    Mutation(
        "list-dropped-by-a-failure",
        "A list whose run failed is dropped for the next list.",
        (Edit(_ROUNDS, "is_ready", ', {"$or": [{"$not": [collects()]}, x.is_final()]}', ""),),
        (f"{_CALLS}::test_a_list_that_failed_is_tried_again_as_it_is",),
    ),
    Mutation(
        "next-round-is-quiet",
        "The streams of workers skip the beginning of the next round.",
        (Edit(_ROUNDS, "begin", ', "quiet_time"', ""),),
        ("tests/integration/features/gathering/test_next_rounds.py::test_the_next_round_is_heard_of_without_a_scan",),
    ),
    Mutation(
        "next-round-keeps-the-failures",
        "The failures of the former round count in the next one.",
        (Edit(_ROUNDS, "begin", '"failed_cnt": 0,', ""),),
        (_ENDS,),
    ),
    Mutation(
        "next-round-keeps-the-runs",
        "The runs of the former round count in the next one.",
        (Edit(_ROUNDS, "begin", '{"$cond": [has_begun(), aged, x.RUNS]}', "x.RUNS"),),
        (f"{_CALLS}::test_a_live_run_goes_on_and_the_task_runs_once_more",),
    ),
    Mutation(
        "cancel-keeps-the-next-round",
        "A canceled task runs all the same, because it was published again before the cancel.",
        (Edit(_REQUESTS, "cancel", ', "again": "$$REMOVE"', ""),),
        (f"{_CALLS}::test_a_cancel_drops_what_was_published_meanwhile",),
    ),
    # --- the order of calls ---------------------------------------------------------------------------------
    Mutation(
        "call-counts-twice",
        "A call that is sent again after its run began makes another run.",
        (Edit(_TWINS, "_gathered", '{"$lte": [call.mark(), {"$ifNull": [consumed, None]}]}', "False"),),
        (f"{_CALLS}::test_a_call_that_is_sent_twice_counts_once",),
    ),
    Mutation(
        "late-call-wins",
        "A call that was on its way for long replaces newer params.",
        (Edit(_TWINS, "merged", '{"$gt": [call.mark(), {"$ifNull": ["$$base.gather.newest", None]}]}', "True"),),
        (f"{_CALLS}::test_a_call_that_arrives_late_changes_nothing_that_is_newer",),
    ),
    Mutation(
        "asked-by-the-clock-alone",
        "A call loses against the one before it, because the next primary's clock is behind.",
        (Edit(_OPERATION, "asked_time", "if known is None else max(now, known + timedelta(milliseconds=1))", ""),),
        (f"{_CALLS}::test_a_call_is_newer_than_those_before_it_though_the_servers_clock_was_set_back",),
    ),
    Mutation(
        "start-by-a-time-ahead",
        "A task starts late by as much as the server's clock was set back.",
        (Edit(_TWINS, "start_time",
              '{"$min": [f"{gather}.newest.asked_time", now]}', 'f"{gather}.newest.asked_time"'),),
        (f"{_CALLS}::test_a_call_is_newer_than_those_before_it_though_the_servers_clock_was_set_back",),
    ),
    Mutation(
        "debounce-without-end",
        "Calls that keep coming delay the start for ever.",
        (Edit(_TWINS, "start_time", '{"$min": [by_newest, by_first]}', "by_newest"),),
        (f"{_CALLS}::test_max_wait_bounds_the_wait",),
    ),
    Mutation(
        "short-call-after-the-claim",
        "A call changes the params of a run that has begun.",
        (Edit(_TWINS, "untouched", '{**is_alone, "$expr": is_untouched()}', "is_alone"),),
        ("tests/integration/features/gathering/test_gathering.py::test_a_failure_between_leaves_the_list_as_it_is",),
    ),
    # --- lists ----------------------------------------------------------------------------------------------
    Mutation(
        "collected-twice",
        "A call that is sent twice is twice in the list.",
        (Edit(_TWINS, "_gathered", "is_known(call.call_id),", ""),),
        (f"{_CALLS}::test_a_repeated_call_is_not_collected_twice",),
    ),
    Mutation(
        "collected-in-two-rounds",
        "A call that is sent again after its round has ended is collected anew.",
        (Edit(_ROUNDS, "begun", '"ids"', ""),),
        (f"{_CALLS}::test_a_repeated_call_is_not_collected_twice",),
    ),
    Mutation(
        "list-without-bound",
        "A list grows beyond 4 MB, and in the end beyond what a document holds.",
        (Edit(_TWINS, "_collected", '{"$or": [{"$not": ["$$base"]}, has_room]}', "True"),),
        (f"{_CALLS}::test_a_full_list_starts_now_and_takes_no_more",),
    ),
    Mutation(
        "kinds-mixed",
        "A call without collect drops the list that others have collected.",
        (Edit(_TWINS, "_gathered", ', {"$and": ["$$base", is_other_kind]}', ""),),
        (f"{_CALLS}::test_one_key_gathers_in_one_way",),
    ),
    # --- the rest -------------------------------------------------------------------------------------------
    Mutation(
        "window-of-no-length",
        "A task is published anew right after its success.",
        (Edit(_TWINS, "outside_window", ", has_passed", ", True"),),
        (f"{_CALLS}::test_a_success_is_kept_for_the_window",),
    ),
    Mutation(
        "gathers-beside-old-workers",
        "A call is taken although a live worker would end the task without its next round.",
        (Edit(_OPERATION, "_ask", 'any("old" in row for row in rows)', "False"),),
        (f"{_CALLS}::test_workers_that_do_not_know_it_are_named",),
    ),
    Mutation(
        "next-round-untold",
        "The events of a task do not tell that it runs once more.",
        (Edit(_EVENTS, "_events_of", "_begins_next_round(description)", "False"),),
        ("tests/integration/client/test_events.py"
         "::test_the_end_of_a_run_that_begins_the_next_round_is_told_with_it",),
    ),
)  # fmt: skip
