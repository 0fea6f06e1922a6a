"""Every call of `offload` that the suite makes: captured on a device, planned, run by an engine."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from offloading.steps import MIB, planned
from torch import nn

from gpu.models import Batch, Case
from gpu.part import Row
from offload import OffloadError, Plan, Runner, TaskGraph, capture, capture_training_step, plan
from offload.graph.memgraph import OFFLOAD, RELOAD
from offload.running.engines.cudagraph import CudaGraph
from offload.running.engines.streams import Streams
from offload.running.trace import Trace

ENGINES = ("cuda", "cudagraph")
"""The loop first, then what has no loop."""
SHARES: Mapping[str, float | None] = {"none": None, "60 %": 0.6, "minimum": 0.0}
"""Of the peak that the step has without a budget."""
FIRST = 3
"""Steps that price a plan."""


def captured(
    case: Case,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    device: str,
) -> TaskGraph:
    """The step on `device`, wherever the module's tensors are now."""
    loss = case.loss(module)
    return capture_training_step(module, loss, optimizer, *batch, device=torch.device(device))


def step_graph(
    case: Case,
    module: nn.Module,
    batch: Batch,
    device: str,
    prefill: bool,
) -> TaskGraph:
    """A training step with an optimizer of its own, or the forward pass alone."""
    if not prefill:
        return captured(case, module, case.optimizer(module), batch, device)

    def step(*inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            return module(*inputs)

    return capture(step, *batch, device=torch.device(device))


def planned_to(graph: TaskGraph, budget: str, **more: Any) -> Plan:
    """none: no limit; minimum: the smallest that holds it; else a size or a share of the peak."""
    if budget in SHARES:
        return planned(graph, SHARES[budget], **more)
    return plan(graph, budget, **more)


def run_by(engine: str, made: Plan, depth: int | None = None) -> Runner:
    """`depth`: nodes that are enqueued ahead on a stream, of an engine that does so."""
    runner = Runner(made, engine)
    if depth is not None:
        # No option of a runner: whoever trains has no use for another one.
        assert isinstance(runner.stage.engine, Streams), engine
        runner.stage.engine._depth = depth
    return runner


def replayed(runner: Runner) -> bool | None:
    """Whether steps are replays of what was captured; None: the engine captures nothing. Where a
    step cannot be captured the loop runs it, which would be compared with itself."""
    if not isinstance(runner.stage.engine, CudaGraph):
        return None
    return any(known.graphs for known in runner.stage.engine._known.values())


def first_steps(made: Plan, engine: str, batch: Batch) -> Plan:
    """The plan priced by what its first steps took, or another one where that is faster."""
    traces: list[Trace] = []
    with run_by(engine, made) as runner:
        runner(*batch)
        runner.measure()
        for _ in range(FIRST):
            runner(*batch)
            traces.append(runner.trace)
    return made.measured(traces).remade()


def eager(
    case: Case, module: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[..., torch.Tensor]:
    """The step as anybody writes it. Returns the loss."""
    loss_of = case.loss(module)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(module(*batch[:-1]), batch[-1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


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
