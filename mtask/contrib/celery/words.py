"""The words of Celery: which of them the bridge maps, which need nothing, and what to write instead of the others.

The bridge and its checker both read these tables, so they refuse the same.
"""

from __future__ import annotations

_FLOW = 'build a `Flow` and add a step with on_failed="run": docs/flows.md'
_CLASS = (
    "shared code goes into a function that tasks call, or into `@app.mtask.middleware`; "
    "`self.context` is mtask's Context in a bound task"
)
_SOFT = "use time_limit, which ends the run; code that must clean up asks `self.context.is_cancelled`"
_RATE = "a rate belongs to a queue: `mtask limit QUEUE --rate 100/1m`"
_HEADERS = "give the task another parameter, or `client.publish(..., lookup={...})` for what you search by"
_ROUTE = "a task goes to a queue: write queue="
_STEP = "mtask's `Child` and `Next` add tasks to a running flow: docs/flows.md"
_MIDDLEWARE = 'use middleware: `@app.mtask.middleware` (around a run) or `@app.mtask.middleware("publish")`'
_SCHEDULE = "`client.add_schedule(...)` and the page of `mtask web` change schedules at run time"
_WORKER = "it is a flag of the worker: `mtask worker --help`"

# --- options of tasks and calls ------------------------------------------------------------------------------

#: Options of `@app.task` and `@shared_task` that have an effect.
TASK_OPTIONS = frozenset({
    "autoretry_for", "bind", "default_retry_delay", "dont_autoretry_for", "expires", "max_retries", "name", "priority",
    "pydantic", "queue", "retry_backoff", "retry_backoff_max", "retry_jitter", "retry_kwargs", "time_limit",
})  # fmt: skip
#: Options that ask for what mtask does anyway, or for nothing that a task could notice.
IDLE_TASK_OPTIONS = frozenset({
    "acks_late", "acks_on_failure_or_timeout", "compression", "ignore_result", "reject_on_worker_lost", "send_events",
    "serializer", "shared", "store_eager_result", "store_errors_even_if_ignored", "throws", "track_started", "trail",
    "typing",
})  # fmt: skip
REFUSED_TASK_OPTIONS = {
    "after_return": _MIDDLEWARE,
    "base": _CLASS,
    "before_start": _MIDDLEWARE,
    "exchange": _ROUTE,
    "link": _FLOW,
    "link_error": _FLOW,
    "on_bound": _CLASS,
    "on_failure": _MIDDLEWARE,
    "on_retry": _MIDDLEWARE,
    "on_success": _MIDDLEWARE,
    "pydantic_context": "give pydantic models without a context",
    "pydantic_dump_kwargs": "return what is to be stored",
    "pydantic_strict": "declare the strict types in the model",
    "rate_limit": _RATE,
    "routing_key": _ROUTE,
    "soft_time_limit": _SOFT,
    "strict_typing": "params are checked where they are published: leave it out",
}

#: Options of `apply_async`, `send_task` and `set` that have an effect.
CALL_OPTIONS = frozenset({"countdown", "eta", "expires", "priority", "queue", "task_id", "time_limit"})
IDLE_CALL_OPTIONS = frozenset({
    "add_to_parent", "compression", "connection", "delivery_mode", "ignore_result", "producer", "publisher", "retry",
    "retry_policy", "serializer",
})  # fmt: skip
REFUSED_CALL_OPTIONS = {
    "chord": "write chord(header, body)",
    "correlation_id": "the id of a task is NAME:KEY: write task_id=KEY",
    "exchange": _ROUTE,
    "group_id": "write group(...)",
    "headers": _HEADERS,
    "link": "write chain(this.s(...), that.s()), or `this.s(...) | that.s()`",
    "link_error": _FLOW,
    "mandatory": "a task waits in its queue until a worker serves it: leave it out",
    "message_group_id": "write `client.publish(..., limit_key=...)` and `client.limit(QUEUE, key_concurrency=1)`",
    "parent_id": "mtask links tasks by itself in flows and traces",
    "reply_to": "results are in the task's document: use AsyncResult(id)",
    "root_id": "mtask links tasks by itself in flows and traces",
    "routing_key": _ROUTE,
    "shadow": "a task is listed by its name: give it another with name=",
    "soft_time_limit": _SOFT,
    "stamped_headers": _HEADERS,
}

#: Arguments of `self.retry` that have an effect.
RETRY_ARGUMENTS = frozenset({"args", "countdown", "eta", "exc", "kwargs", "max_retries", "throw"})

# --- settings ------------------------------------------------------------------------------------------------

SETTINGS = frozenset({
    "beat_schedule", "broker_url", "imports", "include", "result_backend", "result_expires", "result_serializer",
    "task_always_eager", "task_default_priority", "task_default_queue", "task_eager_propagates", "task_routes",
    "task_serializer", "task_time_limit", "timezone", "accept_content",
})  # fmt: skip
IDLE_SETTINGS = frozenset({
    "beat_max_loop_interval", "beat_schedule_filename", "beat_sync_every", "broker_connection_max_retries",
    "broker_connection_retry", "broker_connection_retry_on_startup", "broker_connection_timeout", "broker_heartbeat",
    "broker_pool_limit", "database_table_names", "deprecated_settings", "enable_utc", "event_queue_expires",
    "result_accept_content", "result_backend_transport_options", "result_cache_max", "result_chord_join_timeout",
    "result_chord_retry_interval", "result_compression", "result_extended", "result_persistent", "task_acks_late",
    "task_acks_on_failure_or_timeout", "task_allow_error_cb_on_chord_header", "task_compression",
    "task_create_missing_queues", "task_ignore_result", "task_inherit_parent_priority", "task_protocol",
    "task_publish_retry", "task_publish_retry_policy", "task_queue_max_priority", "task_reject_on_worker_lost",
    "task_send_sent_event", "task_store_eager_result", "task_store_errors_even_if_ignored", "task_track_started",
    "worker_cancel_long_running_tasks_on_connection_loss", "worker_disable_rate_limits", "worker_enable_remote_control",
    "worker_hijack_root_logger", "worker_lost_wait", "worker_prefetch_multiplier", "worker_proc_alive_timeout",
    "worker_redirect_stdouts", "worker_redirect_stdouts_level", "worker_send_task_events",
})  # fmt: skip
REFUSED_SETTINGS = {
    "beat_cron_starting_deadline": '`client.add_schedule(..., catch_up="none")` makes no missed firing up',
    "beat_scheduler": _SCHEDULE,
    "broker_read_url": "give one URI of MongoDB as broker_url, or leave it out and set MTASK_URI",
    "broker_transport": "the broker is MongoDB: leave it out",
    "broker_transport_options": "options of the connection are part of the URI: `mongodb://.../?timeoutMS=...`",
    "broker_use_ssl": "TLS is part of the URI: `mongodb://.../?tls=true&tlsCAFile=...`",
    "broker_write_url": "give one URI of MongoDB as broker_url, or leave it out and set MTASK_URI",
    "security_key": "MongoDB's users and TLS protect tasks: docs/security.md",
    "task_annotations": "give the options to the task itself",
    "task_default_exchange": _ROUTE,
    "task_default_exchange_type": _ROUTE,
    "task_default_rate_limit": _RATE,
    "task_default_routing_key": _ROUTE,
    "task_queues": "queues exist once a task names them: use task_routes, and `mtask worker -Q`",
    "task_soft_time_limit": _SOFT,
    "worker_autoscaler": _WORKER,
    "worker_concurrency": "it is a flag of the worker: `mtask worker -c 20`",
    "worker_log_color": _WORKER,
    "worker_log_format": _WORKER,
    "worker_max_memory_per_child": "it is a flag of the worker: `--max-executor-memory MIB`",
    "worker_max_tasks_per_child": "it is a flag of the worker: `--max-runs-per-executor N`",
    "worker_pool": "sync tasks run in threads; `--isolation process` runs them in child processes",
    "worker_state_db": "revoked tasks are CANCELED in the database: leave it out",
    "worker_task_log_format": _WORKER,
}
#: Names of settings that Celery itself has given up. Code that still uses them gets this.
OLD_SETTING = "it is a name from before Celery 4: write the lower-case name of today"
UNKNOWN_SETTING = "no setting of Celery that the bridge knows has this name: remove it, or keep it elsewhere"

# --- names, attributes and signals -----------------------------------------------------------------------------

#: What modules of `celery` export and the bridge has not.
NAMES = {
    "ChordError": "the body of a chord is FAIL if a task of the header failed: `except TaskFailed`",
    "DatabaseScheduler": _SCHEDULE,
    "EncodedOption": "commands of yours are no part of the worker's",
    "Ignore": "`return` ends a task without an error",
    "ImproperlyConfigured": "NotMapped and mtask.errors.InvalidInput tell of wrong settings",
    "Inspect": "`client.workers()`, or `mtask workers`",
    "LocalProxy": "write `from mtask.contrib.celery import current_app`",
    "LoggingMixin": "use `logging.getLogger(__name__)`",
    "Reject": "`raise mtask.Fail(reason)` ends a task for good, `raise mtask.Retry(delay)` gives it back",
    "ResultSet": "`client.wait_all([...])` and `client.as_completed([...])` take ids and results of publish",
    "SoftTimeLimitExceeded": _SOFT,
    "TimeLimitExceeded": "a run that takes too long is ended from outside: look at the task's fail_reason",
    "WorkerLostError": "the task of a dead worker runs again by itself",
    "bootsteps": "use `@app.mtask.on_start` and `@app.mtask.on_stop`",
    "chunks": "write group(task.s(part) for part in parts)",
    "current_task": "write bind=True, and use self",
    "maybe_signature": "write signature(...)",
    "shared_tasks": "write shared_task",
    "solar": "compute the instant and publish with eta=",
    "states": 'states are texts here, as in Celery: "SUCCESS", "FAILURE", "REVOKED"',
    "subtask": "write signature(...)",
    "task_method": "tasks are functions",
    "xmap": "write group(task.s(item) for item in items)",
    "xstarmap": "write group(task.s(*item) for item in items)",
}

#: Whole modules that the bridge has not.
MODULES = {
    "celery.apps": "`mtask worker proj.celery:app.mtask`",
    "celery.backends": "results are in the task's document",
    "celery.beat": _SCHEDULE,
    "celery.bin": "`mtask worker proj.celery:app.mtask`",
    "celery.bootsteps": NAMES["bootsteps"],
    "celery.contrib": "tests use `mtask.testing`: `with bench(app.mtask) as b: app.client = b.client`",
    "celery.events": "`client.events(...)` tells what happens to tasks",
    "celery.loaders": "`mtask worker` imports the app",
    "celery.local": NAMES["LocalProxy"],
    "celery.platforms": "`mtask worker` is a plain process: let systemd or Kubernetes run it",
    "celery.states": NAMES["states"],
    "celery.task": "write `from mtask.contrib.celery import shared_task`",
    "celery.utils.dispatch": "use `@app.mtask.on_start` and middleware",
    "celery.worker": "`mtask worker proj.celery:app.mtask`",
    "celery_once": "`apply_async(task_id=KEY)` publishes once for each key, without a lock",
    "django_celery_beat": _SCHEDULE,
    "django_celery_results": "results are in the task's document: `client.find(name=...)`",
    "flower": "`mtask web` shows tasks, workers and queues",
    "kombu": "tasks go to queues of MongoDB: write queue=",
}

#: Signals, and what takes their place.
SIGNALS = {
    "after_setup_logger": "logging is configured where the app is imported, or by a flag of the worker",
    "after_setup_task_logger": "logging is configured where the app is imported, or by a flag of the worker",
    "after_task_publish": 'use `@app.mtask.middleware("publish")`: code after its `yield`',
    "beat_embedded_init": "each worker fires schedules: use `@app.mtask.on_start`",
    "beat_init": "each worker fires schedules: use `@app.mtask.on_start`",
    "before_task_publish": 'use `@app.mtask.middleware("publish")`: code before its `yield`',
    "celeryd_after_setup": "use `@app.mtask.on_start`",
    "celeryd_init": "use `@app.mtask.on_start`",
    "heartbeat_sent": "`client.workers()` tells of heartbeats",
    "import_modules": "import what you need where the app is made",
    "setup_logging": "logging is configured where the app is imported, or by a flag of the worker",
    "task_failure": "use `@app.mtask.middleware`: the exception is raised at its `yield`",
    "task_internal_error": 'use `@app.mtask.middleware("finish")`',
    "task_postrun": "use `@app.mtask.middleware`: code after its `yield`",
    "task_prerun": "use `@app.mtask.middleware`: code before its `yield`",
    "task_received": "`client.events(...)` tells of each claim",
    "task_rejected": "`client.events(...)` tells of each end",
    "task_retry": "use `@app.mtask.middleware`: mtask.Retry is raised at its `yield`",
    "task_revoked": "`client.events(...)` tells of each end",
    "task_sent": 'use `@app.mtask.middleware("publish")`',
    "task_success": "use `@app.mtask.middleware`: code after its `yield`",
    "task_unknown": "`mtask doctor` and the warning UnknownTaskName tell of names without a handler",
    "worker_before_create_process": "use `@app.mtask.on_start`, which each process calls",
    "worker_init": "use `@app.mtask.on_start`",
    "worker_process_init": "use `@app.mtask.on_start`, which each process calls",
    "worker_process_shutdown": "use `@app.mtask.on_stop`, which each process calls",
    "worker_ready": "use `@app.mtask.on_start`",
    "worker_shutdown": "use `@app.mtask.on_stop`",
    "worker_shutting_down": "use `@app.mtask.on_stop`",
}
SIGNAL = "use `@app.mtask.on_start`, `@app.mtask.on_stop` or `@app.mtask.middleware`"

#: Attributes of an app that the bridge has not.
OF_APP = {
    "Task": _CLASS,
    "amqp": "tasks go to queues of MongoDB: write queue=",
    "annotations": "give the options to the task itself",
    "backend": "results are in the task's document: use AsyncResult(id)",
    "connection": "`app.client` is mtask's client",
    "connection_for_read": "`app.client` is mtask's client",
    "connection_for_write": "`app.client` is mtask's client",
    "events": "`client.events(...)` tells what happens to tasks",
    "loader": "`mtask worker` imports the app",
    "log": "use `logging.getLogger(__name__)`",
    "pool": "`app.client` is mtask's client",
    "producer_or_acquire": "`app.client` is mtask's client",
    "producer_pool": "`app.client` is mtask's client",
    "register_task": _CLASS,
    "select_queues": "`mtask worker -Q mail`",
    "start": "`mtask worker proj.celery:app.mtask`",
    "steps": NAMES["bootsteps"],
    "user_options": NAMES["EncodedOption"],
    "worker_main": "`mtask worker proj.celery:app.mtask`",
}
#: Calls of `app.control`.
OF_CONTROL = {
    "add_consumer": "start a worker with `-Q QUEUE`",
    "autoscale": "`client.set_worker(id, concurrency=N)`",
    "broadcast": "`client.set_worker(...)`, `client.stop_worker(...)`, `client.pause(...)`",
    "cancel_consumer": "`client.pause(queue=QUEUE)`",
    "discard_all": '`client.purge(status="INIT")`',
    "disable_events": "events cost nothing: leave it out",
    "enable_events": "events are always there: leave it out",
    "heartbeat": "`client.workers()`",
    "inspect": '`client.workers()`, `client.find(status="RUNNING")`, `client.stats()`',
    "ping": "`client.workers()`",
    "pool_grow": "`client.set_worker(id, concurrency=N)`",
    "pool_restart": "restart the worker",
    "pool_shrink": "`client.set_worker(id, concurrency=N)`",
    "purge": '`client.purge(status="INIT")`',
    "rate_limit": _RATE,
    "revoke_by_stamped_headers": '`client.plan_bulk("cancel", lookup={...})`',
    "shutdown": "`client.stop_worker(id)`",
    "terminate": "write app.control.revoke(id, terminate=True)",
    "time_limit": "`client.update_option(NAME, KEY, ...)`, or time_limit= of the task",
}
#: Attributes of a task.
OF_TASK = {
    "add_around": _MIDDLEWARE,
    "add_to_chord": _STEP,
    "after_return": _MIDDLEWARE,
    "annotate": "give the options to the task itself",
    "apply_async_on_commit": "with mtask.contrib.django the task is part of the transaction; else call "
    "`transaction.on_commit(...)`",
    "backend": OF_APP["backend"],
    "before_start": _MIDDLEWARE,
    "chunks": NAMES["chunks"],
    "delay_on_commit": "with mtask.contrib.django the task is part of the transaction; else call "
    "`transaction.on_commit(lambda: task.delay(...))`",
    "map": NAMES["xmap"],
    "on_failure": _MIDDLEWARE,
    "on_replace": _STEP,
    "on_retry": _MIDDLEWARE,
    "on_success": _MIDDLEWARE,
    "rate_limit": _RATE,
    "replace": _STEP,
    "send_event": "`client.events(...)` tells what happens to tasks; `self.context.progress(...)` tells of more",
    "signature_from_request": "write self.s(...)",
    "soft_time_limit": _SOFT,
    "starmap": NAMES["xstarmap"],
    "subtask": NAMES["subtask"],
    "subtask_from_request": "write self.s(...)",
    "update_state": '`self.context.progress(0.5, "half")`, which AsyncResult(id).info reads',
}
#: Attributes of `self.request`.
OF_REQUEST = {
    "callbacks": _FLOW,
    "chain": "use AsyncResult, or `client.flow(key)`",
    "children": "`client.flow(key)` has all steps of a flow",
    "chord": "use AsyncResult, or `client.flow(key)`",
    "correlation_id": "write self.request.id",
    "errbacks": _FLOW,
    "eta": "`self.context.task.task_state.start_time`",
    "expires": "a task that is too old does not start: leave it out",
    "group": "`self.context.task.flow.key`",
    "group_index": "`self.context.task.flow.step`",
    "headers": _HEADERS,
    "origin": _HEADERS,
    "parent_id": "`self.context.task.flow`, or `self.context.task.chain`",
    "reply_to": REFUSED_CALL_OPTIONS["reply_to"],
    "root_id": "`self.context.task.flow`, or `self.context.task.chain`",
    "stamped_headers": _HEADERS,
    "timelimit": "`self.context.task.task_option` has the options of the task",
    "utc": "instants are UTC: leave it out",
}
#: Attributes of a result.
OF_RESULT = {
    "backend": OF_APP["backend"],
    "children": OF_REQUEST["children"],
    "collect": OF_REQUEST["children"],
    "forget": "`client.remove(NAME, KEY)`, or the setting result_expires",
    "graph": "`client.flow(key)`, or the page of `mtask web`",
    "iterdeps": OF_REQUEST["children"],
    "iter_native": "`client.as_completed([...])`",
    "join_native": "write get()",
    "kwargs": "`client.get(NAME, KEY).params`",
    "on_ready": "`client.events(...)`",
    "restore": "the id of a group is the key of a flow: `client.flow(id)`",
    "save": "nothing has to be saved: the id of a group is the key of a flow, `client.flow(id)`",
    "then": "`client.as_completed([...])`, or a next task by chain(...)",
}
#: Attributes of signatures and canvases.
OF_SIGNATURE = {
    "apply_chunks": NAMES["chunks"],
    "freeze": "the id is there once the signature is sent: use the result",
    "link": REFUSED_CALL_OPTIONS["link"],
    "link_error": _FLOW,
    "on_error": _FLOW,
    "replace": "write .clone() and .set(...)",
    "stamp": _HEADERS,
    "stamp_links": _HEADERS,
    "unchain_tasks": "write chain(*tasks)",
}
POSITIONAL = "params are stored by name: name each parameter, or give one list"
ASYNC = "Celery runs no async functions; register it with `@app.mtask.task`"
GENERATOR = "a generator would never be run: return a value"
BROKER = "the broker is MongoDB: write mongodb://..., or leave it out and set MTASK_URI"
RESULTS = "results are in the task's document: leave it out"
SERIALIZER = "params and results are stored as BSON: give ids, texts and numbers, and leave it out"
ROUTER = 'write a dict of patterns, {"proj.mail.*": {"queue": "mail"}}, or queue= at the task'
UNKNOWN_ARGS = "no task of this name is registered here, so its parameters are unknown: give kwargs="
NAMELESS = "the id of a result is NAME:KEY, as `AsyncResult.id` and `apply_async(task_id=KEY).id` give it"
