"""Modules and callbacks of all kinds under OffloadStrategy, against plain Lightning."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from products import every_value, only_first
from support import offload_lightning as ol
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


def both(make: Any = ol.Module, budget: str | None = "70%", **options: Any) -> list[ol.Result]:
    """Planned and plain, told apart by nothing."""
    strategy = OffloadStrategy(budget=budget)
    ours, theirs = ol.train(strategy, make, **options), ol.train("auto", make, **options)
    assert ol.differences(theirs, ours) == []
    assert strategy.plan
    return [ours, theirs]


# ---- what a module logs ------------------------------------------------------------------------


class Measured(ol.Module):
    """Metrics of every kind that a training step may have."""

    def __init__(self) -> None:
        super().__init__()
        self.right = torchmetrics.Accuracy("multiclass", num_classes=ol.CLASSES)
        self.top = torchmetrics.Accuracy("multiclass", num_classes=ol.CLASSES, top_k=2)
        self.mean = torchmetrics.MeanMetric()
        self.several = torchmetrics.MetricCollection(
            {
                "f1": torchmetrics.F1Score("multiclass", num_classes=ol.CLASSES),
                "precision": torchmetrics.Precision("multiclass", num_classes=ol.CLASSES),
            }
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        loss = nn.functional.cross_entropy(out, y)
        value = self.right(out, y)  # logged as a value
        self.log("right of this batch", value)
        self.top(out, y)  # logged as an object
        self.log("top", self.top, on_step=True, on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log_dict(self.several(out.softmax(-1), y), on_step=False, on_epoch=True)
        self.log("largest", out.max(), reduce_fx="max", on_epoch=True)
        self.log("loss", loss, batch_size=3, on_epoch=True)
        return {"loss": loss, "out": out, "note": "kept"}


@pytest.mark.parametrize("precision", only_first("bf16-mixed", "32-true"))
def test_metrics_are_updated_after_the_step_with_what_it_computed(precision: Any) -> None:
    ours, _ = both(Measured, precision=precision)
    names = {"top_epoch", "mean", "f1", "precision", "right of this batch", "largest_epoch"}
    assert names <= {name.removeprefix("callback ") for name in ours.metrics}


class Numbers(ol.Module):
    """Logs python numbers that change."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        groups = self.trainer.optimizers[0].param_groups
        self.log("rate", groups[0]["lr"], on_step=True, on_epoch=True)
        self.log_dict({"other rate": groups[1]["lr"], "epoch": float(1), "two": 2})
        self.log("step", self.global_step)
        self.log("now", self.current_epoch)
        return loss


@pytest.mark.filterwarnings("ignore:.*the value needs to be floating")
def test_a_learning_rate_and_a_step_that_are_logged_are_those_of_now() -> None:
    ours, _ = both(Numbers)
    assert [ours.metrics[f"callback {name}"] for name in ("step", "now")] == [11, 1]
    assert ours.metrics["callback rate_step"] != ours.metrics["callback rate_epoch"]


class Outputs(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs)


def test_callbacks_get_what_the_step_returned() -> None:
    seen = []
    for strategy in (OffloadStrategy(budget="70%"), "auto"):
        outputs = Outputs()
        ol.train(strategy, Measured, callbacks=[outputs], accumulate_grad_batches=2)
        seen.append(outputs.seen)
    assert ol._unequal("", *seen) == []
    assert seen[0][0]["note"] == "kept"
    assert not seen[0][0]["out"].requires_grad


# ---- modules -----------------------------------------------------------------------------------


class Frozen(ol.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].eval()


class Recurrent(ol.Module):
    """Its kernel's workspace has a size that only the kernel knows."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, dropout=0.2, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.lstm(x.unflatten(1, (3, 4)).transpose(0, 1))
        return super().forward(found.mean(0))


@pytest.mark.parametrize("budget", [None, "60%"])
def test_several_fits_of_an_lstm_in_one_process_are_plain_lightnings(budget: Any) -> None:
    for seed in (3, 4):
        both(Recurrent, budget, seed=seed)


class Tied(ol.Module):
    """The same matrix twice, and a parameter that the loss does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.unused = nn.Parameter(torch.ones(3))


class Dictionary(ol.Module):
    """Batches of every form."""

    def training_step(self, batch: Any) -> Any:
        loss = nn.functional.cross_entropy(self(batch["x"]), batch["more"][0])
        self.log("loss", loss * batch["more"][1])
        return loss


def dictionaries(batch: Any) -> Any:
    x, y = (torch.stack(part) for part in zip(*batch, strict=True))
    return {"x": x, "more": (y, 2.5), "who": ["a", None]}


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_frozen_parameters_and_layers_in_evaluation_mode() -> None:
    ours, _ = both(Frozen)
    assert torch.equal(ours.module.enter.weight, _begun(Frozen).enter.weight)


def _begun(make: Any) -> Any:
    torch.manual_seed(3)
    return make()


def test_tied_weights_and_parameters_without_a_gradient() -> None:
    ours, _ = both(Tied)
    assert ours.module.blocks[2].inner.weight is ours.module.blocks[0].inner.weight
    both(Tied, accumulate_grad_batches=2, gradient_clip_val=0.1)


def test_batches_are_dicts_and_tuples_with_numbers_and_text() -> None:
    loader = DataLoader(ol.data().dataset, ol.BATCH, collate_fn=dictionaries)
    both(Dictionary, loader=loader, validate=False)


class Schedules(ol.Module):
    """A python number of its own that a hook changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def on_train_epoch_start(self) -> None:
        self.weight = 1.0 / (1 + self.current_epoch)
        self.blocks[0].drop.p = 0.1 * (1 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * self.weight


def test_python_numbers_that_the_step_reads_may_change_from_epoch_to_epoch() -> None:
    both(Schedules)


class Unfreezes(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.enter.requires_grad_(trainer.current_epoch % 2 == 1)


def test_what_requires_a_gradient_may_change_from_epoch_to_epoch() -> None:
    both(callbacks=[Unfreezes()])


class Shares(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.blocks[0] = pl_module.blocks[1]


class Swaps(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            blocks = pl_module.blocks
            blocks[0], blocks[1] = blocks[1], blocks[0]


class Renews(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            torch.manual_seed(11)
            pl_module.blocks[0] = type(pl_module.blocks[0])()


@pytest.mark.parametrize("change, budget", every_value([Shares, Swaps, Renews], ["60%", None]))
def test_submodules_may_be_replaced_between_two_epochs(change: Any, budget: Any) -> None:
    both(callbacks=[change()], budget=budget)


class NoStatistics(ol.Module):
    def __init__(self) -> None:
        super().__init__("sgd", "epoch")
        for block in self.blocks:
            block.norm = nn.LayerNorm(ol.WIDTH)


# ---- callbacks ---------------------------------------------------------------------------------


def test_averages_of_the_weights_are_lightnings() -> None:
    for make in (
        lambda: EMAWeightAveraging(decay=0.9),
        lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1),
    ):
        results = [
            ol.train(strategy, NoStatistics, callbacks=[make()], max_epochs=3, validate=False)
            for strategy in (OffloadStrategy(budget="70%"), "auto")
        ]
        assert ol.differences(results[1], results[0]) == []


# ---- resumed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("before, after", every_value(["60%", "auto"], ["auto", "80%", None]))
def test_a_run_goes_on_from_a_checkpoint_under_another_budget_or_without_us(
    before: str, after: str | None, tmp_path: Path
) -> None:
    def strategy(budget: str | None) -> Any:
        return "auto" if budget == "auto" else OffloadStrategy(budget=budget)

    begun = ol.train(strategy(before), max_epochs=1)
    begun.trainer.save_checkpoint(tmp_path / "half.ckpt")
    plain = ol.train("auto", max_epochs=1)
    plain.trainer.save_checkpoint(tmp_path / "plain.ckpt")
    ours = ol.train(strategy(after), ckpt_path=tmp_path / "half.ckpt", seed=9)
    theirs = ol.train("auto", ckpt_path=tmp_path / "plain.ckpt", seed=9)
    assert ol.differences(theirs, ours) == []


def test_a_checkpoint_has_the_original_names_and_loads_into_the_bare_module(tmp_path: Path) -> None:
    result = ol.train(OffloadStrategy(budget="60%"))
    result.trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = ol.Module.load_from_checkpoint(tmp_path / "last.ckpt")
    assert ol._unequal("", loaded.state_dict(), result.module.state_dict()) == []
    other = BoringModel()
    with pytest.raises(RuntimeError, match="Missing key"):
        ol.train(OffloadStrategy(), lambda: other, ckpt_path=tmp_path / "last.ckpt")


@pytest.mark.full
def test_a_batch_of_one_shape_after_the_other_is_planned_and_told_once() -> None:
    class Sizes(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            noise = torch.Generator().manual_seed(index)
            n = 2 + index
            return torch.randn(n, 12, generator=noise), torch.arange(n) % ol.CLASSES

    loader = DataLoader(Sizes(), batch_size=None)
    strategy = OffloadStrategy()
    with pytest.warns(UserWarning, match="captured and planned the step 3 times") as said:
        ours = ol.train(strategy, loader=loader, validate=False)
    assert len([w for w in said if "planned" in str(w.message)]) == 1
    theirs = ol.train("auto", loader=loader, validate=False)
    assert ol.differences(theirs, ours) == []


def test_tensor_datasets_of_half_precision_inputs() -> None:
    x, y = ol.data().dataset.tensors  # type: ignore[attr-defined]
    loader = DataLoader(TensorDataset(x.double(), y), ol.BATCH)

    class Casts(ol.Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self(batch[0].float()), batch[1])

    both(Casts, loader=loader, validate=False)
