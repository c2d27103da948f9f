"""Loggers of tasks: `mtask.contrib.celery.utils.log` stands for `celery.utils.log`."""

from __future__ import annotations

import logging


def get_task_logger(name: str) -> logging.Logger:
    """Return the logger of this name. Workers add the task to each line, and can keep the lines of each run."""
    return logging.getLogger(name)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of this name."""
    return logging.getLogger(name)
