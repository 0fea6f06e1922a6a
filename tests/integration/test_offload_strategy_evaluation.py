"""validate, test, predict and the validation inside a fit, under OffloadStrategy and without it."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from support import offload_lightning as ol
from support.accelerators import here, on_each_accelerator, pairs_on_each
from support.products import every_value
from torch import nn
from torch.utils.data import DataLoader

from offload import BudgetTooSmall
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


METHODS = ("validate", "test", "predict")


def run(
    method: str,
    strategy: Any = "auto",
    make: Callable[[], L.LightningModule] = ol.Module,
    *,
    loaders: Any = None,
    **options: Any,
) -> tuple[Any, L.Trainer]:
    """What `trainer.validate` and the like return, and the trainer."""
    torch.manual_seed(3)
    module = make()
    trainer = L.Trainer(strategy=strategy, **{**ol.ONE_QUIET_EPOCH, **here(), **options})
    torch.manual_seed(4)
    more: Any = {} if method == "predict" else {"verbose": False}
    result = getattr(trainer, method)(module, loaders or ol.data(20), **more)
    return result, trainer


def both(method: str, make: Any = ol.Module, budget: Any = "60%", **options: Any) -> None:
    """With the strategy and without, told apart by nothing."""
    strategy = OffloadStrategy(budget=budget)
    ours, trainer = run(method, strategy, make, **options)
    theirs, plain = run(method, "auto", make, **options)
    assert ol._unequal("", ours, theirs) == []
    assert ol._unequal("", trainer.callback_metrics, plain.callback_metrics) == []
    state = trainer.lightning_module.state_dict(), plain.lightning_module.state_dict()
    assert ol._unequal("state", *state) == []
    if budget is not None:
        assert strategy.plan.device_bytes


# ---- the same bits, within the budget -----------------------------------------------------------


class Wide(L.LightningModule):
    """Nothing but weights."""

    def __init__(self, layers: int = 8, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.right = torchmetrics.MeanSquaredError()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def _look(self, batch: Any, name: str) -> torch.Tensor:
        out = self(batch)
        self.right(out, batch)
        self.log(name, out.square().mean())
        self.log(f"{name}_metric", self.right)
        return out

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._look(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._look(batch, "test")


def wide_data() -> DataLoader[Any]:
    x = torch.randn(20, 128, generator=torch.Generator().manual_seed(1))
    return DataLoader(x, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("share", [None, 0.6, 0.3])
def test_a_model_larger_than_the_budget_gives_the_bits_of_plain_lightning(
    method: str, share: float | None
) -> None:
    weights = sum(p.numel() * p.element_size() for p in Wide().parameters())
    budget = None if share is None else int(weights * share)
    both(method, Wide, budget, loaders=wide_data())


class Magnifying(ol.Module):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])[:, None].expand(-1, 5_000, -1).exp()


def test_after_a_fit_within_a_share_a_larger_prediction_gets_what_its_largest_task_needs() -> None:
    ours, theirs = (ol.train(s, Magnifying) for s in (OffloadStrategy(budget="60%"), "auto"))
    predicted: list[Any] = [run.trainer.predict(run.module, ol.data()) for run in (ours, theirs)]
    assert all(map(torch.equal, *predicted))


# ---- inside of a fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget, precision, inference_mode, accelerator",
    pairs_on_each([None, "60%", "40%"], ["32-true", "bf16-mixed"], [True, False]),
    indirect=["accelerator"],
)
def test_validation_within_a_fit_is_plain_lightnings(
    budget: str | None,
    precision: Any,
    inference_mode: bool,
    accelerator: str,
) -> None:
    options: dict[str, Any] = {
        "precision": precision,
        "inference_mode": inference_mode,
        "num_sanity_val_steps": 2,
        "val_check_interval": 3,
        "max_epochs": 3,
    }
    ours = ol.train(OffloadStrategy(budget=budget), **options)
    assert ol.differences(ol.train(**options), ours) == []
    assert not any(p.is_inference() for p in ours.module.parameters())
    if budget is not None:
        assert ol.keeps_share(ours.strategy, budget)


class Large(ol.Module):
    """Validates on more than it is trained on."""

    def val_dataloader(self) -> Any:
        return ol.data(2000, 1000)


def test_a_validation_that_does_not_fit_is_refused_or_gets_what_a_share_is_not_of() -> None:
    options: dict[str, Any] = {"make": Large, "validate": False}
    with pytest.raises(BudgetTooSmall, match="raise the budget to"):
        ol.train(OffloadStrategy(budget=ol.smallest()), **options)
    ours = ol.train(OffloadStrategy(budget="60%"), **options)
    assert ol.differences(ol.train(**options), ours) == []


# ---- averaged weights ---------------------------------------------------------------------------


class Swaps(L.Callback):
    """Shows other weights to validation."""

    def __init__(self, how: str) -> None:
        self.how, self.kept = how, {}

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        for name, p in pl_module.named_parameters():
            if self.how == "copied":
                self.kept[name] = p.detach().clone()
                p.data.mul_(0.5)
            else:
                self.kept[name] = p.data  # not a copy: the very memory
                p.data = p.data * 0.5

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for name, p in pl_module.named_parameters():
            if self.how == "copied":
                p.data.copy_(self.kept[name])
            else:
                p.data = self.kept[name]


@pytest.mark.parametrize("how", ["copied", "pointed"])
def test_weights_that_are_swapped_are_those_that_are_validated(how: str) -> None:
    options: dict[str, Any] = {"num_sanity_val_steps": 2, "max_epochs": 3}
    ours = ol.train(OffloadStrategy(budget="60%"), callbacks=[Swaps(how)], **options)
    assert ol.differences(ol.train(callbacks=[Swaps(how)], **options), ours) == []


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


@on_each_accelerator
@pytest.mark.parametrize("method, precision", every_value(METHODS, ["32-true", "bf16-mixed"]))
def test_several_loaders_each_with_graphs_of_its_own(
    method: str, precision: Any, accelerator: str
) -> None:
    loaders = [ol.data(20), ol.data(12)]
    both(method, Several, loaders=loaders, precision=precision)


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
