"""A task that waits for a file. It is in the project of examples/django, beside its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.integration.contrib.django.shop.tasking import task


@task
def wait_for(folder: str) -> str:
    (Path(folder) / f"begun-{os.getpid()}").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.05)
    return "gone"
