"""Steps whose Python runs every time and whose kernels run by a plan that a benchmark makes itself.

    made(graph) -> Plan     run_by(plan, key=...) -> Runner
    with LiveSteps(step, made, module, optimizer) as steps:
        loss = steps(*batch)

An optimizer makes its states in the first step, so from the second one on the graph is the same.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from offload import BudgetTooSmall, Plan, PlanCache, Runner, TaskGraph, plan
from offload.live.session import LiveSession
from offload.planning.wanted import peak_bytes
from offload.plans.plan import Budget
from offload.running.runner_memory import Migration
from offload.running.stage import Stage

MIB = 1 << 20
SETTLED = 2
"""Steps until all states are there."""


class MadePlans:
    """The planner of a session whose plans somebody else makes. It knows the runner."""

    def __init__(
        self,
        made: Callable[[TaskGraph], Plan],
        run_by: Callable[..., Runner],
        cache: PlanCache | None,
    ) -> None:
        self._made, self._run_by, self.cache = made, run_by, cache
        self.now: Runner | None = None
        self.known: dict[Hashable, Plan] = {}
        self.ran: dict[Hashable, None] = {}
        """In the latest step, which has several parts if it is cut."""

    def place(self, graph: TaskGraph, homes: Mapping[str, int]) -> TaskGraph:
        del homes
        return graph

    def plan(self, graph: TaskGraph, budget: Budget) -> Plan:
        del budget
        return self._made(graph)

    def runner(self, plan: Plan, key: Hashable) -> Runner:
        self.now = self._run_by(plan, key=key)
        return self.now

    def note_plan(self, key: Hashable, plan: Plan) -> None:
        self.known[key] = plan
        self.ran[key] = None

    def run(self, runner: Runner, key: Hashable, batch: Collection[torch.Tensor]) -> Sequence[Any]:
        self.ran[key] = None
        return runner.run(key, *batch)


class LiveSteps:
    """A context manager. Calling it with a batch is a step, which returns what `step` returns."""

    def __init__(
        self,
        step: Callable[..., torch.Tensor],
        made: Callable[[TaskGraph], Plan],
        module: nn.Module,
        *optimizers: torch.optim.Optimizer,
        device: torch.device | str = "cpu",
        run_by: Callable[..., Runner] = Runner,
        cache: PlanCache | None = None,
        runs: bool = True,
    ) -> None:
        """`cache`: where what kernels cost is kept, for the next ones. `runs`: without it steps are
        only planned."""
        self._step, self._plans = step, MadePlans(made, run_by, cache)
        # Any budget, which `made` need not keep: with one the first step has a plan, too.
        self.session = LiveSession(
            module, *optimizers, budget=1, device=device, planner=self._plans, runs=runs
        )

    @property
    def plans(self) -> list[Plan]:
        """Of the latest step, part by part."""
        return [self._plans.known[key] for key in self._plans.ran]

    @property
    def known(self) -> list[Plan]:
        """Of all steps so far: the first one, which makes the states, has parts of its own."""
        return [*self._plans.known.values()]

    @property
    def plan(self) -> Plan:
        """Of the latest step, which was not cut."""
        (found,) = self.plans
        return found

    @property
    def runner(self) -> Runner:
        assert self._plans.now is not None
        return self._plans.now

    def move_to(self, plan: Plan, stage: Stage | None = None) -> Migration:
        """Go on by another plan of the latest step, which was not cut."""
        (key,) = self._plans.ran
        self._plans.known[key] = plan
        return self.runner.move_to(plan, key, stage)

    def suspended(self) -> AbstractContextManager[None]:
        """Within it, what is compared with these steps runs as without the session."""
        return self.session.suspended()

    def settle(self, *batch: torch.Tensor) -> None:
        for _ in range(SETTLED):
            self(*batch)

    def __enter__(self) -> "LiveSteps":
        self.session.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.session.__exit__(*error)

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        self._plans.ran.clear()
        with self.session.step():
            return self._step(*batch)


def training_step(
    module: nn.Module, loss: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer
) -> Callable[..., torch.Tensor]:
    """The step as anybody writes it. Returns the loss."""

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(module(*batch[:-1]), batch[-1])
        found.backward()
        optimizer.step()
        return found.detach()

    return step


def plan_share(graph: TaskGraph, share: float | None, **more: Any) -> Plan:
    """Within so much of the peak; None: no limit; 0: the smallest budget that holds it."""
    if share is None:
        return plan(graph, **more)
    budget = max(1, int(peak_bytes(graph, 0) * share))
    while True:
        try:
            return plan(graph, budget, **more)
        except BudgetTooSmall as refused:
            if refused.needed <= budget:
                raise
            budget = refused.needed
