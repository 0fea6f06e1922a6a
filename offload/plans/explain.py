"""Describes a plan in words and numbers, on one screen.

    device      40.0 MiB of a budget of 40.0 MiB: 60 % of ...             a fact a line
    moves       ...
                       all         resident         streamed   ...        a row a role:
    parameters    62   42.6 MiB    ...                                    role_table.py

Facts that a plan does not have are left out: without copies there are no rows of copies. Long names
are cut, so that a line has at most `WIDTH` columns.
"""

from typing import TYPE_CHECKING

from offload.graph.memgraph import OFFLOAD, RELOAD, SEND, TASK, MemGraph
from offload.graph.taskgraph import Role, Task
from offload.lowering.device_placing import PLACED
from offload.lowering.host_updates import is_update, move_updates_to_host, weigh_moves
from offload.lowering.micro_batches import ONCE
from offload.planning.refusal import smallest_budget
from offload.planning.wanted import peak_bytes
from offload.plans.account import (
    Amount,
    add_up,
    count_dropped,
    count_moved,
    format_seconds,
    format_share,
)
from offload.plans.device_table import describe_part, device_table
from offload.plans.role_table import role_table
from offload.sizes import format_count, format_size

if TYPE_CHECKING:
    from offload.plans.plan import Plan

WIDTH, LABEL = 100, 12
MOST_NOTES = 5
MOST_NAMES = 4
LANES = 6
"""The most lanes on a line."""
BITS_DIFFER = "the last bits differ"
"""Stands in the note of every pass that changes bits, after `name of the pass:`."""


def explain(plan: "Plan") -> str:
    """About 30 lines of at most `WIDTH` columns."""
    facts = [
        ("plan", _counts(plan)),
        *_devices(plan),
        *_largest_task(plan),
        ("host", _host(plan)),
        ("step", _step(plan)),
        ("bound", _bound(plan)),
        *_lanes(plan),
        *_moves(plan),
        ("recomputed", _recomputing(plan)),
        *_updates(plan),
        *_micro_batches(plan),
        ("outputs", _outputs(plan)),
        ("bits", _bits(plan)),
    ]
    table, legend = role_table(plan)
    devices = device_table(plan)
    lines = [*map(_line, facts), "", *table, "", *devices, *([""] if devices else [])]
    lines += map(_line, [*legend, *_notes(plan)])
    return "\n".join(lines)


def _line(fact: tuple[str, str]) -> str:
    label, text = fact
    return f"{label:<{LABEL}}{_cut(text, WIDTH - LABEL)}".rstrip()


def _cut(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


# ---- facts ---------------------------------------------------------------------------------------


def _counts(plan: "Plan") -> str:
    phases: dict[str, int] = {}
    for task in plan.graph.tasks:
        phases[task.phase] = phases.get(task.phase, 0) + 1
    nodes = plan.memgraph.nodes
    copies = sum(node.kind != TASK for node in nodes)
    edges = sum(len(node.deps) for node in nodes)
    parts = ", ".join(f"{count:,} {phase}" for phase, count in phases.items())
    tasks = format_count(len(plan.graph.tasks), "task")
    return f"{tasks} ({parts}), {format_count(copies, 'copy')}, {format_count(edges, 'edge')}"


def _devices(plan: "Plan") -> list[tuple[str, str]]:
    devices = plan.graph.devices
    return [(f"device {d}" if len(devices) > 1 else "device", _device(plan, d)) for d in devices]


def _device(plan: "Plan", device: int) -> str:
    taken = plan.memgraph.arenas.get(device, 0) + plan.reserve
    peak = peak_bytes(plan.source, device) + plan.reserve
    return (
        f"{_bytes_within(taken, plan.budget.get(device), 'budget')}:"
        f" {format_share(taken, peak)} of the {format_size(peak)} of a step without offload"
    )


def _bytes_within(nbytes: int, limit: int | None, name: str) -> str:
    return f"{format_size(nbytes)}, {f'{name} {format_size(limit)}' if limit else f'no {name}'}"


def find_largest_task(plan: "Plan") -> tuple[int, str, int]:
    """Bytes that the largest task needs, its name, and its device.

    In copy mode tasks have no workspace of their own but share the reserve, as `plan.graph`
    shows."""
    graph = plan.graph
    if plan.optimizer == "auto":  # updates on the host allow a smaller budget
        graph = move_updates_to_host(graph, plan.costs, "host")
    candidates = [(*smallest_budget(graph, device), device) for device in graph.devices]
    nbytes, name, device = max(candidates, default=(0, "", 0))
    return nbytes + plan.reserve, name, device


def _largest_task(plan: "Plan") -> list[tuple[str, str]]:
    nbytes, name, device = find_largest_task(plan)
    if not name:
        return [("at least", "nothing: no task uses a device")]
    on = f" of device {device}" if len(plan.graph.devices) > 1 else ""
    where = next((task.where for task in plan.graph.tasks if task.name == name), "")
    lines = [f"{format_size(nbytes)}{on} for the largest task, {name}"]
    if where and len(lines[0]) + len(where) + 3 <= WIDTH - LABEL:
        lines = [f"{lines[0]} ({where})"]
    elif where:
        lines.append(f"({where})")
    return [("" if n else "at least", line) for n, line in enumerate(lines)]


def _host(plan: "Plan") -> str:
    from offload.program.kernels import CPU, device_of

    text = _bytes_within(plan.host_bytes, plan.host_budget, "host_budget")
    if plan.graph.program is not None and device_of(plan.graph) == CPU and plan.host_bytes:
        text += f"; {format_size(plan.device_bytes + plan.host_bytes)} together with the device"
    beside = max((task.unplaced for task in _host_tasks(plan)), default=0)
    if plan.placement == "copy" and beside:
        text += f"; kernels on the host allocate up to {format_size(beside)} more"
    return text


def _step(plan: "Plan") -> str:
    seconds, resident = plan.predicted_seconds, plan.resident_seconds
    if not resident:
        return f"{format_seconds(seconds)} predicted"
    return (
        f"{format_seconds(seconds)} predicted: {seconds / resident:.2f}x the"
        f" {format_seconds(resident)} of a step that waits for no copy"
    )


def _bound(plan: "Plan") -> str:
    part = plan.bound.lane if len(plan.graph.devices) == 1 else describe_part(plan.bound.lane)
    return f"{format_seconds(plan.bound.seconds)} for any order, set by {part}"


def _lanes(plan: "Plan") -> list[tuple[str, str]]:
    """The lanes of one device; of several, whose kernels have a table, only the host's."""
    makespan, workers = plan.simulation.makespan, plan.costs.host_workers
    several = len(plan.graph.devices) > 1
    shares = [
        f"{lane} {format_share(seconds / (workers if lane == 'host' else 1), makespan)}"
        for lane, seconds in sorted(plan.simulation.busy.items())
        if lane == "host" or not several
    ]
    lines = [shares[at : at + LANES] for at in range(0, len(shares), LANES)]
    return [("" if n else "busy", ", ".join(line)) for n, line in enumerate(lines)]


def _moves(plan: "Plan") -> list[tuple[str, str]]:
    lines = _host_moves(plan.memgraph)
    if sent := count_moved(plan.memgraph, SEND):
        lines.append(("", f"sent from device to device {_copies(add_up(sent))}"))
    return lines


def _host_moves(memgraph: MemGraph) -> list[tuple[str, str]]:
    out, back = count_moved(memgraph, OFFLOAD), count_moved(memgraph, RELOAD)
    if not out and not back:
        return [("moves", "nothing: everything is resident")]
    if not out and set(back) == {Role.INPUT}:
        inputs = format_size(add_up(back).nbytes)
        return [("moves", f"only the inputs, {inputs} to the device: everything else is resident")]
    lines = [("moves", f"offloaded {_copies(add_up(out))}, reloaded {_copies(add_up(back))}")]
    if (clean := count_dropped(memgraph)).count:
        size = format_size(clean.nbytes)
        lines.append(("", f"dropped without a copy {size}: the host has the same bytes"))
    return lines


def _copies(amount: Amount) -> str:
    if not amount.count:
        return "nothing"
    return f"{format_size(amount.nbytes)} in {format_count(amount.count, 'copy')}"


def _recomputing(plan: "Plan") -> str:
    graph = plan.graph
    again = [task for task in graph.tasks if task.recomputes]
    if not again:
        return "nothing" if plan.recompute else "nothing: plan(recompute=False)"
    seconds = sum(plan.costs.of_task(task) for task in again)
    nbytes = sum(graph.buffers[b].nbytes for b in {b for task in again for b in task.writes})
    names = ", ".join(task.recomputes for task in again[:MOST_NAMES])
    return (
        f"{format_count(len(again), 'task')}, {format_seconds(seconds)} more, {format_size(nbytes)}"
        f" less to keep: {names}{', ...' if len(again) > MOST_NAMES else ''}"
    )


def _host_tasks(plan: "Plan") -> list[Task]:
    return [task for task in plan.graph.tasks if task.lane == "host"]


def _updates(plan: "Plan") -> list[tuple[str, str]]:
    """How many updates run on the host, and why."""
    count = sum(task.phase == "update" and is_update(task) for task in plan.source.tasks)
    if plan.optimizer == "device" or not count:
        return []
    names = {t.name for t in _host_tasks(plan) if t.phase == "update" and is_update(t)}
    why = "as asked for" if plan.optimizer == "host" else "the fastest of the plans tried"
    if not names:
        if plan.optimizer == "host":
            why = "none can run on the host (half precision, or not an optimizer's update)"
        return [("updates", f"on the device: {why}")]
    tasks = plan.source.tasks
    moves = weigh_moves(plan.source, plan.costs)
    chosen = {n: move for n, move in moves.items() if tasks[n].name in names}
    state = {
        b for n in chosen for b in tasks[n].touches if plan.source.buffers[b].role is Role.STATE
    }
    size = format_size(sum(plan.source.buffers[b].nbytes for b in state))
    saved = format_seconds(sum(move.saved for move in chosen.values()))
    took = format_seconds(sum(move.seconds for move in chosen.values()))
    return [
        ("updates", f"{len(names)} of {count} on the host, {why}: {size} of state stay there;"),
        ("", f"{took} of the host's time, {saved} less on the links if all of it were streamed"),
    ]


def _micro_batches(plan: "Plan") -> list[tuple[str, str]]:
    count = len({task.turn for task in plan.source.tasks})
    if count < 2:
        return []
    how = next((note for note in plan.graph.notes if note.startswith(ONCE)), f"{ONCE} each")
    return [("weights", f"{count} micro-batches in one step, {how}")]


def _outputs(plan: "Plan") -> str:
    from offload.memory.cuda_shim import why_not_on
    from offload.program.kernels import device_of

    if plan.placement == "shim":
        return "written by the kernels at their planned addresses (placement: shim)"
    reason = why_not_on(device_of(plan.graph)) or "as asked for"
    return f"copied to their planned addresses (placement: copy; {reason})"


def _bits(plan: "Plan") -> str:
    changed = [note.split(":")[0] for note in plan.graph.notes if BITS_DIFFER in note]
    if changed:
        return f"NOT bit-equal to eager: {', '.join(changed)}"
    return "as eager: no pass that changes bits was asked for"


# ---- afterwards ----------------------------------------------------------------------------------


def _notes(plan: "Plan") -> list[tuple[str, str]]:
    made = [note for note in plan.graph.notes if not note.startswith(ONCE)]  # a fact above
    notes = sorted([*plan.remarks, *made], key=lambda note: not note.startswith(PLACED))
    shown = [("notes" if not n else "", note) for n, note in enumerate(notes[:MOST_NOTES])]
    if len(notes) > MOST_NOTES:
        shown[-1] = ("", f"... and {len(notes) - MOST_NOTES + 1} more: plan.remarks, graph.notes")
    return [*shown, ("chosen", _choice(plan))]


def _choice(plan: "Plan") -> str:
    tried, policy = plan.found.tried, plan.found.policy
    if plan.found.nothing_moves:
        return f"{tried[0]}: there was nothing to choose"
    failed = sum(line.endswith("does not fit") for line in tried)
    by = "by an earlier start of this run: " if plan.found.known else ""
    unfit = f" ({failed} did not fit)" if failed else ""
    return (
        f"{by}the fastest of {format_count(len(tried), 'plan')}{unfit}:"
        f" {format_count(policy.ahead, 'task')} placed ahead, {policy.drop_ahead} where others are"
        f" dropped for them, {policy.evict_ahead} where others must go"
    )
