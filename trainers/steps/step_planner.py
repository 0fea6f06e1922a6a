"""Makes the plans of a live session with the user's options, and measures their runs."""

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from offload import BudgetTooSmall, Costs, Plan, PlanCache, Runner, TaskGraph
from offload.lowering.device_placing import place_tasks
from offload.lowering.passes import MERGES
from offload.plans.plan import Budget
from trainers.steps.meter import Meter
from trainers.steps.plan_request import PlanRequest

EVALUATIONS = ("validation_step", "test_step", "predict_step")


class StepPlanner:
    """Plans and runs the steps of one session."""

    def __init__(self, request: PlanRequest, meter: Meter, remark: str = "") -> None:
        """`remark`: a line that the explanation of every plan ends with."""
        self.request = request
        self._meter = meter
        self._remark = remark
        self._part, self._inputs = "", None
        self._unplaced: TaskGraph | None = None
        """The latest step, if it may be spread over more devices later."""
        self._counted: set[Hashable] = set()
        """The keys of the plans of training, whose time is counted."""

    def begin(self, part: str, inputs: Any) -> None:
        """Note which part of training the next step is, and its inputs."""
        self._part, self._inputs = part, inputs

    def end(self) -> None:
        """Let go of the inputs."""
        self._inputs = None

    @property
    def cache(self) -> PlanCache | None:
        return self.request.cache

    def place(self, graph: TaskGraph, homes: Mapping[str, int]) -> TaskGraph:
        if self.request.most_devices > self.request.devices:
            self._unplaced = graph
        return place_tasks(graph, self.request.devices, self._costs, homes=homes)

    @property
    def _costs(self) -> Costs:
        return self.request.target.costs or Costs()

    def seconds_by_devices(self) -> tuple[float, ...]:
        """Predict the latest step on 1, 2, .. devices; infinite where there is no plan of it."""
        devices = range(1, self.request.most_devices + 1)
        return tuple(self._predict_on(count) for count in devices)

    def _predict_on(self, count: int) -> float:
        assert self._unplaced is not None
        graph = place_tasks(self._unplaced, count, self._costs)
        for run_pass in MERGES:
            graph = run_pass(graph)
        try:
            return self.request.plan(graph).predicted_seconds
        except BudgetTooSmall:
            return math.inf

    def plan(self, graph: TaskGraph, budget: Budget) -> Plan:
        assert budget is None or isinstance(budget, str | int)
        with self._meter.planning():
            return replace(self.request, budget=budget).plan(graph)

    def runner(self, plan: Plan, key: Hashable) -> Runner:
        return self.request.target.runner(plan, key)

    def note_plan(self, key: Hashable, plan: Plan) -> None:
        if self._remark:
            plan.remarks.add(self._remark)
        if self._part not in EVALUATIONS:
            self._counted.add(key)
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in _tensors(self._inputs))
            self._meter.add(key, plan, shapes, self._part)

    def run(self, runner: Runner, key: Hashable, batch: Collection[torch.Tensor]) -> Sequence[Any]:
        if key not in self._counted:
            return runner.run(key, *batch)
        runner.measure(self._meter.wants_times(key))
        begun = self._meter.begin()
        made = runner.run(key, *batch)
        self._meter.ran(key, begun, runner.trace)
        return made


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, dict):
        yield from _tensors([*given.values()])
    elif isinstance(given, list | tuple):
        for item in given:
            yield from _tensors(item)
