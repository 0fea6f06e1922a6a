"""The public names of offload, each imported from where it is."""

from offload.caching.plan_cache import PlanCache
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
from offload.live.function_capture import capture
from offload.live.prefill import prefill
from offload.live.within import within
from offload.lowering.passes import lower
from offload.measuring.calibration import calibrate
from offload.planning.simulator import Simulation, simulate
from offload.planning.verify import verify
from offload.plans.plan import Plan, plan
from offload.running.runner import Runner

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
    "PlanCache",
    "RaceFound",
    "Role",
    "Runner",
    "Simulation",
    "StepError",
    "Task",
    "TaskGraph",
    "calibrate",
    "capture",
    "lower",
    "plan",
    "prefill",
    "simulate",
    "verify",
    "within",
]
