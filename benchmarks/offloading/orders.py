"""Orders of one and the same plan on a modelled GPU, over links of four speeds.

    priority   an idle lane takes the ready node that comes first in the plan: ours
    random     any that is ready                      in order   each lane a queue: CUDA streams

The step is captured on this CPU without attention dropout, so that its kernels are the GPU's kind,
and under parameters that have addresses and no memory: nothing is computed. All that counts are its
FLOPs and bytes, priced by the rates of a modern GPU. Everything here is simulated.

The ceiling is the bound: the work of the busiest lane, or the longest path. `two-phase` is what
an ideal order reaches where the forward pass only offloads and the backward pass only reloads.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offload import Costs, Plan, TaskGraph, lower, simulate
from offload.graph.memgraph import OFFLOAD, RELOAD
from offload.tracing.capture import traced_training_step
from offloading.nets import TINY, Bfloat16, Gpt, Llama, Size, adamw, word_loss
from offloading.process import in_a_fresh_process
from offloading.report import Report, spread, table
from offloading.steps import MIB, planned

GPU = Costs(flops=4e14, memory=2.5e12, launch=4e-6, copy=1e-5)
LINKS = {"C2C 400": 400e9, "PCIe5 50": 50e9, "PCIe4 25": 25e9, "PCIe3 12": 12e9}
"""Bytes a second each way."""
BUDGETS = (("60 %", 0.6), ("40 %", 0.4), ("smallest", 0.0))
GPT2_LONG = Size(50257, 768, 12, 12, 3072, 8, 1024)
LLAMA_1B = Size(32000, 2048, 22, 32, 5632, 2, 2048)
SEEDS = 5


def measure(smoke: bool) -> Report:
    sizes = {"gpt2-small": GPT2_LONG, "llama-1.1b": LLAMA_1B}
    links = dict(list(LINKS.items())[:2]) if smoke else LINKS
    report = Report(
        "orders",
        "Claim: taking what is ready, first in the plan first, is faster than queues in order",
        {"GPU": "400 TFLOP/s, 2.5 TB/s, 4 us a kernel, 10 us a copy", "random orders": SEEDS},
    )
    for name, size in sizes.items():
        found = in_a_fresh_process(one, name, TINY if smoke else size, links)
        report.rows += found
        report.tables[f"{name} ({TINY if smoke else size}, bfloat16 autocast, AdamW)"] = _table(
            found
        )
        report.remarks.append(f"{name}: {_summary(found)}")
    report.remarks += [
        "x bound: the simulated step over the bound. Random: median [min, max] of the seeds.",
        "without recompute: the best plan that keeps or moves every activation, in priority order.",
        "alone: the same tasks with no copies at all, on a device that holds everything.",
    ]
    return report


def one(name: str, size: Size, links: dict[str, float]) -> list[dict[str, Any]]:
    """In a process of its own."""
    graph = unmeasured(name, size)
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
        "two_phase": best.two_phase,
        "priority": best.makespan,
        "random": [simulate(made, costs, "random", seed).makespan for seed in range(SEEDS)],
        "in_order": simulate(made, costs, "in_order").makespan,
        "without_recompute": plain.predicted_seconds,
    }


def unmeasured(name: str, size: Size) -> TaskGraph:
    """The graph of a step of this model, priced by what it does and not by this CPU."""
    models: dict[str, Callable[[], nn.Module]] = {
        "gpt2-small": lambda: Gpt(size, dropout=0.0),
        "llama-1.1b": lambda: Llama(size),
    }
    with torch.device("meta"):
        inner = models[name]()
    # Addresses, and no memory: nobody ever touches it.
    module = Bfloat16(inner.to_empty(device="cpu"))
    if isinstance(inner, Gpt):
        inner.head.weight = inner.words.weight
    optimizer = adamw(module)
    for p in module.parameters():
        optimizer.state[p] = {
            "step": torch.zeros(()),
            "exp_avg": torch.empty_like(p),
            "exp_avg_sq": torch.empty_like(p),
        }
    return lower(traced_training_step(module, word_loss, optimizer, *size.text()))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = [
        "link GB/s", "budget", "device MiB (of the peak)", "GiB out + in", "recomputed",
        "alone ms", "bound ms (binds)", "two-phase x bound", "priority x bound",
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
            f"{row['two_phase'] / bound:.3f}", f"{row['priority'] / bound:.3f}",
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
