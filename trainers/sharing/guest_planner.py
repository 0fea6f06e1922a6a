"""Plans a guest's steps, and runs them on a stage of its own.

reserved    the stage takes the memory that the plans need, and keeps it
borrowed    until `give_back`, the first bytes of the training's arena are the stage's
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from offload import Costs, Plan, Runner, TaskGraph
from offload.graph.taskgraph import HOST
from offload.live.runner_plans import PlainPlanner
from offload.plans.plan import Budget
from offload.running.stage import Stage


class GuestPlanner(PlainPlanner):
    """Of one guest's session."""

    def __init__(self, costs: Costs | None, stage: Stage, lender: Callable[[], Stage | None]):
        """`lender` returns the stage whose memory is borrowed; None: this one has its own."""
        super().__init__(costs)
        self._stage = stage
        self._lender = lender
        self._sizes: dict[int, int] = {}
        """What all plans need of the device."""
        self._lent: dict[int, int] = {}
        self._loan = ExitStack()

    def plan(self, graph: TaskGraph, budget: Budget) -> Plan:
        found = super().plan(graph, budget)
        self._make_room(found)  # tensors move to their places before it runs
        return found

    def runner(self, plan: Plan, key: Hashable) -> Runner:
        return Runner(plan, key=key, stage=self._stage)

    def added(self, key: Hashable, plan: Plan) -> None:
        self._make_room(plan)

    def run(self, runner: Runner, key: Hashable, batch: Collection[torch.Tensor]) -> Sequence[Any]:
        self._borrow()
        return super().run(runner, key, batch)

    def _make_room(self, plan: Plan) -> None:
        for number, nbytes in plan.memgraph.arenas.items():
            if number != HOST:
                self._sizes[number] = max(nbytes, self._sizes.get(number, 0))
        self._borrow()

    def _borrow(self) -> None:
        lender = self._lender()
        if lender is None or self._lent == self._sizes:
            return
        self.give_back()
        arena = self._loan.enter_context(lender.lent_out(self._sizes))
        self._loan.enter_context(self._stage.borrowing(arena))
        self._lent = {**self._sizes}

    def give_back(self) -> None:
        """The guest's tensors leave what was borrowed."""
        self._lent = {}
        self._loan.close()

    def close(self) -> None:
        self._stage.close()
