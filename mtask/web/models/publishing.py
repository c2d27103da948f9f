"""The bodies of publishing: one task, a job, a batch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mtask.arguments.publish import OwnArguments, PublishManyArguments, WorkArguments
from mtask.features.callbacks.rest import CallbackBody
from mtask.features.gathering.client import CallArguments
from mtask.web.models.common import Body, Params, ProblemDocument, example, taking
from mtask.web.schemas import Key, Name, Options, Tenant


@taking(WorkArguments)
class WorkBody(Body):
    """What a task and a step of a flow have in common."""

    params: Params = None
    callback: CallbackBody | None = None
    options: Options = Field(default_factory=dict)


@taking(OwnArguments)
class TaskBody(WorkBody):
    """A task without its name and key."""

    #: Only for a token without a tenant: another token publishes for its own tenant.
    tenant: Tenant | None = None


@taking(PublishManyArguments)
class Existing(Body):
    """What becomes of a task that exists already, and how calls under one key gather."""


@taking(CallArguments)
class PutTask(TaskBody, Existing):
    """The body of `PUT /v1/tasks/{name}/{key}`."""

    model_config = example({"params": {"to": "a@b.c", "subject": "hi"}, "options": {"priority": 5}})


class PublishTask(PutTask):
    """The body of `POST /v1/tasks`."""

    model_config = example({"name": "send_email", "key": "welcome/42", "params": {"to": "a@b.c"}, "delay": 60})

    name: Name
    key: Key | None = None


class JobBody(Body):
    """The body of `POST /jobs`, as jobber takes it: the name of the task, and its params."""

    model_config = example({"jobType": "send_email", "payload": {"to": "a@b.c"}})

    jobType: Name
    payload: Params = None


class QueuedJobBody(Body):
    """The body of `POST /jobber/queue`, as jobber's README has it: the name of the task, and its params."""

    model_config = example({"type": "send_email", "payload": {"to": "a@b.c"}})

    type: Name
    payload: Params = None


class BatchTask(TaskBody):
    """One task of a batch."""

    name: Name
    key: Key | None = None


class PublishBatch(Existing):
    """The body of `POST /v1/tasks:batch`."""

    model_config = example({"tasks": [{"name": "send_email", "key": "a"}, {"name": "send_email"}]})

    tasks: Annotated[list[BatchTask], Field(min_length=1, max_length=1000)]


class PublishedTask(BaseModel):
    """The result of publishing a task."""

    model_config = example(
        {
            "task_id": "send_email:welcome/42",
            "name": "send_email",
            "key": "welcome/42",
            "created": True,
            "updated": False,
        }
    )

    task_id: str
    name: str
    key: str
    created: bool
    updated: bool
    #: Only of a task that existed before and was not changed: whether it has other params than this request.
    params_differ: bool | None = None
    #: Only if there are any: what seems to be wrong, such as a name without a handler.
    warnings: list[str] | None = None


class BatchEntry(BaseModel):
    """The result of one task of a batch: that of a publish, or a problem."""

    model_config = ConfigDict(extra="allow")

    task_id: str
    name: str
    key: str
    created: bool = False
    updated: bool = False
    params_differ: bool | None = None
    warnings: list[str] | None = None
    problem: ProblemDocument | None = None


class PublishedBatch(BaseModel):
    """The results of a batch, in the order of its tasks."""

    tasks: list[BatchEntry]


class PublishedJob(BaseModel):
    """The result of `POST /jobs`."""

    model_config = example({"jobId": "019a5f6b1c2d4e5f60718293a4b5c6d7"})

    jobId: str


class QueuedJob(BaseModel):
    """The result of `POST /jobber/queue`."""

    model_config = example({"job-id": "019a5f6b1c2d4e5f60718293a4b5c6d7"})

    job_id: str = Field(alias="job-id")
