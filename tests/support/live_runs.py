"""Cases of whole runs, of optimizers and of batches of all kinds (live_modules.py)."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportReturnType=false

from typing import Any, ClassVar

import torch
from support import offload_lightning as ol
from support import own_optimizers as own
from support.live_modules import WIDTH, Case, Manual
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.data import DataLoader

OPTIMIZERS: dict[str, Any] = {
    "Fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "FusedSgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, fused=True),
    "Foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True, amsgrad=True),
    "Maximized": lambda p: torch.optim.SGD(p, 1e-4, maximize=True, dampening=0.1, momentum=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, centered=True, momentum=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2, foreach=False),
    "Muon": lambda p: torch.optim.Muon([w for w in p if w.ndim == 2], 1e-3),
    "Slow": lambda p: own.Slow(p, lr=0.01),
    "Branching": lambda p: own.Branching(p, lr=0.01),
    "Together": lambda p: own.Together(p, lr=0.01),
}


class OfOptimizer(Case):
    make: Any

    def configure_optimizers(self) -> Any:
        return type(self).make(self.parameters())


OF_OPTIMIZERS = tuple(
    type(f"With{name}", (OfOptimizer,), {"make": staticmethod(make)})
    for name, make in OPTIMIZERS.items()
)


class Tied(Case):
    def __init__(self) -> None:
        super().__init__()
        self.body[1][0].weight = self.body[0][0].weight
        self.body[2][0].weight = nn.Parameter(self.body[0][0].weight.data.T)


class Toggled(Case):
    """Parts of the net are frozen in turns, in the step and out of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.body.requires_grad_(batch_idx % 2 == 0)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.enter.bias.requires_grad_(batch_idx % 3 == 0)
        self.head.train(batch_idx % 2 == 0)


class Grown(Case):
    """The net gets a layer in the middle of an epoch, and loses one."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.body.append(nn.Linear(WIDTH, WIDTH))
            self.trainer.optimizers[0].add_param_group({"params": self.body[-1].parameters()})
        if self.global_step == 7:
            del self.body[0]


class Swapped(Case):
    """Another optimizer from the middle on."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 4:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)]


class AveragedModel(Case):
    def __init__(self) -> None:
        super().__init__()
        average = swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = swa_utils.AveragedModel(self.body, multi_avg_fn=average, use_buffers=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.update_parameters(self.body)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            there = self.average(self.enter(batch[0]))
        return (
            super().training_step(batch, batch_idx)
            + self.body(self.enter(batch[0])).sub(there).square().mean()
        )


class Perturbed(Manual):
    """Sharpness-aware: two passes, and weights that move in between."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        kept = []
        with torch.no_grad():
            for p in self.parameters():
                kept.append(p.clone())
                p.add_(p.grad, alpha=0.05 / (float(norm) + 1e-12))
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        with torch.no_grad():
            for p, before in zip(self.parameters(), kept, strict=True):
                p.copy_(before)
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss)


class States(Case):
    """What a recurrent net carries from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.state: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.enter(batch[0])
        state = torch.zeros(8, WIDTH) if self.state is None else self.state
        state = self.cell(x, state[: len(x)])
        self.state = F.pad(state.detach(), (0, 0, 0, 8 - len(x)))
        return F.cross_entropy(self.head(self.body(state)), batch[1])


class Same(Case):
    """One batch that is the same tensors every time, and the step changes them."""

    options: ClassVar[Any] = {"max_epochs": 3}

    @classmethod
    def loader(cls) -> Any:
        return DataLoader([tuple(next(iter(ol.data())))] * 4, None)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(1.01)
        batch[1][0] = (batch[1][0] + 1) % 5
        return super().training_step((batch[0].clone(), batch[1].clone()), batch_idx)


class SavedInStep(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            file = f"{self.trainer.default_root_dir}/{self.current_epoch}.ckpt"
            self.trainer.save_checkpoint(file)
            found = torch.load(file, weights_only=False)
            self.seen += [t.tolist() for t in found["state_dict"].values()]
            self.seen.append(repr(found["optimizer_states"]))
        return loss


class OwnTransfer(Case):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch[0].to(device) * 2, batch[1].to(device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + torch.randn_like(batch[0]) * 0.1 + self.enter.weight.mean(), batch[1]
