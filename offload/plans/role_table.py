"""A plan's bytes as a table: a row a role, a column a place.

                       all        resident        streamed   at the peak   offloaded   reloaded
    parameters 62 42.6 MiB     8  10.1 MiB    54  32.5 MiB      12.0 MiB        ...
    together                   ...

Rows without bytes are left out.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from offload.graph.memgraph import OFFLOAD, RELOAD, TASK
from offload.graph.taskgraph import HOST, Role
from offload.plans.account import (
    NAMES,
    ROLES,
    Amount,
    Usage,
    add_up,
    count_at_home,
    count_moved,
    count_used,
    find_lives,
    format_seconds,
    measure_usage,
)
from offload.sizes import format_size

if TYPE_CHECKING:
    from offload.plans.plan import Plan

HEAD = ("", "all", "resident", "streamed", "at the peak", "offloaded", "reloaded")
USUAL = (16, 16, 16, 16, 13, 11, 11)


def role_table(plan: "Plan") -> tuple[list[str], list[tuple[str, str]]]:
    """The lines of the table, and facts that say what its columns mean."""
    memgraph = plan.memgraph
    counted = (
        _with_workspaces(plan),
        count_at_home(memgraph, plan.graph.devices),
        count_at_home(memgraph, [HOST]),
    )
    copied = count_moved(memgraph, OFFLOAD), count_moved(memgraph, RELOAD)
    device, use = _find_fullest(plan)
    peak = {role: Amount(0, int(use.by_role[role][use.fullest])) for role in ROLES}
    rows: list[Sequence[str]] = [HEAD]
    for role in ROLES:
        cells = [_cell(column.get(role)) for column in counted]
        sizes = [_size(column.get(role)) for column in (peak, *copied)]
        if any(cells) or any(sizes):
            rows.append((NAMES[role], *cells, *sizes))
    sums = (_cell(add_up(column)) for column in counted[1:])
    rows.append(("together", "", *sums, *(_size(add_up(c)) for c in (peak, *copied))))
    return align_columns(rows), _legend(plan, device, use)


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines. A column has its usual width, or that of its longest cell and the
    two spaces before it."""
    longest = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    widths = [max(pair) for pair in zip(USUAL, longest, strict=True)]
    lines = []
    for name, *cells in rows:
        line = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"{name:<{widths[0]}}{line}".rstrip())
    return lines


def _legend(plan: "Plan", device: int, use: Usage) -> list[tuple[str, str]]:
    moment = float(use.times[use.fullest])
    running = next(
        (
            f", in {plan.memgraph.name(node)}"
            for node, _, start, end in plan.simulation.timeline
            if start <= moment < end and plan.memgraph.nodes[node].kind == TASK
        ),
        "",
    )
    largest = "; of the workspaces the largest" if Role.WORKSPACE in _with_workspaces(plan) else ""
    return [
        ("all", f"each buffer of the step once{largest}"),
        ("the peak", f"device {device} when it is fullest: at {format_seconds(moment)}{running}"),
    ]


def _with_workspaces(plan: "Plan") -> Mapping[Role, Amount]:
    tasks = plan.source.tasks
    sizes = [t.unplaced if plan.placement == "copy" else t.workspace for t in tasks]
    most = max(sizes, default=0)
    amounts = count_used(plan.source)
    return {**amounts, Role.WORKSPACE: Amount(sum(s > 0 for s in sizes), most)} if most else amounts


def _find_fullest(plan: "Plan") -> tuple[int, Usage]:
    """The device that holds most at a time, and what it holds."""
    memgraph = plan.memgraph
    lived = find_lives(memgraph, plan.simulation.timeline)
    uses = [(d, measure_usage(memgraph, lived, d, plan.reserve)) for d in plan.graph.devices or [0]]
    return max(uses, key=lambda use: int(use[1].total.max()))


def _cell(amount: Amount | None) -> str:
    return f"{amount.count:,} {format_size(amount.nbytes):>10}" if amount and amount.count else ""


def _size(amount: Amount | None) -> str:
    return format_size(amount.nbytes) if amount and amount.nbytes else ""
