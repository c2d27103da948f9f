"""Mutations of what is told of tasks: events, their tokens, and a run's progress."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_CHANGES = "mtask/store/changes.py"
_CLIENT = "mtask/client/events.py"
_EVENTS = "mtask/store/events.py"

_EVENTS_TESTS = "tests/integration/test_events.py"
_PROGRESS_TESTS = "tests/integration/test_progress.py"

EVENT_MUTATIONS = (
    # --- events ---------------------------------------------------------------------------------------------
    Mutation(
        "token-one-event-back",
        "Who goes on in the middle of a change is told its last event again.",
        (Edit(_CLIENT, 'f"{before}.{place + 1}" for', 'f"{before}.{place}" for'),),
        (f"{_EVENTS_TESTS}::test_from_every_token_on_the_rest_is_told",),
    ),
    Mutation(
        "skips-in-every-change",
        "Who went on in the middle of a change misses as many events of each that follows.",
        (Edit(_CLIENT, "read, self.skip = self.skip, 0", "read = self.skip"),),
        (f"{_EVENTS_TESTS}::test_from_every_token_on_the_rest_is_told",),
    ),
    Mutation(
        "cleaned-is-claimed-again",
        "A run that moved up when a publish dropped the ended ones is told as claimed again.",
        (Edit(_CHANGES, ' or updated.get(_FAILED_CNT) == 0:', ":"),),
        (f"{_EVENTS_TESTS}::test_a_run_that_a_publish_moved_up_beyond_those_kept_is_not_claimed_again",),
    ),
    Mutation(
        "told-of-who-stands-there-now",
        "An end that is read late is told of the run that stands in its place by now.",
        (Edit(_CHANGES, "            if len(same) == len(places):\n                return same[places.index(place)]\n"
              "            return at_place if at_place in same else {}", "            return at_place"),),
        (f"{_EVENTS_TESTS}::test_of_many_tries_each_is_told_however_late_it_is_read",),
    ),
    Mutation(
        "lapse-told-after-the-claim",
        "The claim that closed a lapsed run is told before the lapse.",
        (Edit(_CHANGES, "in_place = [place for place in sorted(changed) if",
              "in_place = [place for place in sorted(changed, reverse=True) if"),),
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
        (Edit(_EVENTS, """f"^(?:{'|'""", """f"(?:{'|'"""),),
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
        (Edit("mtask/store/pipelines.py", '{"$or": [{"$lt": ["$$place", 0]}, {"$eq": [there, fresh]}]}',
              '{"$lt": ["$$place", 0]}'),),
        (f"{_EVENTS_TESTS}::test_progress_that_is_sent_again_is_told_once",),
    ),
    Mutation(
        "progress-forgotten-amid-a-ping",
        "What a handler tells while a ping takes along what it told before is taken for written.",
        (Edit("mtask/worker/run.py", "            if self.progress is progress:\n                self.progress = None",
              "            self.progress = None"),),
        (f"{_PROGRESS_TESTS}::test_what_is_told_while_a_ping_is_under_way_is_written_too",),
    ),
)  # fmt: skip
