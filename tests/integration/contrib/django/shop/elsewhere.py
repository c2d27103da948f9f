"""A module of tasks that has another name. `OPTIONS["MODULES"]` names it."""

from __future__ import annotations

from tests.integration.contrib.django.shop.tasking import task


@task
def far() -> str:
    return "far"
