"""Mutations of what deploying rests on: health files, and versions beside each other."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_HEALTH = "mtask/health.py"
_FILE = "mtask/kernel/worker/process/health.py"
_PULSE = "mtask/kernel/worker/process/health.py"
_SYSTEMD = "mtask/kernel/worker/process/systemd.py"
_PROBE = "mtask/cli/health.py"

_SCHEMA = "mtask/database/schema.py"
_SCHEMA_TESTS = "tests/integration/database/test_schema.py"
_UNIT_TESTS = "tests/unit/test_health.py"
_PROBE_TESTS = "tests/unit/cli/test_health.py"
_PROCESS_TESTS = "tests/acceptance/test_probes_tell_the_health.py"
_SERVICE_TESTS = "tests/acceptance/test_systemd_is_told.py"

DEPLOYING_MUTATIONS = (
    Mutation(
        "alive-though-blocked",
        "A worker whose event loop a handler blocks looks alive.",
        (Edit(_PULSE, "Pulse._run", "wait()", "wait(0)"),),
        (f"{_PROCESS_TESTS}::test_frozen_worker_is_not_alive_and_a_stopped_one_leaves_no_file",
         f"{_SERVICE_TESTS}::test_blocked_worker_shows_no_sign_of_life_and_the_watchdogs_signal_shows_the_handler"),
    ),
    Mutation(
        "service-ready-at-once",
        "Systemd takes a worker for started that takes no tasks yet.",
        (Edit(_SYSTEMD, "ServiceWitness.see", "and health.status == WorkerStatus.RUNNING", ""),),
        (f"{_SERVICE_TESTS}::test_service_is_ready_when_it_takes_tasks_and_says_that_it_stops",),
    ),
    Mutation(
        "processes-speak-for-their-supervisor",
        "One process of several that ends tells systemd that the whole service stops.",
        (Edit("mtask/cli/workers/serving.py", "_OF_ONE_PROCESS", "| VARIABLES", ""),),
        (f"{_SERVICE_TESTS}::test_only_the_supervisor_of_several_processes_is_the_service",),
    ),
    Mutation(
        "watchdog-of-another-process",
        "A process that systemd does not watch shows signs of life in the name of the one that it watches.",
        (Edit(_SYSTEMD, "service_of", "and watchdog_pid in (None, pid)", ""),),
        ("tests/unit/kernel/worker/process/test_systemd.py::test_only_the_process_that_systemd_names_is_watched",),
    ),
    Mutation(
        "dead-without-database",
        "A database that is away makes Kubernetes restart all workers.",
        (Edit(_HEALTH, "Health.not_alive",
              "0 <= now - self.written <= max_age", "(0 <= now - self.written <= max_age and self.is_answered)"),),
        (f"{_UNIT_TESTS}::test_worker_whose_database_is_away_is_alive_and_not_ready",),
    ),
    Mutation(
        "ready-without-database",
        "A worker that cannot reach the database looks ready, and a rollout goes on.",
        (Edit(_HEALTH, "Health.not_ready", "(self.is_answered and now - self.answered <= max_age)", "self.worker_id"),),
        (f"{_UNIT_TESTS}::test_worker_whose_database_is_away_is_alive_and_not_ready",),
    ),
    Mutation(
        "alive-before-a-restart",
        "A file of before a restart of the machine, whose clock began anew, looks fresh.",
        (Edit(_HEALTH, "Health.not_alive", "0 <=", ""),),
        (f"{_UNIT_TESTS}::test_old_file_and_one_of_before_a_restart_of_the_machine_are_stale",),
    ),
    Mutation(
        "one-of-several-is-well",
        "One process of a supervisor that is well hides the others.",
        (Edit(_PROBE, "main", "1 if refused else 0", "1 if len(refused) == len(answers) else 0"),),
        (f"{_PROBE_TESTS}::test_each_process_of_a_supervisor_must_be_well",),
    ),
    Mutation(
        "health-file-over-anything",
        "A wrong --health-file removes a file that is no health file.",
        (Edit(_FILE, "_reason_against", '"it is there, and is no health file"', "None"),),
        (f"{_PROBE_TESTS}::test_worker_refuses_a_health_file_that_would_overwrite_another_file",),
    ),
    Mutation(
        "older-validators-put-back",
        "An older worker that starts beside newer ones puts its own validators back.",
        (Edit("mtask/database/setup.py", "_check_collection",
              'ours and int(ours["revision"]) > SCHEMA_REVISION', "False"),),
        ("tests/integration/database/test_setup.py::test_a_newer_revision_of_the_same_schema_version_is_left_as_it_is",),
    ),
    Mutation(
        "validator-takes-any-begun-task",
        "The validator checks no task in full that has run and waits for its next run.",
        (Edit(_SCHEMA, "task_validator", '"$in": ["RUNNING", "SUCCESS", "FAIL", "CANCELED"]', '"$exists": True'),),
        (f"{_SCHEMA_TESTS}::test_only_what_bears_all_marks_of_a_worker_is_taken_without_a_full_check",),
    ),
    Mutation(
        "validator-takes-any-running-task",
        "The validator takes what a service inserts as RUNNING, and no worker has run.",
        (Edit(_SCHEMA, "task_validator", ', "task_state.worker_states.run_id": {"$exists": True}', ""),),
        (f"{_SCHEMA_TESTS}::test_only_what_bears_all_marks_of_a_worker_is_taken_without_a_full_check",),
    ),
    Mutation(
        "refused-retry-is-lost",
        "A run fails, its document was broken meanwhile, and its outcome is written nowhere.",
        (Edit("mtask/kernel/worker/running/finisher.py", "Finisher._refused",
              "_cannot_go_on(ending, error)", "False"),),
        (
            "tests/integration/kernel/worker/test_documents.py::"
            "test_task_that_its_own_handler_breaks_is_not_tried_again_but_keeps_its_reason",
        ),
    ),
    Mutation(
        "nagle-of-the-web-server",
        "Each answer of the web server waits for the acknowledgement of its first part.",
        (Edit("mtask/web/server.py", "listen",
              "socket.socket(family, kind, protocol)", "socket.socket(family, kind)"),),
        ("tests/unit/web/test_listening.py::test_answer_in_two_parts_does_not_wait_for_an_acknowledgement",),
    ),
)  # fmt: skip
