"""A short run of hostile requests to a real `mtask web`. `make web-fuzz` makes a long one, with schemathesis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.fuzzing import SCALE
from tests.faults.web.serving import target
from tests.faults.web.texts import CANARY, TEXTS
from tests.faults.web_fuzz import described, hostile, in_log

pytestmark = pytest.mark.timeout(300 * SCALE)
#: Texts with markup, and some of each other kind.
FEW = [*[text for text in TEXTS if CANARY in text][:8], *TEXTS[20::6]]


def test_hostile_requests_get_clear_answers_and_nothing_unescaped(
    mongo_uri: str, database_name: str, tmp_path: Path
) -> None:
    with target(mongo_uri, tmp_path, database_name, FEW) as serving:
        verdict = asyncio.run(hostile(serving, 300 * SCALE, seed=7))
        assert verdict.findings == [], described(verdict, 0)
        assert serving.stop() == 0
        assert in_log(serving) == []
    # Else the requests would show nothing.
    assert verdict.pages_with_canary > 5
    assert {"2xx", "3xx", "400", "401", "403", "404", "422"} <= verdict.statuses.keys()
