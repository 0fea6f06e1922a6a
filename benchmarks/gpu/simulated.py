"""What plans are worth on a GPU, told by a machine without one: steps on paper.

    a step, captured for the CPU -> plans by a GPU's rates -> what the simulator says they take

    python -m gpu.simulated [--out DIR] [--only WORD ...] [--smoke]

from benchmarks/, with the project's root and benchmarks/ in PYTHONPATH. The rates are those that
part a measured (`benchmarks/results/gpu_ceilings.jsonl`), the link's also halved: PCIe 4. A kernel
takes what a roofline says, so seconds are too few; what a plan makes of copies beside kernels is in
the ratios. On an H200, with measured kernels, the simulator was 0.5 to 2.1 % off.

No weight is drawn: only shapes count here. What kernels allocate by themselves is in no plan.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from offloading.report import Report, table, write

from gpu import models
from gpu.machine import record
from gpu.speed import resident_share
from gpu.workloads import Workload, workloads
from offload import Costs, Plan, TaskGraph, plan
from offload.graph.rates import Link, Rates
from offload.lowering.passes import lower
from offload.tracing.capture import traced, traced_training_step

RESULTS = Path(__file__).parents[1] / "results"
CLAIM = "Claim: on paper, with an H200's rates, a plan hides its copies behind kernels"
LINKS = {"PCIe 5": 1.0, "PCIe 4": 0.5}
"""Times the rate that was measured."""
MORE = {"llama-7b lora 8x1K": ("12GiB",)}
"""Budgets beside those of part d."""
HEAD = (
    "workload", "budget", "link", "needed GiB", "resident", "GiB out + in", "recomputed",
    "no offload s", "predicted s", "over no offload", "bound s", "over the bound", "planning CPU s",
)  # fmt: skip


def rates(path: Path) -> Rates:
    """Of the last line that part a wrote."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = [row for row in rows if row["cell"] == "costs"][-1]
    found = last["row"]["costs"] | {"device": last["device"]}
    links = {way: Link(**found[way]) for way in ("h2d", "d2h")}
    # Of fewer workers the caches told (see results/README.md): all of them together are the memory.
    workers = max(found["host"], key=int)
    return Rates(**{**found, **links, "host": {int(workers): found["host"][workers]}})


@contextmanager
def undrawn() -> Iterator[None]:
    """Weights as they are found in memory."""
    fill = models.fill
    models.fill = lambda *_: None
    try:
        yield
    finally:
        models.fill = fill


def graph_of(load: Workload) -> TaskGraph:
    """Lowered, no kernel of it run."""
    with undrawn():
        module = load.case.build("cpu")
    batch = load.case.batch("cpu")
    if load.prefill:

        def step(*inputs: torch.Tensor) -> Any:
            with torch.no_grad():
                return module(*inputs)

        return lower(traced(step, *batch))
    optimizer = load.case.optimizer(module)
    return lower(traced_training_step(module, load.case.loss(module), optimizer, *batch))


def line(made: Plan, whole: Plan, seconds: float) -> list[str]:
    """`whole`: without a budget. `seconds`: of planning."""
    moved = {"h2d": 0, "d2h": 0}
    for node in made.memgraph.nodes:
        if node.lane in moved:
            moved[node.lane] += node.nbytes
    recomputed = sum(bool(task.recomputes) for task in made.graph.tasks)
    took, bound = made.predicted_seconds, made.bound
    return [
        f"{whole.device_bytes / 2**30:.1f}", f"{resident_share(made):.0%}",
        f"{moved['d2h'] / 2**30:.1f} + {moved['h2d'] / 2**30:.1f}", f"{recomputed}",
        f"{whole.predicted_seconds:.4f}", f"{took:.4f}", f"{took / whole.predicted_seconds:.3f}",
        f"{bound.seconds:.4f} {bound.lane}", f"{took / bound.seconds:.3f}", f"{seconds:.1f}",
    ]  # fmt: skip


def lines(name: str, load: Workload, found: Rates) -> Iterator[list[str]]:
    graph = graph_of(load)
    given = [b for b in (*MORE.get(name, ()), *load.budgets) if b not in ("none", "minimum")]
    for link, factor in LINKS.items():
        costs = scaled(found.costs(load.precision), factor)
        whole = plan(graph, costs=costs)
        for budget in given:
            begin = time.process_time()
            made = plan(graph, budget, costs=costs, **load.options)
            yield [name, budget, link, *line(made, whole, time.process_time() - begin)]


def scaled(costs: Costs, link: float) -> Costs:
    return replace(costs, h2d=link * costs.h2d, d2h=link * costs.d2h)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu.simulated", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    found = rates(RESULTS / "gpu_ceilings.jsonl")
    report = Report("simulated", CLAIM, {"rates": found.device})
    rows: list[list[str]] = []
    for name, load in workloads(args.smoke).items():
        if any(word in name for word in args.only):
            if args.smoke:
                load = replace(load, budgets=("600KiB",))
            for row in lines(name, load, found):
                print(" | ".join(row), flush=True)
                rows.append(row)
    report.tables["A step, on paper"] = table(HEAD, rows)
    report.rows = [dict(zip(HEAD, row, strict=True)) for row in rows]
    report.remarks = [
        "Simulated: no GPU ran any of it. Kernels by a roofline; ratios count, seconds do not.",
        "no offload: without a budget, which needs so much. bound: of the plan as it"
        " is. planning: of the search and the proof, on this machine's CPU.",
    ]
    stem = args.out / f"{date.today().isoformat()}_gpu_simulated"
    write(report, stem, record("cpu"), "python -m gpu.simulated")


if __name__ == "__main__":
    main()
