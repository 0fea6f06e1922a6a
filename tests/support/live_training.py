"""A training step whose Python runs every time, and whose kernels run by a plan of the test's."""

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from offload import BudgetTooSmall, Costs, Plan, Runner, TaskGraph, plan
from offload.live.session import LiveSession

Beside = Callable[[Runner], AbstractContextManager[Any]]


class TestPlanner:
    """Keeps the graph that it is given. Without a plan to follow it makes its own."""

    __test__ = False  # it is no class of tests
    cache = None

    def __init__(self, follows: Plan | None, beside: Beside, how: dict[str, Any]) -> None:
        self._follows, self._beside, self._how = follows, beside, how
        self.graph: TaskGraph | None = None
        """The latest."""
        self.made: Runner | None = None
        self.plans: list[Plan] = []
        self.open = ExitStack()

    def place(self, graph: TaskGraph, homes: Mapping[str, int]) -> TaskGraph:
        del homes
        return graph

    def plan(self, graph: TaskGraph, budget: Any) -> Plan:
        self.graph = graph
        if self._follows is None:
            return plan(graph, budget, Costs())
        try:
            return self._follows.replan(graph)
        except BudgetTooSmall as refused:  # what is grouped, the clock decides
            return plan(graph, refused.needed, Costs(), placement=self._follows.placement)

    def runner(self, plan: Plan, key: Hashable) -> Runner:
        self.plans.append(plan)
        self.made = Runner(plan, key=key, **self._how)
        self.open.enter_context(self._beside(self.made))
        return self.made

    def note_plan(self, key: Hashable, plan: Plan) -> None:
        del key
        self.graph = plan.source

    def run(self, runner: Runner, key: Hashable, batch: Collection[torch.Tensor]) -> Sequence[Any]:
        return runner.run(key, *batch)


class LiveTraining:
    """A context manager. Calling it with a batch is a step, which returns the loss."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        follows: Plan | None = None,
        *,
        budget: Any = "100%",
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        beside: Beside = nullcontext,
        planner: TestPlanner | None = None,
        **how: Any,
    ) -> None:
        """`follows`: a plan of such a step, whose budget and options are taken. `around`: the
        forward pass. `beside`: what goes on while the runner is there. `how`: its options."""
        self._module, self._loss_fn, self._optimizer = module, loss_fn, optimizer
        self._around = around
        self.planner = planner or TestPlanner(follows, beside, how)
        device = next(module.parameters()).device
        self.session = LiveSession(
            module, optimizer, budget=budget, device=device, planner=self.planner
        )

    @property
    def runner(self) -> Runner:
        assert self.planner.made is not None
        return self.planner.made

    def __enter__(self) -> "LiveTraining":
        self.session.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.planner.open.__exit__(None, None, None)
        finally:
            self.session.__exit__(*error)

    def __call__(self, *batch: torch.Tensor) -> tuple[torch.Tensor]:
        with self.session.step():
            with self._around():
                loss = self._loss_fn(self._module(*batch[:-1]), batch[-1])
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._module.zero_grad()  # it may have parameters of no optimizer
            kept = loss.detach()
            del loss
        return (kept,)


def training_graph(
    module: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *batch: torch.Tensor,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> TaskGraph:
    """The graph of such a step, of copies: states are there, and nothing has changed. It has homes
    of its own, so it is for planners; a runner steps by `LiveTraining`."""
    own, twin = copy.deepcopy((module, optimizer))
    devices = [0] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), LiveTraining(own, loss_fn, twin, around=around) as step:
        step(*batch)
        step(*batch)
    assert step.planner.graph is not None
    return step.planner.graph
