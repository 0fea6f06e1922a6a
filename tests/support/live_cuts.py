"""Loops whose Python needs a value in the middle of a step, or has a pointer to some bytes."""
# pyright: reportCallIssue=false

from typing import Any

import numpy as np
import torch
from support.live_loops import Loop
from torch import nn
from torch.nn import functional as F


class Longer(Loop):
    """A cut is planned when it comes for the second time."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.batches = self.batches * 2


class Item(Longer):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x, y)
        self.seen.append(loss.item())
        return loss


class NothingFound(Longer):
    """A mask finds no row: a column of none begins behind the end of their memory."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        columns = x[x[:, 0] > 99].unbind(1)
        return super().loss(x, y) + torch.maximum(columns[3], columns[2]).sum()


class Numpy(Longer):
    """The array of a value is kept while the step goes on, and until the next one."""

    array = np.zeros(())

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x, y)
        self.seen.append(float(self.array))
        self.array = loss.detach().cpu().numpy()
        return loss


class TwoCuts(Longer):
    """One in the forward pass, and one at the gradients."""

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.calls += 1
        out = self.net(x)
        self.seen.append(out.mean().item())
        loss = F.cross_entropy(out, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen.append(loss.detach())


class AnotherWayAfterACut(Longer):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        self.seen.append(out.mean().item())
        loss = F.cross_entropy(out, y)
        return loss * 2 + out.abs().mean() if self.calls in (6, 9) else loss


class RaisesAfterACut(Longer):
    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        try:
            loss = self.loss(x, y)
            self.seen.append(loss.item())
            loss.backward()
            self.calls += 1
            if self.calls == 7:
                raise ValueError("of the user's own")
            self.optimizer.step()
        except ValueError:
            self.seen.append("raised")
        self.optimizer.zero_grad()


class WritesAfterACut(Longer):
    """What was made before a cut is written after it, and kept; a weight is written at the cut."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.net(x).detach()
        value = out.sum().item()
        self.seen += [out.mul_(2), out[:2]]
        with torch.no_grad():
            self.net.last.bias.fill_(value / 100)
        return super().loss(x, y)


class Hooked(Longer):
    """A value is needed in the middle of the backward pass."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        weight = self.net.blocks[1].weight
        weight.register_hook(lambda gradient: self.seen.append(gradient.sum().item()))


class Scaled(Longer):
    """The scaler asks whether a gradient is infinite."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.scaler = torch.amp.GradScaler(device, init_scale=256.0)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = self.loss(x, y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.seen.append(loss.detach())


class IndexedByAValue(Longer):
    """A value decides which row is read: each is another tape."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        row = int(self.net(x).abs().argmax().item()) % 8
        return super().loss(x[row : row + 1].repeat(8, 1) + x, y)


class ArrayOfAWeight(Longer):
    """Numpy has had a view of a weight since before the session, and reads it in every step."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.array: Any = self.net.last.weight.detach().cpu().numpy()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(self.array.sum()))
        return super().loss(x, y)


class ArrayForAWhile(ArrayOfAWeight):
    """Numpy has a view of a weight during some steps, and another one between any two."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.array = np.zeros(1)

    def between(self) -> None:
        if self.calls == 4:
            self.array = self.net.last.bias.detach().cpu().numpy()
        if self.calls == 8:
            self.array = np.zeros(1)
        self.seen.append(float(self.net.first.bias.detach().cpu().numpy().sum()))
        self.calls += 1


class NumbersOfTheHost(Loop):
    """No cut: operations of the device are given single numbers of the host, of any type, which
    change within the step, too."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.scale = torch.tensor(1.5, dtype=torch.float64)
        self.count = torch.tensor(0)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9)
        out = self.net(x) * self.scale / torch.tensor(3.0)
        self.count.add_(1)
        out = out + self.count
        out = torch.where(out > self.count, out, torch.tensor(0.1 * self.calls))
        out = out.clamp(max=torch.tensor(8.0)) * torch.tensor(True)
        floats = y.to(torch.bfloat16) * torch.tensor(0.3, dtype=torch.float16) + self.scale
        floats[0] = torch.tensor(2.5)
        floats += torch.tensor(1, dtype=torch.uint8)
        self.seen += [floats, y * torch.tensor(0.5), y + torch.tensor(1 + 2j)]
        return F.cross_entropy(out, y) * (self.scale * 2)


class Conjugated(Loop):
    """Numbers that are conjugated or negated when a copy or a product reads them."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        wave = torch.complex(out, out.flip(1))
        power = (wave @ wave.conj().mT).real.mean()
        return super().loss(x, y) + power + (wave.conj().imag.clone() * out).mean()
