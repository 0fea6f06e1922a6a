"""A step, planned to a byte budget and run in any legal order. Imports none of our other packages.

    graph = offload.capture_training_step(module, loss_fn, optimizer, *batch)
    plan = offload.plan(graph, budget="8GiB")
    with offload.Runner(plan) as runner:
        loss, *_ = runner(*batch)

step -> TaskGraph -> Plan (MemGraph) -> Runner. See docs/offload.md.
"""

from offload.calibration import calibrate
from offload.capture import capture, capture_training_step
from offload.costs import Costs
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
from offload.executor import Runner
from offload.lowering import lower
from offload.memgraph import MemGraph
from offload.plan import Plan, plan
from offload.prefill import prefill
from offload.simulator import Simulation, simulate
from offload.taskgraph import Buffer, Role, Task, TaskGraph
from offload.verify import verify

__all__ = [
    "BudgetTooSmall",
    "Buffer",
    "CaptureError",
    "Costs",
    "DeviceLost",
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
