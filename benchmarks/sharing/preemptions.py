"""Wrong bits in steps that are stopped between any nodes, their memory lent and written over.

A guest comes as often as it can and fills a random part of the device's arena
(benchmarks/jobs/intruder.py). Losses, parameters, buffers and optimizer state must be eager's.
"""

import copy
import os
from collections.abc import Mapping
from functools import partial
from itertools import product

import torch
from torch import nn

from benchmarks.gpu.models import TINY, Case, Kind, language
from benchmarks.gpu.pictures import resnet18, vit
from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_table
from benchmarks.jobs.intruder import Intruder
from benchmarks.offloading.live_steps import SETTLED, LiveSteps, plan_share, training_step
from offload import Runner

MODELS: Mapping[str, Case] = {
    "gpt2-small": language(Kind(TINY, "gpt2", dropout=0.1, dtype=torch.float32)),
    "resnet18": resnet18(smoke=True),
    "vit-b-16": vit("b-16", smoke=True),
    "llama": language(Kind(TINY, dtype=torch.float32)),
}
"""Small ones have as many kinds of nodes as large ones."""
SHARE = 0.6
"""Of the memory that a step needs without offloading."""
PREEMPTIONS = 1000
RATE = 2.0**-13
"""A number of float32, which is what a captured fused update takes (docs/offload/gpu.md)."""
LEAST_STEPS, MOST_STEPS = 3, 1000


def one(case: Case, engine: str, preemptions: int, seed: int) -> dict[str, int]:
    """Train beside eager until the guest came so often, and for a few steps."""
    torch.manual_seed(0)
    device = "cpu" if engine == "threads" else "cuda"
    eager = case.build(device)
    module = copy.deepcopy(eager)
    optimizers = case.optimizer(eager), case.optimizer(module)
    for group in (*optimizers[0].param_groups, *optimizers[1].param_groups):
        group["lr"] = RATE
    expected = training_step(eager, case.loss(eager), optimizers[0])
    # A graph is replayed in the order in which it was captured.
    order = "priority" if engine == "cudagraph" else "random"
    run_by = partial(Runner, engine=engine, order=order, seed=seed, poison=True)
    step = training_step(module, case.loss(module), optimizers[1])
    made = partial(plan_share, share=SHARE)
    losses = steps = 0
    with LiveSteps(step, made, module, optimizers[1], device=device, run_by=run_by) as live:

        def differs(number: int) -> bool:
            batch = case.batch(device)
            torch.manual_seed(number)
            with live.suspended():
                loss = expected(*batch)
            torch.manual_seed(number)
            return not torch.equal(live(*batch), loss)

        while steps < SETTLED:
            losses += differs(steps)
            steps += 1
        with Intruder(live.runner, seed, evicts=True) as guest:
            while guest.visits < preemptions or steps < LEAST_STEPS:
                assert steps < MOST_STEPS, f"{guest.visits} preemptions in {steps} steps"
                losses += differs(steps)
                steps += 1
        visits = guest.visits
    tensors = sum(
        not torch.equal(value, other)
        for value, other in zip(
            state(eager, optimizers[0]), state(module, optimizers[1]), strict=True
        )
    )
    return {"steps": steps, "preemptions": visits, "losses": losses, "tensors": tensors}


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = optimizer.state_dict()["state"].values()
    moments = [v for one in kept for v in one.values() if isinstance(v, torch.Tensor)]
    return [*module.state_dict().values(), *moments]


def measure(options: Options) -> Report:
    """`repeats`: of every model on every engine, with other preemptions."""
    smoke, repeats = options.smoke, options.rounds
    torch.set_num_threads(1)
    models = [*MODELS][:1] if smoke else [*MODELS]
    engines = ("cuda", "cudagraph") if torch.cuda.is_available() else ("threads",)
    each = 5 if smoke else -(-PREEMPTIONS // (len(models) * len(engines) * repeats))
    report = Report("preemptions", "a preemption changes no bit", {"of the peak": f"{SHARE:.0%}"})
    for name in models:
        for engine, seed in product(engines, range(repeats)):
            found = one(MODELS[name], engine, each, seed)
            report.rows.append({"model": name, "engine": engine, "seed": seed, **found})
    report.tables["Training beside a guest that takes memory"] = format_table(
        ["model", "engine", "steps", "preemptions", "wrong losses + tensors"],
        [
            [r["model"], r["engine"], f"{r['steps']}", f"{r['preemptions']}",
             f"{r['losses']} + {r['tensors']}"]
            for r in report.rows
        ],
    )  # fmt: skip
    count = sum(row["preemptions"] for row in report.rows)
    least = len(report.rows) * each if smoke else PREEMPTIONS
    report.asked = [
        Target("preemptions with evictions", least, count, at_least=True),
        Target("losses and tensors with other bits",
              0, sum(row["losses"] + row["tensors"] for row in report.rows)),
    ]  # fmt: skip
    if "FAKE_CUDA" in os.environ:
        report.remarks.append("The GPU is a fake one (tests/fakecuda).")
    return report
