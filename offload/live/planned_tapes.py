"""The plans of a session's tapes, which share one runner and its arenas."""

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from offload.graph.costs import Costs
from offload.graph.taskgraph import TaskGraph
from offload.live.graphs import LiveGraph, graph_of
from offload.live.weights import LiveWeights
from offload.lowering.passes import grouped, lower
from offload.measuring.profiling import measured
from offload.plans.plan import Budget, Plan, fullest, plan, reserve_of
from offload.running.runner import Runner
from offload.sizes import is_share, parse_share

GROUP, GROUP_BYTES = 32, 1 << 20
"""A group of small kernels has at most so many, which touch at most so many bytes."""


@dataclass(frozen=True, slots=True)
class PlannedTape:
    """The graph of a tape, and the passes of the tape that it serves."""

    live: LiveGraph
    kind: bytes
    held: frozenset[int]
    varying: frozenset[int]

    def serves(self, tape: Any, held: Collection[int]) -> bool:
        """Whether it computes what this pass is to compute."""
        return (
            self.kind == tape.kind
            and self.held.issuperset(held)
            and self.varying.issuperset(tape.varied)
        )


class PlannedTapes:
    """Makes a plan for a tape when its first pass is to run."""

    def __init__(
        self,
        core: Any,
        weights: LiveWeights,
        budget: Budget,
        device: torch.device,
        costs: Costs | None,
    ) -> None:
        self._core = core
        self._weights = weights
        self._budget = budget
        self._device = device
        self._costs = costs
        self._planned: dict[int, PlannedTape] = {}
        self._runner: Runner | None = None
        self.plan: Plan | None = None
        """The first one."""

    def run(self, tape: Any, held: Collection[int]) -> None:
        """Run the kernels of a pass, and give what is held its bytes. Raises `CaptureError`,
        before anything runs, if the tape has no place in a plan."""
        planned = self._planned.get(tape.leaf)
        if planned is None or not planned.serves(tape, held):
            planned = self._planned[tape.leaf] = self._make(tape, held, planned)
        live = planned.live
        live.numbers.take(tape)
        batch = [tape.given_bytes(one.slot, one.start, one.nbytes) for one in live.inputs]
        assert self._runner is not None
        try:
            made = self._runner.run(tape.leaf, *batch)
        finally:
            self._core.nothing_pending()
        for slot, tensor in zip(live.outputs, made, strict=True):
            tape.hand_over(slot, tensor)

    def _make(self, tape: Any, held: Collection[int], old: PlannedTape | None) -> PlannedTape:
        """`old`: what was planned before serves no longer."""
        returned, varying = frozenset(held), frozenset(tape.varied)
        if old is not None:
            returned, varying = returned | old.held, varying | old.varying
        self._core.nothing_pending()
        weights = self._weights.of(tape)
        live = graph_of(self._core, tape, weights, returned, varying, self._device)
        self._add(tape.leaf, _with_few_tasks(lower(measured(live.graph))))
        return PlannedTape(live, tape.kind, returned, varying)

    def _add(self, key: int, graph: TaskGraph) -> None:
        if self._runner is None:
            self.plan = plan(graph, _bytes_of(self._budget, graph), self._costs)
            self._runner = Runner(self.plan, key=key)
        else:
            self._runner.forget(key)
            self._runner.add(key, graph)

    def close(self) -> None:
        """Give every tensor memory of its own again."""
        if self._runner is not None:
            self._runner.close()


def _with_few_tasks(graph: TaskGraph) -> TaskGraph:
    """Small kernels in groups, none larger than the largest task: an engine's overhead is paid once
    a group."""
    largest = max(sum(graph.buffers[b].nbytes for b in task.touches) for task in graph.tasks)
    return grouped(graph, GROUP, min(GROUP_BYTES, largest), any_kind=True)


def _bytes_of(budget: Budget, graph: TaskGraph) -> Budget:
    """A share is one of what the step needs if nothing ever leaves the device."""
    if not isinstance(budget, str) or not is_share(budget):
        return budget
    return ceil(fullest(graph) * parse_share(budget)) + reserve_of(graph)
