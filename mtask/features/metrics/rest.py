"""The route of metrics, in the text format of Prometheus."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request, Response
from prometheus_client.core import GaugeMetricFamily

from mtask.client import AsyncClient
from mtask.features.metrics.prometheus import CONTENT_TYPE, FleetText, text_of
from mtask.web.bodies import about
from mtask.web.routes.common import TheHub, router

routes = router("metrics")


class Metrics:
    """The metrics of the database. The caller shares what was read."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._text_of = FleetText()

    async def read(self) -> bytes:
        """Return the metrics as text."""
        fleet = await self._client.metrics()
        # Hundreds of names make thousands of lines, so they are written in a thread.
        return await asyncio.to_thread(self._text_of.of, fleet)


@routes.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}},
    openapi_extra=about(of_database=True),
)
async def metrics(request: Request, hub: TheHub) -> Any:
    """Return the metrics of the database, in the text format of Prometheus. They may be a few seconds old."""
    streams = GaugeMetricFamily(
        "mtask_web_streams", "Open streams of events and waits of this server.", value=hub.viewer_cnt
    )
    text: bytes = await request.app.state.metrics.get()
    return Response(text + text_of([streams]), headers={"Cache-Control": "no-store", "Content-Type": CONTENT_TYPE})
