"""Mutations of the worker: what it hears, trusts, keeps alive and gives back."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_CLAIMER = "mtask/kernel/worker/running/claim_loop.py"
_NEXT_GROUP = "mtask/kernel/worker/running/claim_loop.py"
_NEXT_GROUPS_FILE = "tests/unit/kernel/worker/running/test_next_group.py"
_NEXT_GROUPS = f"{_NEXT_GROUPS_FILE}::test_the_last_tasks_wait_only_while_tasks_come"
_LAST_OF_OTHERS = (
    "tests/integration/kernel/worker/running/test_ahead.py::"
    "test_last_tasks_of_another_worker_are_claimed_only_for_free_slots"
)
_PACE = "mtask/kernel/worker/running/slots.py"
_PACES = "tests/unit/kernel/worker/running/test_pace.py"
_SENDER = "mtask/kernel/worker/running/claim.py"
_ADOPTION = "mtask/kernel/worker/running/accept.py"
_SCANS = "mtask/kernel/worker/discovery/fetch_loop.py"
_BATCHES = "mtask/kernel/worker/discovery/fetch.py"
_QUEUE = "mtask/kernel/worker/discovery/buffer.py"
_QUEUE_TESTS = "tests/unit/kernel/worker/discovery/test_queue.py"
_ISOLATED_BACKLOG = "tests/integration/features/isolation/test_backlog.py"
_STREAM = "mtask/kernel/worker/discovery/stream.py"
_JANITOR = "mtask/kernel/worker/discovery/reaper.py"
_INBOX = "mtask/kernel/worker/discovery/inbox.py"
_FINISHER = "mtask/kernel/worker/running/finisher.py"
_OUTCOMES = "mtask/kernel/worker/running/outcomes.py"
_PINGER = "mtask/kernel/worker/running/leases.py"
_REPLIES = "mtask/kernel/worker/running/leases.py"
_RECOVERY = "mtask/kernel/worker/running/claim.py"
_RUNNER = "mtask/kernel/worker/running/runner.py"

_CLAIMED = "mtask/kernel/operations/claim.py"
_CLAIMED_TESTS = "tests/unit/kernel/operations/test_claimed.py"
_CAUGHT = "tests/integration/kernel/worker/test_mutants_caught.py"
_STARTS = "tests/integration/kernel/worker/running/test_starts.py"
_CLAIMS = "tests/integration/kernel/worker/running/test_claims.py"
_DOCUMENTS = "tests/integration/kernel/worker/test_documents.py"
_TOGETHER = (
    "tests/integration/kernel/worker/discovery/test_inbox.py::test_tasks_of_a_scan_are_queued_together_as_each_is_alone"
)
_RANKED_ALIKE = (
    "tests/integration/kernel/worker/discovery/test_inbox.py"
    "::test_tasks_of_a_share_are_queued_with_the_ranks_that_they_have_alone"
)
_SHARES = "tests/integration/kernel/worker/discovery/test_shares.py"
_ENDINGS = "tests/integration/kernel/worker/running/test_endings.py"
_LEAKS = "tests/integration/kernel/worker/test_leaks.py"
_REST = "tests/integration/kernel/worker/discovery/test_rest.py"
_HEARING = "tests/integration/kernel/worker/discovery/test_hearing.py"
_WAKEUP_TESTS = "tests/integration/kernel/operations/test_wakeups.py"
_WAKEUPS = "mtask/kernel/operations/change_stream.py"
_CONCERNS = "mtask/kernel/operations/stream_filter.py"
_ROSTER = "mtask/kernel/worker/discovery/fleet.py"
_ROSTER_TESTS = "tests/integration/kernel/worker/discovery/test_roster.py"
_HEARING_CODE = "mtask/kernel/worker/discovery/stream.py"
_OVERFLOW = "mtask/kernel/worker/running/claim_loop.py"
_LOOKS = "mtask/kernel/worker/discovery/stream.py"
_GIVING_WAY = "tests/integration/kernel/worker/discovery/test_giving_way.py"
_LOCKED = "tests/integration/kernel/worker/running/test_locked_tasks.py"

_MANY_QUEUES = (
    "tests/integration/kernel/worker/discovery/test_shares.py::"
    "test_scan_of_many_queues_is_in_order_and_sorts_nothing_on_the_server"
)
_REFILLS = "tests/integration/kernel/worker/discovery/test_refills.py"
_LOOK_AT_ALL = f"{_REFILLS}::test_worker_with_tasks_of_its_own_only_looks_at_those_of_all_unless_others_go_first"
_SCAN_AFTER_OPENING = Edit(_STREAM, "StreamLoop.follow", "self._scans.ask_full()", "")

WORKER_MUTATIONS = (
    # --- what it hears --------------------------------------------------------------------------------------
    Mutation(
        "times-by-the-local-clock",
        "When to try a task is read from the wall clock of the worker's machine.",
        (
            Edit("mtask/kernel/worker/process/time.py", "ServerClock.monotonic_of",
                 "self._offset", "time.time() + time.monotonic()"),
        ),
        ("tests/unit/kernel/worker/process/test_clock.py::test_slow_answer_leaves_the_estimate_late_and_never_early",),
    ),
    Mutation(
        "each-reads-the-whole-backlog",
        "A worker that wants more asks for all that waits, and leaves most of it to the others.",
        (Edit(_BATCHES, "Batches.scan_share", "not share", "share"),),
        ("tests/integration/kernel/worker/discovery/test_shares.py::"
         "test_worker_asks_for_its_share_while_there_is_more_and_takes_what_others_leave",),
    ),
    Mutation(
        "what-others-leave-is-left",
        "A worker whose share is done looks for nothing else before the regular scan.",
        (Edit(_BATCHES, "Batches.scan_share", "return is_enough", "return True"),),
        ("tests/integration/kernel/worker/discovery/test_shares.py::"
         "test_worker_asks_for_its_share_while_there_is_more_and_takes_what_others_leave",),
    ),
    Mutation(
        "share-from-the-beginning",
        "Each scan for a share begins with the first due task, and passes all keys that claims have removed.",
        (Edit(_BATCHES, "Batches._take_share", "finding.behind(found.documents[-1])", "None"),),
        ("tests/integration/kernel/worker/discovery/test_shares.py::"
         "test_worker_asks_for_its_share_while_there_is_more_and_takes_what_others_leave",),
    ),
    Mutation(
        "position-in-the-order-of-priorities",
        "A scan behind a position names the priority in its sort, so the server reads all of the backlog and sorts it.",
        (Edit("mtask/kernel/operations/find_due.py", "scan", "del by_order[0]", ""),),
        ("tests/integration/kernel/worker/discovery/test_shares.py::"
         "test_scan_behind_a_position_examines_only_what_it_brings",),
    ),
    Mutation(
        "absent-fields-in-each-scan",
        "Each scan for due tasks looks for absent fields, and for each passes all keys that claims have removed.",
        (Edit("mtask/kernel/statements/filters.py", "claimable", "if horizon_ms else []", ""),),
        ("tests/acceptance/test_queries_examine_what_they_return.py::test_only_a_scan_of_the_horizon_looks_for_absent_fields",),
    ),
    Mutation(
        "absent-fields-in-no-scan",
        "No scan finds a malformed task that lacks its queue.",
        (Edit("mtask/kernel/statements/filters.py", "claimable", "[None] if horizon_ms else", ""),),
        ("tests/integration/kernel/operations/test_malformed.py::"
         "test_a_scan_of_what_is_due_finds_it_unless_fields_are_absent",),
    ),
    Mutation(
        "many-queues-in-one-query",
        "A worker with many queues has the server read all of their waiting tasks at each scan.",
        (Edit("mtask/kernel/operations/find_due.py", "_MOST_QUEUES", "40", "4_000"),),
        (_MANY_QUEUES,),
    ),
    Mutation(
        "many-queues-not-in-order",
        "A worker with many queues takes the tasks of the first queues before more urgent ones.",
        (Edit("mtask/kernel/operations/find_due.py", "_merged", "_order", "lambda _: 0"),),
        (_MANY_QUEUES,),
    ),
    Mutation(
        "many-queues-cut-unnoticed",
        "A worker with many queues takes a scan that was cut for one that found all.",
        (Edit("mtask/kernel/operations/find_due.py", "_merged", "len(found) <= limit and", ""),),
        (_MANY_QUEUES,),
    ),
    Mutation(
        "refill-unheard",
        "A worker with room does not ask whether its queue needs more.",
        (Edit("mtask/kernel/worker/running/claim_loop.py", "Claimer.run",
              "self._ask_for_more()", "pass"),),
        (f"{_REFILLS}::test_worker_with_room_whose_queue_the_others_have_emptied_asks_for_a_refill",),
    ),
    Mutation(
        "refill-for-nothing",
        "A worker that may not claim asks for refills, twenty times a second.",
        (Edit("mtask/kernel/worker/running/claim_loop.py", "Claimer.run", "and not self._is_held_back()", ""),),
        (f"{_REFILLS}::test_worker_with_room_whose_queue_the_others_have_emptied_asks_for_a_refill",),
    ),
    Mutation(
        "lost-and-not-read-again",
        "A worker does not look at the tasks whose claim it has lost.",
        (Edit(_SENDER, "Sender.claim_group", "self._scope.signals.tasks_doubtful.send(lost)", ""),),
        ("tests/integration/kernel/worker/test_documents.py::"
         "test_malformed_tasks_that_a_claim_of_a_group_made_running_are_examined",),
    ),
    Mutation(
        "order-unheard-at-rest",
        "A worker whose stream rests hears of orders with its next heartbeat.",
        (Edit(_LOOKS, "Looks.look_at_orders", "orders != self._control", "False"),),
        (f"{_REST}::test_pauses_and_orders_are_heard_while_the_stream_rests",),
    ),
    Mutation(
        "cancel-unheard-at-rest",
        "A worker whose stream rests does not look whether its runs may continue.",
        (Edit(_LOOKS, "Looks.take", "await self._look_at_held()", ""),),
        (f"{_REST}::test_run_is_ended_while_the_stream_rests",),
    ),
    Mutation(
        "urgent-unseen-at-rest",
        "A worker whose stream rests finds urgent tasks behind the backlog.",
        (Edit(_LOOKS, "Looks.take", "await self._batches.look_for_urgent()", "pass"),),
        (f"{_REST}::test_urgent_task_and_lapsed_run_overtake_the_backlog_while_the_stream_rests",),
    ),
    Mutation(
        "rest-without-end",
        "The stream rests on when the backlog is done.",
        (Edit(_STREAM, "StreamLoop._rest", "self._may_rest", "not self._is_stopping"),),
        (f"{_REST}::test_stream_is_open_again_after_the_backlog_and_misses_nothing",),
    ),
    Mutation(
        "stream-waits-on-in-a-backlog",
        "A stream that waits for events is woken by each write of a backlog, until its wait is over.",
        (Edit(_STREAM, "StreamLoop._watch_backlog", "await stream.interrupt()", "pass"),),
        (f"{_REST}::test_stream_that_waits_for_long_is_interrupted_when_a_backlog_has_come",),
    ),
    Mutation(
        "not-simple-and-unheard",
        "A worker of a fleet hears of a task that wants several workers only if it is one of the first two.",
        (Edit(_CONCERNS, "_is_heard", '[{"$not": [is_shared]}, *is_ours]', "is_ours"),),
        (f"{_WAKEUP_TESTS}::test_stream_with_shares_tells_of_their_simple_tasks_and_of_all_that_are_not_simple",),
    ),
    Mutation(
        "only-the-first-hears",
        "A new task waits for a scan if the worker that ranks first for it has no room.",
        (Edit("mtask/kernel/worker/discovery/fleet.py", "FLEET", "2", "1"),),
        (f"{_HEARING}::test_worker_hears_of_the_simple_tasks_for_which_it_ranks_first_or_second_and_of_all_others",),
    ),
    Mutation(
        "narrow-beside-older-workers",
        "A worker leaves new tasks to workers of a version that does not say when it has no room.",
        (Edit("mtask/kernel/worker/discovery/fleet.py", "Ranks.take", "if self._peers.do_all_appeal else []", ""),),
        (f"{_HEARING}::test_worker_beside_one_that_never_appeals_hears_of_all",),
    ),
    Mutation(
        "narrow-with-limits",
        "A worker hears only of its shares while a limit holds back tasks of the others.",
        (Edit(_HEARING_CODE, "Hearing.is_plain", "self._batches.is_plain", "True"),),
        (f"{_HEARING}::test_limit_makes_it_hear_of_all",),
    ),
    Mutation(
        "changes-of-the-fleet-narrow-nothing",
        "A worker hears only of its former shares when another one has begun to stop.",
        (Edit(_STREAM, "StreamLoop._take_event",
              "self._hearing.widen()\nself._scans.ask_peers()", "self._scans.ask_peers()"),),
        (f"{_HEARING}::test_changes_of_the_fleet_and_of_controls_make_it_hear_of_all",),
    ),
    Mutation(
        "last-change-of-the-fleet-forgotten",
        "Workers that come soon after others are unknown until the next regular read.",
        (Edit(_ROSTER, "Roster.due_at",
              "self._next if self._is_asked else inf",
              "0.0 if self._is_asked and monotonic() >= self._next else inf"),),
        (f"{_ROSTER_TESTS}::test_first_change_is_read_at_once_and_those_of_the_next_second_together",),
    ),
    Mutation(
        "change-amid-a-read-forgotten",
        "A worker that comes while the others are read is unknown until the next regular read.",
        (Edit(_ROSTER, "Roster.read_if_due",
              "return await self._ranks.take(self._live)",
              "self._is_asked = False\nreturn await self._ranks.take(self._live)"),),
        (f"{_ROSTER_TESTS}::test_change_amid_a_read_is_read_later",),
    ),
    Mutation(
        "names-of-a-former-registration",
        "A worker that starts again with other handlers is taken to serve what it served before.",
        (Edit("mtask/kernel/operations/workers.py", "_registration_of", 'str(worker.get("incarnation"))', '""'),),
        ("tests/integration/kernel/operations/test_peers.py::"
         "test_what_a_worker_serves_is_read_again_when_it_has_registered_again",),
    ),
    Mutation(
        "stopping-unheard",
        "Workers hear that another one stops only when it has stopped.",
        (Edit(_CONCERNS, "_worker_events", "WorkerStatus.STOPPING.value,", ""),),
        (f"{_WAKEUP_TESTS}::test_appeals_and_ends_of_other_workers_are_told",),
    ),
    Mutation(
        "appeal-unheard",
        "A worker does not hear that others have no room.",
        (Edit(_CONCERNS, "_worker_events", ", _APPEALS", ""),),
        (f"{_WAKEUP_TESTS}::test_appeals_and_ends_of_other_workers_are_told",),
    ),
    Mutation(
        "appeal-without-a-scan",
        "A worker that hears an appeal does not look for the tasks of which it had not heard.",
        (Edit(_STREAM, "StreamLoop.read", "self._scans.ask_soon()", "pass"),),
        (f"{_HEARING}::test_appeal_of_another_worker_makes_it_hear_of_all_and_scan",),
    ),
    Mutation(
        "turned-behind-an-event-that-it-leaves-out",
        "A stream that tells of less from now on begins behind an event that it leaves out, and breaks.",
        (Edit(_WAKEUPS, "Stream.hear", "token, begin = None, self._last[1]", "pass"),),
        (f"{_WAKEUP_TESTS}::test_stream_turns_to_shares_without_its_last_event",),
    ),
    Mutation(
        "appeal-for-all-that-is-due",
        "A worker appeals for a task that names it, and that nobody else may take.",
        (Edit("mtask/kernel/worker/discovery/rereads.py", "Lookups.look_whether_due",
              "any(map(_is_for_any_worker, documents))", "bool(documents)"),),
        (f"{_HEARING}::test_worker_without_room_appeals_for_a_task_that_nobody_takes",),
    ),
    Mutation(
        "no-appeal",
        "A worker without room keeps tasks to itself that others could take.",
        (Edit(_OVERFLOW, "Overflow._read", "self._hearing.appeal()", "pass"),),
        (f"{_HEARING}::test_worker_without_room_appeals_for_a_task_that_nobody_takes",),
    ),
    Mutation(
        "appeal-for-taken-tasks",
        "A worker without room appeals for tasks that the first worker has taken long ago.",
        (Edit("mtask/kernel/worker/discovery/rereads.py", "Lookups.look_whether_due",
              "any(map(_is_for_any_worker, documents))", "True"),),
        (f"{_HEARING}::test_worker_without_room_appeals_for_a_task_that_nobody_takes",),
    ),
    Mutation(
        "paused-worker-appeals",
        "A worker with concurrency 0 wakes the others for tasks that they take anyway.",
        (Edit(_OVERFLOW, "Overflow.look", "or not self._vitals.concurrency", ""),),
        (f"{_HEARING}::test_worker_with_concurrency_0_appeals_for_nothing",),
    ),
    Mutation(
        "share-looked-for-in-vain",
        "A worker whose share is done looks through all that others have left, again and again.",
        (Edit(_BATCHES, "Batches._share", "and now >= self.next_share", ""),),
        ("tests/integration/kernel/worker/discovery/test_shares.py::"
         "test_share_that_is_done_is_not_looked_for_again_and_again_in_the_others_backlog",),
    ),
    Mutation(
        "shares-alone",
        "What a worker leaves behind of its share waits as long as another has enough of its own.",
        (Edit(_BATCHES, "Batches.scan_share", "or began > self.all_at + MAX_ALL_PAUSE", ""),),
        ("tests/integration/kernel/worker/discovery/test_shares.py::test_all_that_is_due_is_looked_for_again_and_again_whoever_it_is_left_to",),
    ),
    Mutation(
        "others-behind-those-that-wait-for-an-executor",
        "If more isolated tasks are due than the queue holds, the tasks of other handlers wait until these are done.",
        (Edit(_BATCHES, "Batches._is_crowded",
              "0 < self._enough <= self._queue.isolated_count(monotonic())", "False"),),
        (f"{_ISOLATED_BACKLOG}::test_tasks_behind_more_isolated_ones_than_the_queue_holds_all_run",),
    ),
    Mutation(
        "executors-run-dry",
        "When the isolated tasks of the queue are done, no refill brings more of those that wait.",
        (Edit(_BATCHES, "Batches.is_low_in_isolated", "self._queue.has_more_isolated", "False"),),
        (f"{_ISOLATED_BACKLOG}::test_isolated_tasks_go_on_after_those_that_the_queue_held",),
    ),
    Mutation(
        "dead-worker-behind-those-that-wait-for-an-executor",
        "A dead worker's isolated task waits behind a backlog of isolated tasks.",
        (Edit(_SCANS, "Scans.run", "or self._queue.has_more_isolated", ""),),
        (f"{_ISOLATED_BACKLOG}::test_begun_task_is_found_behind_more_isolated_ones_than_the_queue_holds",),
    ),
    Mutation(
        "keys-of-isolated-tasks-passed-again-and-again",
        "Each regular scan passes the keys of a long backlog of isolated tasks, to find that nothing else is due.",
        (Edit(_BATCHES, "Batches._read_beside_isolated", "bool(names) and began < self.next_beside", "False"),),
        (f"{_ISOLATED_BACKLOG}::test_tasks_beside_isolated_ones_are_not_looked_for_again_at_once_if_all_are_known",),
    ),
    Mutation(
        "share-drops-isolated-tasks",
        "A share scan without isolated tasks drops those of the other workers, and then looks for them again.",
        (Edit(_QUEUE, "PreemptionQueue.drop_behind_own", "if with_isolated else self._ready[:2]", ""),),
        (f"{_QUEUE_TESTS}::test_isolated_tasks_of_others_are_dropped_behind_own_only_if_wanted",),
    ),
    Mutation(
        "isolated-tasks-behind-a-backlog-of-others",
        "The executors stand idle while a backlog of other tasks of a higher priority is worked off.",
        (Edit(_SCANS, "Scans._scan_once", "await self._batches.scan_isolated()", "pass"),),
        (f"{_ISOLATED_BACKLOG}::test_isolated_tasks_are_found_behind_others_of_which_more_wait_than_the_queue_holds",),
    ),
    Mutation(
        "keys-of-isolated-tasks-without-a-limit",
        "A worker beside very many isolated tasks has no scan that ends, and no upkeep.",
        (Edit(_BATCHES, "Batches._read_beside_isolated", "with _at_most(BESIDE_TIMEOUT):", "if True:"),),
        (f"{_ISOLATED_BACKLOG}::test_scan_beside_isolated_tasks_that_takes_too_long_leaves_the_rest_to_a_later_one",),
    ),
    Mutation(
        "what-waits-for-an-executor-is-enough",
        "A worker whose queue holds isolated tasks has no refill when its other tasks are done.",
        (Edit(_QUEUE, "PreemptionQueue.ready_count", "self._ready_cnt[:2] if self._is_shared else", ""),),
        (f"{_QUEUE_TESTS}::test_tasks_of_isolated_handlers_are_counted_apart_only_beside_other_handlers",),
    ),
    Mutation(
        "isolated-tasks-push-out-others",
        "A flood of isolated tasks pushes the tasks of other handlers out of the queue.",
        (Edit(_QUEUE, "PreemptionQueue._is_apart", "self._is_shared and entry.kind > 1", "False"),),
        (f"{_QUEUE_TESTS}::test_tasks_of_isolated_handlers_and_of_others_push_out_their_own_kind",),
    ),
    Mutation(
        "what-is-not-due-is-enough",
        "A worker with tasks of its own that are not yet due looks for nothing else.",
        (Edit(_QUEUE, "PreemptionQueue._forget", "self._ready_cnt[entry.kind] -= 1", "pass"),),
        ("tests/unit/kernel/worker/discovery/test_queue.py::test_what_is_ready_is_counted",),
    ),
    Mutation(
        "queues-of-others-shared",
        "A worker leaves tasks of its queue to another that does not serve it.",
        (Edit("mtask/kernel/worker/discovery/fleet.py", "Peers.shares", "() if name in self._unshared else", ""),),
        ("tests/unit/kernel/worker/discovery/test_peers.py::test_names_that_others_serve_in_other_queues_are_not_shared",),
    ),
    Mutation(
        "refill-forgotten-right-after-a-scan",
        "What a scan brought is done before it may be repeated, and nobody repeats it.",
        (Edit(_SCANS, "Scans.refill",
              "self.refill_timer = asyncio.get_running_loop().call_later(pause, self._refill_late)", "pass"),),
        ("tests/integration/kernel/worker/discovery/test_shares.py::"
         "test_worker_asks_for_its_share_while_there_is_more_and_takes_what_others_leave",),
    ),
    Mutation(
        "scans-again-at-once",
        "Runs that end during a scan have the worker scan again, whatever the scan brings.",
        (Edit(_SCANS, "Scans.refill", "self._is_refill_asked = True\nreturn", "pass"),),
        (f"{_REFILLS}::test_refill_that_is_asked_for_while_a_scan_is_under_way_waits_for_what_the_scan_brings",),
    ),
    Mutation(
        "refill-forgotten-amid-a-scan",
        "Runs that end during a scan that brings nothing are the last ones, and the worker idles.",
        (Edit(_SCANS, "Scans.scan", "self.refill()", ""),),
        (f"{_REFILLS}::test_refill_that_was_asked_for_follows_a_scan_that_has_brought_nothing",),
    ),
    Mutation(
        "looks-for-its-own-alone",
        "A worker leaves the old tasks of a full worker to it for as long as it has tasks of its own.",
        (Edit(_BATCHES, "Batches.look_at_all", "or not is_own_next", ""),),
        (f"{_LOOK_AT_ALL}[refill-behind-others]", f"{_LOOK_AT_ALL}[regular-behind-others]"),
    ),
    Mutation(
        "reads-what-others-do",
        "A worker with tasks of its own reads all those of the others again and again.",
        (Edit(_BATCHES, "Batches.look_at_all", "not is_own_next", "True"),),
        (f"{_LOOK_AT_ALL}[refill]",),
    ),
    Mutation(
        "looks-without-a-backlog",
        "A regular scan brings a part of what waits, and nothing asks for the rest.",
        (Edit(_SCANS, "Scans._scan_once", "and (is_refill or self.was_cut.is_set())", ""),),
        (f"{_LOOK_AT_ALL}[regular-without-a-backlog]",),
    ),
    Mutation(
        "look-puts-off-the-refill",
        "A look brings little, and the worker waits until most of this is done.",
        (Edit(_SCANS, "Scans._count_ready", "count = max(count, self.scanned)", "pass"),),
        (f"{_REFILLS}::test_look_amid_a_backlog_does_not_put_off_the_next_refill",),
    ),
    Mutation(
        "share-read-twice",
        "A worker that has met the end of its share reads all of it again, though it has enough.",
        (Edit(_BATCHES, "Batches.scan_share", "and not self.has_enough_own", ""),),
        (f"{_REFILLS}::test_share_that_ends_behind_the_position_is_read_from_the_beginning_only_if_that_is_not_enough",),
    ),
    Mutation(
        "share-not-begun-again",
        "What lies before the position of a share is left to the next scan of all.",
        (Edit(_BATCHES, "Batches.scan_share",
              "found = await self._take_share(names, share, ranks, limit, None)", "pass"),),
        (f"{_REFILLS}::test_share_that_ends_behind_the_position_is_read_from_the_beginning_only_if_that_is_not_enough",),
    ),
    Mutation(
        "looks-at-due-tasks-alone",
        "Amid a backlog, a worker meets an urgent task only some time after it has become due.",
        (Edit(_BATCHES, "Batches.look_at_all", "horizon,", "timedelta(0),"),),
        (f"{_REFILLS}::test_regular_look_brings_a_task_of_a_higher_priority_that_will_be_due",),
    ),
    Mutation(
        "look-without-a-share",
        "A worker whose share is nearly done has a few of the others' tasks, and waits for the next refill.",
        (Edit(_SCANS, "Scans._scan_once", "and (not is_refill or await self._batches.scan_share())", ""),),
        (f"{_REFILLS}::test_worker_whose_share_is_nearly_done_reads_the_tasks_of_all_though_its_own_go_first",),
    ),
    Mutation(
        "malformed-tasks-of-a-break-are-found-late",
        "A malformed task that came while the stream was broken is found after a minute.",
        (Edit(_SCANS, "Scans.upkeep", "is_full or", ""),),
        (
            "tests/integration/kernel/worker/discovery/test_discovery.py"
            "::test_worker_looks_for_malformed_tasks_when_its_stream_was_broken",
        ),
    ),
    Mutation(
        "full-scan-forgotten-amid-a-scan",
        "What a full scan is wanted for happens during a scan, and no full scan follows.",
        (Edit(_SCANS, "Scans.run", "self._full_done = asked", "self._full_done = self._full_asked"),),
        (f"{_REFILLS}::test_full_scan_that_is_asked_for_amid_a_scan_follows_it",),
    ),
    Mutation(
        "slots-of-another-hash",
        "A worker puts tasks into other slots than the server does.",
        (Edit("mtask/kernel/document/identity.py", "_STEM", "15", "10"),),
        ("tests/integration/kernel/worker/discovery/test_shares.py::test_the_server_puts_each_id_into_the_slot_that_a_worker_does",),
    ),
    Mutation(
        "larger-shares-for-some",
        "Who scores highest for a slot has it, however many it has already.",
        (Edit("mtask/kernel/worker/discovery/fleet.py", "ranks_among", "room[chosen] -= 1", ""),),
        ("tests/unit/kernel/worker/discovery/test_peers.py::"
         "test_each_worker_has_another_rank_for_a_task_and_each_ranks_first_for_its_part",),
    ),
    Mutation(
        "scans-full-of-what-is-left-alone",
        "Tasks that are left alone for a while fill every scan, and hide what stands behind them.",
        (Edit(_BATCHES, "Batches._not_left_alone",
              "*other_than(self._quarantine.left_alone()), *self._hooks.guard()", ""),),
        ("tests/integration/kernel/worker/test_bounds.py::test_tasks_that_are_left_alone_do_not_fill_the_scans",),
    ),
    Mutation(
        "place-of-what-never-started-kept",
        "What a run takes up that was claimed and cannot be started is kept in mind for ever.",
        (Edit(_ADOPTION, "Adoption.adopt",
              'attempt.admission.release(document["_id"], run_id, is_closed=is_closed)', "pass"),),
        ("tests/integration/kernel/worker/test_bounds.py::test_run_that_cannot_be_started_keeps_no_place",),
    ),
    Mutation(
        "gives-way-with-events-at-hand",
        "A worker lets others go first though further events have come with the last one.",
        (Edit(_STREAM, "StreamLoop.read", "stream.has_more", "False"),),
        (f"{_GIVING_WAY}::test_events_that_came_together_are_all_taken_before_a_worker_gives_way",),
    ),
    Mutation(
        "never-gives-way",
        "All workers read their streams again at once while the first one claims.",
        (Edit(_STREAM, "StreamLoop._give_way", "await asyncio.sleep(GIVE_WAY)", "pass"),),
        (f"{_GIVING_WAY}::test_worker_gives_way_to_the_first_one_and_takes_the_task_if_that_one_does_not",),
    ),
    Mutation(
        "gives-way-in-a-series",
        "A worker lets others go first after each event, so that a series of events comes late.",
        (Edit(_STREAM, "StreamLoop._give_way", "self._last_event - last > APART", "last"),),
        (f"{_GIVING_WAY}::test_events_in_series_are_not_late",),
    ),
    Mutation(
        "no-scan-after-a-lost-stream",
        "What came while there was no stream is not looked for.",
        (
            _SCAN_AFTER_OPENING,
            Edit(_STREAM, "StreamLoop.run", "self._scans.ask_full()", "pass"),
        ),
        (f"{_CAUGHT}::test_task_that_comes_between_a_broken_stream_and_the_next_is_found_by_the_scan_after_its_opening",),
    ),
    Mutation(
        "scan-before-the-stream",
        "What comes between the scan and the stream's opening is missed.",
        (_SCAN_AFTER_OPENING,),
        (f"{_CAUGHT}::test_task_that_comes_between_a_broken_stream_and_the_next_is_found_by_the_scan_after_its_opening",),
    ),
    Mutation(
        "no-regular-scan",
        "What moves into the horizon is never met.",
        (
            Edit(_SCANS, "Scans.run", "part * HORIZON.total_seconds() / 2", "3600.0"),
        ),
        (f"{_CAUGHT}::test_task_that_moves_into_the_horizon_is_met_by_a_regular_scan",),
    ),
    Mutation(
        "priority-ignored",
        "Due tasks go by age alone.",
        (
            Edit("mtask/kernel/worker/discovery/ready.py", "Entry.order",
                 "-self.priority, self.moment + later", "0, self.moment + later"),
        ),
        ("tests/unit/kernel/worker/discovery/test_queue.py::test_priority_goes_before_any_preference",),
    ),
    # --- claims ---------------------------------------------------------------------------------------------
    Mutation(
        "lost-claim-is-a-failure",
        "A claim whose reply was lost is held by this worker and run by nobody until its lease lapses.",
        (
            Edit(_SENDER, "Sender.claim_group",
                 "left = await self._recovery.recover(attempt, read_again_first=not is_timeout)",
                 "left = task_ids\nself._scope.signals.tasks_doubtful.send(task_ids)"),
        ),
        (f"{_CLAIMS}::test_claim_that_was_not_answered_as_it_should_be_is_read_back_and_run",),
    ),
    Mutation(
        "late-claim-forgotten",
        "A claim that came true after it had been read back is held by nobody until its lease lapses.",
        (Edit(_RECOVERY, "Recovery.recover", "if doubtful:", "if False:"),),
        (f"{_CAUGHT}::test_claim_that_comes_true_after_it_was_given_up_is_handed_back",),
    ),
    Mutation(
        "malformed-document-raises",
        "One document that cannot be read keeps all others of its group from starting.",
        (
            Edit(_ADOPTION, "Adoption.adopt", "Exception as", "StopIteration as"),
        ),
        (f"{_CLAIMS}::test_document_that_cannot_be_started_does_not_keep_the_others_of_its_group_from_starting",),
    ),
    Mutation(
        "types-of-simple-tasks-unseen",
        "A malformed document that looks like a simple task is run, or stops the worker, instead of being marked FAIL.",
        (Edit(_CLAIMED, "simple_facts",
              "or not (type(created) is type(preempts) is type(claimed) is type(expires) is datetime)", ""),),
        (f"{_CLAIMED_TESTS}::test_no_value_of_any_field_is_taken_for_a_simple_task_that_is_none",),
    ),
    Mutation(
        "further-fields-unseen",
        "A task with a part in a flow, a callback or a next round is run as if it had none.",
        (Edit(_CLAIMED, "simple_facts",
              'len(document) != _TASK_CNT + ("params" in document) + ("quiet_time" in document)'
              ' + ("declared" in document)', "False"),),
        (f"{_CLAIMED_TESTS}::test_no_value_of_any_field_is_taken_for_a_simple_task_that_is_none",),
    ),
    Mutation(
        "run-of-another-taken",
        "A task that another run holds by now is run here, too, if it was read late.",
        (Edit(_CLAIMED, "simple_facts", "or own_id != run_id or holder != worker_id or attempt != 1", ""),),
        (f"{_CLAIMED_TESTS}::test_what_a_worker_must_look_at_is_no_simple_task",),
    ),
    Mutation(
        "cancel-request-unseen",
        "A run whose task was canceled between its claim and the read goes on until its first ping.",
        (Edit(_CLAIMED, "simple_facts", "or is_canceled is not False", ""),),
        (f"{_CLAIMED_TESTS}::test_what_a_worker_must_look_at_is_no_simple_task",),
    ),
    Mutation(
        "models-made-for-all",
        "A worker makes the model of each task that it claims, which few runs need.",
        (Edit(_ADOPTION, "Adoption._simple", "not self._codec.is_plain", "True"),),
        ("tests/integration/kernel/worker/running/test_models.py::test_usual_handlers_have_no_model_made",),
    ),
    # --- locked documents -----------------------------------------------------------------------------------
    Mutation(
        "claims-wait-for-a-lock",
        "A locked task holds up the claims of all others of its group.",
        (Edit(_SENDER, "_LEAST_WAIT", "0.3, 5.0", "100.0, 100.0"),),
        (f"{_LOCKED}::test_claims_of_a_backlog_do_not_wait_for_a_locked_task",),
    ),
    Mutation(
        "results-wait-for-a-lock",
        "A locked task holds up the results of all others of its group.",
        (Edit(_FINISHER, "Finisher._flush", "self._send_apart(group, was_held_up=True)\nreturn", "pass"),),
        (f"{_LOCKED}::test_results_do_not_wait_for_a_locked_task",),
    ),
    Mutation(
        "results-wait-behind-a-lock",
        "Results that are fewer than a group wait for the one under way, which waits for a locked task.",
        (
            Edit(_FINISHER, "_LEAST_WAIT", "0.3, 5.0", "100.0, 100.0"),
            Edit(_FINISHER, "Finisher._is_to_gather", "return left > 0", "return True"),
        ),
        (f"{_LOCKED}::test_single_results_do_not_wait_behind_a_locked_one",),
    ),
    Mutation(
        "pings-wait-for-a-lock",
        "A locked task costs all others of its worker their leases.",
        (
            Edit(_PINGER, "Pinger._ping", "self._is_held_up(runs, limit) if is_timeout else", ""),
        ),
        (f"{_LOCKED}::test_leases_are_kept_beside_a_locked_task",),
    ),
    Mutation(
        "settling-waits-for-a-lock",
        "A locked task keeps the other lapsed ones from being settled.",
        (
            Edit(_JANITOR, "TaskJanitor._settle_apart", "in task_ids", "in ()"),
        ),
        (f"{_LOCKED}::test_lapsed_tasks_are_settled_beside_a_locked_one",),
    ),
    # --- documents that nobody foresaw ----------------------------------------------------------------------
    Mutation(
        "loop-that-dies",
        "What nobody foresaw in one loop of the worker ends the process.",
        (Edit("mtask/kernel/worker/process/time.py", "enduring", "Exception", "OSError"),),
        (f"{_DOCUMENTS}::test_loop_outlives_what_nobody_foresaw",),
    ),
    Mutation(
        "document-ends-a-scan",
        "One document that a reader trips over keeps what a scan found behind it from being taken.",
        (Edit(_INBOX, "Inbox.push_all_found", "Exception", "OSError"),),
        (f"{_DOCUMENTS}::test_document_that_a_reader_trips_over_is_examined_and_holds_up_no_other",),
    ),
    Mutation(
        "alike-but-older",
        "A task like the one before it in a scan is queued although this worker knows something newer of it.",
        (Edit(_INBOX, "Inbox._push_alike", "not self._ledger.is_beyond(task_id, sent)", "True"),),
        (_TOGETHER,),
    ),
    Mutation(
        "share-of-former-ranks",
        "A share scan that was under way when a worker came queues the other's tasks as if they were its own.",
        (Edit(_BATCHES, "Batches.take", "== self._ranks.version", "is not None"),),
        (f"{_SHARES}::test_what_a_scan_brings_for_a_share_of_former_ranks_is_ranked_anew",),
    ),
    Mutation(
        "all-of-a-share-first",
        "Tasks of a name that others serve in other queues, which a share scan brings, count as this worker's own.",
        (Edit("mtask/kernel/worker/discovery/fleet.py", "Ranks.rank_in_share",
              "0 if self._peers.is_divided(name) else self._peers.rank(task_id, name)", "0"),),
        (_RANKED_ALIKE,),
    ),
    Mutation(
        "tried-before-but-first",
        "A worker goes first for a task of its share that it has tried in vain.",
        (Edit("mtask/kernel/worker/discovery/fleet.py", "Ranks.rank_in_share",
              "if self._ledger.was_claimed(task_id):\n    return self._peers.last(name)", ""),),
        (_RANKED_ALIKE,),
    ),
    Mutation(
        "out-of-order-but-last",
        "A task that must go before those that are ready goes behind them.",
        (Edit("mtask/kernel/worker/discovery/ready.py", "Ready.push", "not row or row[-1] < item", "True"),),
        ("tests/unit/kernel/worker/discovery/test_ready.py::test_first_is_always_the_least_of_those_that_are_left",),
    ),
    Mutation(
        "alike-but-paused",
        "Of a tenant that is paused, all tasks of a scan but the first are queued.",
        (Edit(_INBOX, "Inbox._is_taken", "and not self._served.is_paused(queue, name, tenant)", ""),),
        (_TOGETHER,),
    ),
    Mutation(
        "alike-by-its-name-alone",
        "A task whose _id is of another name is queued, if a task of this name was queued before it.",
        (Edit(_INBOX, "Inbox._push_alike", "not task_id.startswith(beginning) or", ""),),
        (_TOGETHER,),
    ),
    Mutation(
        "alike-but-left-alone",
        "A task that this worker must leave alone for a while is queued, if one like it was queued before it.",
        (Edit(_INBOX, "Inbox._push_alike", "or task_id in left_alone", ""),),
        (_TOGETHER,),
    ),
    Mutation(
        "queued-and-untold",
        "A scan does not tell the claimer of the tasks that it has queued together.",
        (Edit(_INBOX, "Inbox.push_all_found", "self._scope.signals.task_queued.send()", ""),),
        (_TOGETHER,),
    ),
    Mutation(
        "room-untold",
        "A worker does not hear that a slot is free.",
        (Edit("mtask/kernel/worker/running/slots.py", "Slots.free", "self._signals.slot_left.send()", ""),),
        ("tests/integration/kernel/worker/running/test_claims.py::"
         "test_each_slot_that_becomes_free_is_filled_though_no_hint_comes",),
    ),
    Mutation(
        "started-as-they-came",
        "The runs that wait for a slot or for an executor start in the order in which their claims landed.",
        (Edit("mtask/kernel/worker/running/slots.py", "Line.push",
              "order, self._came_cnt, item", "(), self._came_cnt, item"),),
        (f"{_STARTS}::test_tasks_start_by_priority_and_at_most_those_of_the_other_slots_at_once",
         f"{_STARTS}::test_the_first_in_order_of_the_runs_that_a_worker_holds_starts_next_whatever_their_kinds",
         "tests/integration/features/isolation/test_starts.py"
         "::test_an_executor_takes_the_first_in_order_of_the_runs_that_wait_for_it"),
    ),
    Mutation(
        "turns-lost-while-they-wait",
        "Of the runs that wait in a queue with fair turns, those of the highest priority start first.",
        (Edit(_ADOPTION, "Adoption.adopt", "self._served.fair_queues", "False"),),
        (f"{_STARTS}::test_tenants_take_turns_among_the_runs_that_wait_too_whatever_the_priorities",),
    ),
    Mutation(
        "interrupted-and-forgotten",
        "The run of a task that was handed back waits behind all runs of higher priority.",
        (Edit(_CLAIMED, "_standing", "handed_back or", ""),),
        (f"{_CLAIMED_TESTS}::test_the_order_of_a_run_is_that_of_its_task_before_the_claim",
         f"{_STARTS}::test_the_first_in_order_of_the_runs_that_a_worker_holds_starts_next_whatever_their_kinds"),
    ),
    Mutation(
        "patient-for-the-wrong-run",
        "The worker looks at what has waited too long when the run that starts next would have.",
        (Edit("mtask/kernel/worker/running/slots.py", "Slots.start_waiting",
              "min(since for since, _ in self._waiting)", "next(iter(self._waiting))[0]"),),
        ("tests/unit/kernel/worker/running/test_slots.py"
         "::test_run_that_has_waited_longest_is_handed_back_first_though_it_would_start_first_or_last",),
    ),
    Mutation(
        "last-group-held-back",
        "The last tasks of a backlog wait for the claim before theirs, though no further task can join them.",
        (Edit(_NEXT_GROUP, "NextGroup.seconds_left", "min(left, self._queued_at + _QUIET - now)", "left"),),
        (_NEXT_GROUPS,),
    ),
    Mutation(
        "last-group-not-held-back",
        "Tasks that come one after the other get a claim each, beside the claims that are under way.",
        (Edit(_NEXT_GROUP, "_QUIET", "0.01", "0.0"),),
        (_NEXT_GROUPS,),
    ),
    Mutation(
        "many-groups-among-others",
        "A worker keeps tasks from the others in more claims than the database can work at.",
        (Edit(_NEXT_GROUP, "NextGroup.seconds_left", "not is_shared and", ""),),
        (f"{_NEXT_GROUPS_FILE}::test_a_worker_among_others_claims_one_group_at_a_time_but_waits_for_no_slow_claim",),
    ),
    Mutation(
        "one-group-without-others",
        "A worker without others claims one group at a time, though it could claim more.",
        (Edit(_NEXT_GROUP, "NextGroup.seconds_left", "not is_shared", "False"),),
        (f"{_NEXT_GROUPS_FILE}::test_half_of_what_the_worker_may_hold_waits_for_nothing",),
    ),
    Mutation(
        "last-tasks-of-others-claimed-ahead",
        "At the end of a backlog, workers claim each other's tasks before they have slots for them.",
        (Edit(_CLAIMER, "Claimer.launch", "or self._is_helping_at_end(now)", ""),),
        (_LAST_OF_OTHERS,),
    ),
    Mutation(
        "own-last-tasks-not-claimed-ahead",
        "At the end of a backlog, a worker has its last tasks wait for slots unclaimed.",
        (Edit(_CLAIMER, "Claimer._is_helping_at_end", "or queue.is_own_next(now, past_isolated=True)", ""),),
        (_LAST_OF_OTHERS,),
    ),
    Mutation(
        "no-help-ahead-in-a-backlog",
        "A worker helps others in a long backlog with its free slots alone.",
        (Edit(_CLAIMER, "Claimer._is_helping_at_end", "queue.has_more or", ""),),
        (_LAST_OF_OTHERS,),
    ),
    Mutation(
        "rest-counted",
        "A worker that had nothing to do takes the next tasks for slow ones.",
        (Edit(_PACE, "Pace.claimed", "- rest", ""),),
        (f"{_PACES}::test_time_without_runs_does_not_count_but_what_has_ended_is_forgotten",),
    ),
    Mutation(
        "pace-of-an-earlier-burst",
        "A worker claims tasks ahead at the pace of tasks that ended a minute ago.",
        (Edit(_PACE, "Pace.claimed", ">= _PAUSE", "< 0"),),
        (f"{_PACES}::test_first_claims_of_a_burst_tell_its_pace_whatever_came_before_the_rest",),
    ),
    Mutation(
        "few-runs-prove-much",
        "A worker that has run a few quick tasks claims many of the next ones ahead, which may be slow.",
        (Edit(_PACE, "Pace.claimed", "_EVIDENCE * self._ended", "1e9"),),
        (f"{_PACES}::test_few_quick_runs_prove_little",),
    ),
    Mutation(
        "rest-untold",
        "The pace does not hear that no run is left.",
        (Edit("mtask/kernel/worker/running/slots.py", "Slots.free", "not self.running_cnt", "self.running_cnt < 0"),),
        ("tests/integration/kernel/worker/running/test_ahead.py::test_rest_after_the_last_run_is_no_time_of_runs",),
    ),
    Mutation(
        "claimed-in-vain-at-a-rate",
        "A task whose claims are all lost is claimed again at once.",
        (Edit(_INBOX, "Inbox.schedule", "self._losses.pause(task.id)", "0.0"),),
        (f"{_DOCUMENTS}::test_task_that_is_claimed_in_vain_again_and_again_is_tried_ever_more_rarely",),
    ),
    Mutation(
        "too-large-and-left",
        "A task into which no claim fits waits for ever.",
        (Edit("mtask/kernel/worker/discovery/quarantine.py", "Quarantine._examine",
              "isinstance(refusal, DocumentTooLarge)", "refusal is self"),),
        (f"{_DOCUMENTS}::test_task_that_leaves_no_room_for_a_claim_or_an_end_is_not_left_open_and_keeps_what_it_holds",),
    ),
    # --- leases ---------------------------------------------------------------------------------------------
    Mutation(
        "claim-trusted-from-its-reply",
        "The lease of a claim that was answered late is trusted beyond its end.",
        (
            Edit(_ADOPTION, "Adoption.adopt", "attempt.sent", "monotonic()"),
            Edit(_ADOPTION, "Adoption._simple", "attempt.sent", "monotonic()"),
        ),
        (f"{_CAUGHT}::test_lease_is_trusted_from_when_it_was_asked_for_however_late_the_answer_comes",),
    ),
    Mutation(
        "ping-trusted-from-its-reply",
        "The lease of a ping that was answered late is trusted beyond its end.",
        (
            Edit(_PINGER, "Pinger._send", "documents, sent", "documents, monotonic()"),
        ),
        (f"{_CAUGHT}::test_lease_is_trusted_from_when_it_was_asked_for_however_late_the_answer_comes",),
    ),
    Mutation(
        "lapse-unnoticed",
        "A worker that is cut off from the database goes on with runs that are others' by now.",
        (Edit(_PINGER, "Pinger._expire", "run.trusted_until <= now and not run.is_over", "False"),),
        (f"{_CAUGHT}::test_handler_is_told_when_its_lease_can_no_longer_be_trusted_though_the_server_is_not_heard",),
    ),
    Mutation(
        "out-of-time-kept-alive",
        "A handler that blocks the loop for good holds its task for good, whatever run_timeout_ms says.",
        (Edit(_PINGER, "Pinger._is_to_ping", "min(run.trusted_until, run.deadline + OVERTIME)", "run.trusted_until"),),
        (f"{_CAUGHT}::test_run_out_of_time_that_blocks_the_loop_keeps_its_lease_no_longer_and_counts",),
    ),
    Mutation(
        "pings-into-the-transaction",
        "Pings go on during a handler's transaction and make it conflict with itself.",
        (
            Edit(_PINGER, "Pinger._is_to_ping", "run.suspended or", ""),
            Edit(_PINGER, "Pinger._sending", "not run.suspended and", ""),
        ),
        ("tests/acceptance/test_effects_happen_once.py"
         "::test_ping_interval_shorter_than_the_transaction_does_not_abort_it",),
    ),
    Mutation(
        "ended-run-kept-alive",
        "A run that has ended, canceled or not, is pinged on and on.",
        (
            Edit(_FINISHER, "Finisher._flush", "self._pinger.release_all(ending.run for ending in group)", ""),
        ),
        (f"{_LEAKS}::test_worker_that_ran_tasks_of_all_kinds_leaves_nothing_when_it_stops",),
    ),
    # --- ends -----------------------------------------------------------------------------------------------
    Mutation(
        "lost-finish-is-a-failure",
        "A result whose write was not answered is thrown away.",
        (
            Edit(_FINISHER, "Finisher._flush",
                 "group = await self._drop_expired(group)",
                 "for ending in group:\n    self._resolve(ending, is_accepted=False)\ngroup = []"),
        ),
        (f"{_ENDINGS}::test_one_error_of_the_server_on_a_finish_costs_no_success",),
    ),
    Mutation(
        "late-answer-not-read-back",
        "A result whose lease ended before the answer counts as lost, though it is stored.",
        (
            Edit(_FINISHER, "Finisher._drop_expired", "await self._resolve_written(expired)", "pass"),
        ),
        (f"{_ENDINGS}::test_answer_that_is_lost_until_the_lease_has_ended_is_read_back",),
    ),
    Mutation(
        "hand-back-as-a-failure",
        "What a worker hands back when it stops is written as failed.",
        (
            Edit(_OUTCOMES, "ended", "CANCELED,", "FAIL,"),
        ),
        ("tests/acceptance/test_stops_and_pauses.py::test_second_signal_stops_at_once_and_what_ran_is_handed_back",),
    ),
    Mutation(
        "cancel-unheard",
        "A task that runs cannot be canceled.",
        (
            Edit(_REPLIES, "_end_reason",
                 'if document["task_state"].get("cancel_requested"):\n    return EndReason.CANCELED', ""),
        ),
        ("tests/acceptance/test_changes_while_it_runs.py::test_canceled_task_ends_at_once_and_nothing_counts",),
    ),
    Mutation(
        "exclusion-unheard",
        "A run goes on though specific_worker_ids no longer admits its worker.",
        (
            Edit(_REPLIES, "_end_reason",
                 "isinstance(admitted, list) and admitted and worker_id not in admitted", "False"),
        ),
        ("tests/acceptance/test_one_worker_claims.py"
         "::test_run_ends_when_its_worker_is_no_longer_admitted_and_the_named_one_takes_over",),
    ),
    Mutation(
        "slot-freed-too-early",
        "A worker runs more plain handlers at once than its concurrency allows.",
        (Edit(_RUNNER, "Runner._leave", "called.thread is None or called.thread.is_over", "True"),),
        (f"{_CAUGHT}::test_plain_handler_that_goes_on_after_its_run_keeps_its_slot",),
    ),
    # --- what stays behind ----------------------------------------------------------------------------------
    Mutation(
        "client-left-open",
        "A worker that has stopped keeps connections.",
        (Edit("mtask/kernel/worker/process/worker.py", "Worker.run",
              "closing.push_async_callback(runtime.to_thread, pings.close)", "pass"),),
        (f"{_LEAKS}::test_worker_that_ran_tasks_of_all_kinds_leaves_nothing_when_it_stops",),
    ),
    Mutation(
        "handlers-clients-left-open",
        "A worker that has stopped keeps the connections of its handlers' transactions.",
        (Edit("mtask/parts/assembly.py", "connections", "await handlers.close()", "pass"),),
        (f"{_LEAKS}::test_worker_that_ran_tasks_of_all_kinds_leaves_nothing_when_it_stops",),
    ),
    Mutation(
        "named-session-left-open",
        "A task is rescued from a dead worker's open transaction only when MongoDB gives that up, a minute later.",
        (
            Edit(_SENDER, "Sender._end_lapsed_sessions",
                 "ended = await self._store.run(sessions.end_lapsed(task_ids))", "ended: list[str] = []"),
        ),
        ("tests/acceptance/test_effects_happen_once.py"
         "::test_task_is_rescued_at_once_from_a_transaction_that_a_killed_worker_left_open",),
    ),
    Mutation(
        "aborted-session-used-again",
        "The transaction of one run is ended for another's, whose session it uses.",
        (
            Edit("mtask/kernel/worker/running/transactions.py", "RunTransactions.end", "False", "True"),
        ),
        ("tests/integration/kernel/worker/running/test_transactions.py::test_session_of_an_aborted_transaction_serves_no_other_run",),
    ),
    Mutation(
        "transaction-left-open",
        "A handler's transaction that is not committed holds its locks until the server gives up.",
        (Edit("mtask/kernel/worker/running/transactions.py", "RunTransactions._abandon",
              "await session.abort_transaction()", "pass"),),
        (f"{_LEAKS}::test_worker_that_ran_tasks_of_all_kinds_leaves_nothing_when_it_stops",),
    ),
    Mutation(
        "finished-runs-remembered",
        "The worker's memory grows with each task that it does.",
        (Edit(_RUNNER, "Runner._leave", "self._ledger.forget(run)", ""),),
        (f"{_LEAKS}::test_worker_keeps_nothing_of_the_tasks_that_it_has_done",),
    ),
    Mutation(
        "clients-connections-left-open",
        "A client that was closed keeps its connections.",
        (
            Edit("mtask/kernel/driver/stores.py", "SyncStore.close", "self.client.close()", ""),
        ),
        (f"{_LEAKS}::test_clients_that_are_closed_leave_nothing",),
    ),
    Mutation(
        "counted-retry-not-counted",
        "A handler that asks for a counted retry is tried for ever.",
        (Edit(_OUTCOMES, "failed", "error.counted is True", "False"),),
        ("tests/integration/kernel/worker/running/test_endings.py::test_counted_retry_is_a_failure_with_a_delay_of_its_own",),
    ),
)  # fmt: skip
