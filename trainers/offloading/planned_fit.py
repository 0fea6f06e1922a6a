"""The methods that Lightning calls of an offloading strategy.

    Trainer.fit --> training_step(batch)   runs the graph of this batch: forward, backward,
                                           accumulation, clipping, update; then makes the log calls
                    backward               does nothing: the graph has done it
                    optimizer_step         calls the closure, and nothing else

The module trains within a byte budget, with the bits of plain Lightning. A run that cannot be
planned is trained eagerly, or refused if it has a budget (tracing/refusals.py).
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from offload import CaptureError, OffloadError
from offload.gate import Gate, stand_aside
from offload.running.drivers.device_loss import device_lost
from offload.running.runner_memory import Migration
from offload.running.stage import Stage
from trainers.offloading.guests import Guests, Loss
from trainers.offloading.hardware.devices import (
    forget_results,
    keep_on_host,
)
from trainers.offloading.hardware.target import Target
from trainers.offloading.planned_steps import PlannedSteps
from trainers.offloading.steps.budget_moves import BudgetMoves
from trainers.offloading.steps.micro_batch import MicroBatch
from trainers.offloading.steps.step_graphs import StepGraphs
from trainers.sharing.high_priority import HighPriority


class PlannedFit(PlannedSteps):
    """Overrides what Lightning calls of a strategy, so that steps run as plans. It is mixed into
    one of Lightning's strategies, whose own methods train the runs that have no plan."""

    @cached_property
    def _guests(self) -> Guests:
        return Guests(lambda: self._request.target, self._stage, lambda: self.lightning_module)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or another process, has guests of its own."""
        guests = self.__dict__.get("_guests")
        if guests is not None and not all(one.closed for one in guests.all):
            raise OffloadError(
                "a strategy cannot be copied or sent to another process in a block of"
                " high_priority(): its requests come in this process. Begin the block in the"
                " process that trains"
            )
        return {name: value for name, value in self.__dict__.items() if name != "_guests"}

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

    def move_to(self, budget: str | int | None) -> Future[Migration]:
        """Have the training go on within another budget, with the same bits. Any thread may call
        this while the trainer fits. The plan is made here; the tensors move before the next step.
        The result has the bytes that moved and the seconds that it took, or raises
        `MemoryTooSmall` where there was no room: then nothing has moved."""
        if isinstance(self, ParallelStrategy):
            raise OffloadError("move_to() moves one process; the ranks of DDP must move together")
        if self._eager:
            raise OffloadError("this run trains eagerly, so it has no plan that could move")
        return self._moves.plan(self._steps, replace(self._request, budget=budget))

    @cached_property
    def _moves(self) -> BudgetMoves:
        return BudgetMoves()

    def _run_planned(self, micro: MicroBatch, steps: StepGraphs) -> Any:
        if micro.first and (request := self._moves.make(steps)) is not None:
            self._request = request
        return super()._run_planned(micro, steps)

    def _close(self) -> None:
        self._moves.end()
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
        self._request = replace(self._request, target=target.measured(self.precision_plugin))

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
        self._gate.close()
        self._lost = self._lost or device_lost(exception, self.root_device)
        self._close()

    def teardown(self) -> None:
        self._gate.close()
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
