"""Mutations of the backend for Django's tasks, and of what runs keep of exceptions."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_BACKEND = "mtask/contrib/django/backend.py"
_CONNECTIONS = "mtask/contrib/django/connections.py"
_RUNNING = "mtask/contrib/django/running.py"
_FINISH = "mtask/kernel/statements/finish.py"
_OUTCOMES = "mtask/kernel/worker/running/outcomes.py"

_TRANSACTIONS = "tests/integration/contrib/django/test_transactions.py"
_CONTRACT = "tests/integration/contrib/django/test_contract.py"
_ERRORS = "tests/integration/kernel/worker/running/test_errors.py"

DJANGO_MUTATIONS = (
    Mutation(
        "django-outside",
        "A task is enqueued outside of the open transaction: it exists, and the order may not.",
        (Edit(_BACKEND, "MtaskBackend.enqueue", "session = session_of(self.target)", "session = None"),),
        (f"{_TRANSACTIONS}::test_rollback_leaves_neither_order_nor_task",
         f"{_TRANSACTIONS}::test_commit_makes_exactly_one_task_that_sees_the_order"),
    ),
    Mutation(
        "django-reads-outside",
        "A transaction does not find the tasks that it has enqueued itself.",
        (Edit(_BACKEND, "MtaskBackend._stored", "session=session_of(self.target)", "session=None"),),
        (f"{_TRANSACTIONS}::test_commit_makes_exactly_one_task_that_sees_the_order",),
    ),
    Mutation(
        "django-collections-in-transaction",
        "The first enqueue in a transaction makes the collections, and fails as the transaction cannot see them.",
        (Edit(_CONNECTIONS, "session_of", '"tasks" not in connection.introspection.table_names()', "False"),),
        (f"{_TRANSACTIONS}::test_transaction_without_collections_says_what_to_do",),
    ),
    Mutation(
        "django-one-thread",
        "The calls of the ORM in all async tasks share one thread.",
        (Edit(_RUNNING, "handler_of.run_async", "async with ThreadSensitiveContext():", "if True:"),),
        (f"{_TRANSACTIONS}::test_connections_of_async_tasks_are_closed",),
    ),
    Mutation(
        "django-finished-early",
        "The signal of the end is sent for an exception that is tried again.",
        (Edit(_RUNNING, "_Call._is_last", "0 <= limit <= task.task_state.failed_cnt", "True"),),
        (f"{_CONTRACT}::test_exception_of_a_task_with_retries_is_tried_again",),
    ),
    Mutation(
        "error-of-each-run",
        "Each failed run keeps its traceback: a document with many runs grows.",
        (Edit(_FINISH, "finish", 'x.without("$$run", "error")', '"$$run"'),),
        (f"{_ERRORS}::test_newest_failed_run_keeps_what_was_raised",),
    ),
    Mutation(
        "error-dropped-by-hand-back",
        "A run that goes back uncounted drops what the failed run before it raised.",
        (Edit(_FINISH, "finish", "mine([outcome.error is not None for outcome in outcomes])", "True"),
         Edit(_FINISH, "finish", "if any(outcome.error is not None for outcome in outcomes):", "if True:")),
        (f"{_ERRORS}::test_newest_failed_run_keeps_what_was_raised",),
    ),
    Mutation(
        "error-unbounded",
        "A traceback is stored whole, whatever its length.",
        (Edit(_OUTCOMES, "_error_of", "len(text) <= _MAX_TRACEBACK", "True"),),
        (f"{_ERRORS}::test_newest_failed_run_keeps_what_was_raised",),
    ),
)  # fmt: skip
