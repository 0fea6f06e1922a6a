"""torch's SGD, Adam and AdamW, reading the numbers that change from step to step from memory.

    p += -lr * g     add_(p, g, alpha=-lr) fixes lr in      p.addcmul_(g, row.minus_lr) reads it

These are torch/optim's kernels without `capturable` (which has other last bits). Only where a
changing Python number would come in, the same product or quotient is taken with a tensor without
dimensions. The bits are eager's where both round alike: measured on a CPU, read from the kernels'
source for CUDA (docs/offload/gpu.md). Fused updates call torch's kernels that take the learning
rate as a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD

from offload.optimizer.updates import Update
from offload.torch_seams import (
    foreach_addcmul_,
    foreach_lerp_,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
)

HALF = frozenset({torch.float16, torch.bfloat16})
COLUMNS = ("lr", "minus_lr", "step", "decay", "size", "root")


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The numbers of one parameter as tensors without dimensions, in the order of `COLUMNS`."""

    lr: torch.Tensor
    minus_lr: torch.Tensor
    step: torch.Tensor
    """The number of this update; the first is 1."""
    decay: torch.Tensor
    """1 - lr * weight_decay"""
    size: torch.Tensor
    """-lr / (1 - beta1 ** step)"""
    root: torch.Tensor
    """sqrt(1 - beta2 ** step)"""


@dataclass(frozen=True, slots=True, eq=False)
class TensorUpdate:
    """`update(p, g, *states)` does what its `Update` does, with numbers from memory."""

    update: Update
    wide: Row
    """In float64."""
    single: Row
    """In float32."""
    fused: bool

    def __call__(self, p: torch.Tensor, g: torch.Tensor, *states: torch.Tensor) -> None:
        if self.fused:
            self.together([(p, g, *states)], [self])
            return
        now = self.update.numbers()
        with torch.no_grad():
            if type(self.update.optimizer) is SGD:
                self._sgd(now, p, g, states)
            else:
                self._adam(now, p, g, states)

    def _row(self, p: torch.Tensor) -> Row:
        return self.wide if p.dtype in (torch.float64, torch.complex128) else self.single

    @property
    def _foreach(self) -> bool:
        """Whether torch would choose its foreach kernels. By default it does so on a device for
        plain tensors (`update_of` has checked for those)."""
        chosen = self.update.foreach
        return self.update.device.type != "cpu" if chosen is None else chosen

    def _sgd(self, now: dict[str, Any], p: Any, g: Any, states: Sequence[Any]) -> None:
        momentum, decay = now["momentum"], now["weight_decay"]
        g = -g if now["maximize"] else g
        if decay != 0:
            g = g.add(p, alpha=decay)
        if momentum != 0:
            [buffer] = states
            buffer.mul_(momentum).add_(g, alpha=1 - now["dampening"])
            if now["nesterov"]:
                add = g.add_ if self.update.changes_gradient else g.add
                g = add(buffer, alpha=momentum)
            else:
                g = buffer
        add_product(p, g, self._row(p).minus_lr)

    def _adam(self, now: dict[str, Any], p: Any, g: Any, states: Sequence[Any]) -> None:
        row, (beta1, beta2) = self._row(p), now["betas"]
        g = -g if now["maximize"] else g
        if now["weight_decay"] != 0:
            if now["decoupled_weight_decay"]:
                scale(p, row.decay)
            else:
                g = g.add(p, alpha=now["weight_decay"])
        if torch.is_complex(p):
            p, g, *states = map(torch.view_as_real, (p, g, *states))
        mean, square, *largest = states
        if self._foreach:
            foreach_lerp_([mean], [g], 1 - beta1)
            square.mul_(beta2)
            foreach_addcmul_([square], [g], [g], 1 - beta2)
        else:
            mean.lerp_(g, 1 - beta1)
            square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if now["amsgrad"]:
            torch.maximum(largest[0], square, out=largest[0])
            square = largest[0]
        root = square.sqrt()
        divide(root, row.root)
        add_quotient(p, mean, root.add_(now["eps"]), row.size)

    def together(
        self, tensors: Sequence[Sequence[torch.Tensor]], updates: Sequence["TensorUpdate"]
    ) -> None:
        """Run fused updates of one group in one call; this update is the first of them."""
        now = self.update.numbers()
        p, g, *states = map(list, zip(*tensors, strict=True))
        # The CPU's kernel gives eager's bits with float64; a device's kernel takes only float32.
        lr = self.wide.lr if p[0].device.type == "cpu" else self.single.lr
        with torch.no_grad():
            if type(self.update.optimizer) is SGD:
                fused_sgd_(
                    p,
                    g,
                    *(states or [[]]),
                    weight_decay=now["weight_decay"],
                    momentum=now["momentum"],
                    lr=lr,
                    dampening=now["dampening"],
                    nesterov=now["nesterov"],
                    maximize=now["maximize"],
                    is_first_step=False,
                )
                return
            mean, square, *largest = states
            beta1, beta2 = now["betas"]
            kernel = fused_adamw_ if now["decoupled_weight_decay"] else fused_adam_
            kernel(
                p,
                g,
                mean,
                square,
                *(largest or [[]]),
                [one.single.step for one in updates],
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=now["weight_decay"],
                eps=now["eps"],
                amsgrad=now["amsgrad"],
                maximize=now["maximize"],
            )


# Torch would round a tensor without dimensions to the half precision of the other operand, while
# eager's number is float32 there. So what eager rounds once is rounded once here, in float32.


def scale(x: torch.Tensor, number: torch.Tensor) -> None:
    """x *= number"""
    if x.dtype in HALF:
        x.copy_(x.float().mul_(number))
    else:
        x.mul_(number)


def divide(x: torch.Tensor, number: torch.Tensor) -> None:
    """x /= number"""
    if x.dtype in HALF:
        x.copy_(x.float().div_(number))
    else:
        x.div_(number)


def add_product(x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> None:
    """x += number * y. The CPU's `add_` rounds its alpha to half precision, a device's does not."""
    if x.dtype in HALF:
        if x.device.type == "cpu":
            number = number.to(x.dtype).float()
        x.copy_(x.float().addcmul_(y.float(), number))
    else:
        x.addcmul_(y, number)


def add_quotient(
    x: torch.Tensor, y: torch.Tensor, divisor: torch.Tensor, number: torch.Tensor
) -> None:
    """x += number * y / divisor, and the divisor is overwritten. The CPU's `addcdiv_` multiplies
    first, a device's divides first."""
    wide = x.float() if x.dtype in HALF else x
    if x.dtype in HALF:
        y, divisor = y.float(), divisor.float()
    if x.device.type == "cpu":
        wide.addcdiv_(y * number, divisor)
    else:
        wide.addcmul_(torch.div(y, divisor, out=divisor), number)
    if wide is not x:
        x.copy_(wide)
