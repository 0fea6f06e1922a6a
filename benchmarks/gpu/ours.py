"""Every call of `offload` that the suite makes: steps on a device, by plans, run by an engine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from offloading.live_steps import LiveSteps, training_step
from offloading.steps import MIB, planned
from torch import nn

from gpu.models import Batch, Case
from gpu.part import Row
from offload import OffloadError, Plan, PlanCache, Runner, TaskGraph, plan
from offload.gate import Gate
from offload.graph.memgraph import OFFLOAD, RELOAD
from offload.running.engines.cudagraph import CudaGraph
from offload.running.trace import Trace

ENGINES = ("cuda", "cudagraph")
"""The loop first, then what has no loop."""
BUDGETS = ("none", "60 %", "minimum")
"""Shares are of the peak that the step has without a budget."""
FIRST = 3
"""Steps that price a plan."""


def stepping(
    case: Case,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: str,
    engine: str,
    budget: str,
    *,
    gate: Gate | None = None,
    cache: PlanCache | None = None,
    **options: Any,
) -> LiveSteps:
    """Steps on `device`, wherever the module's tensors are now. `optimizer`: None for the forward
    pass alone. `options`: of the plans."""
    made = partial(planned_to, budget=budget, cache=cache, **options)
    run_by = partial(Runner, engine=engine, gate=gate)
    how: dict[str, Any] = {"device": device, "run_by": run_by, "cache": cache}
    if optimizer is None:
        return LiveSteps(without_gradients(module), made, module, **how)
    return LiveSteps(eager(case, module, optimizer), made, module, optimizer, **how)


def without_gradients(module: nn.Module) -> Callable[..., torch.Tensor]:
    def step(*batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return module(*batch)

    return step


def planned_to(graph: TaskGraph, budget: str, **more: Any) -> Plan:
    """none: no limit; minimum: the smallest that holds it; a share of the peak; else a size."""
    if budget in ("none", "minimum"):
        return planned(graph, None if budget == "none" else 0.0, **more)
    if budget.endswith(" %"):
        return planned(graph, float(budget.removesuffix(" %")) / 100, **more)
    return plan(graph, budget, **more)


def replayed(runner: Runner) -> bool | None:
    """Whether steps are replays of what was captured; None: the engine captures nothing. Where a
    step cannot be captured the loop runs it, which would be compared with itself."""
    if not isinstance(runner.stage.engine, CudaGraph):
        return None
    return any(known.graphs for known in runner.stage.engine._known.values())


def priced(steps: LiveSteps, batch: Batch) -> Plan:
    """The plan priced by what its first steps took, or another one where that is faster: then the
    steps go on by it."""
    before, traces = steps.plan, list[Trace]()
    steps.runner.measure()
    for _ in range(FIRST):
        steps(*batch)
        traces.append(steps.runner.trace)
    steps.runner.measure(False)
    made = before.measured(traces).remade()
    if made.memgraph is not before.memgraph:
        steps.move_to(made)
    return made


def eager(
    case: Case, module: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[..., torch.Tensor]:
    """The step as anybody writes it. Returns the loss."""
    return training_step(module, case.loss(module), optimizer)


def facts(made: Plan) -> Row:
    nodes, tasks = made.memgraph.nodes, made.graph.tasks
    return {
        "placement": made.placement,
        "peak_mib": made.peak_bytes / MIB,
        "device_mib": made.device_bytes / MIB,
        "host_mib": made.host_bytes / MIB,
        "tasks": len(tasks),
        "recomputed": sum(bool(task.recomputes) for task in tasks),
        "offloads": sum(node.kind == OFFLOAD for node in nodes),
        "reloads": sum(node.kind == RELOAD for node in nodes),
        "out_mib": sum(node.nbytes for node in nodes if node.kind == OFFLOAD) / MIB,
        "in_mib": sum(node.nbytes for node in nodes if node.kind == RELOAD) / MIB,
        "predicted_s": made.predicted_seconds,
        "bound_s": made.bound.seconds,
        "binds": made.bound.lane,
        "two_phase_s": made.simulation.two_phase,
        "resident_s": made.resident_seconds,
    }


def attempt(measure: Callable[[], Row]) -> Row:
    """What leaves the process whole is the cell's problem, and the next cell goes on in it. Any
    other error ends the process: after one of the device nothing in it can be trusted."""
    try:
        return measure()
    except (OffloadError, torch.OutOfMemoryError, MemoryError) as error:
        return {"problem": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
