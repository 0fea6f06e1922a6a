"""The plans of a live session as the strategy's user wishes them, with their times."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from offload import Plan, PlanCache, Runner, TaskGraph
from offload.plans.plan import Budget
from trainers.offloading.hardware.meter import Meter
from trainers.offloading.plan_request import PlanRequest

EVALUATIONS = ("validation_step", "test_step", "predict_step")


class LivePlanner:
    """Of one session."""

    def __init__(self, request: PlanRequest, meter: Meter, remark: str = "") -> None:
        """`remark`: what every plan's explanation tells, too."""
        self.request = request
        self._meter = meter
        self._remark = remark
        self._inputs = self._part = ""
        self._counted: set[Hashable] = set()
        """What is a part of training, whose time is counted."""

    def begin(self, part: str, given: Any) -> None:
        """Know what the step that begins does, and what it is given."""
        self._part, self._inputs = part, _shapes(given)

    @property
    def cache(self) -> PlanCache | None:
        return self.request.cache

    def plan(self, graph: TaskGraph, budget: Budget) -> Plan:
        assert budget is None or isinstance(budget, str | int)
        with self._meter.planning():
            return replace(self.request, budget=budget).plan(graph)

    def runner(self, plan: Plan, key: Hashable) -> Runner:
        return self.request.target.runner(plan, key)

    def added(self, key: Hashable, plan: Plan) -> None:
        if self._remark:
            plan.remarks.say(self._remark)
        if self._part not in EVALUATIONS:
            self._counted.add(key)
            self._meter.add(key, plan, self._inputs, self._part)

    def run(self, runner: Runner, key: Hashable, batch: Collection[torch.Tensor]) -> Sequence[Any]:
        if key not in self._counted:
            return runner.run(key, *batch)
        runner.measure(self._meter.wants_times(key))
        begun = self._meter.begin()
        made = runner.run(key, *batch)
        self._meter.ran(key, begun, runner.trace)
        return made


def _shapes(given: Any) -> str:
    found = [str(tuple(t.shape)) for t in _tensors(given)]
    return ", ".join(found)


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, dict):
        yield from _tensors([*given.values()])
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _tensors(one)
