"""Orders of one and the same plan on a modelled GPU, over links of four speeds.

    priority   an idle lane takes the ready node that comes first in the plan: ours
    random     any that is ready                      in order   each lane a queue: CUDA streams

The steps are made up (stacks.py): all that counts are their FLOPs and bytes, priced by the rates of
a modern GPU. Everything here is simulated.

The ceiling is the bound: the work of the busiest lane, or the longest path.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from offload import Costs, Plan, simulate
from offload.graph.memgraph import OFFLOAD, RELOAD
from offloading.process import in_a_fresh_process
from offloading.report import Report, spread, table
from offloading.stacks import Stack, Way, step
from offloading.steps import MIB, planned

GPU = Costs(flops=4e14, memory=2.5e12, launch=4e-6, copy=1e-5)
LINKS = {"C2C 400": 400e9, "PCIe5 50": 50e9, "PCIe4 25": 25e9, "PCIe3 12": 12e9}
"""Bytes a second each way."""
BUDGETS = (("60 %", 0.6), ("40 %", 0.4), ("smallest", 0.0))
WAYS = {"streamed": Way(clipped=False, on_host=False), "clipped": Way(clipped=True, on_host=False)}
"""How GPT-2 XL is trained."""
SEEDS = 5


def measure(smoke: bool) -> Report:
    stack = Stack(2, 2, 64, 128, 64) if smoke else Stack(8)
    links = dict(list(LINKS.items())[:2]) if smoke else LINKS
    report = Report(
        "orders",
        "Claim: taking what is ready, first in the plan first, is faster than queues in order",
        {"GPU": "400 TFLOP/s, 2.5 TB/s, 4 us a kernel, 10 us a copy", "random orders": SEEDS},
    )
    for name, way in WAYS.items():
        found = in_a_fresh_process(one, name, stack, way, links)
        report.rows += found
        report.tables[f"{name} ({stack})"] = _table(found)
        report.remarks.append(f"{name}: {_summary(found)}")
    report.remarks += [
        "x bound: the simulated step over the bound. Random: median [min, max] of the seeds.",
        "without recompute: the best plan that keeps or moves every activation, in priority order.",
        "alone: the same tasks with no copies at all, on a device that holds everything.",
    ]
    return report


def one(name: str, stack: Stack, way: Way, links: dict[str, float]) -> list[dict[str, Any]]:
    """In a process of its own."""
    graph = step(stack, way)
    rows = []
    for link, rate in links.items():
        costs = replace(GPU, h2d=rate, d2h=rate)
        for budget, share in BUDGETS:
            made = planned(graph, share, costs=costs)
            plain = planned(graph, share, costs=costs, recompute=False)
            rows.append({"graph": name, "link": link, "budget": budget} | _row(made, plain, costs))
            print(f"{name}, {link}, {budget}: {rows[-1]['priority']:.4f} s", flush=True)
    return rows


def _row(made: Plan, plain: Plan, costs: Costs) -> dict[str, Any]:
    best = simulate(made, costs)
    nodes = made.memgraph.nodes
    return {
        "device_mib": made.device_bytes / MIB,
        "peak_mib": made.peak_bytes / MIB,
        "tasks": len(made.graph.tasks),
        "tried": list(made.found.tried),
        "recomputed": sum(bool(task.recomputes) for task in made.graph.tasks),
        "out_mib": sum(node.nbytes for node in nodes if node.kind == OFFLOAD) / MIB,
        "in_mib": sum(node.nbytes for node in nodes if node.kind == RELOAD) / MIB,
        "alone": made.resident_seconds,
        "bound": best.bound.seconds,
        "parts": dict(best.bound.parts),
        "binds": best.bound.lane,
        "priority": best.makespan,
        "random": [simulate(made, costs, "random", seed).makespan for seed in range(SEEDS)],
        "in_order": simulate(made, costs, "in_order").makespan,
        "without_recompute": plain.predicted_seconds,
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = [
        "link GB/s", "budget", "device MiB (of the peak)", "GiB out + in", "recomputed",
        "alone ms", "bound ms (binds)", "priority x bound",
        "random x bound", "in order x bound", "without recompute x ours",
    ]  # fmt: skip
    lines = []
    for row in rows:
        bound = row["bound"]
        lines.append([
            row["link"], row["budget"],
            f"{row['device_mib']:.0f} ({row['device_mib'] / row['peak_mib']:.0%})",
            f"{row['out_mib'] / 1024:.2f} + {row['in_mib'] / 1024:.2f}", str(row["recomputed"]),
            f"{1e3 * row['alone']:.1f}", f"{1e3 * bound:.1f} ({row['binds']})",
            f"{row['priority'] / bound:.3f}",
            spread([one / bound for one in row["random"]], ".3f"),
            f"{row['in_order'] / bound:.3f}",
            f"{row['without_recompute'] / row['priority']:.3f}",
        ])  # fmt: skip
    return table(head, lines)


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    def span(values: list[float]) -> str:
        return f"{min(values):.3f} to {max(values):.3f}, median {statistics.median(values):.3f}"

    queued = [row["in_order"] / row["priority"] for row in rows]
    drawn = [statistics.median(row["random"]) / row["priority"] for row in rows]
    return f"in order takes {span(queued)} times as long as priority; random {span(drawn)}."
