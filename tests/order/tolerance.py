"""What the model of the order does not hold against the workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The times that the model allows, in seconds."""

    grace: float = 1.0  #: a task that could not be started for so long breaks no order
    under_way: float = 0.25  #: claims so close to each other were sent at the same time
    #: A start has taken what others needed if nothing is left so soon after it. This is no longer on a slow machine:
    #: there, less is certain.
    filled: float = 0.25
    lag: float = 0.25  #: how much later than its end a run may return its permit
    turns: int = 1  #: how many turns each other tenant may have between two turns of a tenant
    clock: float = 0.05  #: how far two readings of a clock may be apart: a handler notes its start a little later
    #: Without limits, workers share a backlog. A worker learns of all tasks of other shares within this time, and goes
    #: on with its own share where the other task is older by no more than `preference`.
    slot_grace: float = 6.0
    preference: float = 3.5


USUAL = Tolerance()
