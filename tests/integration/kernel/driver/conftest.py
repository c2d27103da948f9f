"""A fixture of the tests of the driver: a database that is set up."""

from __future__ import annotations

from tests.integration.stores import store as store
