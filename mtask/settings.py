"""The settings of mtask. Only this module reads the environment.

Values come from three sources, the most important first: the caller's arguments, the environment (`MTASK_…`), and a
`.env` file in the working folder. Another user may have written the `.env` file, so this file cannot name a program to
run: `MTASK_MONGOD` is read from the environment only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mtask.defaults import DEFAULT_URI
from mtask.errors import InvalidInput, shown

#: The settings that name a program to run or a file to write, or let somebody in. They are ignored in a `.env` file.
_NOT_FROM_FILE = frozenset({"mongod", "web_tokens", "health_file"})


class Settings(BaseSettings):
    """The settings of one process."""

    model_config = SettingsConfigDict(env_prefix="MTASK_", env_file=".env", env_ignore_empty=True, extra="ignore")

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
    metrics_allow_hosts: str | None = Field(default=None, description="further names of that port, comma-separated")
    encryption_key_file: Path | None = Field(default=None, description="file with the local master key of data keys")
    encryption_key_vault: str | None = Field(default=None, description="collection of the data keys")
    encryption_queues: str | None = Field(default=None, description="queues whose tasks must be encrypted")
    encryption_tenants: str | None = Field(default=None, description="tenants whose tasks must be encrypted")
    log_level: str = Field(default="INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: str = Field(default="text", description="lines of the log: text or json")
    keep_logs: int = Field(default=0, description="lines of each run that are kept in the database; 0: none")
    keep_logs_days: float = Field(default=7.0, description="days for which these lines are kept")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings, the most important first.

        The source for `.env` leaves out the settings that name a program to run, or let somebody in.
        """
        return init_settings, env_settings, _EnvFile(settings_cls, dotenv_settings)


class SystemdSettings(BaseSettings):
    """What systemd tells the process of a service in its environment: sd_notify(3), sd_watchdog_enabled(3)."""

    model_config = SettingsConfigDict(env_ignore_empty=True, extra="ignore")

    notify_socket: str | None = Field(default=None, description="path of systemd's socket, or @ and its abstract name")
    watchdog_usec: int | None = Field(default=None, gt=0, description="µs after which a silent process is ended")
    watchdog_pid: int | None = Field(default=None, description="the process that is watched; else any")


class _EnvFile(PydanticBaseSettingsSource):
    """The settings in `.env`, without those that name a program to run, or let somebody in."""

    def __init__(self, settings_cls: type[BaseSettings], read: PydanticBaseSettingsSource) -> None:
        super().__init__(settings_cls)
        self._read = read

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return one setting. Only pydantic-settings calls this method."""
        return self._read.get_field_value(field, field_name)

    def __call__(self) -> dict[str, Any]:
        """Return all settings of this source."""
        return {name: value for name, value in self._read().items() if name not in _NOT_FROM_FILE}


def read_settings() -> Settings:
    """Return the settings from the environment and from `.env`.

    Raises InvalidInput, which names the wrong variable or file.
    """
    try:
        return Settings()
    except ValidationError as error:
        raise _wrong_variable(error, "MTASK_") from None
    except (OSError, ValueError) as error:
        raise InvalidInput(f".env in the working folder cannot be read: {error}.", field=".env") from None


def read_systemd() -> SystemdSettings:
    """Return what systemd tells this process; raise InvalidInput, which names the wrong variable."""
    try:
        return SystemdSettings()
    except ValidationError as error:
        raise _wrong_variable(error) from None


def _wrong_variable(error: ValidationError, prefix: str = "") -> InvalidInput:
    first = error.errors()[0]
    variable = prefix + "_".join(str(part) for part in first["loc"]).upper()
    return InvalidInput(f"{variable}={shown(first['input'])}: {first['msg']}", field=variable)
