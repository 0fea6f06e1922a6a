"""Part f: what each idea is worth, alone. The same step once with it and once without.

    in order      every engine takes its nodes in the plan's order: edges make it a queue
    depth K       nodes enqueued ahead of time on a stream        ahead N   tasks placed ahead
    recompute     activations may be computed once more           cudagraph the loop replaced
    clean drop    what is unchanged is not copied back: bytes and seconds that saves, of the plan

Each variant is timed beside eager, which stays the same; `against` is the ratio of both ratios.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from offloading.report import Asked, Report, spread, table
from offloading.steps import MIB

from gpu.ours import ENGINES, attempt
from gpu.part import Found, Job, Outcome, Row, Rows, Step
from gpu.picture import Panel
from gpu.speed import Bench, bench_of, measured_rates, timed
from gpu.timing import free
from offload import Plan, simulate, verify
from offload.graph.memgraph import RELOAD, TASK
from offload.graph.rates import Rates
from offload.graph.taskgraph import HOST
from offload.planning.planner import build_memgraph
from offload.planning.reduction import reduced

NAME = "ablations"
CLAIM = "Claim: every part of the engine is worth its while: each is taken away in turn"
CASES = {
    "llama-7b lora 8x1K": "6GiB", "gpt2-1.5b full 8x1K": "6GiB", "vit-l-16 full": "4GiB",
}  # fmt: skip
"""Workloads of part d, each with the budget at which it is looked at."""
BASE = "as it is"
VARIANTS = (
    BASE, "in order", "depth 1", "depth 2", "depth 16", "depth 64", "ahead 0", "ahead 16",
    "ahead 256", "no recompute", "cudagraph",
)  # fmt: skip
SMOKE = (BASE, "in order", "depth 2", "ahead 0", "no recompute", "cudagraph")


def steps(smoke: bool) -> Sequence[Step]:
    cases = {"llama lora": "minimum"} if smoke else CASES
    variants = SMOKE if smoke else VARIANTS
    return [
        Step("gpu.ablations:measure", tuple(f"{n}; {budget}; {v}" for v in variants), minutes=5)
        for n, budget in cases.items()
    ]


def measure(job: Job) -> Rows:
    found = measured_rates(job)
    bench: Bench | None = None
    for cell in job.cells:
        name, budget, variant = cell.split("; ")
        if bench is None:
            free(job.device)
            bench = bench_of(name, job, found)
        yield cell, attempt(partial(_one, bench, budget, variant, job, found))


def _one(bench: Bench, budget: str, variant: str, job: Job, found: Rates) -> Row:
    more = {"recompute": False} if variant == "no recompute" else {}
    _, made = bench.planned(budget, **more)
    made = changed(made, variant)
    loop, graph = ENGINES
    depth = int(variant.split()[1]) if variant.startswith("depth") else None
    row = timed(bench, made, graph if variant == "cudagraph" else loop, job, depth)
    clean = clean_bytes(made)
    return row | {"clean_mib": clean / MIB, "clean_s": clean / found.d2h.rate}


def changed(made: Plan, variant: str) -> Plan:
    """The same plan but for one thing; proven as every plan is."""
    change: Callable[[Plan], Plan] | None = {
        "in order": in_order,
        "ahead 0": partial(ahead, tasks=0),
        "ahead 16": partial(ahead, tasks=16),
        "ahead 256": partial(ahead, tasks=256),
    }.get(variant)
    return made if change is None else change(made)


def in_order(made: Plan) -> Plan:
    """Every node waits for the one before it on its stream, too."""
    last: dict[str, int] = {}
    nodes = []
    for number, node in enumerate(made.memgraph.nodes):
        if node.lane == "host":  # as many at once as it has workers
            nodes.append(node)
            continue
        before = [last[node.lane]] if node.lane in last else []
        nodes.append(replace(node, deps=tuple(sorted({*node.deps, *before}))))
        last[node.lane] = number
    return _of(made, replace(made.memgraph, nodes=tuple(nodes)))


def ahead(made: Plan, tasks: int) -> Plan:
    """Tasks get their places so many ahead of the one that runs."""
    clock, now = [], 0.0
    for task in made.graph.tasks:
        clock.append(now)
        now += made.costs.of_task(task)
    capacities = {
        device: (made.device_bytes if nbytes is None else nbytes) - made.reserve
        for device, nbytes in made.budget.items()
    }
    if made.host_budget is not None:
        capacities[HOST] = made.host_budget
    policy = replace(made.found.policy, ahead=tasks, evict_ahead=min(tasks, 16))
    return _of(made, build_memgraph(made.graph, capacities, policy, clock))


def _of(made: Plan, memgraph: Any) -> Plan:
    deps = reduced([node.deps for node in memgraph.nodes])
    nodes = (replace(n, deps=before) for n, before in zip(memgraph.nodes, deps, strict=True))
    memgraph = replace(memgraph, nodes=tuple(nodes))
    verify(memgraph)
    simulation = simulate(memgraph, made.costs)
    return replace(made, found=replace(made.found, memgraph=memgraph, simulation=simulation))


def clean_bytes(made: Plan) -> int:
    """Of reloaded copies that nobody wrote to and that made way for others: an engine that does not
    know which copies are clean copies each of them back."""
    memgraph = made.memgraph
    saved = 0
    for block in memgraph.blocks:
        nodes = [memgraph.nodes[n] for n in block.nodes]
        if block.buffer is None or block.to_end or not nodes or nodes[0].kind != RELOAD:
            continue
        written = any(
            access.writes and access.buffer == block.buffer
            for node in nodes if node.kind == TASK for access in node.accesses
        )  # fmt: skip
        saved += 0 if written else nodes[0].nbytes
    return saved


def report(found: Found) -> Outcome:
    said = Report(NAME, CLAIM)
    bars: dict[str, float] = {}
    lines = []
    for cell, row in found.rows.items():
        name, budget, variant = cell.split("; ")
        base = found.rows.get(f"{name}; {budget}; {BASE}")
        against = row["over_eager"] / base["over_eager"] if base else None
        if against is not None and variant != BASE:
            bars[cell] = against
        lines.append(_line(cell, row, against))
    said.tables["One thing changed"] = table(HEAD, lines)
    said.asked = [
        Asked(f"{cell}: over the loop", 1.0, bars.get(cell))
        for cell in found.cells if cell.endswith("cudagraph")
    ]  # fmt: skip
    said.remarks = [
        f"against: over eager, of the row '{BASE}': above 1, what was changed was worth that much.",
        "in order: priority among the ready ones is what the row without it has.",
        "clean: bytes that are not copied back because they are unchanged, and the seconds of a"
        " link that they would take.",
    ]
    return Outcome(said, [Panel("Step time of the variant over ours", "times", bars, limit=1.0)])


HEAD = (
    "workload", "budget", "variant", "ours s", "over eager", "against", "predicted s", "bound s",
    "GiB out + in", "recomputed", "clean GiB", "clean s",
)  # fmt: skip


def _line(cell: str, row: Mapping[str, Any], against: float | None) -> list[str]:
    return [
        *cell.split("; "), spread(row["ours"]), f"{row['over_eager']:.3f}",
        "" if against is None else f"{against:.3f}",
        f"{row['predicted_s']:.4f}", f"{row['bound_s']:.4f}",
        f"{row['out_mib'] / 1024:.2f} + {row['in_mib'] / 1024:.2f}", str(row["recomputed"]),
        f"{row['clean_mib'] / 1024:.2f}", f"{row['clean_s']:.4f}",
    ]  # fmt: skip
