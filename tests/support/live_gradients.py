"""Cases of hooks between the parts of a step, which change gradients and weights (live_modules.py).

backward --> on_after_backward --> clipping --> on_before_optimizer_step --> update
"""
# pyright: reportArgumentType=false

from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import grad_norm
from support.live_modules import WIDTH, Case
from torch import nn


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


class LogsItself(Case):
    options: ClassVar[Any] = {"logger": True}

    def on_after_backward(self) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics({"norm": self.head.weight.grad.norm()})


class Cleaned(Case):
    options: ClassVar[Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in used(self):
            torch.nan_to_num_(p.grad, nan=0.0, posinf=0.0, neginf=0.0)


class Doubled(Case):
    """The loss is changed in place, and weights are, before the update."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.log("before", loss)
        loss.mul_(2.0)

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.clamp_(-0.2, 0.2)


class Halved(Case):
    """Half of large gradients, and none if they are not finite: a value decides."""

    def on_after_backward(self) -> None:
        if self.head.weight.grad.abs().max() > 0.1:
            self.head.weight.grad.mul_(0.5)
            self.seen.append("halved")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not torch.isfinite(self.head.weight.grad).all():
            optimizer.zero_grad()


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


class LastGradients(Case):
    """Those of the step before, which are there without a budget."""

    only: ClassVar[Any] = (None,)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.head.weight.grad is not None:
            self.log("late", self.head.weight.grad.norm())
