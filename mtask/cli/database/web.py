"""`mtask web`: the web page and the REST API of a database, until a signal ends them."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mtask.cli.context import SERVER_TIMEOUT, Cli
from mtask.cli.options import commands
from mtask.client import AsyncClient
from mtask.errors import InvalidInput
from mtask.settings import read_settings

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8787
#: The number of new objects between two garbage collections, as in a worker.
_GC_THRESHOLD = 10_000


def web(
    cli: Cli,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")] = DEFAULT_HOST,
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Port; 0 = any free one.")] = DEFAULT_PORT,
    token_file: Annotated[
        str | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help='The tokens: JSON like [{"name": "ci", "role": "read|publish|operate", "sha256": "..."}], and tenant.',
        ),
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Ask for no token. Only on 127.0.0.1.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse every change.")] = False,
    rate: Annotated[
        float, typer.Option("--rate", metavar="NUMBER", min=0, help="Most requests of one token in a second; 0 = any.")
    ] = 2000.0,
    allow_host: Annotated[
        list[str],
        typer.Option("--allow-host", metavar="HOST", help="A further value of the header Host; repeatable."),
    ] = [],  # noqa: B006 typer reads it
    proxy: Annotated[
        list[str],
        typer.Option(
            "--proxy",
            metavar="ADDRESS",
            help="A proxy whose header X-Forwarded-For is believed: an address or a network; repeatable.",
        ),
    ] = [],  # noqa: B006 typer reads it
    connections: Annotated[
        int, typer.Option("--connections", metavar="NUMBER", min=4, help="Most connections at once.")
    ] = 4000,
    log_format: Annotated[
        str | None,
        typer.Option(
            "--log-format", metavar="FORMAT", help="Lines of the log as text, or as JSON objects: text, json."
        ),
    ] = None,
    otel: Annotated[
        bool, typer.Option("--otel", help="Make spans of what is published; start it by opentelemetry-instrument.")
    ] = False,
) -> None:
    """Serve the web page and the REST API of the database. SIGTERM or SIGINT ends it.

    MTASK_WEB_TOKENS may hold the content of a token file. Without tokens and --no-token, the command makes a token for
    this run, and prints it and a link with it. An address that other machines reach needs tokens.
    """
    if host == "":
        raise InvalidInput("--host is empty: use 127.0.0.1, or 0.0.0.0 for all addresses.", field="host")
    _check_extra()
    _start_logging(log_format)
    middleware = _tracing() if otel else ()
    from mtask.web import server
    from mtask.web.access import Caller, Role
    from mtask.web.gate import connections_within
    from mtask.web.settings import WebSettings
    from mtask.web.tokens import Token, Tokens, digest_of, fresh_token, read_tokens, tokens_of

    settings = WebSettings(
        host,
        port,
        is_read_only=read_only,
        is_open=no_token,
        allowed_hosts=tuple(allow_host),
        max_rate=rate,
        proxies=tuple(proxy),
        connections=connections_within(connections),
    )
    named = None if token_file is not None or no_token else read_settings().web_tokens
    tokens = tokens_of(named) if named is not None else Tokens()
    if token_file is not None:
        tokens = read_tokens(Path(token_file))
    settings.check(has_tokens=len(tokens) > 0)
    token = None
    if not tokens and not no_token:
        token = fresh_token()
        tokens = Tokens([Token(Caller("the token of this run", Role.OPERATE), digest_of(token))])
    listening = server.listen(settings)

    def ready(bound: int) -> None:
        # What the server consists of stays to its end, so no collection looks at it again: that would take longer than
        # most requests.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
        url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        page = url if token is None else f"{url}/login?token={token}"
        lines = [f"page: {page}", f"API: {url}/v1 (OpenAPI: {url}/v1/openapi.json)"]
        lines += [] if token is None else [f"Authorization: Bearer {token}"]
        cli.answer({"url": url, "page": page, "token": token}, *lines)
        sys.stdout.flush()

    uri, database, encryption = cli.uri(), cli.database(), cli.encryption()

    def make_client() -> AsyncClient:
        return AsyncClient(
            uri,
            database=database,
            check=not read_only,
            server_timeout=SERVER_TIMEOUT,
            middleware=middleware,
            encryption=encryption,
        )

    with listening:
        asyncio.run(server.serve(make_client, settings, tokens, listening, ready))


def _start_logging(log_format: str | None) -> None:
    chosen = log_format or read_settings().log_format
    if log_format is not None or chosen == "json":
        from mtask.kernel.worker.process.log import start_logging

        start_logging("WARNING", chosen)


def _tracing() -> Sequence[Any]:
    """Return the middleware that traces what is published; raise InvalidInput without the extra."""
    try:
        from mtask.otel import publishing
    except ImportError as error:
        raise InvalidInput(f"--otel: {error}.", field="otel") from None
    return [publishing()]


def _check_extra() -> None:
    try:
        import fastapi
        import jinja2
        import uvicorn
    except ImportError as error:
        raise InvalidInput(
            f"mtask web needs the extra `web` ({error.name} is missing): pip install 'mtask[web]'.", field="web"
        ) from None
    del fastapi, jinja2, uvicorn


register = commands("Database", {"web": web})
