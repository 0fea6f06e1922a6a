"""validate, test, predict and the validation inside a fit, under OffloadStrategy and without it."""

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from support import offload_lightning as ol
from support.accelerators import pairs_on_each
from support.offload_evaluation import METHODS, both, run
from torch import nn
from torch.utils.data import DataLoader

from offload import BudgetTooSmall
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


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


@pytest.mark.parametrize("method", METHODS)
def test_the_arena_is_no_larger_than_the_smallest_budget_and_is_not_left(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.memory.arenas import DeviceArena

    sizes: list[int] = []
    real = DeviceArena.__init__

    def noted(self: DeviceArena, wanted: Any, *more: Any) -> None:
        sizes.append(wanted.get(0, 0))
        real(self, wanted, *more)

    with pytest.raises(BudgetTooSmall) as refused:
        run(method, OffloadStrategy(budget=64), Wide, loaders=wide_data())
    monkeypatch.setattr(DeviceArena, "__init__", noted)
    budget = refused.value.needed
    both(method, Wide, budget, loaders=wide_data())
    weights = sum(p.numel() * p.element_size() for p in Wide().parameters())
    assert 0 < max(sizes) <= budget < weights / 2


def test_poisoned_dead_bytes_are_read_by_no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    from functools import partial

    import trainers.steps.target as target

    monkeypatch.setattr(target, "Runner", partial(target.Runner, poison=True))
    both("validate", Wide, "45%", loaders=wide_data())


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


def test_training_and_validation_share_one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    import offload.running.runner as executor

    made: list[Any] = []
    real = executor.Runner.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        real(self, *args, **kwargs)

    monkeypatch.setattr(executor.Runner, "__init__", noted)
    ol.train(OffloadStrategy(budget="60%"))
    assert len(made) == 1


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
