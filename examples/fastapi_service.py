"""A FastAPI service that publishes: 202 with the task's key, a status to ask for, and requests that may be repeated.

Run a worker:     mtask-worker examples.app:app --queues mail
Run the service:  uvicorn examples.fastapi_service:service

Both find MongoDB by MTASK_URI. It takes `pip install fastapi uvicorn`. Then:

  curl -i localhost:8000/mails -H 'Idempotency-Key: welcome/42' --json '{"to": "ada@example.com", "subject": "Welcome"}'
  curl localhost:8000/mails/welcome/42
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from mtask import AsyncClient, TaskNotFound
from mtask.errors import DatabaseUnavailable, InvalidInput


@asynccontextmanager
async def lifespan(service: FastAPI) -> AsyncIterator[None]:
    """Keep one client, with its connections, for as long as the service runs."""
    async with AsyncClient() as client:
        service.state.client = client
        yield


service = FastAPI(lifespan=lifespan)


def client_of(request: Request) -> AsyncClient:
    """Return the service's client."""
    client: AsyncClient = request.app.state.client
    return client


Tasks = Annotated[AsyncClient, Depends(client_of)]


class Mail(BaseModel):
    """What the caller wants sent."""

    to: str
    subject: str


class Accepted(BaseModel):
    """The task that sends it: `created` is false where an earlier request had made it."""

    key: str
    created: bool


@service.post("/mails", status_code=202)
async def send_mail(
    mail: Mail, tasks: Tasks, response: Response, idempotency_key: Annotated[str | None, Header()] = None
) -> Accepted:
    """Accept a mail. A caller who got no answer repeats the request with its key: it is sent once."""
    params = mail.model_dump()
    # By name: the handler's code belongs to the worker. Without a key a fresh one is made.
    published = await tasks.publish("send_email", params, key=idempotency_key, queue="mail")
    key = published.task_id.removeprefix("send_email:")
    if not published.created and (await tasks.get("send_email", key)).params != params:
        raise HTTPException(409, f"another mail has the key {key}")
    response.headers["Location"] = f"/mails/{key}"
    return Accepted(key=key, created=published.created)


@service.get("/mails/{key:path}")
async def mail_status(key: str, tasks: Tasks) -> dict[str, Any]:
    """Tell what has become of a mail."""
    try:
        task = await tasks.get("send_email", key)
    except TaskNotFound:
        raise HTTPException(404, f"no mail has the key {key}") from None
    return {"status": task.status, "runs": len(task.runs), "returns": task.returns, "reason": task.fail_reason}


@service.exception_handler(InvalidInput)
async def refuse(_: Request, error: Exception) -> JSONResponse:
    """Say what is wrong with a key."""
    return JSONResponse({"detail": str(error)}, 422)


@service.exception_handler(DatabaseUnavailable)
async def ask_again(_: Request, error: Exception) -> JSONResponse:
    """Have the caller repeat a request that may have been carried out: its key makes that safe."""
    return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "5"})
