"""A step, planned to a byte budget and run in any legal order. Imports none of our other packages.

    graph = offload.capture_training_step(module, loss_fn, optimizer, *batch)
    plan = offload.plan(graph, budget="8GiB")
    with offload.Runner(plan) as runner:
        loss, *_ = runner(*batch)

step -> TaskGraph -> Plan (MemGraph) -> Runner. See docs/offload.md.
"""

from offload.errors import (
    BudgetTooSmall,
    CaptureError,
    DeviceLost,
    GraphError,
    MemoryTooSmall,
    OffloadError,
    RaceFound,
    StepError,
)
from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.memgraph import MemGraph
from offload.graph.taskgraph import Buffer, Role, Task, TaskGraph
from offload.lowering.passes import lower
from offload.measuring.calibration import calibrate
from offload.planning.simulator import Simulation, simulate
from offload.planning.verify import verify
from offload.plans.plan import Plan, plan
from offload.plans.prefill import prefill
from offload.running.runner import Runner
from offload.tracing.capture import capture, capture_training_step

__all__ = [
    "BudgetTooSmall",
    "Buffer",
    "CaptureError",
    "Costs",
    "DeviceLost",
    "GraphBuilder",
    "GraphError",
    "MemGraph",
    "MemoryTooSmall",
    "OffloadError",
    "Plan",
    "RaceFound",
    "Role",
    "Runner",
    "Simulation",
    "StepError",
    "Task",
    "TaskGraph",
    "calibrate",
    "capture",
    "capture_training_step",
    "lower",
    "plan",
    "prefill",
    "simulate",
    "verify",
]
