"""The flags of options under their former names."""

from __future__ import annotations

from mtask.kernel.driver.stores import SyncStore
from tests.integration.cli.commands import Commands


def test_old_names_of_options_work_and_are_told_of(mtask: Commands, store: SyncStore) -> None:
    old = ["--max-unexpected-retries", "0", "--unexpected-retry-delay", "2", "-o", "run_timeout_ms=1500"]
    ended = mtask.ok("publish", "send", "-k", "k1", *old)
    option = (store.tasks.find_one({"_id": "send:k1"}) or {})["task_option"]
    told = (option["max_unexpected_retries"], option["unexpected_retry_delay_ms"], option["run_timeout_ms"])
    assert told == (0, 2000, 1500)
    assert ended.err.count("goes with mtask 1.0") == 3
    assert "--unexpected-retry-delay is called --retry-delay now" in ended.err
    assert "--option run_timeout_ms is called run_timeout now, in seconds" in ended.err
    assert "goes with" not in mtask.ok("publish", "send", "-k", "k2", "--max-retries", "0", "-o", "run_timeout=2").err
    both = mtask("publish", "send", "--max-retries", "1", *old[:2])
    assert (both.code, "its old name, too" in both.err) == (2, True), both.err
