"""A model without a table: its entry in the admin leads to mtask's page."""

from __future__ import annotations

from typing import Any

from django.db import models


class Tasks(models.Model):
    """Stands for the tasks of mtask. Whoever has the permission "view" sees the link."""

    name: Any = models.CharField(max_length=1, primary_key=True)

    class Meta:
        """No table, and one permission."""

        managed = False
        default_permissions = ("view",)
        verbose_name = verbose_name_plural = "tasks"

    def __str__(self) -> str:
        return str(self.name)
