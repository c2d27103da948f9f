"""The seam between a worker and the features: a part of a feature overrides the hooks that it needs.

`mtask.parts.worker` lists the parts. Two hooks stand beside them: who is told of the ends of tasks is a `Relay`, as
clients need it, too; as what a task goes on is the `Chaining` of `Successes`, as executors need it, too. The statements
have no hooks: each process must send the same ones, whatever it has loaded.
"""

from __future__ import annotations


class Part:
    """What a feature does in a worker."""

    async def upkeep(self, count: int, *, is_full: bool) -> None:
        """Do what a dead process has left undone. Raises DatabaseUnavailable.

        `count` is the number of regular scans before this one. `is_full`: it also looks for what is seldom there.
        """
