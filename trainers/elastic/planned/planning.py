"""The live session of a strategy that has a budget (offload/live).

lanes, updates    steps over the module, its optimizer and the sums of gradients
validation_step   a step, too

The module's Python runs in every step. Between two steps everything runs at once.
"""

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload import OffloadError, Plan, Runner
from offload.live.core import why_no_core
from offload.live.session import LiveSession
from trainers.elastic.errors import CannotBeElastic
from trainers.offloading.hardware.meter import Meter
from trainers.offloading.hardware.target import target_of
from trainers.offloading.interrupt import DelayedInterrupt
from trainers.offloading.live_planner import LivePlanner
from trainers.offloading.live_run import OPEN
from trainers.offloading.plan_request import PlanRequest


class LanePlanner(LivePlanner):
    """Notes by which plans the latest step ran."""

    def __init__(self, request: PlanRequest) -> None:
        super().__init__(request, Meter())
        self._known: dict[Hashable, Plan] = {}
        self.ran: list[Plan] = []

    def added(self, key: Hashable, plan: Plan) -> None:
        super().added(key, plan)
        self._known[key] = plan

    def run(self, runner: Runner, key: Hashable, batch: Collection[Tensor]) -> Sequence[Any]:
        self.ran.append(self._known[key])
        return super().run(runner, key, batch)


class Planning:
    """One strategy's."""

    def __init__(self, budget: str | int) -> None:
        self.request = PlanRequest(budget)
        self.interrupt = DelayedInterrupt()
        self.ran: Sequence[Plan] = ()
        """The plans by which the latest step ran, part by part."""
        self.plan: Plan | None = None
        """The plan of the latest lanes."""
        self._session: LiveSession | None = None
        self._planner = LanePlanner(self.request)
        self._module = torch.nn.ModuleList()
        """The module, and the sums of its gradients."""
        self._optimizers: tuple[Optimizer, ...] = ()
        self.update = ExitStack()
        """Whoever enters it ends the step that `begin` begins."""
        self._is_in_step = False

    def find_target(self, strategy: Any) -> None:
        """Plan for the device of this strategy of Lightning's."""
        if why := why_no_core():
            raise CannotBeElastic(
                f"budget={self.request.budget!r}: this run cannot be planned: {why}."
                " Without a plan no budget can be kept: change what is named, or leave out budget="
            )
        target = target_of("auto", strategy.accelerator, strategy.root_device)
        # A GPU's peers have the same bits, and the host's updates would have others.
        where = "auto" if target.device.type == "cpu" else "device"
        request = replace(self.request, optimizer=where)
        self.request = request.on(target, strategy.precision_plugin)

    def place(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer | None = None,
        sums: Sequence[Tensor] = (),
    ) -> None:
        """Have the next steps be over these tensors."""
        self.close()
        of_sums = torch.nn.Module()
        for number, one in enumerate(sums):
            of_sums.register_buffer(f"sum{number}", one)
        self._module = torch.nn.ModuleList([module, of_sums])
        self._optimizers = () if optimizer is None else (optimizer,)

    # ---- steps ----------------------------------------------------------------------------------

    def open(self) -> LiveSession:
        """Open the session if it is not. From now on all tensors look as if on the device."""
        if self._session is None:
            if OPEN.run is not None:
                OPEN.run.give_way()
            self._planner = LanePlanner(self.request)
            session = LiveSession(
                self._module,
                *self._optimizers,
                budget=self.request.budget,
                device=self.request.target.device,
                planner=self._planner,
            )
            self._session = session.__enter__()
            OPEN.run = self
        return self._session

    def home_of(self, tensor: Tensor) -> Tensor:
        """The tensor where its bytes are between two steps."""
        return tensor if self._session is None else self._session.home_of(tensor)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A live step. It keeps all gradients."""
        self.interrupt.deliver()
        session = self.open()
        with self.interrupt.held(), session.step(name, keeps=[*self._module.parameters()]):
            self._is_in_step, self._planner.ran = True, []
            try:
                yield
            finally:
                self._is_in_step = False
        self.ran = self._planner.ran

    def begin(self, name: str) -> None:
        """Begin a step that ends with `update`."""
        self.update.enter_context(self.step(name))

    # ---- the end --------------------------------------------------------------------------------

    def give_way(self) -> None:
        """Close the session between two steps, because another trainer runs in this thread."""
        if self._is_in_step:
            raise OffloadError(
                "a trainer runs within a step of another one, which has a budget: run it between"
                " two steps, or in another thread"
            )
        self.close()

    def close(self) -> None:
        """Give all tensors memory of their own again. It is safe to call again."""
        session, self._session = self._session, None
        if session is not None:
            OPEN.run = None
            session.__exit__(None, None, None)
