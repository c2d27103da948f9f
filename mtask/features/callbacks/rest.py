"""The body of a callback, in the bodies of publishing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mtask.features.callbacks.rules import check_callback
from mtask.kernel.document.parts import MAX_URL, SECRET_PATTERN, Callback, Told
from mtask.web.models.common import Body, example
from mtask.web.schemas import says


class CallbackBody(Body):
    """Who is told of the end of a task."""

    model_config = example({"url": "https://hooks.example.com/mtask"})

    url: Annotated[
        str,
        Field(max_length=MAX_URL),
        says(
            "An address that begins with https://, without user, password and fragment.",
            pattern=r"^https?://[A-Za-z0-9.-]+(:[1-9][0-9]{0,3})?(/[!$-;=-Z_a-z~]*)?$",
        ),
    ]
    on: Annotated[list[Told], says(minItems=1)] | None = Field(
        default=None, description="The ends to tell; null: each."
    )
    secret: Annotated[str, says(pattern=SECRET_PATTERN)] | None = Field(
        default=None, description="The name of the secret that signs; null: `default`."
    )

    def checked(self, tenant: str | None) -> Callback:
        """Return the callback; raise InvalidInput. A tenant's shows its keys as it knows them, and has its secrets."""
        return Callback.model_validate(check_callback(self.model_dump(exclude_none=True), tenant))
