"""Part c: what the device holds at the most while a planned step runs, and the budget it was given.

    device   | context, libraries | arena ......... | workspaces |     budgets 100 % ... the minimum
             ^ base: taken before, after a step of eager and with all of it given back

The model lies in the host's memory, so whatever the device holds above the base is ours. The first
steps measure kernels on made-up data before there is an arena: their peak is told beside the run's.
"""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.gpu.memory_watch import MemoryWatch, counter, settled
from benchmarks.gpu.models import GPT2, TINY, Case, Kind, language
from benchmarks.gpu.ours import ENGINES, MIB, attempt, eager, stepping
from benchmarks.gpu.part import Found, Job, Row, Rows, Step
from benchmarks.gpu.pictures import vit
from benchmarks.gpu.timing import synchronize
from benchmarks.harness.report import Report, Target, format_table

NAME = "peaks"
CLAIM = "Claim: a planned step never takes more of the device than its budget, as the driver counts"
BUDGETS = ("100 %", "80 %", "60 %", "50 %", "40 %", "30 %", "20 %", "10 %", "minimum")
"""Of the peak that the step has without a budget. Below the minimum: the minimum."""
CAPTURED = ("60 %", "minimum")
"""Budgets of which the step as one CUDA graph is measured, too."""
CASES = ("gpt2-small", "vit-b-16")
STEPS = 4


def case_of(name: str, smoke: bool) -> Case:
    if name == "vit-b-16":
        return vit("b-16", smoke)
    return language(Kind(TINY if smoke else GPT2, "gpt2", dropout=0.1, dtype=torch.float32))


def steps(smoke: bool) -> Sequence[Step]:
    if smoke:
        cells = (*_cells("gpt2-small")[-2:], f"vit-b-16; {ENGINES[0]}; minimum")
        return [Step("gpu.peaks:watch", cells)]
    return [Step("gpu.peaks:watch", _cells(name), minutes=4) for name in CASES]


def _cells(name: str) -> tuple[str, ...]:
    loop, graph = ENGINES
    found = [f"{name}; {loop}; {share}" for share in BUDGETS]
    return (*found, *(f"{name}; {graph}; {share}" for share in CAPTURED))


def watch(job: Job) -> Rows:
    who, used = counter(job.device)
    _warmed(case_of(job.cells[0].split("; ")[0], job.smoke), job.device)
    for cell in job.cells:
        name, engine, share = cell.split("; ")
        case = case_of(name, job.smoke)
        base = settled(job.device, used)
        with MemoryWatch(used) as watched:
            row = attempt(partial(_one, case, engine, share, job.device, watched, base))
        yield cell, row | {"counter": who, "base_mib": base / MIB}


def _warmed(case: Case, device: str) -> None:
    """Kernels are loaded when they are called first, and stay: they are no step's."""
    module = case.build(device)
    eager(case, module, case.optimizer(module))(*case.batch(device))
    synchronize(device)


def _one(
    case: Case, engine: str, budget: str, device: str, watched: MemoryWatch, base: int
) -> Row:  # fmt: skip
    module = case.build("cpu")
    given = case, module, case.optimizer(module), case.batch(device), device, engine, budget
    with stepping(*given) as steps:
        steps.settle(*case.batch(device))
        synchronize(device)
        first = watched.most() - base
        watched.begin()
        for _ in range(STEPS):
            steps(*case.batch(device))
        synchronize(device)
        running, looks = watched.most() - base, watched.looks
        plans = steps.plans
    within = plans[0].budget[0]
    assert within is not None
    return {
        "budget_mib": within / MIB,
        "planned_mib": max(made.device_bytes for made in plans) / MIB,
        "peak_mib": max(made.peak_bytes for made in plans) / MIB, "running_mib": running / MIB,
        "first_mib": first / MIB, "looks": looks, "of_budget": running / within,
    }  # fmt: skip


def report(found: Found) -> Report:
    said = Report(NAME, CLAIM, {"steps": STEPS, "period": "1 ms"})
    keys = ("budget_mib", "planned_mib", "running_mib", "first_mib", "base_mib")
    lines = [
        [*cell.split("; "), *(f"{row[key]:.1f}" for key in keys), f"{row['of_budget']:.3f}",
         row["counter"], str(row["looks"])]
        for cell, row in found.rows.items()
    ]  # fmt: skip
    head = ["model", "engine", "budget", "budget MiB", "planned", "real peak", "of the first steps",
            "base", "peak, of the budget", "counted by", "looks"]  # fmt: skip
    said.tables["The most that was taken, MiB above the base"] = format_table(head, lines)
    said.asked = [
        Target(f"{cell}: real peak, of the budget", 1.0, found.number(cell, "of_budget"))
        for cell in found.cells
    ]
    said.remarks = [
        "base: taken before (context, libraries, loaded kernels).",
        "100 %: the peak of the step without a budget. looks: how often the driver was asked.",
    ]
    return said
