"""Plans that spread a step over several devices, wherever its cuts fall."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import torch
from support.live_training import LiveTraining, TestPlanner
from support.offload_training import Training, rated

import offload
from offload import Costs, Plan, TaskGraph
from offload.lowering.device_placing import place_tasks

COSTS = Costs(flops=1e12, memory=1e12, launch=1e-7, h2d=2e10, d2h=2e10, d2d=2e10, copy=1e-7)


class PlacingPlanner(TestPlanner):
    """Plans a step on so many devices, each of which has this share of one device's peak."""

    def __init__(self, devices: int, laps: int, share: float, **how: Any) -> None:
        super().__init__(None, lambda _: nullcontext(), how)
        self._placed = devices, laps
        self._share, self._wanted = share, 0
        self.last: Plan | None = None

    def place(self, graph: TaskGraph, homes: Mapping[str, int]) -> TaskGraph:
        whole = offload.plan(graph, None, COSTS)
        self._wanted = whole.reserve + int(whole.peak_bytes * self._share)
        devices, laps = self._placed
        timings = (timed_at_random(graph, seed) for seed in range(10))
        return [place_tasks(timed, devices, COSTS, (laps,), homes) for timed in timings][-1]

    def plan(self, graph: TaskGraph, budget: Any) -> Plan:
        del budget
        try:
            self.last = offload.plan(graph, self._wanted or 1, COSTS)
        except offload.BudgetTooSmall as refused:
            self.last = offload.plan(graph, refused.needed, COSTS)
        self.last.verify()
        return self.last


def compare_training(case: Training, planner: PlacingPlanner) -> None:
    """Train by the planner's plans. Every loss, weight and state must have eager's bits."""
    case.restart()
    around = case.case.around
    with LiveTraining(
        case.model, case.case.loss, case.optimizer, around=around, planner=planner
    ) as step_of:
        for number, batch in enumerate(case.batches):
            rated(case.optimizer, number)
            torch.manual_seed(number)
            (loss,) = step_of(*batch)
            assert torch.equal(loss, case.losses[number]), number
        case.compare()
    case.compare()


def timed_at_random(graph: TaskGraph, seed: int) -> TaskGraph:
    """Cuts fall anywhere, as on machines whose kernels take other times."""
    dice = Random(seed)
    return graph.with_tasks([replace(task, seconds=dice.random()) for task in graph.tasks])
