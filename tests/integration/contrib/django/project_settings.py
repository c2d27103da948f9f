"""The settings of examples/django, with one more module of tasks."""

from __future__ import annotations

from importlib import import_module

from django_mongodb_backend.features import DatabaseFeatures

# Releases for Django 6 want MongoDB 7, and need nothing of it here.
DatabaseFeatures.minimum_database_version = min(DatabaseFeatures.minimum_database_version, (6, 0))
_own = vars(import_module("shop.settings"))
_own["TASKS"]["default"]["OPTIONS"]["MODULES"] = ["tests.integration.contrib.django.slow"]
globals().update({name: value for name, value in _own.items() if name.isupper()})
