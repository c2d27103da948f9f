"""How long a group waits for further tasks while another group is under way."""

from __future__ import annotations

import pytest

from mtask.kernel.worker.running.claim_loop import NextGroup

START = 1_000.0


def _left(
    after: float,
    *,
    room: int,
    in_queue: int,
    most: int = 1_000,
    queued_cnt: int = 500,
    last: float = 0.0,
    is_shared: bool = False,
) -> float:
    """Return the seconds left, so long after a claim began, if the last of the tasks was queued at `last` after it."""
    group = NextGroup()
    group.began(START)
    counts = {"in_queue": in_queue, "queued_cnt": queued_cnt, "most": most}
    group.seconds_left(START + last, is_shared=is_shared, room=0, **counts)
    return group.seconds_left(START + after, is_shared=is_shared, room=room, **counts)


@pytest.mark.parametrize(
    ("room", "in_queue", "most", "is_worth_it"),
    [
        (360, 2_000, 1_000, True),
        (359, 2_000, 1_000, False),
        (200, 2_000, 400, True),
        (199, 2_000, 400, False),
        (50, 2_000, 1, True),  # however few slots there are
        (49, 2_000, 1, False),
        (1_000, 360, 1_000, True),
    ],
)
def test_half_of_what_the_worker_may_hold_waits_for_nothing(
    room: int, in_queue: int, most: int, *, is_worth_it: bool
) -> None:
    assert (_left(0.002, room=room, in_queue=in_queue, most=most) <= 0) == is_worth_it


def test_fewer_wait_for_others_a_fifth_of_a_second_at_most() -> None:
    assert _left(0.002, room=100, in_queue=200) == pytest.approx(0.198)
    assert _left(0.150, room=100, in_queue=200) == pytest.approx(0.050)
    assert _left(0.201, room=100, in_queue=200) <= 0


def test_a_worker_among_others_claims_one_group_at_a_time_but_waits_for_no_slow_claim() -> None:
    assert _left(0.150, room=1_000, in_queue=2_000, is_shared=True) == pytest.approx(0.050)
    assert _left(0.201, room=1_000, in_queue=2_000, is_shared=True) <= 0
    assert _left(0.011, room=1_000, in_queue=1_000, is_shared=True) <= 0  # no further task would join it


def test_the_last_tasks_wait_only_while_tasks_come() -> None:
    assert _left(0.004, room=200, in_queue=200) == pytest.approx(0.006)
    assert _left(0.011, room=200, in_queue=200) <= 0
    assert _left(0.052, room=200, in_queue=200, last=0.05) == pytest.approx(0.008)
    assert _left(0.061, room=200, in_queue=200, last=0.05) <= 0


def test_a_further_task_begins_the_wait_anew() -> None:
    group = NextGroup()
    group.began(START)
    for n in range(30):  # they come every 9 ms
        now = START + n * 0.009
        left = group.seconds_left(now, is_shared=False, room=500, in_queue=n, queued_cnt=n + 1, most=1_000)
        assert left == pytest.approx(min(0.010, 0.2 - n * 0.009))
