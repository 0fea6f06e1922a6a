"""The methods that Lightning calls of an offloading strategy.

    Trainer.fit --> training_step(batch)   runs the graph of this batch: forward, backward,
                                           accumulation, clipping, update; then makes the log calls
                    backward               does nothing: the graph has done it
                    optimizer_step         calls the closure, and nothing else

The module trains within a byte budget, with the bits of plain Lightning. A run that cannot be
planned is trained eagerly, or refused if it has a budget (tracing/refusals.py).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from offload import CaptureError
from offload.running.drivers.device_loss import device_lost
from trainers.offloading.hardware.devices import (
    forget_results,
    keep_on_host,
)
from trainers.offloading.planned_steps import PlannedSteps


class PlannedFit(PlannedSteps):
    """Overrides what Lightning calls of a strategy, so that steps run as plans. It is mixed into
    one of Lightning's strategies, whose own methods train the runs that have no plan."""

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
        super().setup(trainer)
        self._eager = False
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._device_loss_noted():
            return self._training_step(*args, **kwargs)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_planned():
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
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._first_steps.compare_gradients(self._module, self._steps)
        return loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if not self._is_planned():
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
        self._close()

    def teardown(self) -> None:
        self._close()
        if self._lost is None:
            super().teardown()
        else:  # Lightning would copy tensors from the lost device
            forget_results(self._module.trainer)

    def _evaluate(self, kind: str, eager: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._device_loss_noted():
            return self._run_evaluation(kind, eager, *args, **kwargs)
