"""The methods that Lightning calls of an offloading strategy.

    Trainer.fit --> training_step(batch)   runs the graph of this batch: forward, backward,
                                           accumulation, clipping, update; then makes the log calls
                    backward               does nothing: the graph has done it
                    optimizer_step         calls the closure, and nothing else

The module trains within a byte budget, with the bits of plain Lightning. A run that cannot be
planned is trained eagerly, or refused if it has a budget (tracing/refusals.py).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from offload import CaptureError, MemoryTooSmall, OffloadError
from offload.gate import Gate, stand_aside
from offload.running.drivers.cuda import check_cuda
from offload.running.drivers.device_loss import device_lost
from offload.running.runner_memory import Migration
from offload.running.stage import Stage
from offload.sizes import say_size
from trainers.offloading.guests import Guests, Loss
from trainers.offloading.hardware.devices import bring_along, forget_results, keep_on_host, tell
from trainers.offloading.hardware.generators import hand_over
from trainers.offloading.hardware.target import ON_CPU, Target, accelerator_for, target_of
from trainers.offloading.planned_steps import PlannedSteps
from trainers.offloading.steps.budget_moves import BudgetMoves
from trainers.offloading.steps.device_moves import SAME, DeviceMove, DeviceMoves
from trainers.offloading.steps.micro_batch import MicroBatch
from trainers.offloading.steps.movable_steps import MovableSteps
from trainers.offloading.tracing.batch_parts import BatchParts
from trainers.sharing.high_priority import HighPriority


class PlannedFit(PlannedSteps):
    """Overrides what Lightning calls of a strategy, so that steps run as plans. It is mixed into
    one of Lightning's strategies, whose own methods train the runs that have no plan."""

    @cached_property
    def _guests(self) -> Guests:
        return Guests(lambda: self._request.target, self._stage, lambda: self.lightning_module)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or another process, begins a fit of its own: it has none of this one's plans."""
        guests = self.__dict__.get("_guests")
        if guests is not None and not all(one.closed for one in guests.all):
            raise OffloadError(
                "a strategy cannot be copied or sent to another process in a block of"
                " high_priority(): its requests come in this process. Begin the block in the"
                " process that trains"
            )
        own = {"_guests", "_moves", "_device_moves", *self._of_a_fit}
        state = {name: value for name, value in super().__getstate__().items() if name not in own}
        return state | {"_request": replace(self._request, target=ON_CPU, reserved=int)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    @property
    def _gate(self) -> Gate:
        return self._guests.gate

    def high_priority(
        self,
        net: torch.nn.Module,
        budget: str | int | None = None,
        *,
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        priority: int = 0,
        seed: int = 0,
    ) -> HighPriority:
        """Return what answers requests by `net` between two nodes of this run's steps, from any
        thread: `with strategy.high_priority(net, budget="1GiB") as serve: y = serve(x)`.

        `budget`: its bytes of the device. `loss` and `optimizer` make it a training job: each call
        is a step, and returns the loss. The highest `priority` comes first. `seed`: of its random
        numbers."""
        has_budget = self._request.budget is not None
        return self._guests.admit(net, budget, loss, optimizer, priority, seed, has_budget)

    def move_to(
        self, budget: str | int | None = SAME, device: torch.device | str | None = None
    ) -> Future[Migration]:
        """Have the training go on within another budget, or on another device. Any thread may call
        this while the trainer fits. The tensors move between two steps. The result has the bytes
        that moved and the seconds that it took, or raises `MemoryTooSmall` where there was no room:
        then nothing has moved.

        Another budget: the plan is made here, and all bits stay the same. Another `device`: the
        step is captured for it at the next step, and moves after that. On a GPU like the one
        before, all bits stay the same. On another kind of device the weights are equal at the move,
        and a warning says that later bits are the new device's."""
        if isinstance(self, ParallelStrategy):
            raise OffloadError("move_to() moves one process; the ranks of DDP must move together")
        if self._eager:
            raise OffloadError("this run trains eagerly, so it has no plan that could move")
        try:
            there = self.root_device if device is None else torch.device(device)
        except RuntimeError as error:
            raise OffloadError(f"move_to(device={device!r}): {error}") from None
        now = self._request
        request = now if budget == SAME else replace(now, budget=budget)
        if there != self.root_device:
            return self._ask_for_device(there, budget)
        if budget == SAME:
            raise OffloadError(
                f"move_to() names no other place than the run has: give another budget, or another"
                f" device than {self.root_device}"
            )
        return self._moves.plan(self._steps, request)

    def _ask_for_device(self, device: torch.device, budget: str | int | None) -> Future[Migration]:
        if self._request.target.make_runner is not None:
            raise OffloadError("a fleet gives its jobs their devices: this job cannot choose one")
        if not all(guest.closed for guest in self._guests.all):
            raise OffloadError(
                "the nets of high_priority() are on the device that would be left: end their blocks"
                " before move_to(device=...)"
            )
        if self._steps is None or self._steps.plan is None:
            raise OffloadError(
                "move_to() comes before the first step, so there is no plan to move from: give the"
                " device to the Trainer, or call it from the second step on"
            )
        return self._device_moves.ask(self.find_target_on(device), budget)

    def find_target_on(self, device: torch.device) -> Target:
        """Return this run's target on another device. Raise `OffloadError` if there is none."""
        device = check_cuda(device) if device.type == "cuda" else device
        kind, asked = accelerator_for(device.type), self._request
        target = target_of(asked.engine, kind, device, asked.host_dir)
        return replace(target, gate=self._gate)

    @cached_property
    def _moves(self) -> BudgetMoves:
        return BudgetMoves()

    @cached_property
    def _device_moves(self) -> DeviceMoves:
        return DeviceMoves()

    def _run_planned(self, micro: MicroBatch, steps: MovableSteps) -> Any:
        if micro.first:
            self._request = self._moves.make(steps, self._request)
            move = self._device_moves.next
            if move is not None and move.there is None:
                self._capture_ahead(move, micro)
        return super()._run_planned(micro, steps)

    def _capture_ahead(self, move: DeviceMove, micro: MicroBatch) -> None:
        """Capture and plan the step for another device. This step still runs on the present one."""
        moves, now = self._device_moves, self._request
        with moves.refusing(move, Exception), self._seen_on(move.target):
            there = moves.left(move.target.device)
            known = there.request.target.costs if there is not None else None
            budget = now.budget if move.budget == SAME else move.budget
            target = replace(move.target, costs=known)
            request = replace(now, budget=budget).on(target, self.precision_plugin)
            there = there or self._new_steps(request)
            there.capture_ahead(micro, BatchParts.of(micro.batch), request)
            move.there = there

    @contextmanager
    def _seen_on(self, target: Target) -> Iterator[None]:
        """Have Lightning and the module say this device while the step is captured for it."""
        device, accelerator = self.root_device, self.accelerator
        assert accelerator is not None
        try:
            self._say_device(target.device, accelerator_for(target.device.type))
            yield
        finally:
            self._say_device(device, accelerator)

    def _say_device(self, device: torch.device, accelerator: Accelerator) -> None:
        self._root_device = device  # SingleDeviceStrategy's
        self.accelerator = accelerator
        accelerator.setup_device(device)
        if isinstance(self.precision_plugin, MixedPrecision):
            self.precision_plugin.device = device.type
        tell(self._module, device)

    def _move_device(self) -> None:
        """Go on on another device if a move there is ready and an optimizer step begins."""
        move, steps = self._device_moves.next, self._steps
        trainer = self._module.trainer
        if move is None or move.there is None or steps is None or not trainer.training:
            return
        if (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._flush()
        moved: Migration | None = None
        refusing = self._device_moves.refusing(move, MemoryTooSmall)
        with self._device_loss_noted(), self._interrupt.held(), refusing:
            moved = move.there.take_over(steps)
        if moved is not None:
            said = f"moved here from {self._request.target.name} before step {trainer.global_step}"
            self._live_on(move.there, steps)
            self._remark(f"{said}: {say_size(moved.nbytes)} in {moved.seconds:.2f} s")
            self._device_moves.made(move, moved)

    def _live_on(self, there: MovableSteps, left: MovableSteps) -> None:
        """Have this run be one of the device where its tensors are now."""
        old, new = self._request.target, there.request.target
        self._device_moves.leave(old.device, left)
        self._steps, self._groups, self._request = there, None, there.request
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None
        self._say_device(new.device, accelerator_for(new.device.type))
        hand_over(old.device, new.device)
        bring_along(self._module.trainer, old.device, new.device)
        self._begin_checks()
        if old.name != new.name and old.device.type == new.device.type:
            rank_zero_warn(
                f"the training moved from {old.name} to {new.name}: the weights are equal, and"
                " later bits are those of the new device's kernels"
            )

    def _remark(self, text: str) -> None:
        """Have `explain()` show it."""
        assert self._steps is not None and self._steps.plan is not None
        self._steps.plan.remarks.say(text)

    def _close(self) -> None:
        with self._gate.held():  # a guest may have borrowed the memory that is given back
            self._moves.end()
            self._device_moves.end()
            super()._close()

    def find_target(self) -> Target:
        return replace(super().find_target(), gate=self._gate)

    def _stage(self) -> Stage | None:
        """The stage of the training steps; None before the first one and after the last."""
        runner = self._steps.runner if self._steps is not None else None
        return runner.stage if runner is not None else None

    def setup_environment(self) -> None:
        target = self.find_target()
        super().setup_environment()
        before = self._request.target
        if target.device == before.device:
            target = replace(target, costs=before.costs)
        self._request = self._request.on(target, self.precision_plugin)

    def model_to_device(self) -> None:
        """Leave the module on the host. The plan of the first step moves what it keeps on a GPU."""
        if self.root_device.type == "cpu":
            super().model_to_device()
        else:
            keep_on_host(self._module, self.root_device)

    def setup(self, trainer: L.Trainer) -> None:
        self._close()
        self._lost = None
        self._guests.check()
        super().setup(trainer)
        self._eager = False
        self._gate.open()
        self._request = replace(self._request, reserved=self._guests.reserved)
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._device_loss_noted():
            return self._training_step(*args, **kwargs)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_planned():
            with self._gate.held():
                stand_aside()
                return super().training_step(*args, **kwargs)
        micro = self._micro(*args)
        try:
            output = self._run(micro)
        except CaptureError as error:
            return self._without_plan(error, *args, **kwargs)
        if self._expected is None:
            return output
        eager = super().training_step(*args, **kwargs)
        self._first_steps.compare_loss(eager)
        return eager

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._silence.end()
        if self._is_planned() and self._expected is None:
            return closure_loss
        with self._gate.held():
            stand_aside()
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._first_steps.compare_gradients(self._module, self._steps)
        return loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if not self._is_planned():
            with self._gate.held():
                return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = closure()
        if not self._eager and self._expected is None:
            return result
        # Plain Lightning makes this step: the closure was called, and the gradients are in .grad.
        result = super().optimizer_step(optimizer, lambda: result, model, **kwargs)
        self._first_steps.compare_state(self._module)
        if found := self._first_steps.difference:
            self._go_eager(str(found))  # this step is plain Lightning's, and so are all that follow
        return result

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._check_not_lost()
        self._flush()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._check_not_lost()
        self._flush()
        return super().optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the states without moving them: before there is a plan they belong on the host."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
        if self._eager:
            self._all_on_device()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._check_not_lost()
        super().save_checkpoint(*args, **kwargs)

    def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        self._interrupt.deliver()
        if not self._eager:
            self._move_device()
        return super().batch_to_device(*args, **kwargs)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._log_guests()
        self._flush()  # the run may have been stopped between two micro-batches
        self._interrupt.deliver()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", super().predict_step, *args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._lost = self._lost or device_lost(exception, self.root_device)
        with closing(self._gate):
            self._close()

    def teardown(self) -> None:
        with closing(self._gate):
            self._close()
        if self._lost is None:
            super().teardown()
        else:  # Lightning would copy tensors from the lost device
            forget_results(self._module.trainer)

    def explain(self) -> str:
        """Explain the plan on one screen of text, with what requests of high priority took."""
        lines = [f"high priority: {guest.waits.said()}" for guest in self._guests.all]
        return "\n".join([super().explain(), *lines])

    def _log_guests(self) -> None:
        """Give the loggers how long the requests of this run took."""
        trainer = self._module.trainer
        guests = self._guests.all
        for number, guest in enumerate(guests):
            name = f"sharing{number}" if len(guests) > 1 else "sharing"
            if metrics := guest.waits.metrics(name):
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, trainer.global_step)

    def _evaluate(self, kind: str, eager: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._device_loss_noted():
            return self._run_evaluation(kind, eager, *args, **kwargs)
