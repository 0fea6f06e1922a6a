"""Cases of who has the weights, numpy's memory, errors and dice, and odd tensors."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPrivateImportUsage=false

import ctypes
import functools
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from support import offload_lightning as ol
from support.live_modules import WIDTH, Case
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


class Kept(L.Callback):
    """Has the weights' data, and reads and writes them between the steps and in them."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.data = [p.data for p in pl_module.parameters()]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.seen.append(float(sum(d.abs().sum() for d in self.data)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.data[0].mul_(0.999)
        pl_module.seen.append([d.sum().item() for d in self.data])


class KeptByCallback(Case):
    @classmethod
    def callbacks(cls) -> list[L.Callback]:
        return [Kept()]


class FromNumpy(Case):
    def __init__(self) -> None:
        super().__init__()
        self.memory = np.ones(ol.CLASSES, np.float32)
        self.register_buffer("scale", torch.from_numpy(self.memory))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale

    def on_train_batch_end(self, *_: Any) -> None:
        self.memory *= 0.95
        self.seen.append(self.memory.tolist())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scale.mul_(1.01)
        self.seen.append(self.memory.tolist())
        return super().training_step(batch, batch_idx)


class ViewOfBuffer(Case):
    """A batch is a view of a buffer, which the step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "store", torch.randn(64, 12, generator=torch.Generator().manual_seed(2))
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.store[: len(batch[1])], batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.store.add_(0.01)
        loss = super().training_step((batch[0] * 2, batch[1]), batch_idx)
        batch[0].mul_(0.99)
        return loss + self(self.store[:3].clone()).square().mean()


class LeafBatch(Case):
    """The gradient of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].requires_grad_()
        self.last = x
        return super().training_step((x, batch[1]), batch_idx)

    def on_after_backward(self) -> None:
        self.seen.append(self.last.grad.norm().item())

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.last.grad.tolist())


class GradientPenalty(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        loss = self.loss((x, batch[1]))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


class CachedTensors(Case):
    @functools.cached_property
    def table(self) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(4))

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def mask(self, length: int) -> torch.Tensor:
        return (torch.rand(length, WIDTH) > 0.2).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "rotary"):
            angles = torch.outer(torch.arange(12.0), 1 / 10 ** torch.arange(0, 1, 1 / WIDTH))
            self.rotary = angles.cos()
        x = self.enter(x) * self.mask(len(x)) + self.table + x @ self.rotary
        return self.head(self.body(x))


class Normed(Case):
    """Spectral norm, batch norm and a parametrization, whose matrix exponential takes most."""

    only: ClassVar[Any] = (None, "90%")

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.body[0][0] = nn.utils.spectral_norm(self.body[0][0])
        nn.utils.parametrizations.weight_norm(self.body[1][0])
        nn.utils.parametrizations.orthogonal(self.body[2][0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.enter(x))))


class Ctypes(Case):
    """Bytes by address."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.head.weight
        first = ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_float))[0]
        record = np.zeros(1, [("at", np.int64), ("value", np.float32)])
        record["value"] = first
        self.seen.append(first)
        loss = super().training_step(batch, batch_idx)
        there = loss.detach()
        value = ctypes.c_float.from_address(there.data_ptr()).value
        self.seen.append(value)
        return loss * float(1 + record["value"][0]) + 0 * value


class Losses(Case):
    """A step that returns None at times, or a loss that is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3 and not torch.isnan(loss):
            return None
        return loss


class Tried(Case):
    """Errors that the step catches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        gram = self.head.weight @ self.head.weight.T
        if batch_idx % 2:
            gram = gram * 0 - 1
        try:
            factor = torch.linalg.cholesky(gram + 1e-3 * torch.eye(5))
        except RuntimeError:
            factor = torch.eye(5)
            self.seen.append("cholesky")
        try:
            solved = torch.linalg.solve(gram * (batch_idx % 2), torch.ones(5))
        except RuntimeError:
            solved = torch.zeros(5)
            self.seen.append("solve")
        try:
            torch.linalg.inv(gram * 0)
        except RuntimeError:
            self.seen.append("inv")
        if batch_idx == 1:
            return loss
        try:
            torch._assert_async(loss.detach() < 1.5)
        except RuntimeError:
            self.seen.append("assert")
        return loss + factor.diagonal().sum() * 1e-2 + solved.sum() * 1e-3


class Sparse(Case):
    @classmethod
    def loader(cls) -> Any:
        return DataLoader([*ol.data().dataset], 8, collate_fn=_sparse)  # type: ignore[misc]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_sparse:
            return self.head(self.body(torch.sparse.mm(x, self.enter.weight.T) + self.enter.bias))
        return super().forward(x)


def _sparse(samples: Any) -> Any:
    x = torch.stack([s[0] for s in samples])
    return (x * (x > 0)).to_sparse(), torch.stack([s[1] for s in samples])


class SparseEmbedding(Case):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 10).long().clamp(max=49)
        return self.head(self.body(self.enter(x) + self.table(words).mean(1)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class Checkpointed(Case):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.body, self.enter(x), use_reentrant=False)
        return self.head(checkpoint(self.body, x, use_reentrant=True))


class Drawn(Case):
    """Distributions, also after the update."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mean, spread = self(batch[0])[:, :2].T
        normal = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
        drawn = normal.rsample()
        picked = torch.distributions.Categorical(logits=self(batch[0])).sample()
        loss = (drawn - batch[1]).square().mean() + F.cross_entropy(self(batch[0]), picked)
        return (
            loss
            + torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).mean()
        )

    def on_train_batch_end(self, *_: Any) -> None:
        made = torch.distributions.Normal(self.head.bias.detach(), 1.0)
        self.seen.append(made.sample().tolist())


class Packed(Case):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = (x[:, 0] > 0).long() + 1 + (x[:, 1] > 0).long()
        rows = nn.utils.rnn.pack_padded_sequence(
            x.view(-1, 3, 4), lengths, batch_first=True, enforce_sorted=False
        )
        out, (last, _) = self.rnn(rows)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return self.head(self.body(last[0] + padded.sum(1)))
