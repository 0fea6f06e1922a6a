"""Cases of what Python can do in a step (live_modules.py)."""
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportPrivateImportUsage=false

import ctypes
import types
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from support import offload_lightning as ol
from support.live_modules import WIDTH, Case, Manual
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


class Dynamic(Case):
    """Names that are computed, proxies, `vars`, a class that is swapped, a patched function."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"scale": 1.0}
        self.view = types.MappingProxyType(self.settings)
        self.gate_0, self.gate_1 = 1.0, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) * self.view["scale"]
        out = out * getattr(self, f"gate_{self.global_step % 2}")
        return out + vars(self)["_parameters"].get("more", 0.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.settings["scale"] *= 0.98
        vars(self)["gate_1"] += 0.1
        if batch_idx == 2:
            self.body[0][1].__class__ = nn.Tanh
            self.body[1][1].forward = torch.relu
        if batch_idx == 4:
            self.body[0][1].__class__ = nn.Softsign


class Settings(Case):
    """What torch and Lightning know of the run changes from step to step."""

    options: ClassVar[Any] = {"max_epochs": 3}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = 1.0 + self.trainer.optimizers[0].param_groups[0]["weight_decay"]
        weight += self.trainer.is_last_batch + float(torch.tensor(0.1).double() * 10)
        return super().training_step(batch, batch_idx) * weight

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        (optimizer,) = self.trainer.optimizers
        if self.global_step == 2:
            self.body[0][2].eval()
            self.hook = nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 0.9)
        elif self.global_step == 4:
            self.hook.remove()
            self.body[1][1] = nn.ReLU()
            self.body[2].register_forward_hook(lambda m, i, o: o * 0.5)
            optimizer.param_groups[0].update(momentum=0.0, weight_decay=0.1)
        elif self.global_step == 7:
            plain = optimizer.step
            optimizer.step = lambda closure: plain(closure) * 0.5
        elif self.global_step == 9:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters(), 1e-3)]
        torch.set_default_dtype(torch.float64 if batch_idx == 3 else torch.float32)


class Patched(Case):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.plain = F.cross_entropy
        if batch_idx % 2:
            F.cross_entropy = lambda *args, **more: 0.5 * self.plain(*args, **more)

    def on_train_batch_end(self, *_: Any) -> None:
        F.cross_entropy = self.plain


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


class Arrays(Case):
    """numpy in the middle of a step, as with scikit-learn."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        guess = out.detach().cpu().numpy()
        right = float((guess.argmax(-1) == batch[1].numpy()).mean())
        centers = torch.from_numpy(
            np.stack([guess[batch[1].numpy() == c].sum(0) for c in range(5)])
        )
        loss = F.cross_entropy(out, batch[1]) + (out - centers[batch[1]]).square().mean() * right
        self.log("right", right)
        self.seen.append(loss.item())
        if loss.item() > 1.5:
            loss = loss * 0.5
        return loss


class Losses(Case):
    """A step that returns None at times, or a loss that is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3 and not torch.isnan(loss):
            return None
        return loss


class OwnGenerator(Case):
    only: ClassVar[Any] = (None, "80%")

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] + 0.1 * torch.randn(batch[0].shape, generator=self.noise)
        self.seen.append(int(self.noise.get_state().sum()))
        self.seen.append(int(torch.get_rng_state().sum()))
        if batch_idx == 2:
            self.noise.set_state(torch.Generator().manual_seed(1).get_state())
        return super().training_step((x, batch[1]), batch_idx) + torch.rand(()) * 0.1


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


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class Dataclass(Case):
    @classmethod
    def loader(cls) -> Any:
        make = lambda s: Pair(torch.stack([a for a, _ in s]), torch.stack([b for _, b in s]))  # noqa
        return DataLoader([*ol.data().dataset], 8, collate_fn=make)  # type: ignore[misc]

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((batch.x, batch.y) if isinstance(batch, Pair) else batch)


class NumpyBatch(Case):
    @classmethod
    def loader(cls) -> Any:
        make = lambda s: types.SimpleNamespace(  # noqa: E731
            x=np.stack([a.numpy() for a, _ in s]), y=[int(b) for _, b in s]
        )
        return DataLoader([*ol.data().dataset], 8, collate_fn=make)  # type: ignore[misc]

    def loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, types.SimpleNamespace):
            batch = torch.as_tensor(batch.x), torch.tensor(batch.y)
        return super().loss(batch)


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


class DrawnManual(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        made = torch.distributions.Normal(self.head.bias.detach(), self.head.bias.detach().exp())
        out["drawn"] = made.sample()
        self.seen.append(made.log_prob(out["drawn"]).tolist())
        self.log("drawn", out["drawn"].mean())
        return out


class Ctc(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])[:, None].expand(-1, 3, -1).log_softmax(-1)
        size = len(batch[0])
        words = torch.randint(1, 5, (3, 3))
        lengths = torch.full((3,), size), torch.tensor([1, 2, 1 + batch_idx % 2])
        return F.ctc_loss(out, words, *lengths) + nn.CTCLoss()(out, words, *map(tuple, lengths))


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


class Images(Case):
    """channels_last from the middle of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, WIDTH, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 3, 2, 2)
        if self.trainer.global_step > 3:
            x = x.contiguous(memory_format=torch.channels_last)
        return self.head(self.body(self.convs(x).flatten(1)))

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            self.to(memory_format=torch.channels_last)


class Double(Case):
    """The weights become other tensors in the middle of a run."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 4:
            self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.head.weight.dtype))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class NewHead(Case):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head = nn.Linear(WIDTH, ol.CLASSES)
            self.optimizers().add_param_group({"params": self.head.parameters()})


class Threshold(Case):
    """Validation reads a value, and the run changes with it."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.seen.append(loss.item())
        if loss > 1.55:
            self.optimizers().param_groups[0]["lr"] *= 0.5
        return {"out": self(batch[0])}

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs["out"].sum().item())

    options: ClassVar[Any] = {"val_check_interval": 2}
