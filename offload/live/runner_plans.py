"""One runner's plans. The first one gives all weights their homes; when there are more weights,
another plan does.

budget 60%    of what the largest part of a step needs if nothing ever leaves the device
budget None   every part has a plan as fast as it can be
"""

import logging
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, Protocol

import torch

from offload.caching.plan_cache import PlanCache
from offload.errors import BudgetTooSmall
from offload.graph.costs import Costs
from offload.graph.taskgraph import BACKWARD, FORWARD, UPDATE, TaskGraph
from offload.live.lanes import has_lanes
from offload.lowering.device_placing import place_tasks
from offload.plans.plan import Budget, Plan, largest_peak, plan, reserve_of
from offload.running.runner import Runner
from offload.running.runner_memory import Migration
from offload.sizes import format_size, is_share, parse_share

log = logging.getLogger(__name__)


class TapePlanner(Protocol):
    """Makes plans as somebody wishes them, and runs them."""

    @property
    def cache(self) -> PlanCache | None:
        """Where it is kept what kernels cost."""
        ...

    def place(self, graph: TaskGraph, homes: Mapping[str, int]) -> TaskGraph:
        """Spread a graph over the devices. `homes`: where its tensors are by now."""
        ...

    def plan(self, graph: TaskGraph, budget: Budget) -> Plan: ...

    def runner(self, plan: Plan, key: Hashable) -> Runner: ...

    def note_plan(self, key: Hashable, plan: Plan) -> None:
        """Note a plan that will run under this key."""
        ...

    def run(
        self, runner: Runner, key: Hashable, batch: Collection[torch.Tensor]
    ) -> Sequence[Any]: ...


class PlainPlanner:
    """Plans with these rates, and with these options of `offload.plan`."""

    cache = None

    def __init__(self, costs: Costs | None = None, devices: int = 1, **options: Any) -> None:
        self._costs = costs
        self._devices = devices
        self._options = options

    def place(self, graph: TaskGraph, homes: Mapping[str, int]) -> TaskGraph:
        return place_tasks(graph, self._devices, self._costs or Costs(), homes=homes)

    def plan(self, graph: TaskGraph, budget: Budget) -> Plan:
        return plan(graph, budget, self._costs, **self._options)

    def runner(self, plan: Plan, key: Hashable) -> Runner:
        return Runner(plan, key=key)

    def note_plan(self, key: Hashable, plan: Plan) -> None:
        del key, plan

    def run(self, runner: Runner, key: Hashable, batch: Collection[torch.Tensor]) -> Sequence[Any]:
        return runner.run(key, *batch)


class RunnerPlans:
    """Makes a plan of a graph when it is to run for the first time."""

    def __init__(self, planner: TapePlanner, budget: Budget) -> None:
        self._planner = planner
        self._budget = budget
        self.budget_bytes: Budget = None
        """The budget in bytes, as the graphs so far need it; None: no limit."""
        self._graphs: dict[Hashable, TaskGraph] = {}
        self._homes_of: dict[Hashable, frozenset[str]] = {}
        self._needs: dict[Hashable, tuple[int, int]] = {}
        """Of each graph: the bytes it has at once, and the reserve beside them."""
        self.runner: Runner | None = None
        self._homes: set[str] = set()
        self._home_devices: dict[str, int] = {}
        self._planned_with: Budget = None
        self._plans: dict[Hashable, Plan] = {}
        self._runs: Counter[Hashable] = Counter()

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest graph, if possible of an update that ran again. The first step of
        an optimizer makes its states, and does not come again."""

        def rank(key: Hashable) -> tuple[bool, bool, int]:
            tasks = self._plans[key].graph.tasks
            updates = any(task.phase == UPDATE for task in tasks)
            return updates and self._runs[key] > 1, updates, len(tasks)

        return self._plans[max(self._plans, key=rank)] if self._plans else None

    @property
    def refused(self) -> bool:
        """Whether the first graph has got no plan, or no runner."""
        return self.runner is None and bool(self._graphs)

    def place(self, graph: TaskGraph) -> TaskGraph:
        """Spread a graph over the devices. What has a home keeps it."""
        return self._planner.place(graph, self._home_devices)

    def add(self, key: Hashable, graph: TaskGraph) -> None:
        self._graphs[key] = graph
        self._homes_of[key] = frozenset(b.tensor for b in graph.buffers if b.persistent)
        if not self._needs or not has_lanes(graph):  # lanes: those of one
            self._needs[key] = largest_peak(graph), reserve_of(graph)
            self.budget_bytes = self._bytes_of(self._budget)
        if self.runner is not None and self._plans.pop(key, None) is not None:
            self.runner.forget(key)

    def run(self, key: Hashable, batch: Collection[torch.Tensor]) -> Sequence[Any]:
        graph = self._graphs[key]
        if not graph.tasks:  # nobody needs what it makes
            return ()
        if self.runner is None or not self._are_at_home(key):
            self._start_with(key, self._plan_of(graph, self._budget, self._planner))
            self._homes |= self._homes_of[key]
        elif key not in self._plans:
            with self._share_in_refusals(self._budget):
                added = self.runner.add(key, graph)
            assert isinstance(added, Plan)
            self._note(key, added)
        assert self.runner is not None
        self._runs[key] += 1
        return self._planner.run(self.runner, key, batch)

    def _are_at_home(self, key: Hashable) -> bool:
        """Whether the runner has a home for every weight, within the present budget."""
        return self._homes_of[key] <= self._homes and self.budget_bytes == self._planned_with

    def has(self, key: Hashable) -> bool:
        """Whether this can run as it is, and nothing has to be planned or moved before."""
        return key in self._plans and self._are_at_home(key)

    def move_to(self, budget: Budget, new_plan: Plan) -> Migration:
        """Go on within another budget. `found`: the plan of the largest graph in it."""
        key = next(key for key, plan in self._plans.items() if plan is self.plan)
        before = self._budget, self.budget_bytes
        self._budget, self.budget_bytes = budget, self._bytes_of(budget)
        try:
            moved = self._start_with(key, new_plan)
        except BaseException:
            self._budget, self.budget_bytes = before
            raise
        assert moved is not None
        return moved

    def plan_in(self, budget: Budget, planner: TapePlanner, *, places: bool = False) -> Plan:
        """The plan of the largest graph in another budget. Any thread may ask for it. `places`: on
        the devices of this planner."""
        assert self.plan is not None
        graph = self.plan.source
        if places:
            graph = planner.place(graph.on_one_device(), {})
        return self._plan_of(graph, budget, planner)

    def _start_with(self, key: Hashable, plan: Plan) -> Migration | None:
        """Every other graph is planned again when it runs."""
        moved = None
        if self.runner is None:
            self.runner = self._planner.runner(plan, key)
        else:
            moved = self.runner.move_to(plan, key, beside=self._budget is None)
            log.debug("weights moved: %d bytes in %.3f s", moved.nbytes, moved.seconds)
        self._plans, self._planned_with = {}, self.budget_bytes
        self._note(key, plan)
        return moved

    def _note(self, key: Hashable, plan: Plan) -> None:
        self._plans[key] = plan
        used = {b for task in plan.graph.tasks for b in task.touches}
        for b, device in enumerate(plan.graph.home_devices()):
            if plan.graph.buffers[b].persistent and b in used:
                self._home_devices.setdefault(plan.graph.buffers[b].tensor, device)
        self._planner.note_plan(key, plan)

    def _plan_of(self, graph: TaskGraph, budget: Budget, planner: TapePlanner) -> Plan:
        try:
            with self._share_in_refusals(budget):
                return planner.plan(graph, self._bytes_of(budget))
        except BudgetTooSmall as error:
            known = (task for other in self._graphs.values() for task in other.tasks)
            is_of_it = any(task.phase != FORWARD for task in graph.tasks) and any(
                task.phase == BACKWARD for task in known
            )
            if error.on_host or is_of_it or not isinstance(_limit_of(budget), float):
                raise
            # an evaluation, or an update before the first gradients: it is no share of these
            return planner.plan(graph, error.needed)

    @contextmanager
    def _share_in_refusals(self, budget: Budget) -> Iterator[None]:
        """Have a refusal say which share would be enough."""
        try:
            yield
        except BudgetTooSmall as error:
            if error.on_host or not isinstance(_limit_of(budget), float):
                raise
            most, reserve = max(self._needs.values())
            enough = ceil(100 * (error.needed - reserve) / most)
            raise error.with_advice(
                f"{budget} is a share of the {format_size(most)} that this step needs without"
                f" offloading: give {enough}%"
            ) from error

    @property
    def cache(self) -> PlanCache | None:
        return self._planner.cache

    @property
    def moves(self) -> bool:
        """Whether a plan may move something."""
        return _limit_of(self._budget) is not None

    def _bytes_of(self, budget: Budget) -> Budget:
        """A share is one of what the largest part needs if nothing ever leaves the device."""
        limit = _limit_of(budget)
        if not isinstance(limit, float):
            return limit
        share = limit
        return max(ceil(most * share) + reserve for most, reserve in self._needs.values())

    def forget(self) -> None:
        if self.runner is not None:
            for key in self._plans:
                self.runner.forget(key)
        self._home_devices.clear()
        for known in (self._plans, self._graphs, self._homes_of, self._needs, self._runs):
            known.clear()

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()

    def abandon(self) -> None:
        """Drop the runner without touching its device, which is lost."""
        if self.runner is not None:
            self.runner.abandon()


class UnrunPlans(RunnerPlans):
    """Plans of graphs that do not run: what they would return is zeros."""

    @property
    def needs(self) -> list[tuple[int, int]]:
        """Of each graph: the bytes it has at once, and the reserve beside them."""
        return [*self._needs.values()]

    def count(self, needs: Iterable[tuple[int, int]]) -> None:
        """Note graphs that others have planned: a share is one of the largest graph."""
        self._needs |= {object(): each for each in needs}

    def run(self, key: Hashable, batch: Collection[torch.Tensor]) -> Sequence[Any]:
        graph = self._graphs[key]
        if graph.tasks:
            self._note(key, self._plan_of(graph, self._budget, self._planner))
        assert graph.program is not None
        outputs, device = graph.program.outputs, graph.program.device
        return [torch.zeros(value.size, dtype=value.dtype, device=device) for value in outputs]


def _limit_of(budget: Budget) -> Budget | float:
    """A share as a number. All of it is no limit: nothing has to leave the device."""
    if not isinstance(budget, str) or not is_share(budget):
        return budget
    share = parse_share(budget)
    return share if share < 1 else None
