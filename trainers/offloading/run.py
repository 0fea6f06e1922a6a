"""A strategy's run: its options, its session, its guests, and the plans and times of its steps."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer

from offload import OffloadError, Plan
from offload.gate import Gate
from offload.live.runner_plans import UnrunPlans
from offload.live.session import LiveSession
from offload.running.stage import Stage
from trainers.lightning_seams import make_update
from trainers.offloading.guests import Guests
from trainers.steps.meter import Meter
from trainers.steps.plan_request import PlanRequest
from trainers.steps.step_planner import StepPlanner
from trainers.steps.step_session import StepSession

COUNTER_BYTES = 4096
"""Larger buffers never run at once."""


class StrategyRun:
    """What happens between a strategy's setup and its teardown. A fit begins with no plans."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.connected: L.LightningModule | None = None
        """The strategy's module; None before its first run."""
        self.guests = Guests(lambda: self.request.target, self._stage, lambda: self.connected)
        self.session = StepSession(self.gate)
        self.is_set_up = False
        """Nobody would end a step that begins by hand after the teardown."""
        self.is_eager = False
        self.meter = Meter()
        self.remark = ""
        """A line of `explain` about the run's move to its device."""
        self._planner: StepPlanner | None = None
        self._needs: list[tuple[int, int]] = []
        """The bytes that the steps need which were planned and did not run."""

    @property
    def gate(self) -> Gate:
        return self.guests.gate

    @property
    def module(self) -> L.LightningModule:
        assert self.connected is not None
        return self.connected

    @property
    def devices(self) -> Sequence[torch.device]:
        """All devices of the steps."""
        target = self.request.target
        if self.request.devices == 1:
            return [target.device]
        return [target.device_at(number) for number in range(self.request.devices)]

    def _stage(self) -> Stage | None:
        """The stage of the steps; None before the first one and after the last."""
        runner = self.session.live.plans.runner if self.session.live is not None else None
        return runner.stage if runner is not None else None

    def set_up(self, *, is_fit: bool) -> None:
        self.gate.open()
        self.request = replace(self.request, reserved=self.guests.reserved)
        self.is_eager = False
        if is_fit:
            self.session.reset()
            self.meter, self.remark, self._needs = Meter(), "", []

    # ---- plans -----------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        plan = self.session.plan
        if plan is None:
            why = (
                "this run trains eagerly"
                if self.is_eager
                else "it is made in the first step, or, without a budget, in the second one like it"
            )
            raise OffloadError(f"there is no plan: {why}")
        return plan

    def planner_for(self, request: PlanRequest) -> StepPlanner:
        return StepPlanner(request, self.meter, self.remark)

    def replace_request(self, request: PlanRequest) -> None:
        """Plan the next steps with this request."""
        self.request = request
        if self._planner is not None:
            self._planner.request = request

    def plan_for(
        self, batch: Any, batch_idx: int, optimizers: Sequence[Optimizer], device: torch.device
    ) -> Plan | None:
        """Return the plan of an update with this batch, of which no kernel runs."""
        self.session.close()
        plans = self._open(optimizers, device, runs=False).plans
        assert isinstance(plans, UnrunPlans)
        plans.count(self._needs)
        make_update(self.module.trainer, batch, batch_idx)
        self._needs = plans.needs
        parameters = [*self.module.parameters()]
        for optimizer in optimizers:
            parameters += _parameters(optimizer)
        for parameter in parameters:
            parameter.grad = None  # it was only planned
        self.session.close()
        return plans.plan

    def seconds_by_devices(self) -> tuple[float, ...]:
        """Predict the latest step on 1, 2, .. devices."""
        assert self._planner is not None
        return self._planner.seconds_by_devices()

    def meter_now(self) -> Meter:
        """Return the meter after the kernels that have been issued have run."""
        if self.session.live is not None:
            self.session.live.kernels.wait_for_kernels()
        return self.meter

    # ---- steps -----------------------------------------------------------------------------------

    def begin_step(
        self, name: str, inputs: Any, optimizers: Sequence[Optimizer], device: torch.device
    ) -> None:
        if self.is_eager or self.session.is_in_step or not self.is_set_up:
            return
        # Guests come here at least, where no plan runs.
        with self.gate.hold() if self.guests.admitted else nullcontext():
            live = self._open(optimizers, device)
        assert self._planner is not None
        self._planner.begin(name, inputs)
        self.session.begin(name, () if live.plans.runner else small_host_buffers(self.module))

    def end_step(self, optimizer: Optimizer | None = None) -> None:
        """End the step if one is open, after its update by this optimizer; None: it has none yet,
        and all gradients are kept."""
        if not self.session.is_in_step:
            return
        assert self.session.live is not None
        cleared = self._cleared_first(optimizer) if optimizer is not None else ()
        parameters = self.session.live.weights.parameters
        self.session.end([p for p in parameters if p not in cleared] if cleared else None)
        if self._planner is not None:
            self._planner.end()

    def _cleared_first(self, optimizer: Optimizer) -> Collection[torch.Tensor]:
        """Return the parameters whose gradients the next backward pass clears first, so that until
        then they need not take room."""
        if (
            self.request.budget is None
            or not _is_method(
                self.module.optimizer_zero_grad, L.LightningModule.optimizer_zero_grad
            )
            or not _is_method(optimizer.zero_grad, Optimizer.zero_grad)
        ):
            return ()
        return {*_parameters(optimizer)}

    def _open(
        self, optimizers: Sequence[Optimizer], device: torch.device, *, runs: bool = True
    ) -> LiveSession:
        def create() -> LiveSession:
            self._planner = self.planner_for(self.request)
            return LiveSession(
                self.module,
                *optimizers,
                budget=self.request.budget or self.request.default_budget,
                device=device,
                planner=self._planner,
                runs=runs,
                overlaps=not self.guests.admitted and self.request.target.make_runner is None,
            )

        return self.session.open(create, optimizers)


def small_host_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the small buffers on the CPU, of which BatchNorm has one."""
    return [b for b in module.buffers() if b.device.type == "cpu" and b.nbytes <= COUNTER_BYTES]


def _is_method(method: Callable[..., None], function: Callable[..., None]) -> bool:
    """Whether a method is this function, which nobody has overridden."""
    return getattr(method, "__func__", None) is function


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
