"""The plans of one runner: its first one, and those of other steps over the same tensors.

first plan     places all tensors
replan(graph)  the plan of another step, with the same budget and the same homes
"""

from collections.abc import Hashable, Sequence

import torch

from offload.errors import StepError
from offload.graph.taskgraph import TaskGraph
from offload.memory.runnable import RunnablePlan
from offload.program.kernels import Program
from offload.running.binding import program_of
from offload.running.input_checks import Shape, shape_of


class StepPlans:
    """All methods are called under the lock of the runner's stage."""

    def __init__(self, plan: RunnablePlan, key: Hashable = None) -> None:
        self._graphs: dict[Hashable, TaskGraph] = {}
        """The graphs of other steps, to plan them again after a move."""
        self._start_with(plan, key)

    def _start_with(self, plan: RunnablePlan, key: Hashable) -> None:
        self.plan = plan
        """The first plan."""
        self.program: Program = program_of(plan.graph)
        """The program of the first plan."""
        self.first: Hashable = self._shape if key is None else key
        """The key of its step."""
        self._plans: dict[Hashable, RunnablePlan] = {self.first: plan}

    def go_over(self, plan: RunnablePlan, key: Hashable) -> None:
        """Replace the first plan. Other steps are planned again when they are run, but not those
        that were captured for another device."""
        if program_of(plan.graph).device != self.program.device:
            self._graphs.clear()
        self._start_with(plan, key)

    def __getitem__(self, key: Hashable) -> RunnablePlan:
        return self._plans[key]

    def key_for_batch(self, batch: Sequence[torch.Tensor]) -> Hashable:
        """The key of the plan for a batch of this shape, which is made at the first call."""
        shape = shape_of(batch, self.program)
        if not self._is_planned(shape):
            self._graphs[shape] = graph = self._capture(batch)
            self._plans[shape] = self.plan.replan(graph)
        return shape

    def _is_planned(self, key: Hashable) -> bool:
        """Whether there is a plan of this step. It is made again if there was one before a
        move."""
        if key not in self._plans and key in self._graphs:
            self._plans[key] = self.plan.replan(self._graphs[key])
        return key in self._plans

    def add(self, key: Hashable, graph: TaskGraph) -> RunnablePlan:
        plan = self.plan.replan(graph)
        self._plans[key], self._graphs[key] = plan, graph
        return plan

    def check_added(self, key: Hashable, batch: Sequence[torch.Tensor]) -> Hashable:
        """Return the key. Raises `StepError` unless the step was added, for batches like this."""
        if not self._is_planned(key):
            raise StepError(f"this runner has no step {key!r}: add(key, graph) comes first")
        program = program_of(self._plans[key].graph)
        shape = tuple(value.size for value in program.inputs)
        if shape_of(batch, program) != shape:
            raise StepError(f"the step is for inputs of shape {shape}")
        return key

    def forget(self, key: Hashable) -> None:
        self._plans.pop(key, None)
        self._graphs.pop(key, None)

    def _capture(self, batch: Sequence[torch.Tensor]) -> TaskGraph:
        if self.program.recapture is None:
            raise StepError(
                f"the step is for inputs of shape {self._shape} and cannot be captured anew;"
                f" {tuple(tuple(given.shape) for given in batch)} were given"
            )
        return self.program.recapture(*batch)

    @property
    def _shape(self) -> Shape:
        return tuple(value.size for value in self.program.inputs)
