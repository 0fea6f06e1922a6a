"""Cases of lists, numbers and text that a step reads or fills, and of windows of micro-batches
(live_modules.py)."""

import operator
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from support import offload_lightning as ol
from support.live_modules import WIDTH, Case, Manual
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset

# ---- lists --------------------------------------------------------------------------------------


class Gathers(Case):
    """Lists grow in the step and in a hook, and are read there; they are cleared in the end."""

    only: ClassVar[Any] = (None, "90%")
    options: ClassVar[Any] = {"accumulate_grad_batches": 2}

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Any] = []
        self.more: list[Any] = [[], []]
        self.named: dict[str, list[Any]] = {"loss": [], "out": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.outs += [out.detach().mean(), batch[1].sum()]
        self.outs.extend([loss.detach(), 3])
        self.more[1].append(out.argmax(-1).sum())
        self.more[0] = [loss.detach()]
        for values in self.named.values():
            values.append(loss.detach())
        return loss * (1 + self.named["loss"][-2]) if len(self.outs) > 9 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.outs.append(self.head.weight.grad.norm())

    def on_train_batch_end(self, *_: Any) -> None:
        lists = (self.outs, *self.more, *self.named.values())
        self.seen.append([[float(one) for one in each] for each in lists])

    def on_train_epoch_end(self) -> None:
        self.outs = []
        for each in (*self.more, *self.named.values()):
            each.clear()


READ: tuple[Callable[[list[Any]], Any], ...] = (
    lambda bank: torch.stack(bank).sum().item(),
    lambda bank: len(bank + [1]),  # noqa: RUF005
    lambda bank: len([1] + bank),  # noqa: RUF005
    lambda bank: len(bank * 2),
    lambda bank: len([*reversed(bank)]),
    repr,
    lambda bank: bank == [],
)


class Remembers(Case):
    """A list that validation reads in all ways, and that grows in the step and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Any] = [torch.ones(5)]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += [read(self.bank) for read in READ]
        self.bank.append(self(batch[0]).mean(0))
        return torch.stack(self.bank).sum()

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs.item())
        self.bank.append(torch.ones(5))


# ---- numbers and text ---------------------------------------------------------------------------

CHOICES: tuple[Callable[[Any, int], bool], ...] = (
    lambda module, index: int(index) < 3,
    lambda module, index: divmod(index, 4)[0] == 1,
    lambda module, index: operator.rshift(index, 2) == 0,
    lambda module, index: index in {2, 3},
    lambda module, index: module.current_epoch in {1, 2},
    lambda module, index: {1: True}.get(module.current_epoch, False),
    lambda module, index: module.global_step in {4, 5},
)


class Choosing:
    """It computes with the trainer's numbers in unusual ways."""

    def on_train_epoch_start(self: Any) -> None:
        self.body[0][2].p = 0.1 * (1 + self.current_epoch)

    def loss(self: Any, batch: Any) -> torch.Tensor:
        chosen = [choice(self, self.trainer.fit_loop.batch_idx) for choice in CHOICES]
        self.seen.append(chosen)
        return F.cross_entropy(self(batch[0]), batch[1]) * (1 + sum(chosen))


class Chooses(Choosing, Case):
    pass


class ChoosesByHand(Choosing, Manual):
    pass


class Texts(Case):
    """Text and numbers of the batch are handed on, and looked at."""

    only: ClassVar[Any] = (None, "60%")

    @classmethod
    def loader(cls) -> Any:
        x, y = ol.data(24).dataset.tensors  # type: ignore[attr-defined]
        batches = [
            UserDict(x=x[n : n + 4].double(), y=y[n : n + 4], name=f"{n}.jpg", id=n // 4 % 3)
            for n in range(0, 24, 4)
        ]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        out = self(batch["x"].float())
        loss = F.cross_entropy(out, batch["y"]) * (1 + batch["id"] % 2)
        loss = loss * 2 if batch["name"].startswith("1") else loss
        return {"loss": loss, "as": ("-".join(batch["name"]), batch["id"]), "out": out}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:  # type: ignore[override]
        self.seen += [outputs["as"], outputs["out"].requires_grad]


# ---- modules that change ------------------------------------------------------------------------


class Exchanged(Case):
    """Submodules are shared, swapped and renewed between two epochs."""

    options: ClassVar[Any] = {"max_epochs": 4}

    def on_train_epoch_start(self) -> None:
        body = self.body
        if self.current_epoch == 1:
            body[0], body[1] = body[1], body[0]
        if self.current_epoch == 2:
            body[0] = body[1]
        if self.current_epoch == 3:
            body[2] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


class Masked(Case):
    """Weights that a hook computes before every forward pass, and that are found after it."""

    only: ClassVar[Any] = (None, "60%")

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.head, "weight", 0.5)
        prune.random_unstructured(self.head, "weight", 0.3)
        prune.l1_unstructured(self.body[1][0], "weight", 0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.head.weight.tolist())


# ---- windows of micro-batches -------------------------------------------------------------------


class Window(Case):
    """In the middle of a window the loader draws, a checkpoint is saved, and the run is stopped."""

    only: ClassVar[Any] = (None, "60%")
    options: ClassVar[Any] = {"accumulate_grad_batches": 4, "max_epochs": 3}

    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 88

        def __getitem__(self, number: int) -> Any:
            return torch.randn(12), torch.tensor(number % ol.CLASSES)

    @classmethod
    def loader(cls) -> Any:
        return DataLoader(cls.Noisy(), 8)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.training:
            return batch
        at = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if at in (6, 12):
            file = Path(self.trainer.default_root_dir) / f"{at}.ckpt"
            self.trainer.save_checkpoint(file)
            found = torch.load(file, weights_only=False)
            self.seen += [t.tolist() for t in found["state_dict"].values()]
            self.seen += [repr(found["optimizer_states"]), found["global_step"], found["loops"]]
        self.trainer.should_stop = at == 18
        return batch
