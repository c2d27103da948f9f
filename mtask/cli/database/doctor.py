"""`mtask doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import commands
from mtask.cli.output import clean, fit, hanging, status_text
from mtask.search.findings import Finding, Level


def doctor(
    cli: Cli,
    patience: Annotated[
        str,
        typer.Option("--patience", metavar="DURATION", help="A due task that waits longer than this is a FAIL."),
    ] = "5m",
) -> int:
    """Examine the server, the collections, the workers and the tasks, and print remedies.

    The command changes nothing. The exit code is 7 if a finding is a FAIL.
    """
    allowed = values.duration(patience, "patience")
    client = cli.client(reads_only=True)
    findings = client.diagnose(patience=allowed)
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    if cli.is_json:
        found = [asdict(finding) for finding in findings]
        cli.json({"database": client.database_name, "healthy": not failed, "findings": found})
    else:
        cli.say(*_report(cli.out, findings))
        cli.say("", _summary(findings, client.database_name))
    return failures.PROBLEMS if failed else failures.OK


def _report(screen: Console, findings: list[Finding]) -> list[Text]:
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        level = fit(status_text(finding.level), 4)
        lines += hanging(screen.width, Text.assemble(level, f"  {finding.check:<{width}}  "), clean(finding.message))
        if finding.remedy is not None:
            lines += hanging(screen.width, Text.assemble(" " * (width + 8), ("-> ", "bold")), clean(finding.remedy))
    return lines


def _summary(findings: list[Finding], database: str) -> Text:
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    if counts[Level.FAIL]:
        return Text(f"{database}: {counts[Level.FAIL]} FAIL, {counts[Level.WARN]} WARN", style="bold red")
    if counts[Level.WARN]:
        return Text(f"{database}: works; {counts[Level.WARN]} WARN", style="yellow")
    return Text(f"{database}: all is well", style="green")


register = commands("Database", {"doctor": doctor})
