"""Mutations of traces and kept logs: each loses a link, a line or a bound."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_CALLER = "mtask/kernel/worker/running/call.py"
_FINISHER = "mtask/kernel/worker/running/finisher.py"
_GROWING = "mtask/features/logs/worker.py"
_KEEPER = "mtask/features/logs/worker.py"
_LOGS = "mtask/features/logs/operations.py"
_OTEL = "mtask/otel.py"
_RUNNER = "mtask/kernel/worker/running/runner.py"
_CHAINS = "mtask/features/flows/chains.py"

_SPANS = "tests/integration/app/test_otel.py"
_KEPT = "tests/integration/features/logs/test_keeper.py"

TRACING_MUTATIONS = (
    Mutation(
        "retry-without-a-link",
        "A failed run does not store its span, so the next try links to the publish only.",
        (Edit(_FINISHER, "Finisher.submit", "run.stored_trace is not None", "False"),),
        (f"{_SPANS}::test_each_try_is_a_trace_of_its_own_and_links_to_the_publish_and_to_the_try_before",),
    ),
    Mutation(
        "next-task-without-a-link",
        "A next task does not get the span of the run that goes on.",
        (Edit(_CHAINS, "Chains.returned", ", run.stored_trace", ""),),
        (f"{_SPANS}::test_children_next_tasks_and_tasks_of_schedules_link_to_what_made_them",),
    ),
    Mutation(
        "unsampled-span-is-stored",
        "A span that nobody records is stored with its task.",
        (
            Edit(
                _OTEL, "_Tracing._stored", "span.get_span_context().trace_flags.sampled or not self._is_linked", "True"
            ),
        ),
        (f"{_SPANS}::test_nothing_is_stored_where_nothing_is_recorded",),
    ),
    Mutation(
        "lines-of-another-run",
        "The context of the run before stays: lines of a handler tell no run, or another one.",
        (Edit(_CALLER, "Caller.call", "RUN.set(marks)", ""),),
        (f"{_KEPT}::test_the_last_lines_of_coroutines_threads_and_failures_are_kept_each_with_its_run",),
    ),
    Mutation(
        "write-at-each-line",
        "Lines of a run that goes on are written at once.",
        (Edit(_KEEPER, "LogKeeper._seconds_left", "+ EVERY", ""),),
        (f"{_KEPT}::test_lines_cost_few_writes_and_a_run_without_lines_none",),
    ),
    Mutation(
        "lines-without-a-bound",
        "The first lines of a run stay, however many bytes follow.",
        (Edit(_GROWING, "GrowingLog.add", "or (self.size > MAX_BYTES and len(self._lines) > 1)", ""),),
        (f"{_KEPT}::test_lines_are_bounded_in_bytes",),
    ),
    Mutation(
        "late-write-wins",
        "A write of lines that arrives late replaces newer lines.",
        (Edit(_LOGS, "_upsert", '{"$cond": [is_older, "$$ROOT", made]}', "made"),),
        (f"{_KEPT}::test_an_older_write_that_arrives_late_changes_nothing_and_hostile_text_is_stored",),
    ),
    Mutation(
        "last-lines-are-left",
        "The end of a run is not noted: its last lines wait, and nobody knows that there are no more.",
        (Edit(_RUNNER, "Runner._leave", "run.marks.log.end()", "pass"),),
        (f"{_KEPT}::test_a_stop_writes_the_last_lines_and_no_line_outside_of_a_run_is_kept",),
    ),
)
