"""Mutations of executors: each forgets a step between the death of a process, or the stop, and what must follow."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_CHILD = "mtask/features/isolation/child.py"
_EXECUTOR = "mtask/features/isolation/executor.py"
_POOL = "mtask/features/isolation/pool.py"
_PROCESSES = "mtask/features/isolation/processes.py"
_WORKER = "mtask/kernel/worker/process/worker.py"

_ENDS = "tests/integration/features/isolation/test_ends.py"
_DIES = f"{_ENDS}::test_a_handler_that_dies_fails_at_once_with_the_cause_and_others_go_on"
_HOSTILE = "tests/integration/features/isolation/test_hostile.py"
_PROCESS = "tests/unit/features/isolation/test_processes.py"
_STOPS = "tests/integration/features/isolation/test_stops.py"

EXECUTOR_MUTATIONS = (
    Mutation(
        "stop-that-fails-and-does-not-say-that-it-stopped",
        "The executors cannot be ended, and the worker's document is left as that of a worker that works.",
        (
            Edit(_WORKER, "Worker._end", "ends.push_async_callback(self._leave, parts)", ""),
            Edit(
                _WORKER, "Worker._serve", "await self._end(parts)", "await self._end(parts)\nawait self._leave(parts)"
            ),
        ),
        (f"{_STOPS}::test_a_stop_that_fails_in_part_ends_the_rest",),
    ),
    Mutation(
        "death-with-a-guessed-cause",
        "The worker says that it killed the executor itself, whatever the process died of.",
        (Edit(_EXECUTOR, "Executor._died", "cause_of_death(code)", '"killed"'),),
        (_DIES,),
    ),
    Mutation(
        "death-that-leaves-processes",
        "An executor has died, and what its handler had started goes on.",
        (Edit(_EXECUTOR, "Executor._died", "kill_group(self.pid, signal.SIGKILL)", ""),),
        (_DIES,),
    ),
    Mutation(
        "silence-that-is-not-heard",
        "An executor whose connection is closed is left alone: its run never ends.",
        (Edit(_EXECUTOR, "Executor.__init__", "self._fell_silent", "lambda: None"),),
        (f"{_HOSTILE}::test_a_handler_that_spoils_its_connection_fails_and_the_next_one_runs[closes all files]",),
    ),
    Mutation(
        "socket-that-commands-inherit",
        "A command that a handler starts holds the connection to the worker.",
        (Edit(_CHILD, "run", "False", "True"),),
        (f"{_HOSTILE}::test_what_a_handler_starts_does_not_get_the_connection",),
    ),
    Mutation(
        "start-that-waits-for-threads-for-good",
        "No thread can be started, and the runs that wait for an executor wait until the worker ends.",
        (Edit(_POOL, "Executors._start", "(OSError, RuntimeError)", "OSError"),),
        (f"{_HOSTILE}::test_an_executor_that_cannot_be_started_for_want_of_threads_is_tried_again",),
    ),
    Mutation(
        "orphans-that-stay-zombies",
        "Where the worker is the first process of a container, what executors leave behind is never reaped.",
        (Edit(_EXECUTOR, "Executor._died", "self._reap(_REAP_TRIES)", ""),),
        (f"{_ENDS}::test_a_worker_that_is_the_first_process_of_a_container_reaps_what_its_executors_leave",),
    ),
    Mutation(
        "wait-that-looks-again-and-again",
        "The wait for the end of a process sleeps in between.",
        (Edit(_PROCESSES, "wait_for_end", "descriptor = os.pidfd_open(process.pid)", "raise OSError"),),
        (f"{_PROCESS}::test_the_wait_does_not_look_again_and_again",),
    ),
)
