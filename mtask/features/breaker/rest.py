"""The route of the breaker of a queue. It concerns the whole database."""

from typing import Annotated, Any

from pydantic import Field

from mtask.features.controls.rest import ControlEntry, Timeout
from mtask.kernel.document.handlers import MAX_BREAKER_FAILURES
from mtask.kernel.document.options import WHOLE
from mtask.web import views
from mtask.web.access import Role
from mtask.web.bodies import about
from mtask.web.models.common import Body, example
from mtask.web.paths import Segment
from mtask.web.routes.common import UNCONFIRMED, TheClient, router
from mtask.web.schemas import says

routes = router("operating")


class BreakerBody(Body):
    """The body of `PUT /v1/queues/{queue}/breaker`. Without failures, the breaker is removed."""

    model_config = example({"failures": 20, "wait": 30})

    failures: Annotated[int, says(minimum=1, maximum=MAX_BREAKER_FAILURES), WHOLE] | None = None
    wait: Annotated[float, Field(ge=0, allow_inf_nan=False), says("Seconds.", minimum=0.1, maximum=600)] = 30


@routes.put(
    "/v1/queues/{queue}/breaker",
    response_model=ControlEntry,
    responses=UNCONFIRMED,
    openapi_extra=about(Role.OPERATE, of_database=True),
)
async def breaker(queue: Segment, body: BreakerBody, client: TheClient, timeout: Timeout = 5) -> Any:
    """Hold back a queue after failures in a row. {} removes its breaker."""
    control = await client.set_breaker(queue, body.failures, wait=body.wait, timeout=timeout)
    return views.answer(views.plain(control.model_dump(by_alias=True)))
