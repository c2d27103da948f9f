"""Two releases of handlers. A rolling deploy goes from the former to the new one, and back.

The new release takes one more param in `GROWN`, without a version: what is published for it reaches workers that cannot
run it. `PRICED` has a version and an upcast: each of its tasks runs on the new release, and those of before on both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from mtask import App, Context
from tests.chaos.load.notes import noted
from tests.chaos.load.tasks import QUEUE

Release = Literal["former", "new"]
#: Names the release in a worker's environment. None there: the former one.
VARIABLE = "MTASK_TEST_RELEASE"
GROWN, PRICED = "grown", "priced"

former, new = App(), App()


@former.task(name=GROWN, queue=QUEUE)
async def _grown_before(context: Context, value: int) -> int:
    """Return at once."""
    with noted(context):
        return value


@new.task(name=GROWN, queue=QUEUE)
async def _grown(context: Context, value: int, unit: str) -> str:
    """Return at once; ask for more than before."""
    with noted(context):
        return f"{value} {unit}"


@former.task(name=PRICED, queue=QUEUE)
async def _priced_before(context: Context, euros: int) -> int:
    """Return at once."""
    with noted(context):
        return euros


@new.task(name=PRICED, queue=QUEUE, version=2)
async def _priced(context: Context, cents: int) -> int:
    """Return at once; ask for the same by another name."""
    with noted(context):
        return cents


@new.upcast(_priced, from_version=1)
def _in_cents(params: dict[str, Any]) -> dict[str, Any]:
    return {"cents": 100 * params["euros"]}


RELEASES: Mapping[Release, App] = {"former": former, "new": new}
#: The params of a task of each name, as each release takes them. Nothing is published for `GROWN` of the former one: on
#: the new release, it would fail as it should.
PARAMS: Mapping[Release, Mapping[str, Mapping[str, Any]]] = {
    "former": {PRICED: {"euros": 7}},
    "new": {PRICED: {"cents": 700}, GROWN: {"value": 7, "unit": "kg"}},
}


def deployed() -> App:
    """Return the handlers of the release that this process has."""
    return new if os.environ.get(VARIABLE) == "new" else former
