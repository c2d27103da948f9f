"""`mtask demo` counts real files with several workers, and kills one of the workers meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mtask.cli.context import LOCAL_URI, Cli
from mtask.cli.failures import OK, OTHER
from mtask.cli.interrupts import Interruption
from mtask.cli.options import commands
from mtask.demo.app import default_folder, find_files
from mtask.demo.display import closing_lines, printable, shown
from mtask.demo.play import Plan, Play
from mtask.demo.watch import Scene
from mtask.errors import InvalidInput

MOST_WORKERS = 50


def demo(
    cli: Cli,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="The files to count. Else Python's standard library.", show_default=False
        ),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", metavar="NUMBER", help="Worker processes.")] = 3,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Let all workers live.")] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="NUMBER", help="Count at most this many files, in order.", show_default=False),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the documents, and print commands that show them.")
    ] = False,
    web: Annotated[
        bool,
        typer.Option("--web", help="Show the demo's database in the web page. In a terminal, it stays until Ctrl-C."),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines, not a live picture. Without a terminal this is so anyway.")
    ] = False,
) -> int:
    """Count the words of a folder's files with three workers. One worker is killed while it holds tasks.

    Each file is one task. The demo starts its own MongoDB and leaves nothing behind. With --uri, it uses an existing
    server: the database mtask_demo, or the database that --database names. The exit code is 1 if the tasks' totals
    differ from the totals of a direct computation.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise InvalidInput(f"--workers {workers}: use 1 to {MOST_WORKERS}.", field="workers")
    if limit is not None and limit < 1:
        raise InvalidInput(f"--limit {limit}: use 1 or more.", field="limit")
    if workers == 1 and not no_kill:
        cli.notice("a single worker is not killed: no other could preempt its tasks")
    chosen = folder if folder is not None else default_folder()
    with Interruption() as interruption:
        files = find_files(chosen, limit)
        chosen = chosen.expanduser().absolute()
        plan = Plan(
            folder=chosen,
            files=files,
            workers=workers,
            kill=not no_kill and workers > 1,
            keep=keep,
            uri=_uri(cli),
            database=cli.flags.database,
            mongod=cli.settings.mongod,
            web=web,
            stays=cli.out.is_terminal and not (cli.is_json or cli.flags.quiet),
        )
        try:
            return _show(cli, plan, interruption.check, plain=plain)
        except KeyboardInterrupt:
            cli.notice("interrupted: the workers are stopped and the documents removed")
            raise


def _show(cli: Cli, plan: Plan, check: Callable[[], None], *, plain: bool) -> int:
    noun = "file" if len(plan.files) == 1 else "files"
    scene = Scene(f"mtask demo: {len(plan.files):,} {noun} of {printable(plan.folder)}", len(plan.files), plan.kill)
    if cli.is_json:
        summary = Play(plan, scene, check).run()
        cli.json(summary.document())
        return OK if summary.is_equal else OTHER
    live = cli.out.is_terminal and not plain and not cli.flags.quiet
    if cli.flags.quiet:
        summary = Play(plan, scene, check).run()
    else:
        with shown(scene, cli.out, live=live) as show:

            def notify() -> None:
                check()
                show()

            summary = Play(plan, scene, notify).run()
    for line in closing_lines(summary, scene, cli.out.width, with_rescues=not live):
        cli.out.print(line, soft_wrap=True)
    return OK if summary.is_equal else OTHER


def _uri(cli: Cli) -> str | None:
    """Return the URI of the flag --uri, or None. Other settings are ignored: no database is filled by accident."""
    given = cli.flags.uri
    return cli.uri() if given is not None and given.strip() == LOCAL_URI else given


register = commands("Start here", {"demo": demo})
