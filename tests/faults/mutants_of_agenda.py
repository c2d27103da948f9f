"""Mutations of the migration from Agenda: what makes each job move once."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_MIGRATION = "mtask/contrib/agenda/migration.py"
_JOBS = "mtask/contrib/agenda/jobs.py"
_SCHEDULES = "mtask/features/schedules/client.py"

_TESTS = "tests/integration/contrib/agenda/test_migration.py"
_IN_TRANSACTION = "tests/integration/features/schedules/test_in_transaction.py"

AGENDA_MUTATIONS = (
    Mutation(
        "agenda-disabled-beside",
        "A job is disabled outside of the transaction that publishes it: a kill in between loses it.",
        (Edit(_MIGRATION, "Migration._moved", "self._jobs.disable(job_id, self._published(move, session), session)",
              "self._jobs.disable(job_id, self._published(move, session))"),),
        (f"{_TESTS}::test_killed_migration_loses_nothing_and_the_next_one_doubles_nothing[commitTransaction]",),
    ),
    Mutation(
        "agenda-published-beside",
        "A task is published outside of the transaction that disables its job: both may run it.",
        (Edit(_MIGRATION, "Migration._published",
              "start_time=move.next_run, session=session", "start_time=move.next_run"),),
        (f"{_TESTS}::test_killed_migration_loses_nothing_and_the_next_one_doubles_nothing[commitTransaction]",),
    ),
    Mutation(
        "agenda-conflict-ends",
        "A job that Agenda takes meanwhile ends the migration.",
        (Edit(_JOBS, "_limited", "if session is None else", "if True else"),),
        (f"{_TESTS}::test_job_that_agenda_takes_meanwhile_is_left_to_it",),
    ),
    Mutation(
        "agenda-overdue-run-lost",
        "The overdue run of a repeating job is lost.",
        (Edit(_MIGRATION, "Migration._published",
              "rules.is_near(schedule.schedule_state.next_fire_time, move.next_run)", "True"),),
        (f"{_TESTS}::test_overdue_run_of_a_repeating_job_is_a_task_that_is_due",),
    ),
    Mutation(
        "schedule-waits-for-its-own-transaction",
        "Adding a schedule in a transaction waits until that transaction is over, if the collection must be made.",
        (Edit(_SCHEDULES, "_put", "apart(schedules.tenant_of(definition.schedule_id))",
              "schedules.tenant_of(definition.schedule_id)"),),
        (f"{_IN_TRANSACTION}::test_schedule_of_a_transaction_exists_if_it_commits",),
    ),
)  # fmt: skip
