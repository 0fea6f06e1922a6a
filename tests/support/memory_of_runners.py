"""A process of its own: what runners really take of the host's memory, as JSON on its last line.

base -> [module, capture] -> Runner, steps, hand-overs -> peak -> close -> peak at the end
"""

import gc
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.memory.host_needs import needs
from offload.program.kernels import CPU
from offload.running.runner import Runner
from offload.running.stage import Stage

WIDE = 1024
CASES: tuple[tuple[str, int, float | None, str], ...] = (
    ("all resident", 4, None, "device"),
    ("60 %", 4, 0.6, "device"),
    ("the smallest", 4, 0.0, "device"),
    ("host updates", 3, 0.5, "host"),
)


def resident_set(peak: bool = False) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def captured(layers: int) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(layers)))
    for p in module.parameters():
        p.grad = torch.ones_like(p)  # zeros take nothing yet

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        with torch.no_grad():
            for p in module.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=1e-3)
                p.grad.zero_()
        return loss.detach()

    batch = torch.randn(8, WIDE), torch.randn(8, WIDE)
    return offload.capture(step, *batch), batch, module


def planned(graph: Any, share: float | None, optimizer: str) -> Any:
    whole = offload.plan(graph, optimizer=optimizer)
    if share is None:
        return whole
    budget = max(int(share * whole.peak_bytes), whole.smallest_bytes)
    return offload.plan(graph, budget, optimizer=optimizer)


def measured(layers: int, share: float | None, where: str) -> dict[str, int]:
    graph, batch, *kept = captured(layers)
    plan = planned(graph, share, where)
    filler, small, *also = captured(1)
    other_plan = planned(filler, None, "device")
    gc.collect()
    found = needs(plan)
    tensors = found.passing + needs(other_plan).passing
    base = resident_set() - tensors
    """What is there besides the tensors, which have memory of their own now."""
    forget_peak()
    with Stage(CPU, "threads") as stage:
        other = Runner(other_plan, stage=stage)
        runner = Runner(plan, stage=stage)
        for _ in range(3):
            runner(*batch)
            other(*small)
        gc.collect()
        assert stage.lender.arena is not None
        arena = sum(stage.lender.arena.sizes.values())
        lives, peak = resident_set() - base, resident_set(peak=True) - base
        forget_peak()
        runner.close()
        ends = resident_set(peak=True) - base
        other.close()
    del kept, also
    theirs = needs(other_plan)
    return {
        "held": found.held, "passing": found.passing, "device": arena + plan.reserve,
        "other": theirs.held, "lives": lives, "peak": peak, "ends": ends,
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured(1, None, "device")  # what the first of all makes and keeps
    print(
        json.dumps({name: measured(layers, share, where) for name, layers, share, where in CASES})
    )
