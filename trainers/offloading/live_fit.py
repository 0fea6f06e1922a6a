"""The methods that Lightning calls of an offloading strategy.

    Trainer.fit --> training_step    begins a step: from here on kernels are deferred
                    post_backward    ends it if gradients are accumulated, and keeps them
                    optimizer_step   ends it: a plan runs the kernels

    validation_step, test_step, predict_step, a training_step that optimizes by hand: one step each

The module's Python runs in every step as in plain Lightning, and its bits are the same
(offload/live). Between two steps everything runs at once.
"""

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from time import monotonic
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from offload import OffloadError, Plan
from offload.live.core import why_no_core
from offload.live.runner_plans import UnrunPlans
from offload.running.drivers.cuda import check_cuda
from offload.running.drivers.device_loss import device_lost
from offload.running.runner_memory import Migration
from offload.sizes import say_size
from trainers.lightning_seams import is_accumulating, make_update
from trainers.offloading.hardware.devices import (
    bring_along,
    bring_gradients,
    forget_results,
    keep_on_host,
    move,
    tell,
    tensors_of,
)
from trainers.offloading.hardware.generators import hand_over
from trainers.offloading.hardware.target import (
    Target,
    accelerator_for,
    target_of,
)
from trainers.offloading.live_moves import SAME, LiveMove
from trainers.offloading.live_planner import LivePlanner
from trainers.offloading.live_run import LiveRun
from trainers.offloading.plan_request import PlanRequest

COUNTER_BYTES = 4096
"""Larger ones never run at once."""


class LiveFit(LiveRun):
    """Is mixed into one of Lightning's strategies, whose own methods do the work of a step."""

    # ---- steps -----------------------------------------------------------------------------------

    def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        self._interrupt.deliver()
        if not self._eager:
            self._make_moves()
        return super().batch_to_device(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._module.automatic_optimization:
            with self._one_step("training_step", args):
                return super().training_step(*args, **kwargs)
        if not self._is_in_update:  # an optimizer may ask for the loss several times
            self._end_open()  # the last one has not come to its update
        self._begin_step("training_step", args)
        with self._device_loss_noted():
            return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self._module.automatic_optimization and is_accumulating(self._module.trainer):
            self._end_open()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        self._is_in_update = True
        try:
            with self._device_loss_noted():
                result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._is_in_update = False
        if self._module.automatic_optimization:
            self._end_step(self._cleared_first(optimizer))
        return result

    def _cleared_first(self, optimizer: Optimizer) -> Collection[torch.Tensor]:
        """The parameters whose gradients the next backward pass clears first, so that until then
        they need not take room."""
        ways = self._module.optimizer_zero_grad, optimizer.zero_grad
        known = L.LightningModule.optimizer_zero_grad, Optimizer.zero_grad
        if self._request.budget is None or any(
            getattr(way, "__func__", None) is not plain
            for way, plain in zip(ways, known, strict=True)
        ):
            return set()
        return {p for group in optimizer.param_groups for p in group["params"]}

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("validation_step", args):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("test_step", args):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("predict_step", args):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _one_step(self, name: str, given: Any) -> Iterator[None]:
        self._end_open()
        self._begin_step(name, given)
        with self._device_loss_noted():
            yield
        self._end_open()

    def _begin_step(self, name: str, given: Any) -> None:
        if self._eager or self._is_in_step or not self._runs:
            return
        # Guests come here at least, where no plan runs.
        with self._gate.held() if self._guests.all else nullcontext():
            session = self._open_session()
        assert self._planner is not None
        self._planner.begin(name, given)
        self._counters = [] if session.plans.runner else counters_of(self._module)
        session.begin(name)
        self._holds.enter_context(self._interrupt.held())
        self._is_in_step = True

    def _end_open(self) -> None:
        """End the step that is open. All gradients are kept."""
        self._end_step(())

    def _end_step(self, cleared: Collection[torch.Tensor]) -> None:
        """`cleared`: the parameters whose gradients are not kept."""
        if not self._is_in_step:
            return
        assert self._session is not None
        own = self._session.parameters
        keeps = [p for p in own if p not in cleared] if cleared else None
        self._is_in_step, self._is_unrun = False, True
        with self._holds, self._device_loss_noted():
            self._session.end(keeps=keeps)
        self._is_unrun = False
        self._counters = []

    # ---- plans without steps ---------------------------------------------------------------------

    def plan_for(self, batch: Any, batch_idx: int = 0) -> Plan | None:
        """Return the plan of an update with this batch, of which no kernel runs; None if this run
        trains eagerly. The trainer cannot go on afterwards, because its Python has run."""
        if isinstance(self, ParallelStrategy):
            raise OffloadError(
                "there is no plan before the first step of several ranks, because they make their"
                " plans together there: read strategy.plan after it"
            )
        if self._eager:
            return None
        self._close_session()
        plans = self._open_session(runs=False).plans
        assert isinstance(plans, UnrunPlans)
        plans.count(self._needs)
        make_update(self._module.trainer, batch, batch_idx)
        self._needs = plans.needs
        for parameter in self._parameters():
            parameter.grad = None  # it was only planned
        self._close_session()
        return plans.plan

    # ---- a run -----------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        target = self.find_target()
        super().setup_environment()
        before = self._request.target
        if target.device == before.device:
            target = replace(target, costs=before.costs)
        self._request = self._request.on(target, self.precision_plugin)

    def find_target(self) -> Target:
        """Return the trainer's device and the engine for it. Raise `OffloadError` if there is
        none."""
        engine, host_dir = self._request.engine, self._request.host_dir
        target = target_of(engine, self.accelerator, self.root_device, host_dir)
        return replace(target, gate=self._gate)

    def model_to_device(self) -> None:
        """Leave the module on the host. The first plan moves what it keeps on a GPU."""
        if self.root_device.type == "cpu":
            super().model_to_device()
        else:
            keep_on_host(self._module, self.root_device)

    def setup(self, trainer: L.Trainer) -> None:
        self._close()
        self._lost = None
        self._guests.check()
        super().setup(trainer)
        self._gate.open()
        self._request = replace(self._request, reserved=self._guests.reserved)
        self._eager = False
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset()
        if why := self._why_not():
            self._go_eager(why)
        self._runs = True

    def _why_not(self) -> str:
        """Why this run has no live steps; empty if it has."""
        return why_no_core()

    def _go_eager(self, why: str) -> None:
        self._request.check_eager(why)
        rank_zero_warn(f"OffloadStrategy trains eagerly, without offloading: {why}")
        self._eager = True
        if self.root_device.type != "cpu":
            move(tensors_of(self._module, self.optimizers), self.root_device)
            tell(self._module, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the states without moving them: before there is a plan they belong on the host."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._log_guests()
        self._end_open()  # the run may have been stopped between two micro-batches
        self._interrupt.deliver()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._is_unrun |= self._session is not None and self._session.flights.failed
        self._lost = self._lost or device_lost(exception, self.root_device)
        with closing(self._gate):
            self._close()
        if self._is_unrun:
            forget_results(self._module.trainer)

    def teardown(self) -> None:
        with closing(self._gate):
            self._close()
        if self._lost is None:
            super().teardown()
        else:  # Lightning would copy tensors from the lost device
            forget_results(self._module.trainer)

    # ---- moves -----------------------------------------------------------------------------------

    def move_to(
        self, budget: str | int | None = SAME, device: torch.device | str | None = None
    ) -> Future[Migration]:
        """Have the training go on within another budget, or on another device. Any thread may call
        this while the trainer fits. The tensors move between two steps. The result has the bytes
        that moved and the seconds that it took, or raises `MemoryTooSmall` where there was no room,
        or `BudgetTooSmall` where there was no plan: then nothing has moved.

        Another budget: the plan is made here, and all bits stay the same. Another `device`: on a
        GPU like the one before all bits stay the same. On another kind of device the weights are
        equal at the move, and a warning says that later bits are the new device's."""
        if isinstance(self, ParallelStrategy):
            raise OffloadError("move_to() moves one process; the ranks of DDP must move together")
        if self._eager:
            raise OffloadError("this run trains eagerly, so it has no plan that could move")
        try:
            there = self.root_device if device is None else torch.device(device)
        except RuntimeError as error:
            raise OffloadError(f"move_to(device={device!r}): {error}") from None
        if there == self.root_device and budget == SAME:
            raise OffloadError(
                f"move_to() names no other place than the run has: give another budget, or another"
                f" device than {self.root_device}"
            )
        session = self._session
        before = session.plan if session is not None else None
        if before is None and self._plan is None:
            raise OffloadError(
                "move_to() comes before the first step, so there is no plan to move from: give the"
                " budget to the strategy, give the device to the Trainer, or call it from the"
                " second step on"
            )
        target = None if device is None else self._request.target
        if there != self.root_device:
            target = self._request.on(self._target_on(there), self.precision_plugin).target
        move = LiveMove(budget, target)
        asked = move.asked(self._request)  # what is wrong with it is told here
        if session is not None and before is not None:
            found = session.plans.planned_in(asked.budget, LivePlanner(asked, self._meter))
            move = replace(move, before=before, plan=found)
        return self._moves.add(move)

    def _target_on(self, device: torch.device) -> Target:
        """This run's target on another device. Raise `OffloadError` if there is none."""
        if self._request.target.make_runner is not None:
            raise OffloadError("a fleet gives its jobs their devices: this job cannot choose one")
        if not all(guest.closed for guest in self._guests.all):
            raise OffloadError(
                "the nets of high_priority() are on the device that would be left: end their blocks"
                " before move_to(device=...)"
            )
        device = check_cuda(device) if device.type == "cuda" else device
        kind, asked = accelerator_for(device.type), self._request
        return replace(target_of(asked.engine, kind, device, asked.host_dir), gate=self._gate)

    def _make_moves(self) -> None:
        """Go on where somebody has asked for, if an optimizer step begins now."""
        trainer = self._module.trainer
        begun = trainer.fit_loop.epoch_loop.batch_idx + 1
        if not trainer.training or begun % trainer.accumulate_grad_batches:
            return
        # After a move to another device the next one waits for a plan of its own.
        while self._session is not None and self._session.plan and (move := self._moves.next()):
            with self._device_loss_noted(), self._interrupt.held(), self._moves.refusing(move):
                move.done.set_result(self._moved(move))

    def _moved(self, move: LiveMove) -> Migration:
        session, planner = self._session, self._planner
        assert session is not None and planner is not None
        session.flights.land()
        asked, found = move.asked(self._request), move.plan
        if found is None or session.plan is not move.before:
            found = session.plans.planned_in(asked.budget, LivePlanner(asked, self._meter))
        if asked.target.device != self.root_device:
            asked.target.check_room(found)
            return self._go_to(asked)
        moved = session.plans.move_to(asked.budget, found)
        self._request = planner.request = asked
        return moved

    def _go_to(self, asked: PlanRequest) -> Migration:
        """Have this run be one of another device. All tensors come home, and go on from there."""
        begun, old, new = monotonic(), self._request.target, asked.target
        self._close_session()
        self._request, self._root_device = asked, new.device
        self.accelerator = accelerator = accelerator_for(new.device.type)
        accelerator.setup_device(new.device)
        if isinstance(self.precision_plugin, MixedPrecision):
            self.precision_plugin.device = new.device.type
        tell(self._module, new.device)
        hand_over(old.device, new.device)
        bring_along(self._module.trainer, old.device, new.device)
        tensors = tensors_of(self._module, self.optimizers)
        bring_gradients(tensors)
        moved = Migration(sum(t.nbytes for t in tensors), monotonic() - begun, "by the host")
        step = self._module.trainer.global_step
        size = say_size(moved.nbytes)
        self._remark = (
            f"moved here from {old.name} before step {step}: {size} in {moved.seconds:.2f} s"
        )
        if old.name != new.name:
            rank_zero_warn(
                f"the training moved from {old.name} to {new.name}: the weights are equal, and"
                " later bits are those of the new device's kernels"
            )
        return moved


def counters_of(module: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The small buffers on the CPU, of which BatchNorm has one, and their values."""
    small = [b for b in module.buffers() if b.device.type == "cpu" and b.nbytes <= COUNTER_BYTES]
    return [(buffer, buffer.clone()) for buffer in small]
