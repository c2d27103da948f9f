"""`mtask bulk`: many tasks are canceled, retried or removed, after they were counted."""

from __future__ import annotations

from typing import Annotated

import typer

from mtask.arguments.criteria import PageCriteria
from mtask.cli import failures
from mtask.cli.context import Cli
from mtask.cli.options import YesFlag, commands, is_confirmed
from mtask.cli.output import counted
from mtask.errors import InvalidInput
from mtask.features.bulk.client import Bulk
from mtask.features.bulk.rules import ACTIONS

_DONE = {"cancel": "canceled", "retry": "run again", "remove": "removed"}


def bulk(
    cli: Cli,
    action: Annotated[str, typer.Argument(metavar="ACTION", help=f"{', '.join(ACTIONS)}, or carry with --id.")],
    criteria: PageCriteria,
    bulk_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Carry on with this bulk change, which was begun before.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the tasks and change none.")] = False,
    yes: YesFlag = False,
) -> int:
    """Cancel, retry or remove all tasks that match, in batches, and count them first.

    What fails again after it was retried is not retried again. The command asks for confirmation. In a script, give
    --yes. If the command is interrupted, `mtask bulk carry --id ID` goes on.
    """
    client = cli.client()
    if action == "carry" or bulk_id is not None:
        if action != "carry" or bulk_id is None:
            raise InvalidInput("to go on with a bulk change: mtask bulk carry --id ID.", field="action")
        return _report(cli, client.carry_bulk(bulk_id))
    plan = client.plan_bulk(action, **criteria)
    found = f"{plan.count} task{'s' * (str(plan.count) != '1')}"
    risk = f"{found} would be {_DONE[plan.action]}"
    if dry_run or not plan.count.count:
        document = {"found": plan.count.count, "is_more": plan.count.is_more, "done": 0}
        cli.answer(document, risk if plan.count.count else "nothing matches")
        return failures.OK
    question = f"{plan.action.capitalize()} {found} in {client.database_name}?"
    if not yes and not is_confirmed(cli, question, risk=risk, field=None, refusal="nothing was done"):
        return failures.OTHER
    begun = client.begin_bulk(plan.plan)
    cli.notice(f"bulk change {begun.bulk_id}: `mtask bulk carry --id {begun.bulk_id}` goes on if this is interrupted")
    return _report(cli, client.carry_bulk(begun.bulk_id))


def _report(cli: Cli, done: Bulk) -> int:
    document = {"bulk_id": done.bulk_id, "action": done.action, "done": done.done_cnt, "left": done.left_cnt}
    left = f"; {counted(done.left_cnt, 'task')} had changed meanwhile, or cannot be changed" if done.left_cnt else ""
    cli.answer(document, f"{counted(done.done_cnt, 'task')} {_DONE[done.action]}{left}")
    return failures.OK


register = commands("Tasks", {"bulk": bulk})
