"""What Lightning and the user's step call of a strategy if `automatic_optimization = False`.

    training_step    runs the graph of the whole step, then counts steps, logs and moves schedules
    backward, optimizer_step    are called by the step itself: only where plain Lightning makes it

Outside of `training_step` neither may be called: the graphs know nothing of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from offload import CaptureError, OffloadError
from offload.gate import stand_aside
from trainers.offloading.planned_fit import PlannedFit
from trainers.offloading.steps.manual_steps import ManualSteps
from trainers.offloading.steps.micro_batch import MicroBatch
from trainers.offloading.steps.movable_steps import MovableSteps
from trainers.offloading.steps.plan_request import PlanRequest
from trainers.offloading.tracing.refusals import reason


class ManualFit(PlannedFit):
    """Plans steps that optimize by hand, besides all others."""

    _plans_by_hand = True

    @property
    def _by_hand(self) -> bool:
        """Whether steps are planned that optimize by hand."""
        return self._plans_by_hand and not self._module.automatic_optimization

    def _why_not(self) -> str:
        return reason(self._module.trainer, self._module, by_hand=self._by_hand)

    def _grounds(self) -> tuple[Any, ...]:
        return (*super()._grounds(), self._module.trainer.accumulate_grad_batches)

    def _new_steps(self, request: PlanRequest) -> MovableSteps:
        if not self._by_hand:
            return super()._new_steps(request)
        return ManualSteps(
            self._module, self.optimizers[0], request, self._meter, self._ranks(), self._audit
        )

    def _step_graphs(self) -> MovableSteps:
        steps = self._steps
        if isinstance(steps, ManualSteps) and steps.optimizers != tuple(self.optimizers):
            self._flush()
            self._close()  # its graphs update with an optimizer that was replaced
        return super()._step_graphs()

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._by_hand and self._is_planned()):
            return super()._training_step(*args, **kwargs)
        micro = self._micro(*args)
        try:
            output = self._run(micro)
        except CaptureError as error:
            return self._without_plan(error, *args, **kwargs)
        if self._expected is None:
            return output
        eager = super(PlannedFit, self).training_step(*args, **kwargs)
        self._first_steps.compare_by_hand(eager, self._module)
        if found := self._first_steps.difference:
            self._go_eager(str(found))  # this step is plain Lightning's, and so are all that follow
        return eager

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not self._by_hand:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self._check_in_step("manual_backward()")
        with self._gate.held():
            stand_aside()
            return super(PlannedFit, self).backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if not self._by_hand:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._check_in_step("an optimizer's step()")
        with self._gate.held():
            return super(PlannedFit, self).optimizer_step(optimizer, closure, model, **kwargs)

    def _check_in_step(self, what: str) -> None:
        """Raise unless plain Lightning makes the present step."""
        if self._is_planned() and self._expected is None:
            raise OffloadError(
                f"{what} is called outside of training_step, and the planned steps know nothing of"
                " that. Call it in training_step, or train without offloading (strategy='auto')"
            )

    def _micro(self, batch: Any, batch_idx: int | None = None) -> MicroBatch:
        if not self._by_hand:
            return super()._micro(batch, batch_idx)
        return MicroBatch(batch, batch_idx, first=True, last=True)
