"""The settings of mtask. Only this module reads the environment.

Values come from three sources, the most important first: the caller's arguments, the environment (`MTASK_…`), and a
`.env` file in the working folder. Another user may have written the `.env` file, so this file cannot name a program to
run: `MTASK_MONGOD` is read from the environment only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtask.errors import InvalidInput, shown

DEFAULT_DATABASE = "mtask"
DEFAULT_URI = "mongodb://127.0.0.1:27017/?directConnection=false"
#: The beginning of the variables' names. Their case does not matter.
_PREFIX = "mtask_"
#: The settings that name a program to run or a file to write, or let somebody in. They are ignored in a `.env` file.
_NOT_FROM_FILE = frozenset({"mongod", "web_tokens", "health_file"})


class Settings(BaseModel):
    """The settings of one process."""

    # A client that is given its URI needs no settings.
    model_config = ConfigDict(extra="forbid", defer_build=True)

    uri: str = Field(default=DEFAULT_URI, repr=False, description="MongoDB URI, or 'local' for the embedded mongod")
    database: str | None = Field(default=None, description="database; else the URI's, else 'mtask'")
    actor: str | None = Field(default=None, description="name in the action log; else the system's user")
    mongod: Path | None = Field(default=None, description="path of the mongod to embed")
    local_folder: Path | None = Field(default=None, description="data folder of the embedded mongod")
    app: str | None = Field(default=None, description="package.module:app")
    queues: str | None = Field(default=None, description="queues to serve, comma-separated")
    concurrency: int = Field(default=100, ge=0, description="handlers that run at once in one worker process")
    isolation: str = Field(default="thread", description="where sync handlers run: thread or process")
    executors: int | None = Field(default=None, description="child processes for isolated handlers; else the cores")
    max_runs_per_executor: int | None = Field(default=None, description="runs after which an executor is replaced")
    max_executor_memory: int | None = Field(default=None, description="memory at which an executor is killed, in MiB")
    processes: int = Field(default=1, ge=1, description="worker processes")
    worker_id: str | None = Field(default=None, description="worker_id; else host, pid and a random part")
    shutdown_timeout: float = Field(default=30.0, ge=0, description="time for running tasks on SIGTERM, in seconds")
    web_tokens: str | None = Field(
        default=None, repr=False, description="the tokens of `mtask web`: JSON, as in its token file"
    )
    scheduler: bool = Field(default=True, description="fire schedules")
    callbacks: str | None = Field(default=None, description="hosts to tell the ends of tasks, comma-separated")
    callback_networks: str | None = Field(default=None, description="networks that are not public, to be called, too")
    callback_secret_file: Path | None = Field(default=None, description="file with the secrets that sign callbacks")
    callback_secrets: str | None = Field(default=None, repr=False, description="these secrets themselves, as JSON")
    health_file: Path | None = Field(default=None, description="file that tells probes of the worker's health")
    metrics_port: int | None = Field(default=None, description="port of a worker's own metrics")
    metrics_host: str = Field(default="127.0.0.1", description="address of that port")
    encryption_key_file: Path | None = Field(default=None, description="file with the local master key of data keys")
    encryption_key_vault: str | None = Field(default=None, description="collection of the data keys")
    encryption_queues: str | None = Field(default=None, description="queues whose tasks must be encrypted")
    encryption_tenants: str | None = Field(default=None, description="tenants whose tasks must be encrypted")
    log_level: str = Field(default="INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: str = Field(default="text", description="lines of the log: text or json")
    keep_logs: int = Field(default=0, description="lines of each run that are kept in the database; 0: none")
    keep_logs_days: float = Field(default=7.0, description="days for which these lines are kept")


#: One thread builds the validator of the settings at its first use; the others wait.
_BUILDING = Lock()


def read_settings() -> Settings:
    """Return the settings from the environment and from `.env`.

    Raises InvalidInput, which names the wrong variable or file.
    """
    try:
        of_file = {name: value for name, value in _in_file().items() if name not in _NOT_FROM_FILE}
        with _BUILDING:
            return Settings.model_validate({**of_file, **_ours(os.environ)})
    except ValidationError as error:
        first = error.errors()[0]
        variable = _PREFIX.upper() + "_".join(str(part) for part in first["loc"]).upper()
        raise InvalidInput(f"{variable}={shown(first['input'])}: {first['msg']}", field=variable) from None
    except (OSError, ValueError) as error:
        raise InvalidInput(f".env in the working folder cannot be read: {error}.", field=".env") from None


def _in_file() -> dict[str, str]:
    """Return the settings in `.env` of the working folder."""
    path = Path(".env")
    if not (path.is_file() or path.is_fifo()):
        return {}
    from dotenv import dotenv_values  # most processes have no such file

    return _ours(dotenv_values(path, encoding="utf-8"))


def _ours(variables: Mapping[str, str | None]) -> dict[str, str]:
    """Return the values of mtask's variables by setting. An empty value counts as none, as in a compose file."""
    lower = {name.lower(): value for name, value in variables.items() if value}
    found = {name: lower.get(_PREFIX + name) for name in Settings.model_fields}
    return {name: value for name, value in found.items() if value is not None}
