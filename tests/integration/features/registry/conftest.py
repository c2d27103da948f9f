"""A fixture of the tests of the registry: a server of the API on the test's database."""

from __future__ import annotations

from tests.integration.web.conftest import serving as serving
