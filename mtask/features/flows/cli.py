"""`mtask flow` shows, lists, cancels, retries and awaits flows. It draws their graphs as trees of lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import TimeoutFlag, command_group
from mtask.cli.output import Column, clean, counted, hanging, lasting, listing, moment, relative, status_text
from mtask.features.flows.change import ChangedFlow
from mtask.features.flows.views import FlowRow, FlowState, StepState, known_before
from mtask.kernel.document.status import TaskStatus

# --- drawing ---------------------------------------------------------------------------------------------

# Draws the graph of a flow as a tree of lines. Steps that are alike are folded into one line.
#
# Two steps are alike if they run the same handler and stand in the same place: the steps before them are alike, and so
# are the steps behind them. A step is drawn below the last of the steps on which it depends. If it depends on others,
# too, then a note names them.

#: Alike steps are folded if there are more of them than this. A chain is folded if it is longer than CHAIN.
FOLD, CHAIN = 5, 9
#: The number of steps that stay unfolded at each end of a chain.
_CHAIN_ENDS = 2
#: The most names in a note, and the most characters of each.
_NAMED, _NAME_WIDTH = 3, 24
_URGENT = ("FAIL", "RUNNING", "INIT", "WAITING", "CANCELED", "SUCCESS")


@dataclass(frozen=True, slots=True)
class Letters:
    """The letters of the tree."""

    branch: str = "├─ "
    last: str = "└─ "
    beside: str = "│  "
    dots: str = "…"


ASCII = Letters("|- ", "`- ", "|  ", "...")
_BLANK = "   "


@dataclass(slots=True)
class Node:
    """One line of the drawing: a step, or several steps that are alike."""

    steps: list[StepState]
    before: list[Node] = field(default_factory=list)
    behind: list[Node] = field(default_factory=list)  #: the nodes that are drawn below this one
    is_chain: bool = False  #: whether the line stands for the middle of a chain


@dataclass(frozen=True, slots=True)
class Line:
    """A node and the place where it is drawn."""

    prefix: str
    connector: str
    node: Node
    #: Whether the node is the only one below the node of the line before, so that both stand under each other.
    goes_on: bool


def draw(flow: FlowState, width: int, *, limit: int = 0, is_full: bool = False, is_ascii: bool = False) -> list[Text]:
    """Return the drawing as lines that fit into the width: a heading and at most `limit` further lines (0: all)."""
    letters = ASCII if is_ascii else Letters()
    lines = _lines(_tree(flow, is_full=is_full), letters)
    if not is_full:
        lines = _without_chains(lines)
    shown = lines[:limit] if limit else lines
    columns = (
        Column("STEP", gives_way=True, keeps_end=True),
        Column("STATUS"),
        Column("TIME", right=True),
        Column("NOTE", gives_way=True),
    )
    by_id = {step.task_id: step for step in flow.steps}
    rows = [_row(line, by_id, flow.now, letters, max(width // 3, 6)) for line in shown]
    drawn = listing(columns, rows, width)
    if len(shown) < len(lines):
        drawn.append(Text(f"{letters.dots} and {len(lines) - len(shown)} lines more", style="bright_black"))
    return drawn


# --- from steps to nodes --------------------------------------------------------------------------------------


def _tree(flow: FlowState, *, is_full: bool) -> list[Node]:
    """Return the nodes without a node above them."""
    by_id = {step.task_id: step for step in flow.steps}
    before = {step.task_id: known_before(step, by_id) for step in flow.steps}
    nodes: list[Node] = []
    node_of: dict[str, Node] = {}
    for members in _alike(flow.steps, before):
        is_folded = len(members) > FOLD and not is_full
        for group in [members] if is_folded else [[step] for step in members]:
            made = Node(group)
            nodes.append(made)
            node_of |= {step.task_id: made for step in group}
    order = {id(node_of[step.task_id]): index for index, step in reversed(list(enumerate(flow.steps)))}
    nodes.sort(key=lambda node: order[id(node)])
    roots: list[Node] = []
    for node in nodes:
        found = {id(node_of[other]): node_of[other] for step in node.steps for other in before[step.task_id]}
        # Only nodes of before can stand above, so that steps in a circle are drawn, too.
        above = [other for other in found.values() if order[id(other)] < order[id(node)]]
        node.before = sorted(above, key=lambda other: order[id(other)])
        (node.before[-1].behind if node.before else roots).append(node)
    return roots


def _alike(steps: Sequence[StepState], before: Mapping[str, Sequence[str]]) -> list[list[StepState]]:
    """Return the steps in groups that are alike."""
    behind: dict[str, list[str]] = defaultdict(list)
    for task_id, others in before.items():
        for other in others:
            behind[other].append(task_id)
    kinds = {step.task_id: (step.task_id.partition(":")[0], step.on_failed) for step in steps}
    ids = [step.task_id for step in steps]
    up, down = _places(ids, before, kinds), _places(ids[::-1], behind, kinds)
    groups: dict[tuple[int, int], list[StepState]] = defaultdict(list)
    for step in steps:
        groups[up[step.task_id], down[step.task_id]].append(step)
    return list(groups.values())


def _places(
    ids: Sequence[str], related: Mapping[str, Sequence[str]], kinds: Mapping[str, tuple[str, str]]
) -> dict[str, int]:
    """Number the steps so that those with the same number have the same kind, and related steps of the same numbers.

    `ids` holds each step after those that are related to it.
    """
    numbers: dict[object, int] = {}
    places: dict[str, int] = {}
    for task_id in ids:
        counts = Counter(places.get(other, -1) for other in related.get(task_id, ()))
        place = (kinds[task_id], tuple(sorted(counts.items())))
        places[task_id] = numbers.setdefault(place, len(numbers))
    return places


# --- from nodes to lines --------------------------------------------------------------------------------------


def _lines(roots: Sequence[Node], letters: Letters) -> list[Line]:
    lines: list[Line] = []
    # The next line is the last of the stack.
    stack = _below(roots, "", letters, goes_on=False)
    while stack:
        line = stack.pop()
        lines.append(line)
        below = line.prefix
        if line.connector:
            below += _BLANK if line.connector == letters.last else letters.beside
        stack += _below(line.node.behind, below, letters, goes_on=True)
    return lines


def _below(nodes: Sequence[Node], prefix: str, letters: Letters, *, goes_on: bool) -> list[Line]:
    """Return the lines of the nodes below a node, the last one first. A single node stands under the other."""
    if len(nodes) == 1:
        return [Line(prefix, "", nodes[0], goes_on)]
    made = [Line(prefix, letters.branch, node, False) for node in nodes]
    if made:
        made[-1] = replace(made[-1], connector=letters.last)
    return made[::-1]


def _without_chains(lines: Sequence[Line]) -> list[Line]:
    """Fold the middle of long chains of single steps."""
    made: list[Line] = []
    start = 0
    while start < len(lines):
        end = start + 1
        while end < len(lines) and lines[end].goes_on and len(lines[end].node.steps) == 1:
            end += 1
        chain = list(lines[start:end])
        if len(chain) > CHAIN:
            first, middle, last = chain[:_CHAIN_ENDS], chain[_CHAIN_ENDS:-_CHAIN_ENDS], chain[-_CHAIN_ENDS:]
            folded = Node([step for line in middle for step in line.node.steps], [first[-1].node], is_chain=True)
            chain = [*first, replace(middle[0], node=folded), *last]
        made += chain
        start = end
    return made


# --- from lines to text ---------------------------------------------------------------------------------------


def _row(
    line: Line, by_id: Mapping[str, StepState], now: datetime | None, letters: Letters, most: int
) -> list[str | Text]:
    node = line.node
    prefix = line.prefix + line.connector
    if len(prefix) > most:
        prefix = letters.dots + prefix[-(most - len(letters.dots)) :]
    name = Text.assemble((prefix, "bright_black"), _name(node, letters))
    status, rest = _statuses(node)
    time = _time(node.steps[0], now) if len(node.steps) == 1 else _time_of_all(node.steps)
    notes = [rest, *_notes(node, by_id, letters)]
    return [name, status, time, Text(clean(", ".join(note for note in notes if note)), style="bright_black")]


def _name(node: Node, letters: Letters) -> str:
    first, last = node.steps[0], node.steps[-1]
    if first is last:
        return clean(first.step)
    count = f"{len(node.steps)}x "
    return f"{count}{_short(first.step, letters)} {letters.dots} {_short(last.step, letters)}"


def _short(text: str, letters: Letters) -> str:
    shown = clean(text)
    return shown if len(shown) <= _NAME_WIDTH else shown[: _NAME_WIDTH - len(letters.dots)] + letters.dots


def _statuses(node: Node) -> tuple[Text, str]:
    """Return the status, or the most urgent one with its count, and the counts of the others."""
    counts = Counter(step.status for step in node.steps)
    if len(counts) == 1:
        return status_text(clean(node.steps[0].status, 10)), ""
    known = [*_URGENT, *sorted(counts.keys() - set(_URGENT))]
    first, *others = [status for status in known if status in counts]
    text = status_text(first)
    text.plain = f"{counts[first]} {clean(first, 10)}"
    return text, ", ".join(f"{counts[status]} {status}" for status in others)


def _time(step: StepState, now: datetime | None) -> str:
    begun = step.run.claim_time if step.run is not None else None
    if step.is_ended:
        return lasting(step.finish_time - begun) if step.finish_time and begun else ""
    if step.status == TaskStatus.RUNNING:
        return lasting(now - begun) if now and begun else ""
    due = step.next_preempt_time
    if due is None or now is None:
        return ""
    return relative(due, now) if due > now else f"due {lasting(now - due)}"


def _time_of_all(steps: Sequence[StepState]) -> str:
    """Return the time from the first claim to the last end, if all have ended."""
    begun = [step.run.claim_time for step in steps if step.run is not None and step.run.claim_time is not None]
    ends = [step.finish_time for step in steps if step.finish_time is not None]
    if not begun or not all(step.is_ended for step in steps):
        return ""
    return lasting(max(ends) - min(begun)) if ends else ""


def _notes(node: Node, by_id: Mapping[str, StepState], letters: Letters) -> list[str]:
    def name(task_id: str) -> str:
        return _short(by_id[task_id].step, letters) if task_id in by_id else f"{_short(task_id, letters)} (removed)"

    step = node.steps[0]
    notes = []
    if len(node.steps) == 1:
        if step.cancel_requested and not step.is_ended:
            notes.append("asked to stop")
        elif step.status == TaskStatus.RUNNING and step.run is not None:
            fraction = "" if step.run.fraction is None else f"{step.run.fraction:.0%}"
            notes.append(" ".join(part for part in (fraction, clean(step.run.message or "", 60)) if part))
        if step.has_failed and step.held_by is not None:
            notes.append(f"because of {name(step.held_by)}")
        removed = [other for other in step.after if other not in by_id]
        notes.append(_after(node, removed, name, letters))
        if step.continues is not None:
            notes.append(f"next task of {name(step.continues)}")
        elif step.parent is not None:
            notes.append(f"added by {name(step.parent)}")
    elif not node.is_chain:
        notes.append(_after(node, [], name, letters))
    if node.is_chain:
        notes.append("one after the other")
    elif step.on_failed != "cancel":
        notes.append(f"on_failed {clean(step.on_failed, 10)}")
    return notes


def _after(node: Node, removed: Sequence[str], name: Callable[[str], str], letters: Letters) -> str:
    """Name the steps on which the node depends, unless there is only the one above it."""
    if len(node.before) < 2 and not removed:
        return ""
    names = [_name(other, letters) for other in node.before] + [name(task_id) for task_id in removed]
    short = [_short(text, letters) for text in names[:_NAMED]]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"after {', '.join(short)}{more}"


# --- cli -------------------------------------------------------------------------------------------------

#: The most reasons of failures below a drawing.
MAX_REASONS = 5
_FlowKey = Annotated[str, typer.Argument(metavar="KEY", help="Key of the flow.", show_default=False)]


def show(
    cli: Cli,
    key: _FlowKey,
    full: Annotated[bool, typer.Option("--full", help="Draw each step on a line of its own.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-l", min=0, help="Largest number of lines to draw; 0 = all.")] = 100,
) -> None:
    """Draw the steps of a flow, with their statuses and times.

    A step is drawn below a step on which it depends. Steps that are alike are folded into one line.
    """
    flow = cli.client(reads_only=True).flow(key)
    if cli.is_json:
        cli.json(flow_document(flow))
        return
    is_ascii = not cli.out.encoding.lower().startswith("utf")
    cli.say(*_heading(flow), "", *draw(flow, cli.out.width, limit=limit, is_full=full, is_ascii=is_ascii))
    cli.say(*_reasons(cli, flow))


def flow_document(flow: FlowState) -> dict[str, Any]:
    """Return the flow for JSON."""
    document = asdict(flow)
    server_time = document.pop("now")
    return {**document, "progress": flow.progress, "server_time": server_time}


def _heading(flow: FlowState) -> list[Text]:
    ended = f"{flow.ended_cnt} of {counted(len(flow.steps), 'step')} ended"
    lines = [Text.assemble((clean(flow.key), "bold"), f"  {ended}"), statuses_text(flow.counts)]
    if flow.create_time is not None and flow.now is not None:
        lines.append(Text(f"created {_when(flow.create_time, flow.now)}", style="bright_black"))
        if flow.end_time is not None:
            took = f", after {lasting(flow.end_time - flow.create_time)}"
            lines.append(Text(f"ended {_when(flow.end_time, flow.now)}{took}", style="bright_black"))
    return lines


def _when(instant: datetime, now: datetime) -> str:
    return f"{moment(instant)} ({relative(instant, now)})"


def statuses_text(counts: Mapping[str, int]) -> Text:
    """Return the numbers of steps by status, in colour."""
    parts = [Text.assemble(f"{count} ", status_text(clean(status, 20))) for status, count in counts.items()]
    return Text(", ").join(parts)


def _reasons(cli: Cli, flow: FlowState) -> list[Text]:
    """Return the reasons of the steps whose failure no other step caused."""
    own = [step for step in flow.failed if step.held_by is None and step.reason is not None]
    lines = []
    for step in own[:MAX_REASONS]:
        head = Text.assemble("  ", (clean(step.step, 24), "bold"), "  ")
        lines += hanging(cli.out.width, head, Text(clean(step.reason), style="red"))
    if len(own) > MAX_REASONS:
        lines.append(Text(f"  and {len(own) - MAX_REASONS} more: --json prints all", style="bright_black"))
    return [Text(""), Text("failed", style="bold"), *lines] if lines else []


def list_flows(
    cli: Cli,
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="TEXT", help="Only flows whose keys begin with this.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", min=0, help="Largest number to list; 0 = all.")] = 50,
) -> None:
    """List flows, newest first, with the numbers of their steps by status."""
    client = cli.client(reads_only=True)
    found = client.flows(prefix=prefix, limit=limit + 1 if limit else 0)
    shown = found[:limit] if limit else found
    if cli.is_json:
        cli.json([{**asdict(row), "is_ended": row.is_ended} for row in shown])
        return
    if not shown:
        which = "" if prefix is None else f" whose key begins with {prefix!r}"
        cli.notice(f"database {client.database_name!r} holds no flow{which}")
        return
    now = client.server_time()
    columns = (
        Column("FLOW", is_id=True),
        Column("ENDED", right=True),
        Column("CREATED", leaves=1),
        Column("STEPS", wraps=True),
    )
    cli.say(*listing(columns, [_list_row(row, now) for row in shown], cli.out.width))
    if limit and len(found) > limit:
        cli.notice(f"more: --limit {limit * 2}, or 0 for all")


def _list_row(row: FlowRow, now: datetime) -> list[str | Text]:
    created = "" if row.create_time is None else relative(row.create_time, now)
    return [row.key, f"{row.ended_cnt}/{row.step_cnt}", created, statuses_text(row.counts)]


def cancel(
    cli: Cli,
    key: _FlowKey,
    everything: Annotated[
        bool, typer.Option("--everything", help="Cancel the clean-up, too: steps with on_failed run.")
    ] = False,
) -> None:
    """Cancel the open steps of a flow, and ask the workers of its running steps to stop.

    The clean-up stays: steps with on_failed run that depend on others.
    """
    changed = cli.client().cancel_flow(key, everything=everything)
    remark = f"canceled, or asked to stop: {counted(len(changed.task_ids), 'step')}"
    _report(cli, changed, remark if changed.task_ids else "no step was open to cancel")
    if changed.counts.get(TaskStatus.WAITING) and not everything:
        cli.notice("the clean-up stays: --everything cancels it, too")


def retry(cli: Cli, key: _FlowKey) -> None:
    """Let all FAIL and CANCELED steps of a flow run again. Steps that succeeded stay."""
    changed = cli.client().retry_flow(key)
    remark = f"opened again: {counted(len(changed.task_ids), 'step')}"
    _report(cli, changed, remark if changed.task_ids else "no step is FAIL or CANCELED")


def _report(cli: Cli, changed: ChangedFlow, remark: str) -> None:
    cli.answer(
        asdict(changed), Text.assemble((clean(changed.key), "bold"), f"  {remark}"), statuses_text(changed.counts)
    )


def wait(
    cli: Cli,
    key: _FlowKey,
    timeout: TimeoutFlag = None,
) -> int:
    """Wait until all steps of a flow have ended.

    The exit code is 0 if all succeeded, 8 if a step is FAIL, 9 if none is FAIL and a step is CANCELED, 6 after the
    timeout, and 4 if no such flow exists.
    """
    limit = None if timeout is None else values.duration(timeout, "timeout")
    flow = cli.client(reads_only=True).wait_flow(key, timeout=limit)
    if cli.is_json:
        cli.json(flow_document(flow))
    else:
        cli.say(*_heading(flow), *_reasons(cli, flow))
    if flow.counts.get(TaskStatus.FAIL):
        return failures.TASK_FAILED
    return failures.TASK_CANCELED if flow.counts.get(TaskStatus.CANCELED) else failures.OK


register = command_group(
    "flow",
    "Tasks",
    "Flows: tasks that were published together and that wait for each other.",
    {"show": show, "list": list_flows, "cancel": cancel, "retry": retry, "wait": wait},
)
