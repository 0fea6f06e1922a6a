"""The colours of a plan's picture, and what each of them means.

    bytes of a role, and copies of them     a colour a role
    tasks                                   a grey a phase; orange if a task is run once more

Okabe and Ito's colours are used, which colour-blind people can tell apart.
"""

from collections.abc import Collection
from types import MappingProxyType
from typing import TYPE_CHECKING

from offload.graph.memgraph import OFFLOAD, TASK, MemGraph
from offload.graph.taskgraph import HOST, Role
from offload.plans.account import NAMES, ROLES, count_at_home, count_moved

if TYPE_CHECKING:
    from matplotlib.artist import Artist

    from offload.plans.plan import Plan

INK, MUTED, RULE, FREE = "#1f2933", "#66717e", "#c9d0d8", "#e9f2ec"
AGAIN = "#D55E00"
"""The colour of tasks that are run once more."""
COLOURS = MappingProxyType(
    {
        Role.PARAMETER: "#0072B2",
        Role.STATE: "#56B4E9",
        Role.BUFFER: "#10436b",
        Role.CONSTANT: "#10436b",
        Role.INPUT: "#F0E442",
        Role.ACTIVATION: "#E69F00",
        Role.GRADIENT: "#009E73",
        Role.TEMPORARY: "#CC79A7",
        Role.WORKSPACE: "#8d99a6",
    }
)
PHASES = MappingProxyType({"forward": "#aab4bf", "backward": "#6b7784", "update": "#323c47"})


def colour_of(memgraph: MemGraph, number: int) -> str:
    """The colour of a node: a copy has the colour of its buffer's role."""
    node = memgraph.nodes[number]
    if node.kind != TASK:
        return COLOURS[memgraph.graph.buffers[node.buffer].role]
    task = memgraph.graph.tasks[node.task]
    return AGAIN if task.recomputes else PHASES.get(task.phase, PHASES["forward"])


def legend_keys(plan: "Plan", roles: Collection[Role]) -> "tuple[list[Artist], list[Artist]]":
    """The keys of the memory's colours, for the roles that were drawn, and all other keys."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    memory: list[Artist] = [Patch(color=COLOURS[r], label=NAMES[r]) for r in ROLES if r in roles]
    tasks = plan.memgraph.graph.tasks
    phases = {"again" if task.recomputes else task.phase for task in tasks}
    other: list[Artist] = [
        Line2D([], [], color=INK, linewidth=1.1, linestyle=(0, (3, 2)), label="if nothing left")
    ]
    if count_moved(plan.memgraph, OFFLOAD) or count_at_home(plan.memgraph, [HOST]):
        away = {"facecolor": "white", "edgecolor": MUTED, "hatch": "////", "linewidth": 0}
        other.append(Patch(label="offloaded", **away))
    if any(budget is not None for budget in plan.budget.values()):
        other.append(Patch(facecolor=FREE, label="free"))
    other += [Patch(color=c, label=f"{p} tasks") for p, c in PHASES.items() if p in phases]
    if "again" in phases:
        other.append(Patch(color=AGAIN, label="recomputed"))
    return memory, other
