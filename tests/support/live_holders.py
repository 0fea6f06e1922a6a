"""Cases of others who have the weights, or memory that numpy has (live_modules.py)."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import copy
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from support import offload_lightning as ol
from support.live_modules import WIDTH, Case
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

HELD: dict[str, Any] = {}


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


class KeptGlobally(Case):
    def on_fit_start(self) -> None:
        HELD["data"] = [p.data for p in self.parameters()]
        HELD["rows"] = self.enter.weight.data[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 1e-3 * sum(d.sum() for d in HELD["data"]) + HELD["rows"].norm()


class KeptByClosure(Case):
    def on_fit_start(self) -> None:
        data = [p.data for p in self.parameters()]
        self.norm = lambda: torch.stack([d.norm() for d in data]).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("norm", self.norm())
        return super().training_step(batch, batch_idx) * (1 + self.norm() / 100)


class KeptByDataset(Case):
    class Scaled(Dataset[Any]):
        data: Any = None

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            noise = torch.Generator().manual_seed(index)
            x = torch.randn(12, generator=noise)
            return x if self.data is None else x + self.data.mean(), index % 5

    @classmethod
    def loader(cls) -> Any:
        return DataLoader(cls.Scaled(), 8)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.train_dataloader.dataset.data = self.head.weight.data


class AverageOfMine(Case):
    def configure_optimizers(self) -> Any:
        self.average = [[p.detach().clone() for p in self.parameters()]]
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average[0], self.parameters(), strict=True):
                mean.lerp_(p, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        far = sum(
            (p - m).square().sum() for p, m in zip(self.parameters(), self.average[0], strict=True)
        )
        self.log("far", far)
        return super().training_step(batch, batch_idx) + 0.1 * far


class AverageInStep(Case):
    """A teacher, which is updated in training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for mean, p in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
            there = self.teacher(self.enter(batch[0]))
        return super().training_step(batch, batch_idx) + F.mse_loss(
            self.body(self.enter(batch[0])), there
        )


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


class WeightAsArray(Case):
    def on_fit_start(self) -> None:
        self.array = self.head.weight.detach().numpy()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(float(self.array.sum()))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.array[0] *= 0.9


class SharedMemory(Case):
    def on_fit_start(self) -> None:
        self.enter.share_memory()
        self.elsewhere = np.asarray(memoryview(self.enter.weight.detach().numpy()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(self.elsewhere.copy().tolist())


class Refilled(Case):
    """A loader's array, which is refilled before the step has read it."""

    class Filling:
        def __init__(self) -> None:
            self.x, self.y = np.zeros((8, 12), np.float32), np.zeros(8, np.int64)

        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[Any]:
            draws = np.random.default_rng(0)
            for _ in range(6):
                self.x[:] = draws.standard_normal((8, 12))
                self.y[:] = draws.integers(0, 5, 8)
                yield torch.from_numpy(self.x), torch.from_numpy(self.y)

    @classmethod
    def loader(cls) -> Any:
        return cls.Filling()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        batch[0].numpy()[:] += 1
        return loss + self(batch[0]).square().mean()


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


class OutputsAreWeights(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "weight": self.head.weight, "row": self.enter.weight.detach()[1]}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append([outputs["weight"].sum().item(), outputs["row"].tolist()])


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


class LastLoss(Case):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.all = torch.zeros(()), []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        both = loss + 0.1 * self.last
        self.last = loss.detach()
        self.all.append(loss.detach())
        return both

    def on_train_epoch_end(self) -> None:
        self.seen.append(torch.stack(self.all).mean().item())
        self.log("mean", torch.stack(self.all).mean())
        self.all.clear()


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
