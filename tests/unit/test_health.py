"""The judgement of probes: alive as long as the event loop turns, ready as long as the database answers, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtask.health import MAX_AGE, Health, parsed

WELL = Health("w", 1, "running", written=1000.0, answered=995.0, is_answered=True)


def test_worker_that_runs_and_is_answered_is_alive_and_ready() -> None:
    assert WELL.not_alive(1010.0) is None
    assert WELL.not_ready(1010.0) is None
    assert parsed(WELL.dumped()) == WELL


@pytest.mark.parametrize("health", [replace(WELL, is_answered=False), replace(WELL, answered=900.0)])
def test_worker_whose_database_is_away_is_alive_and_not_ready(health: Health) -> None:
    assert health.not_alive(1010.0) is None
    assert "the database has not answered for" in str(health.not_ready(1010.0))


@pytest.mark.parametrize("status", ["ready", "stopping", "stopped"])
def test_worker_that_starts_or_stops_is_alive_and_not_ready(status: str) -> None:
    assert replace(WELL, status=status).not_alive(1010.0) is None
    assert replace(WELL, status=status).not_ready(1010.0) == f"its status is {status}, not running"


@pytest.mark.parametrize("now", [1000.0 + MAX_AGE + 0.1, 999.0, 3.0])
def test_old_file_and_one_of_before_a_restart_of_the_machine_are_stale(now: float) -> None:
    assert "stale" in str(WELL.not_alive(now))
    assert "stale" in str(WELL.not_ready(now))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", WELL.dumped()[:-5], WELL.dumped().replace('"w"', "7")])
def test_another_content_is_no_health_file(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parsed(text)
