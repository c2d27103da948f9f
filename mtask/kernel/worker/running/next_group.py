"""The next group: how long it waits for further tasks while the claim of another group is under way."""

from __future__ import annotations

#: The least number of tasks in a group that a worker without others claims while another group is under way. It is half
#: of what the worker could claim if it held nothing, within these bounds: small groups cost the server and the worker
#: more for each task.
_MIN_FURTHER, _MAX_FURTHER = 50, 360
#: The longest time for which another group waits after the previous group's claim began, in seconds. So a slow claim
#: does not hold the next group back for longer.
_MAX_GATHER = 0.2
#: If no task was queued for this time, in seconds, another group waits no longer if it holds all queued tasks: no
#: further task would join it. So the end of a backlog need not wait for the group before it.
_QUIET = 0.01


class NextGroup:
    """Decides when the next group of tasks is worth a claim beside the claims that are under way."""

    def __init__(self) -> None:
        self._began_at = 0.0
        #: The number of tasks that had been queued at the last look, and the time of the first look that saw it.
        self._queued_cnt, self._queued_at = 0, 0.0

    def began(self, now: float) -> None:
        """Note that the claim of a group has begun. All times are monotonic seconds."""
        self._began_at = now

    def seconds_left(
        self, now: float, *, is_shared: bool, room: int, in_queue: int, queued_cnt: int, most: int
    ) -> float:
        """Return the seconds for which the next group should wait; at most 0: claim it now.

        `is_shared`: whether other workers share the tasks. Then even a large group waits: the groups of all workers
        keep the database at work. With more, each takes longer, and other workers try its tasks meanwhile.

        `room`: the number of tasks that may be claimed now. `in_queue`: the number of tasks in the queue. `queued_cnt`:
        the number of tasks that were queued so far. `most`: the number of runs that the worker may hold.
        """
        if queued_cnt != self._queued_cnt:
            self._queued_cnt, self._queued_at = queued_cnt, now
        if not is_shared and min(room, in_queue) >= min(max(_MIN_FURTHER, most // 2), _MAX_FURTHER):
            return 0.0
        left = self._began_at + _MAX_GATHER - now
        return left if room < in_queue else min(left, self._queued_at + _QUIET - now)
