"""The routes that say whether the server lives, whether it can work, and what its errors mean."""

import asyncio
from typing import Any

from mtask.errors import DatabaseUnavailable
from mtask.web import views
from mtask.web.bodies import about
from mtask.web.models.common import ProblemKind
from mtask.web.models.operating import Health
from mtask.web.paths import Segment
from mtask.web.problems import PATH, NotFound, kinds, slug_of, status_of, title_of
from mtask.web.routes.common import TheClient, router

routes = router("health")

#: The longest wait of `/readyz` for the database, in seconds.
_PATIENCE = 2.0


@routes.get("/healthz", response_model=Health, openapi_extra=about(is_open=True))
async def healthz() -> Any:
    """Say that the process lives. This asks no database."""
    return views.answer({"status": "ok"})


@routes.get("/readyz", response_model=Health, openapi_extra=about(is_open=True))
async def readyz(client: TheClient) -> Any:
    """Say whether the database answers: 200, or 503."""
    try:
        async with asyncio.timeout(_PATIENCE):
            now = await client.server_time()
    except TimeoutError:
        raise DatabaseUnavailable("it did not answer in time") from None
    return views.answer({"status": "ok", "server_time": views.plain(now)})


@routes.get(PATH + "{kind}", response_model=ProblemKind, openapi_extra=about())
async def problem(kind: Segment) -> Any:
    """Say what a kind of problem means. Its `type` is this address."""
    for known in kinds():
        if slug_of(known) == kind:
            made = {"type": PATH + kind, "title": title_of(known), "status": status_of(known)}
            return views.answer(made)
    raise NotFound("There is no such kind of problem.")
