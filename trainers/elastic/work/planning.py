"""The live session of a strategy that has a budget (offload/live).

lanes, updates    steps over the module, its optimizer and the sums of gradients
validation_step   a step, too
"""

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload import Plan, Runner
from offload.live.core import why_no_core
from offload.live.session import LiveSession
from trainers.elastic.errors import CannotBeElastic
from trainers.steps.meter import Meter
from trainers.steps.plan_request import PlanRequest
from trainers.steps.step_planner import StepPlanner
from trainers.steps.step_session import StepSession
from trainers.steps.target import target_of


class LanePlanner(StepPlanner):
    """Notes by which plans the latest step ran."""

    def __init__(self, request: PlanRequest) -> None:
        super().__init__(request, Meter())
        self._known: dict[Hashable, Plan] = {}
        self.ran: list[Plan] = []

    def note_plan(self, key: Hashable, plan: Plan) -> None:
        super().note_plan(key, plan)
        self._known[key] = plan

    def run(self, runner: Runner, key: Hashable, batch: Collection[Tensor]) -> Sequence[Any]:
        self.ran.append(self._known[key])
        return super().run(runner, key, batch)


class Planning:
    """One strategy's."""

    def __init__(self, budget: str | int | None, devices: int) -> None:
        self.request = PlanRequest(budget or "100%", devices=devices)
        self.session = StepSession()
        self.ran: Sequence[Plan] = ()
        self.plan: Plan | None = None
        self._planner = LanePlanner(self.request)
        self._module = torch.nn.ModuleList()
        self._optimizers: tuple[Optimizer, ...] = ()
        self.update = ExitStack()
        """Whoever enters it ends the step that `begin` begins."""

    def find_target(self, strategy: Any) -> None:
        """Plan for the device of this strategy of Lightning's."""
        if why := why_no_core():
            raise CannotBeElastic(
                f"this run cannot be planned: {why}. Without a plan no budget can be kept, and one"
                " device would do all: change what is named, or leave out budget= and devices="
            )
        target = target_of("auto", strategy.accelerator, strategy.root_device)
        target.check_devices(self.request.devices)
        # A GPU's peers have the same bits, and the host's updates would have others.
        where = "auto" if target.device.type == "cpu" else "device"
        request = replace(self.request, optimizer=where)
        self.request = request.for_target(target, strategy.precision_plugin)

    def place(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer | None = None,
        sums: Sequence[Tensor] = (),
    ) -> None:
        """Have the next steps be over these tensors."""
        self.session.close()
        of_sums = torch.nn.Module()
        for number, tensor in enumerate(sums):
            of_sums.register_buffer(f"sum{number}", tensor)
        self._module = torch.nn.ModuleList([module, of_sums])
        self._optimizers = () if optimizer is None else (optimizer,)

    def open(self) -> LiveSession:
        """Open the session if it is not. From now on all tensors look as if on the device."""

        def create() -> LiveSession:
            self._planner = LanePlanner(self.request)
            return LiveSession(
                self._module,
                *self._optimizers,
                budget=self.request.budget,
                device=self.request.target.device,
                planner=self._planner,
            )

        return self.session.open(create, self._optimizers)

    def home_of(self, tensor: Tensor) -> Tensor:
        """The tensor where its bytes are between two steps."""
        live = self.session.live
        return tensor if live is None else live.home_of(tensor)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A live step. It keeps all gradients."""
        self.session.interrupt.deliver()
        self.open()
        self._planner.ran = []
        with self.session.step(name):
            yield
        self.ran = self._planner.ran

    def begin(self, name: str) -> None:
        """Begin a step that ends with `update`."""
        self.update.enter_context(self.step(name))
