"""The settings of mtask. Only this module reads the environment.

Values come from three sources, the most important first: the caller's arguments, the environment (`MTASK_…`), and a
`.env` file in the working folder. Another user may have written the `.env` file, so this file cannot name a program to
run: `MTASK_MONGOD` is read from the environment only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mtask.defaults import DEFAULT_URI
from mtask.errors import InvalidInput, shown
from mtask.says import Says

#: The settings that name a program to run or a file to write, or let somebody in. They are ignored in a `.env` file.
_NOT_FROM_FILE = frozenset({"mongod", "web_tokens", "health_file"})


class Settings(BaseSettings):
    """The settings of one process."""

    model_config = SettingsConfigDict(env_prefix="MTASK_", env_file=".env", env_ignore_empty=True, extra="ignore")

    # A setting with Says is a flag of `mtask-worker`, too.
    queues: Annotated[str | None, Says("Queues to serve, comma-separated. [those of the app]", flag="--queues -Q")] = (
        None
    )
    concurrency: Annotated[int, Says("Handlers that run at once; 0 starts paused. [100]", flag="--concurrency -c")] = (
        Field(default=100, ge=0)
    )
    reload: Annotated[
        bool,
        Says(
            "Restart the worker when a *.py file in the working folder or below, or its .env, is saved. [no]",
            flag="--reload/--no-reload",
        ),
    ] = False
    burst: Annotated[
        bool,
        Says("Run what is due, then exit with 0. Fires no schedules. [no]", flag="--burst/--no-burst"),
    ] = False
    worker_id: Annotated[str | None, Says("Id of this worker. [host, pid, random part]", flag="--worker-id --id")] = (
        None
    )
    uri: Annotated[
        str,
        Says(
            "MongoDB URI, or 'local' for the embedded mongod. Put a URI with a password into MTASK_URI: every user of "
            "the machine can read command lines."
        ),
    ] = Field(default=DEFAULT_URI, repr=False)
    database: Annotated[str | None, Says("Database. [the URI's, else mtask]")] = None
    processes: Annotated[int, Says("Worker processes, restarted when they die. [1]")] = Field(default=1, ge=1)
    isolation: Annotated[
        str, Says("Where sync handlers run that do not say it: in a thread, or in a child process. [thread]")
    ] = "thread"
    executors: Annotated[
        int | None, Says("Child processes for isolated handlers, started when needed. [the cores]")
    ] = None
    max_runs_per_executor: Annotated[int | None, Says("Runs after which a child process is replaced. [no limit]")] = (
        None
    )
    max_executor_memory: Annotated[
        int | None, Says("Memory at which a child process is killed, in MiB. [no limit]")
    ] = None
    shutdown_timeout: Annotated[float, Says("Time for running tasks on SIGTERM, in seconds. [30]")] = Field(
        default=30.0, ge=0
    )
    scheduler: Annotated[
        bool, Says("Whether this worker fires schedules. [yes]", flag="--scheduler/--no-scheduler")
    ] = True
    callbacks: Annotated[
        str | None,
        Says(
            "Deliver callbacks to these hosts, comma-separated: hooks.example.com, *.example.com:8443, "
            "http://10.0.0.5:8080, or * for all with https. [no callbacks]"
        ),
    ] = None
    callback_networks: Annotated[
        str | None, Says("Networks that callbacks may reach although they are not public: 10.0.0.0/8. [none]")
    ] = None
    callback_secret_file: Annotated[
        Path | None,
        Says(
            'File with the secrets that sign callbacks: {"default": "whsec_..."}. Else '
            "MTASK_CALLBACK_SECRETS holds them."
        ),
    ] = None
    health_file: Annotated[
        Path | None, Says("File that tells mtask-health of this worker; with --processes, FILE.0 and so on. [none]")
    ] = None
    metrics_port: Annotated[
        int | None,
        Says(
            "Serve this worker's metrics on this port; 0 = any free one. With --processes, each process takes the "
            "next port. [no metrics]"
        ),
    ] = None
    metrics_host: Annotated[str, Says("Address of the metrics' port. [127.0.0.1]")] = "127.0.0.1"
    metrics_allow_hosts: Annotated[
        str | None, Says("Further names in the header Host that the metrics' port answers, comma-separated. [none]")
    ] = None
    encryption_key_file: Annotated[
        Path | None, Says("File with the master key of encrypted tasks: 96 bytes, or base64. [no encryption]")
    ] = None
    encryption_key_vault: Annotated[
        str | None, Says("Collection of the data keys: DATABASE.COLLECTION. [mtask_keys.keys]")
    ] = None
    encryption_queues: Annotated[
        str | None, Says("Queues whose tasks must be encrypted, comma-separated. [all with a data key]")
    ] = None
    encryption_tenants: Annotated[str | None, Says("Tenants whose tasks must be encrypted. [all with a data key]")] = (
        None
    )
    log_level: Annotated[str, Says("DEBUG, INFO, WARNING or ERROR. [INFO]", flag="--log-level -l")] = "INFO"
    log_format: Annotated[str, Says("Lines of the log as text, or as JSON objects: text or json. [text]")] = "text"
    keep_logs: Annotated[
        int, Says("Lines of each run that are kept in the database, the last ones; see mtask logs. [none]")
    ] = 0
    keep_logs_days: Annotated[float, Says("Days for which these lines are kept. [7]")] = 7.0
    actor: str | None = Field(default=None, description="name in the action log; else the system's user")
    mongod: Path | None = Field(default=None, description="path of the mongod to embed")
    local_folder: Path | None = Field(default=None, description="data folder of the embedded mongod")
    app: str | None = Field(default=None, description="package.module:app")
    web_tokens: str | None = Field(
        default=None, repr=False, description="the tokens of `mtask web`: JSON, as in its token file"
    )
    callback_secrets: str | None = Field(default=None, repr=False, description="these secrets themselves, as JSON")

    @classmethod
    def flags(cls) -> dict[str, Says]:
        """Return the settings that are flags of `mtask-worker`, with what they say."""
        every = cls.model_fields.items()
        return {name: said for name, field in every for said in field.metadata if isinstance(said, Says)}

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
