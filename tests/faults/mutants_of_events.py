"""Mutations of what is told of tasks: events, their tokens, and a run's progress."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_CHANGES = "mtask/features/events/changes.py"
_READER = "mtask/features/events/following.py"
_EVENTS = "mtask/features/events/task_events.py"
_FOLLOWING = "mtask/features/events/following.py"
_LOOKUP = "mtask/features/events/changes.py"
_READERS = "mtask/features/events/readers.py"

_EVENTS_TESTS = "tests/integration/client/test_events.py"
_TOKEN_TESTS = "tests/integration/client/test_event_tokens.py"
_WHOM_TESTS = "tests/integration/client/test_events_of_whom.py"
_MALFORMED_TESTS = "tests/integration/client/test_events_malformed.py"
_PROGRESS_TESTS = "tests/integration/kernel/worker/running/test_progress.py"

EVENT_MUTATIONS = (
    # --- events ---------------------------------------------------------------------------------------------
    Mutation(
        "token-one-event-back",
        "Who goes on in the middle of a change is told its last event again.",
        (Edit(_FOLLOWING, "Following.take", "1", "0"),),
        (f"{_EVENTS_TESTS}::test_from_every_token_on_the_rest_is_told",),
    ),
    Mutation(
        "skips-in-every-change",
        "Who went on in the middle of a change misses as many events of each that follows.",
        (Edit(_FOLLOWING, "Begun.unread", "here == self.change", "True"),),
        (f"{_TOKEN_TESTS}::test_token_within_a_change_skips_nothing_of_what_another_filter_tells",),
    ),
    Mutation(
        "cleaned-is-claimed-again",
        "A run that moved up when a publish dropped the ended ones is told as claimed again.",
        (Edit(_CHANGES, "_is_claim", "_CLEAN_CNT in updated or", ""),),
        (f"{_EVENTS_TESTS}::test_run_that_a_publish_moved_up_behind_twenty_others_is_not_claimed_again",),
    ),
    Mutation(
        "skips-by-place-in-the-stream",
        "Who goes on within a transaction is told what came before its change again.",
        (Edit(_FOLLOWING, "Begun.unread", "if here < self.change:\n    return []", ""),),
        (f"{_TOKEN_TESTS}::test_token_within_a_transaction_names_one_of_its_changes",),
    ),
    Mutation(
        "cancelled-read-is-ended",
        "A cancelled call takes what it had sent for with it.",
        (Edit(_READER, "AsyncReader._read_on", "asyncio.wait((reading,))", "reading"),),
        (f"{_TOKEN_TESTS}::test_reader_that_is_cancelled_all_the_time_is_told_each_event_once",),
    ),
    Mutation(
        "told-of-whoever-has-the-key",
        "What happened to a task that was removed is told of the one that has its key now, to readers of its queue.",
        (Edit(_LOOKUP, "document_of", 'change["operationType"] != "update"', "True"),),
        (f"{_WHOM_TESTS}::test_reader_of_another_queue_is_not_told_of_the_task_that_had_the_key_before",),
    ),
    Mutation(
        "queue-as-it-is-now",
        "What happened before a task was moved is told to readers of the queue where it is now.",
        (Edit(_LOOKUP, "_is_before", "moved is None", "True"),),
        (f"{_WHOM_TESTS}::test_task_that_moved_to_another_queue_is_told_of_in_each_as_it_was_there",),
    ),
    Mutation(
        "waits-for-whoever-has-the-key",
        "Who waits for a task that was removed is given another one's result.",
        (Edit("mtask/client/requests.py", "WaitPolicy.same", "self.is_removed or", "False and"),),
        (f"{_WHOM_TESTS}::test_another_task_is_told_by_its_create_time_or_its_removal",),
    ),
    Mutation(
        "code-is-text",
        "A status that is code ends whoever reads events.",
        (
            Edit(_EVENTS, "_of_runs", "type(status) is str", "isinstance(status, str)"),
            Edit(_FOLLOWING, "_understood", "Exception", "ZeroDivisionError"),
        ),
        (f"{_MALFORMED_TESTS}::test_no_value_of_a_field_ends_a_reader",),
    ),
    Mutation(
        "too-large-is-the-end",
        "A change that is too large for a stream ends whoever reads events.",
        (Edit(_FOLLOWING, "Following.ask_for_less",
              "if self.detail is Detail.NAME:\n    raise error", "if self.detail in Detail:\n    raise error"),),
        (f"{_MALFORMED_TESTS}::test_change_that_is_too_large_for_a_stream_ends_no_reader",),
    ),
    Mutation(
        "told-of-who-stands-there-now",
        "An end that is read late is told of the run that stands in its place by now.",
        (Edit(_CHANGES, "_run_at", "if len(same) == end.count:\n    return same[end.rank]", "return at_index"),),
        (f"{_EVENTS_TESTS}::test_of_many_tries_each_is_told_however_late_it_is_read",),
    ),
    Mutation(
        "lapse-told-after-the-claim",
        "The claim that closed a lapsed run is told before the lapse.",
        (Edit(_CHANGES, "changed_runs", "(changed) if index", "(changed, reverse=True) if index"),),
        (f"{_EVENTS_TESTS}::test_a_life_is_told_in_order_with_who_and_why",),
    ),
    Mutation(
        "end-told-with-the-first",
        "The progress that a finish took along is told as the task's end, and its end is not.",
        (Edit(_EVENTS, "_with_status",
              "*found[:-1], replace(found[-1], task_status=known)",
              "replace(found[0], task_status=known), *found[1:]"),),
        (f"{_EVENTS_TESTS}::test_a_token_in_the_middle_of_a_change_serves_when_the_task_is_gone",),
    ),
    Mutation(
        "names-that-end-alike",
        "Who asks for one name is told of others that end with it.",
        (Edit(_READERS, "Wanted.pipeline", 'f"^{names}:{of_tenant}"', 'f"{names}:{of_tenant}"'),),
        (f"{_EVENTS_TESTS}::test_only_what_was_asked_for_is_told",),
    ),
    Mutation(
        "progress-told-as-it-is-now",
        "Progress that is read late is told as what came after it.",
        (Edit(_EVENTS, "_event", 'and stored.get("time") == progress.get("time")', ""),),
        (f"{_EVENTS_TESTS}::test_progress_that_is_read_late_is_told_as_it_was",),
    ),
    # --- progress -------------------------------------------------------------------------------------------
    Mutation(
        "progress-written-again",
        "A finish beside a ping writes the same progress once more, with another time, and it is told twice.",
        (Edit("mtask/kernel/statements/finish.py", "progress_of",
              '"$or": [{"$lt": ["$$index", 0]}, {"$eq": [there, fresh]}]', '"$lt": ["$$index", 0]'),),
        (f"{_EVENTS_TESTS}::test_progress_that_is_sent_again_is_told_once",),
    ),
    Mutation(
        "progress-forgotten-amid-a-ping",
        "What a handler tells while a ping takes along what it told before is taken for written.",
        (Edit("mtask/kernel/worker/running/run.py", "HeldRun.was_written",
              "if self.progress is progress:\n    self.progress = None", "self.progress = None"),),
        (f"{_PROGRESS_TESTS}::test_what_is_told_while_a_ping_is_under_way_is_written_too",),
    ),
)  # fmt: skip
