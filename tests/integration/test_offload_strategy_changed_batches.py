"""A step that changes its batch in place: metrics, hooks and predictions see the new values."""

from collections import UserDict
from typing import Any

import pytest
import torch
from support import offload_lightning as ol
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, default_collate
from torchmetrics.classification import MulticlassAccuracy

from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


class Relabelling(ol.Module):
    """Folds its last class into the first one, in the labels that the loader gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.right = MulticlassAccuracy(ol.CLASSES, average="micro")
        self.valid = MulticlassAccuracy(ol.CLASSES, average="micro")
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x.data.add_(0.5)
        y[y == ol.CLASSES - 1] = 0
        out = self(x)
        loss = functional.cross_entropy(out, y)
        self.right(out, y)
        self.log("right", self.right, on_step=True, on_epoch=True)
        return {"loss": loss, "labels": y}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([*outputs["labels"].tolist(), *batch[1].tolist()])
        self.log("middle", batch[0].mean())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        y.clamp_(max=1)
        self.valid.update(self(x), y)
        self.log("valid", self.valid)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2)
        return batch[0], self(batch[0])


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_a_step_writes_into_its_batch_is_there_for_metrics_and_hooks(
    micro_batches: int,
) -> None:
    ours, theirs = (
        ol.train(strategy, Relabelling, accumulate_grad_batches=micro_batches)
        for strategy in (OffloadStrategy(budget="80%"), "auto")
    )
    assert ol.differences(theirs, ours) == []
    assert ours.module.seen == theirs.module.seen
    assert ours.strategy.plans
    predicted: list[Any] = [run.trainer.predict(run.module, ol.data()) for run in (ours, theirs)]
    for pair in zip(*predicted, strict=True):
        assert all(map(torch.equal, *pair))


class TakesApart(ol.Module):
    """Takes things out of its batch and puts others in, as the losses of transformers ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def loss_of(self, batch: Any) -> torch.Tensor:
        labels, (x, scale) = batch.pop("labels"), batch["inputs"]
        batch["inputs"][0] = x * 2
        batch["inputs"].append(scale)
        out = self(batch["inputs"][0] * scale)
        batch["out"], batch["same"] = out.detach(), batch["inputs"]
        return functional.cross_entropy(out, labels)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch)

    def note(self, batch: Any) -> None:
        assert batch["same"] is batch["inputs"]
        leaves = [*batch["inputs"], batch["out"]]
        self.seen.append(([*batch], [torch.as_tensor(leaf).clone() for leaf in leaves]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), batch_size=5)

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.note(batch)


class Fields(UserDict[str, Any]):
    """A mapping that is no dict, such as transformers' BatchEncoding."""


@pytest.mark.parametrize("kind", [dict, Fields])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_a_step_takes_out_of_its_batch_or_puts_in_is_so_for_hooks(
    kind: Any, micro_batches: int
) -> None:
    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return kind({"inputs": [x, 0.5], "name": "some", "labels": y})

    def train(strategy: Any) -> ol.Result:
        loader = DataLoader(ol.data().dataset, 5, collate_fn=collate, drop_last=True)
        options: dict[str, Any] = {"accumulate_grad_batches": micro_batches}
        run = ol.train(strategy, TakesApart, loader=loader, validate=False, **options)
        run.trainer.validate(run.module, loader, verbose=False)
        return run

    ours, theirs = train(OffloadStrategy(budget="90%")), train("auto")
    assert ours.strategy.plans and ol.differences(theirs, ours) == []
    assert len(ours.module.seen) == len(theirs.module.seen) > 4
    for (keys, values), (names, expected) in zip(ours.module.seen, theirs.module.seen, strict=True):
        assert keys == names == ["inputs", "name", "out", "same"]
        assert all(map(torch.equal, values, expected))


class ByHand(Relabelling):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(made["loss"])
        optimizer.step()
        return made


class Reshaping(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        y.unsqueeze_(1)
        return functional.cross_entropy(self(x), y[:, 0])


class Recurrent(ol.Module):
    """torch's GRU transposes its own output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(4, ol.WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x.unflatten(1, (3, 4)))[0][:, -1])


@pytest.mark.parametrize("make", [ByHand, Reshaping, Recurrent])
def test_so_it_is_by_hand_and_with_another_shape(make: Any) -> None:
    ours, theirs = (ol.train(s, make) for s in (OffloadStrategy(budget="80%"), "auto"))
    assert ol.differences(theirs, ours) == []
    if make is ByHand:
        assert ours.module.seen == theirs.module.seen
