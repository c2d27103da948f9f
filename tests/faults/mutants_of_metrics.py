"""Mutations of metrics: each lets a run count twice, not at all, or at a cost that nobody has agreed to."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_COUNTS = "mtask/features/metrics/operations.py"
_EXPOSITION = "mtask/features/metrics/prometheus.py"
_FLEET = "mtask/features/metrics/client.py"
_METER = "mtask/kernel/worker/process/counts.py"
_RECORDER = "mtask/features/metrics/worker.py"
_SENDER = "mtask/kernel/worker/running/claim.py"
_TALLIES = "mtask/features/metrics/operations.py"
_TALLY = "mtask/kernel/worker/process/counts.py"

_TALLY_TESTS = "tests/integration/features/metrics/test_tallies.py"
_COUNT_TESTS = "tests/integration/features/metrics/test_counts.py"
_WORKER_TESTS = "tests/integration/features/metrics/test_recorder.py"

METRIC_MUTATIONS = (
    Mutation(
        "text-of-former-counts",
        "Scrapes show the first counts of tasks for ever.",
        (Edit(_EXPOSITION, "FleetText.of", "!= fleet.count_time", "is None"),),
        ("tests/unit/features/metrics/test_exposing.py::test_text_of_one_count_is_made_once_and_the_rest_anew",),
    ),
    Mutation(
        "totals-without-a-guard",
        "Of two processes that fold at once, the second undoes what the first has added.",
        (Edit(_TALLIES, "_add_to_totals", '"_id": TOTALS_ID, "revision": revision', '"_id": TOTALS_ID'),),
        (f"{_TALLY_TESTS}::test_of_two_folders_at_any_step_only_one_counts",),
    ),
    Mutation(
        "folded-tally-still-counts",
        "Readers add the tally of a dead worker to totals that hold it.",
        (Edit(_FLEET, "_not_folded", 'document["_id"] not in folded and', ""),),
        (f"{_TALLY_TESTS}::test_readers_see_each_run_once_between_all_steps_of_a_fold",),
    ),
    Mutation(
        "write-into-a-folded-tally",
        "A worker that was frozen overwrites its tally after it was folded.",
        (Edit(_TALLIES, "record", ', "fold_time": {"$exists": False}', ""),),
        (f"{_TALLY_TESTS}::test_a_worker_that_is_folded_alive_learns_it_and_stores_nothing_there",),
    ),
    Mutation(
        "next-tally-repeats-the-folded-one",
        "A worker whose tally was folded stores all that it has ever counted once more.",
        (
            Edit(
                _RECORDER, "Recorder._begin_next", "self._former.add(self._stored if found is None else found)", "pass"
            ),
        ),
        (f"{_WORKER_TESTS}::test_a_worker_that_was_folded_alive_goes_on_in_another_tally",),
    ),
    Mutation(
        "counts-without-a-lease",
        "Each scraper counts the tasks for itself as soon as the counts are old.",
        (Edit(_COUNTS, "_take_lease", ', "$expr": {"$and": over}', ""),),
        (f"{_COUNT_TESTS}::test_only_the_holder_of_the_lease_counts_and_others_take_what_is_there",),
    ),
    Mutation(
        "pairs-that-come-and-go",
        "A pair counts as other until it is admitted: then other falls.",
        (Edit(_TALLY, "Tally.limited", "if is_full else None", ""),),
        (f"{_COUNT_TESTS}::test_pairs_are_admitted_once_and_for_ever",),
    ),
    Mutation(
        "lapse-of-an-exhausted-task-is-not-counted",
        "Lapsed runs count only if a worker claims their task.",
        (Edit(_SENDER, "Sender.claim_group", "tell_changed=closed.append,", ""),),
        (f"{_WORKER_TESTS}::test_a_lapsed_run_counts_once_at_the_worker_that_closes_it[the janitor closes it]",),
    ),
    Mutation(
        "wait-from-the-creation",
        "The wait of a retried task begins when it was published.",
        (Edit(_METER, "due_since", "max(since, *ends)", "since"),),
        ("tests/unit/kernel/worker/process/test_meter.py::test_a_task_is_due_since",),
    ),
    Mutation(
        "metrics-written-though-nothing-changed",
        "An idle worker writes its tally every 10 s.",
        (
            Edit(
                _RECORDER, "Recorder.write", "if self._tally.revision == (self._stored_revision or 0):\n    return", ""
            ),
        ),
        (f"{_WORKER_TESTS}::test_nothing_is_written_for_a_task_and_nothing_when_nothing_has_changed",),
    ),
)
