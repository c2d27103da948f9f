"""The rooms of one server: what its callers share, and what each of them may have of it."""

from __future__ import annotations

from mtask.web.apart import Apart, MakeClient
from mtask.web.settings import WebSettings
from mtask.web.shares import Shares


class Rooms:
    """What the callers of one server share."""

    def __init__(self, settings: WebSettings, make_client: MakeClient) -> None:
        most = settings.connections
        few = most // 4  # of each kind of what lasts, so that all together leave connections for requests
        self.requests = Shares(most, "the requests at once")
        self.streams = Shares(min(settings.max_streams, few), "the event streams", each=settings.max_streams_each)
        self.pages = Shares(min(settings.max_pages, few), "the live pages")
        self.waiters = Shares(min(settings.max_waiters, few), "the waits")
        self.catch_ups = Shares(settings.max_catch_ups, "the streams of old events")
        self.bodies = Shares(settings.max_held_bytes, "the room for large bodies")
        self.values = Shares(settings.max_held_values, "the room for large bodies")
        #: Where requests with large bodies are answered.
        self.apart = Apart(make_client)
