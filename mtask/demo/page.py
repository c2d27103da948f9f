"""Opens the demo's database in the web page while the demo runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mtask.client import AsyncClient
from mtask.demo.database import DemoDatabase
from mtask.errors import InvalidInput

#: The port at which the page is served if it is free, as that of `mtask web`.
_PORT = 8787


@contextmanager
def served_page(database: DemoDatabase) -> Iterator[str]:
    """Serve the page of the demo's database during the block; give the link. Raises InvalidInput."""
    try:
        from mtask.web import server
        from mtask.web.access import Caller, Role
        from mtask.web.settings import WebSettings
        from mtask.web.tokens import Token, Tokens, digest_of, fresh_token
    except ImportError as error:
        raise InvalidInput(
            f"--web needs the extra `web` ({error.name} is missing): pip install 'mtask[web]'.", field="web"
        ) from None
    token = fresh_token()
    tokens = Tokens([Token(Caller("the demo's visitor", Role.OPERATE), digest_of(token))])
    settings = WebSettings(port=_PORT)
    try:
        server.listen(settings).close()
    except InvalidInput:  # another server has it
        settings = WebSettings(port=0)
    with server.served(lambda: AsyncClient(database.uri, database=database.name), settings, tokens) as port:
        yield f"http://{settings.host}:{port}/login?token={token}"
