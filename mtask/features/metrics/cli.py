"""`mtask metrics`: the metrics of all workers and queues, printed once or served to Prometheus."""

from __future__ import annotations

import sys
import threading
from typing import Annotated

import typer

from mtask.cli.context import Cli
from mtask.cli.options import command
from mtask.errors import InvalidInput

PANEL = "Database"
DEFAULT_HOST = "127.0.0.1"


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "metrics", panel=PANEL)(metrics)


def metrics(
    cli: Cli,
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="PORT", help="Serve them on this port; 0 = any free one.", show_default=False),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="HOST", help="Address to listen on. [127.0.0.1]", show_default=False),
    ] = None,
    allow_host: Annotated[
        list[str],
        typer.Option("--allow-host", metavar="HOST", help="A further value of the header Host; repeatable."),
    ] = [],  # noqa: B006 typer reads it
) -> None:
    """Print the metrics of all workers and queues in the text format of Prometheus, or serve them.

    Every process that serves them shows the whole database: scrape one of them. Ctrl-C or SIGTERM ends it. The metrics
    name queues, tasks and workers, and the port asks for no token: do not open it to strangers.
    """
    from mtask.features.metrics import serving

    serving.check_extra("mtask metrics")
    from mtask.features.metrics import prometheus as exposition

    if port is None and host is not None:
        raise InvalidInput("--host needs --port: without it, the metrics are printed once.", field="host")
    client, text_of = cli.client(reads_only=True), exposition.FleetText()

    def make() -> bytes:
        return text_of.of(client.metrics())

    if port is None:
        text = make().decode()
        cli.answer({"metrics": text}) if cli.is_json else sys.stdout.write(text)
        return
    address = DEFAULT_HOST if host is None else host
    with serving.serving(address, port, serving.Kept(make), exposition.CONTENT_TYPE, allow_host) as bound:
        shown = f"[{address}]" if ":" in address else address
        url = f"http://{shown}:{bound}/metrics"
        cli.answer({"url": url}, f"metrics: {url}")
        sys.stdout.flush()
        _until_signal()


def _until_signal() -> None:
    """Wait until SIGTERM comes. SIGINT raises KeyboardInterrupt in the wait."""
    import signal

    ended = threading.Event()
    former = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        ended.wait()
    finally:
        signal.signal(signal.SIGTERM, former)
