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
from mtask.web.settings import WebSettings
from mtask.web.sharing import Shared

routes = router("metrics")


def service(client: AsyncClient, settings: WebSettings) -> Shared[bytes]:
    """Return the metrics of the database as text, which all callers share."""
    text = FleetText()

    async def read() -> bytes:
        # Hundreds of names make thousands of lines, so they are written in a thread.
        return await asyncio.to_thread(text.of, await client.metrics())

    return Shared(read)


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
    text: bytes = await request.app.state.services["metrics"].get()
    return Response(text + text_of([streams]), headers={"Cache-Control": "no-store", "Content-Type": CONTENT_TYPE})
