"""Every call of `offload` that the suite makes: steps on a device, by plans, run by an engine."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.models import Batch, Case
from benchmarks.gpu.part import Row
from benchmarks.offloading.live_steps import MIB, LiveSteps, training_step
from offload import OffloadError, Plan, PlanCache, Runner, TaskGraph, plan
from offload.gate import Gate
from offload.graph.memgraph import OFFLOAD, RELOAD
from offload.running.engines.cudagraph import CudaGraph

ENGINES = ("cuda", "cudagraph")
"""The loop first, then what has no loop."""
BUDGETS = ("none", "60 %", "minimum")
"""Shares are of the peak that the step has without a budget."""


def stepping(
    case: Case,
    module: nn.Module,
    by: torch.optim.Optimizer | None,
    batch: Batch,
    device: str,
    engine: str,
    budget: str,
    *,
    gate: Gate | None = None,
    cache: PlanCache | None = None,
    **options: Any,
) -> LiveSteps:
    """Steps on `device`, wherever the module's tensors are now. `by`: None for the forward
    pass alone. `budget`: none; minimum, the smallest that holds them; a share of the peak that they
    have without one; else a size. `options`: of the plans."""
    nbytes: str | int | None = None if budget == "none" else budget
    if budget == "minimum" or budget.endswith(" %"):
        share = 0.0 if budget == "minimum" else float(budget.removesuffix(" %")) / 100
        twins = copy.deepcopy((module, by))  # the Python of what is only planned runs
        nbytes = _share(share, _steps(case, *twins, plan, device=device, runs=False), batch)
    made = partial(plan, budget=nbytes, cache=cache, **options)
    run_by = partial(Runner, engine=engine, gate=gate)
    return _steps(case, module, by, made, device=device, run_by=run_by, cache=cache)


def _steps(
    case: Case,
    module: nn.Module,
    by: torch.optim.Optimizer | None,
    made: Callable[[TaskGraph], Plan],
    **how: Any,
) -> LiveSteps:
    if by is None:
        return LiveSteps(without_gradients(module), made, module, **how)
    return LiveSteps(eager(case, module, by), made, module, by, **how)


def without_gradients(module: nn.Module) -> Callable[..., torch.Tensor]:
    def step(*batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return module(*batch)

    return step


def _share(share: float, steps: LiveSteps, batch: Batch) -> int:
    """Bytes that hold every part of the first steps."""
    with steps:
        steps.settle(*batch)
        parts = steps.known
    least = max(part.smallest_bytes for part in parts)
    return max(least, int(share * max(part.peak_bytes for part in parts)))


def replayed(runner: Runner) -> bool | None:
    """Whether steps are replays of what was captured; None: the engine captures nothing. Where a
    step cannot be captured the loop runs it, which would be compared with itself."""
    if not isinstance(runner.stage.engine, CudaGraph):
        return None
    return any(known.graphs for known in runner.stage.engine._known.values())


def eager(
    case: Case, module: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[..., torch.Tensor]:
    """The step as anybody writes it. Returns the loss."""
    return training_step(module, case.loss(module), optimizer)


def facts(parts: Sequence[Plan]) -> Row:
    """Of a step, whose parts run one after the other: a bound of each is one of all together."""
    nodes = [node for part in parts for node in part.memgraph.nodes]
    tasks = [task for part in parts for task in part.graph.tasks]
    largest = max(parts, key=lambda part: len(part.graph.tasks))
    return {
        "parts": len(parts),
        "placement": largest.placement,
        "peak_mib": max(part.peak_bytes for part in parts) / MIB,
        "device_mib": max(part.device_bytes for part in parts) / MIB,
        "host_mib": max(part.host_bytes for part in parts) / MIB,
        "tasks": len(tasks),
        "recomputed": sum(bool(task.recomputes) for task in tasks),
        "offloads": sum(node.kind == OFFLOAD for node in nodes),
        "reloads": sum(node.kind == RELOAD for node in nodes),
        "out_mib": sum(node.nbytes for node in nodes if node.kind == OFFLOAD) / MIB,
        "in_mib": sum(node.nbytes for node in nodes if node.kind == RELOAD) / MIB,
        "predicted_s": sum(part.predicted_seconds for part in parts),
        "bound_s": sum(part.bound.seconds for part in parts),
        "binds": largest.bound.lane,
        "resident_s": sum(part.resident_seconds for part in parts),
    }


def attempt(measure: Callable[[], Row]) -> Row:
    """What leaves the process whole is the cell's problem, and the next cell goes on in it. Any
    other error ends the process: after one of the device nothing in it can be trusted."""
    try:
        return measure()
    except (OffloadError, torch.OutOfMemoryError, MemoryError) as error:
        return {"problem": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
