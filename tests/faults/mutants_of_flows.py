"""Mutations of flows: each step of settling and deciding left out, and each of their guards."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_JANITOR = "mtask/features/flows/worker.py"
_JANITOR_TESTS = "tests/integration/features/flows/test_flow_janitor.py"
_SETTLING = "mtask/features/flows/settle.py"
_DECIDING = "mtask/features/flows/settle.py"
_LOOKING = "mtask/features/flows/read.py"
_FLOWS = "mtask/features/flows/statements.py"
_RETENTION = "mtask/features/flows/retention.py"
_TESTS = "tests/integration/features/flows/test_settling.py"
_PARITY = "tests/parity/test_flows_parity.py"
_WORKER_TESTS = "tests/integration/features/flows/test_flows.py"
_SHORT_PARITY = "tests/parity/test_simple_parity.py"

FLOW_MUTATIONS = (
    Mutation(
        "room-that-another-has-counted-is-none",
        "A next task is refused if another worker counts the flow for the first time at that moment.",
        (
            Edit("mtask/features/flows/publish.py", "take",
                 'found is not None and found["task_cnt"] + count <= MAX_STEPS', "False"),
        ),
        (
            "tests/integration/features/flows/test_children.py::"
            "test_room_that_another_caller_counts_for_the_first_time_meanwhile_is_room",
        ),
    ),
    Mutation(
        "failure-among-successes",
        "A run that fails for lack of room in its flow is written in one statement with successes.",
        (Edit("mtask/kernel/worker/running/finisher.py", "Finisher._make_room",
              "0 < len(failed) < len(group)", "False"),),
        (
            "tests/integration/features/flows/test_next.py::"
            "test_next_tasks_of_one_flow_are_counted_together_and_those_that_fit_go_on",
        ),
    ),
    Mutation(
        "settle-publishes-nothing",
        "What a step owes the flow is never published, and its dependents wait for ever.",
        (Edit(_SETTLING, "settle", "if owing_rows:", "if False:"),),
        (f"{_TESTS}::test_outbox_gap",),
    ),
    Mutation(
        "told-as-it-was-before-its-children",
        "A task that owed a child counts as open once more when its dependents are told, and its mark is removed.",
        (Edit(_SETTLING, "settle", "continue", ""),),
        (f"{_TESTS}::test_a_task_that_owed_a_child_tells_its_dependents_of_its_end",),
    ),
    Mutation(
        "settle-decides-not-itself",
        "A WAITING step that was opened again, or whose watch was moved, is left as it is.",
        (Edit(_SETTLING, "_settle_steps",
              '[row["_id"] for row in rows if status_of(row) == TaskStatus.WAITING]', "[]"),),
        (f"{_TESTS}::test_moved_watch", f"{_TESTS}::test_a_retry_opens_exactly_what_the_failure_canceled"),
    ),
    Mutation(
        "settle-takes-no-verdict-back",
        "A stale verdict stays, although the task that caused it is not failed.",
        (Edit(_SETTLING, "_settle_steps", "further += yield from _reopen_undue(rows)", ""),),
        (f"{_TESTS}::test_stale_verdict_while_the_dependency_runs_again_is_taken_back",),
    ),
    Mutation(
        "settle-without-fail-fast",
        "A flow that fails fast goes on.",
        (Edit(_SETTLING, "_settle_steps", '== TaskStatus.FAIL and part_of(row).get("fail_fast")', "is None"),),
        (f"{_TESTS}::test_fail_fast_cancels_the_open_tasks_but_those_that_run_after_failures",),
    ),
    Mutation(
        "settle-tells-nobody",
        "The end of a step releases nothing.",
        (Edit(_SETTLING, "_settle_steps", "yield from _tell(rows)", "_Told([], is_complete=True)"),),
        (f"{_TESTS}::test_a_diamond_runs_in_order_and_each_step_is_released_once",),
    ),
    Mutation(
        "retry-opens-nothing",
        "A retry leaves canceled what the failure canceled.",
        (Edit(_SETTLING, "_tell",
              "further += yield from _reopen([row for row in found if status_of(row) in FAILED])", ""),),
        (f"{_TESTS}::test_a_retry_opens_exactly_what_the_failure_canceled",),
    ),
    Mutation(
        "nothing-follows",
        "The steps that end because of a step are not settled.",
        (Edit(_SETTLING, "settle_all", "dict.fromkeys([*waiting, *further])", "waiting"),),
        (f"{_TESTS}::test_a_chain_of_cancels_is_settled_at_once",),
    ),
    Mutation(
        "cross-off-whatever-the-mark",
        "The mark of a newer change is removed.",
        (Edit(_FLOWS, "owed_as_read", '"owed_since": mark', '"owed_since": {"$exists": True}'),),
        (f"{_TESTS}::test_a_mark_of_the_same_status_stays_if_it_is_another_mark",),
    ),
    Mutation(
        "move-without-a-mark",
        "A settler that dies right after it moved a watch loses the step.",
        (Edit(_FLOWS, "move", '"owed_since": x.later_than(x.OWED_SINCE, now),', ""),),
        (f"{_TESTS}::test_moved_watch",),
    ),
    Mutation(
        "move-without-reading-again",
        "A watch that moves to a task that has just ended is noticed by a scan only.",
        (Edit(_DECIDING, "decide", "pending += yield from _confirm(moved)", ""),),
        (f"{_TESTS}::test_moved_watch",),
    ),
    Mutation(
        "watch-is-not-written",
        "The end of the task that a step now watches is not marked, so nobody releases the step.",
        (Edit(_DECIDING, "_watch",
              "open_cnt = yield from change(flows.still_open([*task_ids]), flows.watch())",
              'rows = yield from read.newest(flows.still_open([*task_ids]), {"_id": 1}, "_id_")\n'
              "open_cnt = len(rows)"),),
        (f"{_TESTS}::test_a_watch_marks_the_end_that_comes_right_after_it",),
    ),
    Mutation(
        "watch-of-an-ended-task-counts",
        "A step watches a task that ended unmarked before the watch.",
        (Edit(_DECIDING, "_watch", "== len(task_ids)", ">= 0"),),
        (f"{_TESTS}::test_a_watch_that_comes_after_the_end_counts_for_nothing",),
    ),
    Mutation(
        "watch-is-not-made-up-for",
        "A settler died between a move and the watch, and whoever finds the mark forgets the watch.",
        (Edit(_DECIDING, "decide", '{row["other"] for row in staying if row["unwatched"]}', "set()"),
         Edit(_DECIDING, "decide", 'row["unwatched"] and row["other"] not in watched', "False")),
        (f"{_TESTS}::test_a_settler_that_dies_before_the_watch_leaves_it_to_the_next",),
    ),
    Mutation(
        "published-steps-are-watched-by-none",
        "The publisher forgets which steps are watched, so their ends release nobody.",
        (Edit("mtask/features/flows/publish.py", "_part", "step.task.task_id not in watches.watched", "True"),),
        (f"{_TESTS}::test_a_step_that_two_settlers_release_at_once_starts_once",),
    ),
    Mutation(
        "unmarked-although-a-change-is",
        "The success of a step leaves the mark of an earlier change as it is, and whoever settles that removes it.",
        (Edit("mtask/kernel/statements/expressions.py", "must_tell", '{"$not": [OWED_SINCE]},', ""),),
        (f"{_TESTS}::test_a_success_renews_the_mark_of_an_earlier_change",),
    ),
    Mutation(
        "unmarked-although-it-owes",
        "The success of a step that owes children is not marked.",
        (Edit("mtask/kernel/statements/expressions.py", "must_tell", ', {"$not": ["$owed_tasks"]}', ""),),
        (f"{_TESTS}::test_outbox_gap",),
    ),
    Mutation(
        "failure-of-an-unwatched-step-is-not-marked",
        "A failure of a step that nobody watches cancels nobody by fail_fast.",
        (Edit("mtask/kernel/statements/expressions.py", "must_tell",
              '{"$eq": [status, TaskStatus.SUCCESS.value]},', ""),),
        ("tests/parity/test_changes_parity.py::test_settling_closes_lapsed_runs_and_derives_the_rest",),
    ),
    Mutation(
        "decide-whoever-holds",
        "A step is released by one who read before its watch moved to an open task.",
        (Edit(_FLOWS, "waiting", "_held_as_before(holders)", "by_ids(list(holders))"),),
        (f"{_TESTS}::test_a_release_by_one_who_read_before_the_watch_moved_is_none",),
    ),
    Mutation(
        "reopen-whoever-ended-it",
        "A slow settler opens a step again that a user has canceled.",
        (Edit(_FLOWS, "ended_by", "_held_as_before(culprits)", "by_ids(list(culprits))"),),
        (f"{_TESTS}::test_a_cancel_by_a_user_is_not_undone_by_a_slow_settler",),
    ),
    Mutation(
        "release-by-an-old-read",
        "A settler that stood still releases a step whose dependency runs again.",
        (Edit(_DECIDING, "decide", 'guard |= flows.read_at(group[0]["now"], try_cnt)', ""),),
        (f"{_TESTS}::test_a_release_does_not_follow_from_a_read_of_long_ago",),
    ),
    Mutation(
        "cross-off-by-a-lagging-read",
        "After a failover, a read that lags behind the move of a watch removes the mark of the move.",
        (Edit(_SETTLING, "_settle_steps", "decided.stays(row)", "True"),),
        (f"{_TESTS}::test_a_moved_watch_stays_marked_if_the_deciding_read_does_not_show_the_move_yet",),
    ),
    Mutation(
        "cross-off-though-not-told",
        "After a failover, a read that lags behind the end of a step removes the mark of this end.",
        (Edit(_SETTLING, "_settle_steps", "not told.is_complete", "False"),),
        (f"{_TESTS}::test_a_mark_stays_if_the_deciding_read_does_not_show_the_end_yet",),
    ),
    Mutation(
        "fail-fast-cancels-the-retry",
        "A slow settler cancels the step that failed, although it was retried meanwhile.",
        (Edit(_SETTLING, "_fail_fast", '"_id": {"$ne": task_id},', ""),),
        (f"{_TESTS}::test_a_slow_fail_fast_does_not_cancel_the_retry",),
    ),
    Mutation(
        "ended-while-it-owes-tasks",
        "A step counts as ended although tasks that it added are still to be published.",
        (Edit(_LOOKING, "_parsed", 'row["owes"]', "False"),),
        (f"{_PARITY}::test_what_a_look_reads_decides_as_the_rules_do",),
    ),
    Mutation(
        "children-are-not-awaited",
        "A step starts before the children of its dependency have ended.",
        (Edit(_LOOKING, "_parsed", 'bool(part.get("has_children"))', "False"),),
        (f"{_TESTS}::test_outbox_gap",),
    ),
    Mutation(
        "children-that-owe-are-not-awaited",
        "A step starts although a child of its dependency still owes the flow a task.",
        (Edit(_LOOKING, "_descendants", "flows.owing_descendants", ""),),
        (f"{_PARITY}::test_what_a_look_reads_decides_as_the_rules_do",),
    ),
    Mutation(
        "look-at-two-moments",
        "What a step waits for is read later than the step, so a release can follow from no state that ever was.",
        (Edit(_LOOKING, "at_one_moment", 'if moment is None else {"level": "snapshot", "atClusterTime": moment}', ""),),
        (f"{_TESTS}::test_a_look_shows_one_moment",),
    ),
    Mutation(
        "removed-dependency-is-none",
        "A step starts although somebody removed its dependency.",
        (Edit(_LOOKING, "look",
              ".get(task_id) or Awaited(task_id, None) for task_id in after",
              "[task_id] for task_id in after if task_id in found"),),
        (f"{_TESTS}::test_a_removed_dependency_counts_as_canceled",),
    ),
    Mutation(
        "short-release-of-what-has-run",
        "A step that has run before is released by the short form, which knows nothing of runs.",
        (Edit(_FLOWS, "never_begun", '{"$eq": [x.RUNS, []]},', ""),),
        (f"{_PARITY}::test_the_short_release_is_the_release",),
    ),
    Mutation(
        "short-release-without-the-delay",
        "A delay does not count from the release.",
        (Edit(_FLOWS, "release_unbegun", '{"$max": [{"$ifNull": [start, f"{x.STATE}.create_time"]}, now]}', "now"),),
        (f"{_TESTS}::test_a_delay_counts_from_the_release", f"{_PARITY}::test_the_short_release_is_the_release"),
    ),
    Mutation(
        "short-finish-owes-nothing",
        "The short finish of a step leaves no mark: if its worker dies then, its dependents wait for ever.",
        (Edit("mtask/kernel/statements/claim.py", "succeed",
              '{"$cond": [must_tell, x.later_than(x.OWED_SINCE, now), x.OWED_SINCE]}', "x.OWED_SINCE"),),
        (f"{_SHORT_PARITY}::test_short_success_is_the_success",),
    ),
    Mutation(
        "flows-of-others-are-not-heard-of",
        "A worker that serves another queue does not look after what the only other worker left, for 20 s.",
        (Edit("mtask/kernel/operations/stream_filter.py", "_task_events",
              '{"$or": [is_news, _BEGINS_FLOW]}', "is_wanted"),),
        (f"{_WORKER_TESTS}::test_a_worker_hears_of_the_first_step_of_a_flow_that_is_not_for_it",),
    ),
    Mutation(
        "dead-workers-owe-for-ever",
        "Nobody does what a worker that died right after its finish owes.",
        (Edit(_JANITOR, "FlowPart.upkeep", 'await look_after("flows", self._settle_owed)', ""),),
        (f"{_WORKER_TESTS}::test_what_a_worker_that_died_after_its_finish_owes_is_done_by_another",),
    ),
    Mutation(
        "what-is-owed-is-looked-for-seldom",
        "A worker that has heard of no flow and no chain finds what a dead worker owes after a minute, not after 20 s.",
        (Edit(_JANITOR, "FlowPart.upkeep", "_OWED_EVERY", "_ORPHANS_EVERY"),),
        (f"{_JANITOR_TESTS}::test_a_worker_that_heard_of_no_flow_soon_finds_what_is_owed_and_seldom_looks_for_more",),
    ),
    Mutation(
        "retention-of-a-dead-worker-stays",
        "Steps expire in a flow that is open again, because whoever ended the flow died halfway.",
        (Edit(_RETENTION, "revive", 'or (yield tasks("find_one", expiring, {"_id": 1}, hint=FLOW_INDEX))', ""),),
        (f"{_TESTS}::test_a_step_that_is_opened_again_after_whoever_ended_its_flow_died_takes_the_retention_back",),
    ),
    Mutation(
        "retention-looks-once",
        "A step that is opened again while its flow ends is removed with the flow.",
        (Edit(_RETENTION, "_end", "yield from _revive(head_id, key)", ""),),
        (f"{_TESTS}::test_a_step_that_is_opened_again_amid_the_end_of_its_flow_takes_it_back",),
    ),
)  # fmt: skip
