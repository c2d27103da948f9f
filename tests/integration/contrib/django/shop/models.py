"""Orders, in MongoDB."""

from __future__ import annotations

from typing import Any

from django.db import models
from django_mongodb_backend.fields import ObjectIdAutoField


class Order(models.Model):
    """An order of a number."""

    id: Any = ObjectIdAutoField(primary_key=True)
    number: Any = models.IntegerField()

    class Meta:
        app_label = "shop"
