"""Part d: how long a planned step takes, over no offload and over what no order could beat.

    round   eager  planned        in another order each; both models are there, one on the device
    bound   of the plan: the busiest engine's work, or the longest path, of measured kernels

Asked: 1.05 of the bound where that is compute, and for LoRA and prefill of 8K tokens and more (from
6 GiB up); 1.10 elsewhere; 1.02 of eager where all fits; the step as one CUDA graph no slower than
the loop; and predicted within a tenth of measured.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.ours import ENGINES, attempt, facts, replayed, stepping
from benchmarks.gpu.part import Found, Job, Row, Rows, Step
from benchmarks.gpu.timing import REPEATS, WARM_UP, free, rounds
from benchmarks.gpu.workloads import Workload, eagerly, workloads
from benchmarks.harness.report import Report, Target, format_spread, format_table, round_ratios
from benchmarks.offloading.live_steps import LiveSteps
from offload import Costs, Plan, PlanCache
from offload.graph.rates import Samples, costs_of
from offload.graph.taskgraph import HOST
from offload.measuring.calibration import take_samples

NAME = "speed"
CLAIM = (
    "Claim: a planned step takes <= 1.05x of its bound where that is compute, <= 1.10x elsewhere"
)
COMPUTE, ELSEWHERE, RESIDENT, LOOP, PREDICTED = 1.05, 1.10, 1.02, 1.0, 0.10
MANY = 8192
"""Tokens from which on weights are hidden."""


def steps(smoke: bool) -> Sequence[Step]:
    cells = {
        name: tuple(f"{name}; {budget}; {engine}" for budget in load.budgets for engine in ENGINES)
        for name, load in workloads(smoke).items()
    }
    if smoke:
        return [Step("gpu.speed:measure", tuple(c for some in cells.values() for c in some))]
    return [Step("gpu.speed:measure", some, minutes=4) for some in cells.values()]


@dataclass(slots=True)
class Bench:
    """What the cells of one workload share."""

    name: str
    load: Workload
    eager: Callable[[], object]
    module: torch.nn.Module
    batch: tuple[torch.Tensor, ...]
    costs: Costs
    plans: PlanCache
    """The engines of a budget run the same plan."""


def measure(job: Job) -> Rows:
    samples = take_samples(job.device, 0.5 if job.smoke else 2.5)
    bench: Bench | None = None
    with TemporaryDirectory(prefix="plans-") as plans:
        for cell in job.cells:
            name, budget, engine = cell.split("; ")
            if bench is None or bench.name != name:
                bench = None
                free(job.device)
                bench = bench_of(name, job, samples, PlanCache(plans))
            yield cell, attempt(partial(_one, bench, budget, engine, job))


def bench_of(name: str, job: Job, samples: Samples, plans: PlanCache) -> Bench:
    load = workloads(job.smoke)[name]
    torch.manual_seed(0)
    batch = load.case.batch(job.device)
    module = load.case.build("cpu")
    costs = costs_of(samples, load.precision if job.device == "cuda" else "float32")
    return Bench(name, load, eagerly(load, job.device), module, batch, costs, plans)


def _one(bench: Bench, budget: str, engine: str, job: Job) -> Row:
    load = bench.load
    optimizer = None if load.prefill else load.case.optimizer(bench.module)
    given = load.case, bench.module, optimizer, bench.batch, job.device, engine, budget
    with stepping(*given, cache=bench.plans, costs=bench.costs, **load.options) as steps:
        steps.settle(*bench.batch)
        return _timed(bench, steps, job)


def _timed(bench: Bench, steps: LiveSteps, job: Job) -> Row:
    """Beside eager."""

    def eager() -> None:
        with steps.suspended():
            bench.eager()

    calls = {"eager": eager, "ours": partial(steps, *bench.batch)}
    seen = rounds(calls, job.device, 2 if job.smoke else REPEATS, 2 if job.smoke else WARM_UP)
    ours, parts = statistics.median(seen["ours"]), steps.plans
    share = resident_share(parts[0])  # all parts know all weights
    tokens = bench.load.tokens
    return {
        **facts(parts), "replayed": replayed(steps.runner),
        "eager": seen["eager"], "ours": seen["ours"], "ours_s": ours,
        "over_eager": statistics.median(round_ratios(seen["ours"], seen["eager"])),
        "tokens": tokens, "tokens_a_second": tokens / ours, "resident_share": share,
        "setting": bench.load.case.setting,
    }  # fmt: skip


def resident_share(made: Plan) -> float:
    """Of the bytes of persistent tensors those that stay on the device."""
    buffers = made.graph.buffers
    starts = {b: place for b, place in made.memgraph.starts.items() if buffers[b].persistent}
    every = sum(buffers[b].nbytes for b in starts)
    return sum(buffers[b].nbytes for b, p in starts.items() if p.arena != HOST) / max(1, every)


def report(found: Found) -> Report:
    said = Report(NAME, CLAIM, {"warm-up": WARM_UP, "repeats": REPEATS})
    rows = found.rows
    said.tables["A step"] = format_table(HEAD, [_line(cell, row) for cell, row in rows.items()])
    settings = {cell.split("; ")[0]: row["setting"] for cell, row in found.rows.items()}
    said.tables["Models"] = format_table(
        ["workload", "setting"], [[*one] for one in settings.items()]
    )
    for cell in found.cells:
        said.asked += _asked(cell, found)
    said.remarks = [
        "over eager: within a round; eager has everything on the device.",
        "bound, predicted: of the plans of a step's parts, of kernels measured alone.",
        "resident: the share of the weights that stay on the device, of the plan.",
    ]
    return said


HEAD = (
    "workload", "budget", "engine", "parts", "device GiB", "host GiB", "resident", "GiB out + in",
    "eager s", "ours s", "over eager", "bound s", "over bound", "predicted s", "off by", "tokens/s",
)  # fmt: skip


def _line(cell: str, row: Row) -> list[str]:
    return [
        *cell.split("; "), str(row["parts"]),
        f"{row['device_mib'] / 1024:.2f}", f"{row['host_mib'] / 1024:.2f}",
        f"{row['resident_share']:.0%}",
        f"{row['out_mib'] / 1024:.2f} + {row['in_mib'] / 1024:.2f}",
        format_spread(row["eager"]), format_spread(row["ours"]), f"{row['over_eager']:.3f}",
        f"{row['bound_s']:.4f} {row['binds']}", f"{_over(row, 'bound_s'):.3f}",
        f"{row['predicted_s']:.4f}", f"{_off(row):.1%}",
        f"{row['tokens_a_second']:,.0f}" if row["tokens"] else "",
    ]  # fmt: skip


def _asked(cell: str, found: Found) -> list[Target]:
    name, budget, engine = cell.split("; ")
    row = found.rows.get(cell)
    asked = [Target(f"{cell}: off the prediction", PREDICTED, _off(row) if row else None)]
    if budget == "none":
        asked.append(Target(f"{cell}: over eager", RESIDENT, found.number(cell, "over_eager")))
    most = COMPUTE if row is None or _hidden(name, row) else ELSEWHERE
    over = _over(row, "bound_s") if row else None
    asked.append(Target(f"{cell}: over the bound", most, over))
    if engine == "cudagraph":
        asked.append(Target(f"{cell}: over the loop", LOOP, _over_loop(cell, found)))
    return asked


def _hidden(name: str, row: dict[str, Any]) -> bool:
    """Where the bound is compute."""
    many = row["tokens"] >= MANY and ("lora" in name or "prefill" in name)
    return many or row["binds"] == "compute"


def _over(row: Row, key: str) -> float:
    return row["ours_s"] / row[key]


def _off(row: Row) -> float:
    return abs(row["predicted_s"] - row["ours_s"]) / row["ours_s"]


def _over_loop(cell: str, found: Found) -> float | None:
    name, budget, _ = cell.split("; ")
    loop = found.rows.get(f"{name}; {budget}; cuda")
    graph = found.rows.get(cell)
    if loop is None or graph is None or not graph["replayed"]:
        return None
    return graph["ours_s"] / loop["ours_s"]
