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
        (Edit(_FOLLOWING, "enumerate(found, start=1)", "enumerate(found, start=0)"),),
        (f"{_EVENTS_TESTS}::test_from_every_token_on_the_rest_is_told",),
    ),
    Mutation(
        "skips-in-every-change",
        "Who went on in the middle of a change misses as many events of each that follows.",
        (Edit(_FOLLOWING, "        if here == self.change:\n", "        if True:\n"),),
        (f"{_TOKEN_TESTS}::test_token_within_a_change_skips_nothing_of_what_another_filter_tells",),
    ),
    Mutation(
        "cleaned-is-claimed-again",
        "A run that moved up when a publish dropped the ended ones is told as claimed again.",
        (Edit(_CHANGES, "_CLEAN_CNT in updated or ", ""),),
        (f"{_EVENTS_TESTS}::test_run_that_a_publish_moved_up_behind_twenty_others_is_not_claimed_again",),
    ),
    Mutation(
        "skips-by-place-in-the-stream",
        "Who goes on within a transaction is told what came before its change again.",
        (Edit(_FOLLOWING, "        if here < self.change:\n            return []\n", ""),),
        (f"{_TOKEN_TESTS}::test_token_within_a_transaction_names_one_of_its_changes",),
    ),
    Mutation(
        "cancelled-read-is-ended",
        "A cancelled call takes what it had sent for with it.",
        (Edit(_READER, "await asyncio.wait((reading,))\n        if self", "await reading\n        if self"),),
        (f"{_TOKEN_TESTS}::test_reader_that_is_cancelled_all_the_time_is_told_each_event_once",),
    ),
    Mutation(
        "told-of-whoever-has-the-key",
        "What happened to a task that was removed is told of the one that has its key now, to readers of its queue.",
        (Edit(_LOOKUP, 'is_known = change["operationType"] != "update" or', "is_known = True or"),),
        (f"{_WHOM_TESTS}::test_reader_of_another_queue_is_not_told_of_the_task_that_had_the_key_before",),
    ),
    Mutation(
        "queue-as-it-is-now",
        "What happened before a task was moved is told to readers of the queue where it is now.",
        (Edit(_LOOKUP, "return moved is None or", "return True or"),),
        (f"{_WHOM_TESTS}::test_task_that_moved_to_another_queue_is_told_of_in_each_as_it_was_there",),
    ),
    Mutation(
        "waits-for-whoever-has-the-key",
        "Who waits for a task that was removed is given another one's result.",
        (Edit("mtask/client/requests.py", "if self.is_removed or first not in", "if False and first not in"),),
        (f"{_WHOM_TESTS}::test_another_task_is_told_by_its_create_time_or_its_removal",),
    ),
    Mutation(
        "code-is-text",
        "A status that is code ends whoever reads events.",
        (
            Edit(_EVENTS, "if type(status) is str and status in", "if isinstance(status, str) and status in"),
            Edit(_FOLLOWING, "    except Exception:\n        logger", "    except ZeroDivisionError:\n        logger"),
        ),
        (f"{_MALFORMED_TESTS}::test_no_value_of_a_field_ends_a_reader",),
    ),
    Mutation(
        "too-large-is-the-end",
        "A change that is too large for a stream ends whoever reads events.",
        (Edit(_FOLLOWING, "is Detail.NAME:\n            raise error", "in Detail:\n            raise error"),),
        (f"{_MALFORMED_TESTS}::test_change_that_is_too_large_for_a_stream_ends_no_reader",),
    ),
    Mutation(
        "told-of-who-stands-there-now",
        "An end that is read late is told of the run that stands in its place by now.",
        (Edit(_CHANGES, "    if len(same) == end.count:\n        return same[end.rank]\n", "    return at_index\n"),),
        (f"{_EVENTS_TESTS}::test_of_many_tries_each_is_told_however_late_it_is_read",),
    ),
    Mutation(
        "lapse-told-after-the-claim",
        "The claim that closed a lapsed run is told before the lapse.",
        (Edit(_CHANGES, "in_order = [index for index in sorted(changed) if",
              "in_order = [index for index in sorted(changed, reverse=True) if"),),
        (f"{_EVENTS_TESTS}::test_a_life_is_told_in_order_with_who_and_why",),
    ),
    Mutation(
        "end-told-with-the-first",
        "The progress that a finish took along is told as the task's end, and its end is not.",
        (Edit(_EVENTS, "return [*found[:-1], replace(found[-1], task_status=known)]",
              "return [replace(found[0], task_status=known), *found[1:]]"),),
        (f"{_EVENTS_TESTS}::test_a_token_in_the_middle_of_a_change_serves_when_the_task_is_gone",),
    ),
    Mutation(
        "names-that-end-alike",
        "Who asks for one name is told of others that end with it.",
        (Edit(_READERS, 'f"^{names}:{of_tenant}"', 'f"{names}:{of_tenant}"'),),
        (f"{_EVENTS_TESTS}::test_only_what_was_asked_for_is_told",),
    ),
    Mutation(
        "progress-told-as-it-is-now",
        "Progress that is read late is told as what came after it.",
        (Edit(_EVENTS, ' and stored.get("time") == progress.get("time"):', ":"),),
        (f"{_EVENTS_TESTS}::test_progress_that_is_read_late_is_told_as_it_was",),
    ),
    # --- progress -------------------------------------------------------------------------------------------
    Mutation(
        "progress-written-again",
        "A finish beside a ping writes the same progress once more, with another time, and it is told twice.",
        (Edit("mtask/kernel/statements/finish.py", '{"$or": [{"$lt": ["$$index", 0]}, {"$eq": [there, fresh]}]}',
              '{"$lt": ["$$index", 0]}'),),
        (f"{_EVENTS_TESTS}::test_progress_that_is_sent_again_is_told_once",),
    ),
    Mutation(
        "progress-forgotten-amid-a-ping",
        "What a handler tells while a ping takes along what it told before is taken for written.",
        (Edit("mtask/kernel/worker/running/run.py",
              "            if self.progress is progress:\n                self.progress = None",
              "            self.progress = None"),),
        (f"{_PROGRESS_TESTS}::test_what_is_told_while_a_ping_is_under_way_is_written_too",),
    ),
)  # fmt: skip
