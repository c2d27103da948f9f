"""Settings: the only reader of the environment.

Precedence: what the caller gives, then the environment (`MTASK_…`), then a `.env` file in the working folder.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from mtask.errors import InvalidInput, shown

DEFAULT_DATABASE = "mtask"
DEFAULT_URI = "mongodb://127.0.0.1:27017/?directConnection=false"


class Settings(BaseSettings):
    """What a process takes from its environment."""

    model_config = SettingsConfigDict(env_prefix="MTASK_", env_file=".env", env_ignore_empty=True, extra="ignore")

    uri: str = Field(default=DEFAULT_URI, description="MongoDB URI, or 'local' for the embedded mongod")
    database: str | None = Field(default=None, description="database; else the URI's, else 'mtask'")
    mongod: Path | None = Field(default=None, description="path of the mongod to embed")
    local_folder: Path | None = Field(default=None, description="data folder of the embedded mongod")
    app: str | None = Field(default=None, description="package.module:app")
    queues: str | None = Field(default=None, description="queues to serve, comma-separated")
    concurrency: int = Field(default=100, ge=0, description="handlers that run at once in one worker process")
    processes: int = Field(default=1, ge=1, description="worker processes")
    worker_id: str | None = Field(default=None, description="worker_id; else host, pid and a random part")
    shutdown_timeout: float = Field(default=30.0, ge=0, description="seconds given to running tasks on SIGTERM")
    scheduler: bool = Field(default=True, description="fire schedules")
    log_level: str = Field(default="INFO", description="DEBUG, INFO, WARNING or ERROR")


def read_settings() -> Settings:
    """Read the environment and `.env`; raise InvalidInput naming the variable that is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        variable = "MTASK_" + "_".join(str(part) for part in first["loc"]).upper()
        raise InvalidInput(f"{variable}={shown(first['input'])}: {first['msg']}", field=variable) from None
    except (OSError, ValueError) as error:
        raise InvalidInput(f".env in the working folder cannot be read: {error}.", field=".env") from None
