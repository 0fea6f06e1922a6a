"""Part c: what the device holds at the most while a planned step runs, and the budget it was given.

    device   | context, libraries | arena ......... | workspaces |     budgets 100 % ... the minimum
             ^ base: taken before, after a step of eager and with all of it given back

The model lies in the host's memory, so whatever the device holds above the base is ours. Capturing
measures kernels on made-up data before there is an arena: that peak is told beside the run's.
"""

from collections.abc import Sequence
from functools import partial

import torch
from offloading.report import Asked, Report, table

from gpu.memory_watch import MemoryWatch, counter, settled
from gpu.models import GPT2, TINY, Case, Kind, language
from gpu.ours import ENGINES, MIB, attempt, captured, eager, planned, run_by
from gpu.part import Found, Job, Outcome, Row, Rows, Step
from gpu.picture import Panel
from gpu.pictures import vit
from gpu.timing import synchronize

NAME = "peaks"
CLAIM = "Claim: a planned step never takes more of the device than its budget, as the driver counts"
SHARES = {
    "100 %": 1.0, "80 %": 0.8, "60 %": 0.6, "50 %": 0.5, "40 %": 0.4, "30 %": 0.3, "20 %": 0.2,
    "10 %": 0.1, "minimum": 0.0,
}  # fmt: skip
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
    found = [f"{name}; {loop}; {share}" for share in SHARES]
    return (*found, *(f"{name}; {graph}; {share}" for share in CAPTURED))


def watch(job: Job) -> Rows:
    who, used = counter(job.device)
    _warmed(case_of(job.cells[0].split("; ")[0], job.smoke), job.device)
    for cell in job.cells:
        name, engine, share = cell.split("; ")
        case = case_of(name, job.smoke)
        base = settled(job.device, used)
        with MemoryWatch(used) as watched:
            row = attempt(partial(_one, case, engine, SHARES[share], job.device, watched, base))
        yield cell, row | {"counter": who, "base_mib": base / MIB}


def _warmed(case: Case, device: str) -> None:
    """Kernels are loaded when they are called first, and stay: they are no step's."""
    module = case.build(device)
    eager(case, module, case.optimizer(module))(*case.batch(device))
    synchronize(device)


def _one(
    case: Case, engine: str, share: float, device: str, watched: MemoryWatch, base: int
) -> Row:  # fmt: skip
    module = case.build("cpu")
    made = planned(
        captured(case, module, case.optimizer(module), case.batch("cpu"), device), share
    )  # fmt: skip
    capturing = watched.most() - base
    left = settled(device, counter(device)[1]) - base
    watched.begin()
    with run_by(engine, made) as runner:
        for _ in range(STEPS):
            runner(*case.batch("cpu"))
        synchronize(device)
        running, looks = watched.most() - base, watched.looks
    budget = made.budget[0]
    assert budget is not None
    return {
        "budget_mib": budget / MIB, "planned_mib": made.device_bytes / MIB,
        "peak_mib": made.peak_bytes / MIB, "running_mib": running / MIB,
        "capturing_mib": capturing / MIB, "left_mib": left / MIB, "looks": looks,
        "of_budget": running / budget,
    }  # fmt: skip


def report(found: Found) -> Outcome:
    said = Report(NAME, CLAIM, {"steps": STEPS, "period": "1 ms"})
    keys = ("budget_mib", "planned_mib", "running_mib", "capturing_mib", "left_mib", "base_mib")
    lines = [
        [*cell.split("; "), *(f"{row[key]:.1f}" for key in keys), f"{row['of_budget']:.3f}",
         row["counter"], str(row["looks"])]
        for cell, row in found.rows.items()
    ]  # fmt: skip
    head = ["model", "engine", "budget", "budget MiB", "planned", "real peak", "while captured",
            "left by it", "base", "peak, of the budget", "counted by", "looks"]  # fmt: skip
    said.tables["The most that was taken, MiB above the base"] = table(head, lines)
    said.asked = [
        Asked(f"{cell}: real peak, of the budget", 1.0, found.number(cell, "of_budget"))
        for cell in found.cells
    ]
    said.remarks = [
        "base: taken before (context, libraries, loaded kernels); left by it: what capturing kept.",
        "100 %: the peak of the step without a budget. looks: how often the driver was asked.",
    ]
    lines_ = {
        key: [(row["budget_mib"], row[f"{key}_mib"]) for row in found.rows.values()]
        for key in ("running", "planned", "budget")
    }
    panel = Panel("Real peak", "MiB", lines=lines_, across="budget, MiB")
    return Outcome(said, [panel] if found.rows else [])
