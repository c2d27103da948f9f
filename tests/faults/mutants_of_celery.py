"""Mutations of the bridge from Celery: retries, canvases, revoking, and what is refused."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_TASKS = "mtask/contrib/celery/tasks.py"
_CANVAS = "mtask/contrib/celery/canvas.py"
_RESULT = "mtask/contrib/celery/result.py"
_SCHEDULES = "mtask/contrib/celery/schedules.py"
_TESTS = "tests/integration/contrib/celery/test_bridge.py"
_UNIT = "tests/unit/contrib/celery/test_words.py"

CELERY_MUTATIONS = (
    Mutation(
        "celery-retry-uncounted",
        "self.retry gives a task back without counting, so max_retries never ends it.",
        (Edit(_TASKS, "Task.retry", "counted=True", "counted=False"),),
        (f"{_TESTS}::test_retries_count_and_wait_as_asked",),
    ),
    Mutation(
        "celery-retry-one-more",
        "self.retry raises its own error one try too late, so the error of the task is lost.",
        (Edit(_TASKS, "Task.retry", "request.retries >= limit", "request.retries > limit"),),
        (f"{_TESTS}::test_retries_count_and_wait_as_asked",),
    ),
    Mutation(
        "celery-retry-other-arguments",
        "self.retry takes other arguments, and the task runs again with the old ones.",
        (Edit(_TASKS, "Task._check_same", "known[name] != value", "False"),),
        (f"{_TESTS}::test_retry_raises_its_own_error_at_the_end_and_takes_no_other_arguments",),
    ),
    Mutation(
        "celery-chain-waits-for-nothing",
        "The tasks of a chain do not wait for the ones before, whose results they need.",
        (Edit(_CANVAS, "chain.lay", "task.lay(on, ends, (), {})", "task.lay(on, ends._replace(after=()), (), {})"),),
        (f"{_TESTS}::test_canvases_hand_results_on_as_in_celery",),
    ),
    Mutation(
        "celery-body-canceled",
        "The body of a chord whose header failed is REVOKED.",
        (Edit(_CANVAS, "_InFlow.place", "isinstance(before.value, list)", "False"),),
        (f"{_TESTS}::test_failed_parts_of_canvases_stop_what_needs_them",),
    ),
    Mutation(
        "celery-revoke-ends-runs",
        "A revoke without terminate ends a task that runs.",
        (Edit(_RESULT, "revoke", "task.status is TaskStatus.RUNNING and not terminate", "False"),),
        (f"{_TESTS}::test_revoked_task_does_not_start_and_a_running_one_is_ended_on_request",),
    ),
    Mutation(
        "celery-weekday-of-cron",
        "Weekday 0 of a crontab is Monday.",
        (Edit(_SCHEDULES, "crontab.cron", "_WEEKDAYS[number]", "_WEEKDAYS[(number + 1) % 7]"),),
        (f"{_UNIT}::test_crontab_names_the_times_that_celery_takes",),
    ),
)  # fmt: skip
