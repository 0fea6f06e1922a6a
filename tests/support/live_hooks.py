"""Cases of hooks, gradients and updates, and of steps that optimize by hand."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import grad_norm
from support.live_modules import WIDTH, Case, Manual
from torch import nn


class GradientAfterStep(Case):
    only: ClassVar[Any] = (None,)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.head.weight.grad.tolist())
        self.head.weight.grad.mul_(2)


class GradientInHooks(Case):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.clamp_(-0.1, 0.1)
        self.seen.append(self.head.bias.grad.tolist())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict({f"norm_{n}": p.grad.norm() for n, p in self.named_parameters()})

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.head.bias.data.add_(1e-3)


class ZeroedGradients(Case):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class HookedWeights(Case):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda grad: grad * 0.5)
        self.enter.weight.register_post_accumulate_grad_hook(self._noted)
        self.body[1][0].register_full_backward_hook(lambda m, i, o: (i[0] * 0.9,))

    def _noted(self, p: torch.Tensor) -> None:
        p.grad.add_(1e-3)
        self.seen.append(p.grad.sum().item())


class UpdateInBackward(Manual):
    """Every weight has an optimizer, which steps in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.own = {p: torch.optim.SGD([p], 0.05, momentum=0.9) for p in self.body.parameters()}
        for p in self.own:
            p.register_post_accumulate_grad_hook(self._step)

    def _step(self, p: Any) -> None:
        self.own[p].step()
        self.own[p].zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.enter.parameters(), *self.head.parameters()], 1e-2)


class Lbfgs(Case):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3, line_search_fn="strong_wolfe")


class SecondTime(Case):
    """It steps every second time."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()


def used(module: Any) -> list[Any]:
    return [p for p in module.parameters() if p.grad is not None]


class Scales(L.Callback):
    """Noise, a tensor and a number of its own, which another hook changes; and averages."""

    def __init__(self) -> None:
        self.weight, self.calls = torch.tensor(0.5), 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = [p.detach().clone() for p in pl_module.parameters()]

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.factor = 1.0 / (1 + trainer.current_epoch)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.calls += 1
        for p in used(pl_module):
            p.grad.mul_(self.weight).add_(torch.randn_like(p.grad), alpha=1e-2 * self.factor)

    @torch.no_grad()
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for mean, p in zip(self.average, pl_module.parameters(), strict=True):
            mean.lerp_(p, 0.1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.seen += [self.calls, [mean.tolist() for mean in self.average]]


class Scaled(Case):
    only: ClassVar[Any] = (None, "60%")
    options: ClassVar[Any] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}

    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        halve = LambdaCallback(on_after_backward=lambda _, m: [p.grad.mul_(0.5) for p in used(m)])
        return [Scales(), halve]


class ReplacedGradients(Case):
    options: ClassVar[Any] = {"gradient_clip_val": 0.1}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first, second, *_ = used(self)
        first.grad, second.grad = first.grad.sign(), None


class Norms(Case):
    """As Lightning's documentation shows it, in every fourth step, and clipped by hand."""

    only: ClassVar[Any] = (None, "60%")
    options: ClassVar[Any] = {"precision": "bf16-mixed", "gradient_clip_val": 0.1}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.body[0], norm_type=2))
        self.log("rate", optimizer.param_groups[0]["lr"])
        if self.head.weight in optimizer.state:
            self.log("mean", optimizer.state[self.head.weight]["exp_avg"].mean())

    def on_after_backward(self) -> None:
        if self.trainer.global_step % 4 == 0:
            norm = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
            self.log("norm", norm, on_epoch=True, prog_bar=True)


class Doubled(Case):
    """The loss is changed in place, and weights are, before the update."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.log("before", loss)
        loss.mul_(2.0)

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.clamp_(-0.2, 0.2)


class HooksOfTensors(Case):
    """One of them comes and goes."""

    options: ClassVar[Any] = {"max_epochs": 3, "accumulate_grad_batches": 2}

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.arange(WIDTH) % 2
        self.enter.bias.register_hook(lambda grad: grad * self.mask)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.handle = self.head.bias.register_hook(torch.zeros_like)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.handle.remove()


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
