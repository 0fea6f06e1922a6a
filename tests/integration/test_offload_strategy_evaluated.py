"""Modules and batches of all kinds that are evaluated under OffloadStrategy, and what cannot be."""

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from support import offload_lightning as ol
from support.accelerators import here, on_each_accelerator
from support.offload_evaluation import METHODS, both, run
from support.products import every_value
from torch import nn

from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


# ---- modules of all kinds -----------------------------------------------------------------------


class Several(ol.Module):
    """Two loaders, other things with each, metrics that are computed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.ModuleList(
            torchmetrics.Accuracy("multiclass", num_classes=ol.CLASSES) for _ in range(2)
        )
        self.area = torchmetrics.AUROC("multiclass", num_classes=ol.CLASSES)
        self.other = nn.Linear(ol.WIDTH, ol.CLASSES)

    def _look(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        hidden = self.blocks(self.enter(x))
        out = self.other(hidden) if dataloader_idx else self.head(hidden)
        metric: Any = self.right[dataloader_idx]
        self.log("now", metric(out, y), on_step=True)
        self.log(f"right_{dataloader_idx}", metric, add_dataloader_idx=False)
        self.area.update(out.softmax(-1), y)
        return {"out": out, "say": (f"loader {dataloader_idx}", 7, None), "x": x}

    validation_step = _look
    test_step = _look

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        out = self(batch[0]) + dataloader_idx
        return {"out": out, "best": (out.argmax(-1), "text"), "batch": batch[1], "none": None}

    def on_validation_epoch_end(self) -> None:
        self.log("area", self.area.compute())
        self.area.reset()

    on_test_epoch_end = on_validation_epoch_end


class Writes(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.seen: list[Any] = []

    def write_on_batch_end(  # type: ignore[override]
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *more: Any
    ) -> None:
        self.seen.append((prediction, batch_indices))


class Gathers(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_batch_end(  # type: ignore[override]
        self, trainer: Any, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        self.seen.append(outputs)


@on_each_accelerator
@pytest.mark.parametrize("method, precision", every_value(METHODS, ["32-true", "bf16-mixed"]))
def test_several_loaders_each_with_graphs_of_its_own(
    method: str, precision: Any, accelerator: str
) -> None:
    loaders = [ol.data(20), ol.data(12)]
    both(method, Several, loaders=loaders, precision=precision)


@on_each_accelerator
def test_callbacks_get_what_the_steps_return(accelerator: str) -> None:
    seen = []
    for make in (lambda: OffloadStrategy(budget="60%"), lambda: "auto"):
        writes, gathers = Writes(), Gathers()
        run("predict", make(), Several, callbacks=[writes])
        run("validate", make(), Several, callbacks=[gathers])
        seen.append((writes.seen, gathers.seen))
    assert ol._unequal("", *seen) == []
    assert len(seen[0][0]) == len(seen[0][1]) == 3


class Dreams(ol.Module):
    """Dropout is active in evaluation, and what is drawn goes on from batch to batch."""

    def on_predict_epoch_start(self) -> None:
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.train()

    on_validation_epoch_start = on_predict_epoch_start

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.stack([self(batch[0]) for _ in range(3)]), torch.rand(2)


def test_random_numbers_are_drawn_in_the_order_of_plain_lightning() -> None:
    both("predict", Dreams)
    options: dict[str, Any] = {"make": Dreams, "num_sanity_val_steps": 2}
    ours = ol.train(OffloadStrategy(budget="60%"), **options)
    assert ol.differences(ol.train(**options), ours) == []


class Numbers(ol.Module):
    """What it reads changes between two evaluations, and its buffer is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(()))

    def on_validation_epoch_start(self) -> None:
        self.scale = 1.0 + self.current_epoch
        self.shift = torch.full((1,), float(self.current_epoch))  # in inference mode

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0]) * self.scale + self.shift
        self.seen += len(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(out, batch[1]))
        self.log("epoch", self.current_epoch)
        self.log("steps", self.global_step)


def test_python_values_and_buffers_that_a_step_reads_are_those_of_now() -> None:
    options: dict[str, Any] = {"make": Numbers, "num_sanity_val_steps": 2}
    ours = ol.train(OffloadStrategy(budget="60%"), **options)
    assert ol.differences(ol.train(**options), ours) == []
    assert ours.module.seen == 2 * 20 + 16


class Replaced(ol.Module):
    """Nothing but a tensor is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(1))

    def on_validation_epoch_start(self) -> None:
        self.shift = self.shift + 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("shift", self.shift + batch[0].sum() * 0)


def test_a_tensor_that_took_the_place_of_another_is_read() -> None:
    ours = ol.train(OffloadStrategy(budget="60%"), Replaced)
    assert ours.trainer.callback_metrics["shift"] == 2


class Quiet(ol.Module):
    """A step that computes nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("one", 1.0)


def test_a_step_that_computes_nothing_is_no_trouble() -> None:
    assert run("validate", OffloadStrategy(budget="1KiB"), Quiet)[0] == [{"one": 1.0}]


# ---- whatever Python does ------------------------------------------------------------------------


class Pictures(ol.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.log("first", batch[0].mean())
        super().validation_step(batch, batch_idx)


class Values(ol.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss.item())


class Steps(ol.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step >= 1:
            super().validation_step(batch, batch_idx)


class Thing:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Objects(ol.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return Thing(batch[0] + 1)


class Gathered(ol.Module):
    """As Lightning's own guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Any] = []
        self.by_class: list[list[Any]] = [[], []]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        self.outs.append({"loss": loss, "n": len(out)})
        self.by_class[1].append(out)
        self.by_class[0] += [loss]
        return loss

    def on_validation_epoch_end(self) -> None:
        losses = torch.stack([out["loss"] for out in self.outs])
        assert torch.equal(losses, torch.stack(self.by_class[0]))
        self.log("val_loss", losses.mean())
        self.log("largest", torch.cat(self.by_class[1]).max())
        self.log("count", float(sum(out["n"] for out in self.outs)))
        self.outs = []
        for values in self.by_class:
            values.clear()


class Attends(ol.Module):
    """torch's attention may take a fast path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layer(x[None])[0])


class LooksBefore(ol.Module):
    """It looks at what it gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.outs:
            self.log("before", self.outs[-1])
        self.outs.append(self(batch[0]).sum())


class LooksAfter(LooksBefore):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outs.append(self(batch[0]).sum())
        self.log("mean", torch.stack(self.outs).mean())


MAKES = [Pictures, Values, Steps, Objects, Attends, LooksBefore, LooksAfter, Gathered]


@pytest.mark.parametrize("make", MAKES)
def test_whatever_python_does_in_a_step_is_as_in_plain_lightning(make: Any) -> None:
    options = {"num_sanity_val_steps": 2, "max_epochs": 3}
    ours = ol.train(OffloadStrategy(budget="60%"), make, **options)
    theirs = ol.train("auto", make, **options)
    assert ol.differences(theirs, ours) == []
    outs = [getattr(result.module, "outs", []) for result in (ours, theirs)]
    assert ol._unequal("", *outs) == []
    if make is not Steps:  # it computes nothing without a fit
        both("validate", make)


class Mistaken(ol.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise ValueError("a mistake of mine")


def test_an_exception_of_the_user_arrives_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^a mistake of mine$"):
        run("validate", OffloadStrategy(budget="60%"), Mistaken)


def test_afterwards_every_tensor_has_memory_of_its_own_outside_of_inference_mode() -> None:
    for method in METHODS:
        _, trainer = run(method, OffloadStrategy(budget="60%"))
        tensors = [*trainer.lightning_module.state_dict().values()]
        assert not any(t.is_inference() for t in tensors)
        tensors[0].resize_(1)
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


@on_each_accelerator
def test_a_fit_goes_on_after_an_evaluation(accelerator: str) -> None:
    results = []
    for strategy in (OffloadStrategy(budget="60%"), "auto"):
        torch.manual_seed(3)
        module = ol.Module()
        trainer = L.Trainer(
            strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, **here(),
        )  # fmt: skip
        trainer.validate(module, ol.data(20), verbose=False)
        trainer.fit(module, ol.data(), ol.data(20))
        trainer.test(module, ol.data(20), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, ol.data(), ol.data(20))
        results.append((module.state_dict(), trainer.callback_metrics))
    assert ol._unequal("", *results) == []
