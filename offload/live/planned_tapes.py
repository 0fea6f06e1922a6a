"""The plans of a session's tapes, which share one runner and its arenas.

tape         no cut               one part, which runs at the step's end
tape | cut | tape                 two: what is made before a cut and used after it has a home
                                  until the step is over, as a weight has for good
"""

import gc
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from offload.graph.costs import Costs
from offload.graph.taskgraph import Role, TaskGraph
from offload.live.graphs import TapeEnds, Weight, graph_of
from offload.live.tape_calls import TapeReader
from offload.live.tried_costs import costs_without_moves
from offload.live.weights import LiveWeights
from offload.lowering.passes import grouped, lower
from offload.measuring.kept_costs import MeasuredCosts
from offload.measuring.profiling import measured
from offload.plans.plan import Budget, Plan, fullest, plan, reserve_of
from offload.running.runner import Runner
from offload.sizes import is_share, parse_share

GROUP, GROUP_BYTES = 32, 1 << 20
"""A group of small kernels has at most so many, which touch at most so many bytes."""


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """What a plan of a tape's part between two cuts needs, and the passes that it serves."""

    ends: TapeEnds
    kind: bytes
    held: frozenset[int]
    varying: frozenset[int]
    crossing: Mapping[int, tuple[int, Weight]]
    """By slot: the number and the place of what the cut at its end is crossed by."""
    unwritten: Mapping[int, int]
    """By slot: the bytes of memory that is only allocated, and held."""

    def serves(self, tape: Any, held: Collection[int]) -> bool:
        """Whether it computes what this pass is to compute."""
        return (
            self.kind == tape.kind
            and self.held.issuperset(held)
            and self.varying.issuperset(tape.varied)
        )


class PlannedTapes:
    """Makes a plan for a part of a tape when its first pass is to run."""

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
        self._planned: dict[Hashable, PlannedPart] = {}
        self._plans = RunnerPlans(budget, costs)
        moves = self._plans.moves
        self._measured = MeasuredCosts() if moves else costs_without_moves(core, device)

    @property
    def plan(self) -> Plan | None:
        """That of the largest part."""
        return self._plans.plan

    def run(self, tape: Any, held: Collection[int], at_home: Collection[int]) -> None:
        """Run the kernels of a pass since its last cut. What is held gets its bytes at once, or, if
        it is kept `at_home`, when somebody looks. Raises `CaptureError`, before anything runs, if
        they have no place in a plan."""
        key = tape.begin, tape.leaf
        self._weights.take_places(tape)
        part = self._planned.get(key)
        if part is not None and part.serves(tape, held):
            self._run(key, tape, part)
            return
        with collector_paused():
            part = self._planned[key] = self._make(key, tape, held, part, at_home)
            self._run(key, tape, part)

    def _run(self, key: Hashable, tape: Any, part: PlannedPart) -> None:
        ends = part.ends
        ends.numbers.take(tape)
        tape.hide_shown()
        self._core.vacate({own for own, _ in part.crossing.values()})
        batch = [tape.given_bytes(one.slot, one.start, one.nbytes) for one in ends.inputs]
        try:
            made = self._plans.run(key, batch)
        finally:
            self._core.nothing_pending()
        for slot, tensor in zip(ends.outputs, made, strict=True):
            tape.hand_over(slot, tensor)
        for slot, (own, weight) in part.crossing.items():
            tape.cross(slot, own, weight.home)
        for slot, nbytes in part.unwritten.items():
            tape.give_memory(slot, torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        tape.ran_by_plan()

    def _make(
        self,
        key: Hashable,
        tape: Any,
        held: Collection[int],
        old: PlannedPart | None,
        at_home: Collection[int],
    ) -> PlannedPart:
        """`old`: what was planned before serves no longer."""
        kept, varying = frozenset(held), frozenset(tape.varied)
        if old is not None:
            kept, varying = kept | old.held, varying | old.varying
        self._core.nothing_pending()
        weights = self._weights.of(tape)
        varying |= _numbers_of_updates(tape, weights)
        reader = TapeReader(self._core, tape, varying, self._device)
        crossing = dict(old.crossing) if old is not None else {}
        for slot in kept & reader.written & {*at_home} - {*weights, *crossing}:
            crossing[slot] = self._weights.cross(reader.nbytes[slot])
        weights |= {slot: weight for slot, (_, weight) in crossing.items()}
        given = [n for n, origin in enumerate(tape.origins) if origin == self._core.GIVEN]
        graph, ends = graph_of(reader, given, weights, kept, self._weights.all)
        self._plans.add(key, _with_few_tasks(lower(measured(graph, self._measured))))
        unwritten = {s: reader.nbytes[s] for s in (kept & reader.allocated) - reader.written}
        return PlannedPart(ends, tape.kind, kept, varying, crossing, unwritten)

    def forget(self) -> None:
        """Drop all parts. Weights stay where they are."""
        self._planned.clear()
        self._measured.forget()
        self._plans.forget()
        self._weights.forget_places()

    def close(self) -> None:
        """Give every tensor memory of its own again."""
        self._plans.close()


class RunnerPlans:
    """One runner's plans. The first one gives all weights their homes; when there are more weights,
    another plan does."""

    def __init__(self, budget: Budget, costs: Costs | None) -> None:
        self._budget = budget
        self._costs = costs
        self._graphs: dict[Hashable, TaskGraph] = {}
        self._needs: dict[Hashable, tuple[int, int]] = {}
        """Of each graph: the bytes it has at once, and the reserve beside them."""
        self._runner: Runner | None = None
        self._homes: set[str] = set()
        self._planned_with: Budget = None
        self._plans: dict[Hashable, Plan] = {}

    @property
    def plan(self) -> Plan | None:
        """That of the largest graph."""
        return max(self._plans.values(), key=lambda plan: len(plan.graph.tasks), default=None)

    def add(self, key: Hashable, graph: TaskGraph) -> None:
        self._graphs[key], self._needs[key] = graph, (fullest(graph), reserve_of(graph))
        if self._runner is not None and self._plans.pop(key, None) is not None:
            self._runner.forget(key)

    def run(self, key: Hashable, batch: Collection[torch.Tensor]) -> tuple[Any, ...]:
        graph = self._graphs[key]
        if not graph.tasks:  # nobody needs what it makes
            return ()
        homes = {buffer.tensor for buffer in graph.buffers if buffer.persistent}
        budget = self._bytes_of_budget()
        if self._runner is None or not homes <= self._homes or budget != self._planned_with:
            self._start_with(key, graph, budget)
            self._homes |= homes
        elif key not in self._plans:
            added = self._runner.add(key, graph)
            assert isinstance(added, Plan)
            self._plans[key] = added
        assert self._runner is not None
        return self._runner.run(key, *batch)

    def _start_with(self, key: Hashable, graph: TaskGraph, budget: Budget) -> None:
        """Every other graph is planned again when it runs."""
        found = plan(graph, budget, self._costs)
        if self._runner is None:
            self._runner = Runner(found, key=key)
        else:
            self._runner.move_to(found, key, beside=self._budget is None)
        self._plans, self._planned_with = {key: found}, budget

    @property
    def moves(self) -> bool:
        """Whether a plan may move something."""
        return self._budget is not None and (self._share is None or self._share < 1)

    @property
    def _share(self) -> float | None:
        is_one = isinstance(self._budget, str) and is_share(self._budget)
        return parse_share(str(self._budget)) if is_one else None

    def _bytes_of_budget(self) -> Budget:
        """A share is one of what the largest part needs if nothing ever leaves the device. With all
        of it nothing does, so there is no plan to search for."""
        if not self.moves or self._share is None:
            return self._budget if self.moves else None
        needs = self._needs.values()
        return max(ceil(most * self._share) + reserve for most, reserve in needs)

    def forget(self) -> None:
        if self._runner is not None:
            for key in self._plans:
                self._runner.forget(key)
        for known in (self._plans, self._graphs, self._needs):
            known.clear()

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within it, garbage is not searched for: plans make many objects, and all of them stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _numbers_of_updates(tape: Any, weights: Mapping[int, Weight]) -> frozenset[int]:
    """The numbers since the first write to a weight that is trained: rates and corrections, which
    differ from step to step."""
    trained = {s for s, w in weights.items() if w.role in (Role.PARAMETER, Role.STATE)}
    nodes = tape.nodes[tape.begin :]
    first = next((n for n, node in enumerate(nodes) if not trained.isdisjoint(node.written)), None)
    return frozenset[int]() if first is None else frozenset(nodes[first].numbers_since(nodes[-1]))


def _with_few_tasks(graph: TaskGraph) -> TaskGraph:
    """Small kernels in groups, none larger than the largest task: an engine's overhead is paid once
    a group."""
    sizes = (sum(graph.buffers[b].nbytes for b in task.touches) for task in graph.tasks)
    largest = max(sizes, default=0)
    return grouped(graph, GROUP, min(GROUP_BYTES, largest), any_kind=True)
