"""A short flood of malformed documents: two worker processes live through it, and each document gets its word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fuzzing import SCALE
from tests.faults.malformed_flood import Flood
from tests.mongo import Client

pytestmark = pytest.mark.timeout(300 * SCALE)


def test_flood_of_malformed_documents_costs_no_good_task_and_each_is_failed_or_named(
    mongo_uri: str, database_name: str, mongo: Client, tmp_path: Path
) -> None:
    result = Flood(mongo_uri, mongo, database_name, tmp_path).run(250 * SCALE, 25 * SCALE, seed=7)
    assert result.is_clean, result.describe()
    # Else the flood would show nothing.
    assert result.failed > 100
    assert len(result.named) > 1
