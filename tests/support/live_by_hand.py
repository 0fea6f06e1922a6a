"""Cases that optimize by hand, in ways that no plan of one step would allow (live_modules.py)."""
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any, ClassVar

import torch
from support.live_modules import Manual
from torch.optim import lr_scheduler


class ScheduleFirst(Manual):
    """The schedule steps before the update, and the step reads it and the optimizer's state."""

    def between(self, optimizer: Any, batch_idx: int) -> None:
        schedule: Any = self.lr_schedulers()
        schedule.step()
        if schedule.last_epoch > 3:
            self.log("late", float(len(optimizer.state)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 2)]


class AsksLate(Manual):
    """It steps twice, and a value decides after that. A tensor of others gets a gradient."""

    kept = torch.zeros(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        self.optimizers().step()
        if (self.head.bias > 0.2).any():
            self.log("large", 1.0)
            self.seen.append(batch_idx)
        self.kept.grad = torch.zeros(3)
        return out

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), 1e-3)


class HistoryInGradients(Manual):
    """Backward passes with a history, weighted by the batch's number, through a method that is
    overridden."""

    only: ClassVar[Any] = (None, "70%")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (batch_idx if batch_idx > 1 else 1)
        self.manual_backward(loss, create_graph=True)
        if (batch_idx + 1) % 3 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)


class Restless(torch.optim.SGD):
    """It works in place on gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
                p.sub_(p.grad, alpha=group["lr"])


class ChangesGradients(Manual):
    def configure_optimizers(self) -> Any:
        return Restless(self.parameters(), 0.1)


class StepsInHooks(Manual):
    """Updates and backward passes outside of training_step."""

    only: ClassVar[Any] = (None, "70%")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.manual_backward(self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.optimizers().step()
        self.optimizers().zero_grad()


class LbfgsAndAdam(Manual):
    """One of two optimizers calls its closure several times."""

    only: ClassVar[Any] = (None, "70%")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        several, once = self.optimizers()

        def closure() -> torch.Tensor:
            several.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        several.step(closure)
        once.step()
        once.zero_grad()

    def configure_optimizers(self) -> Any:
        first = torch.optim.LBFGS(self.head.parameters(), 0.1, max_iter=3)
        return [first, torch.optim.Adam(self.body.parameters(), 1e-2)]
