"""validate, test, predict and the validation inside a fit, under OffloadStrategy and without it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn
from torch.utils.data import DataLoader

from offload import BudgetTooSmall
from trainers import OffloadStrategy
from trainers.evaluation import Evaluation

sys.path.insert(0, str(Path(__file__).parent))
import offload_lightning as ol

one_thread = ol.one_thread
pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]

METHODS = ("validate", "test", "predict")
HOST = "on the host, without offloading"


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of steps that were captured, in order."""
    kinds: list[str] = []
    real = Evaluation._traced

    def traced(self: Evaluation, given: Any) -> Any:
        kinds.append(given.kind)
        return real(self, given)

    monkeypatch.setattr(Evaluation, "_traced", traced)
    yield kinds


def run(
    method: str,
    strategy: Any = "auto",
    make: Callable[[], L.LightningModule] = ol.Module,
    *,
    loaders: Any = None,
    weights: Any = None,
    **options: Any,
) -> tuple[Any, L.Trainer]:
    """What `trainer.validate` and the like return, and the trainer."""
    torch.manual_seed(3)
    module = make()
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = L.Trainer(strategy=strategy, **{**defaults, **options})
    torch.manual_seed(4)
    more: Any = {} if method == "predict" else {"verbose": False}
    result = getattr(trainer, method)(module, loaders or ol.data(20), **more)
    return result, trainer


def both(method: str, make: Any = ol.Module, budget: Any = "60%", **options: Any) -> Any:
    """Planned, and told apart from plain Lightning by nothing."""
    strategy = OffloadStrategy(budget=budget)
    ours, trainer = run(method, strategy, make, **options)
    theirs, plain = run(method, "auto", make, **options)
    assert ol._unequal("", ours, theirs) == []
    assert ol._unequal("", trainer.callback_metrics, plain.callback_metrics) == []
    state = trainer.lightning_module.state_dict(), plain.lightning_module.state_dict()
    assert ol._unequal("state", *state) == []
    assert strategy.plan.device_bytes
    return ours


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


@pytest.mark.parametrize("method", METHODS)
def test_the_arena_is_no_larger_than_the_smallest_budget_and_is_not_left(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.memory import Arenas

    sizes: list[int] = []
    real = Arenas.__init__

    def noted(self: Arenas, wanted: Any) -> None:
        sizes.append(wanted.get(0, 0))
        real(self, wanted)

    with pytest.raises(BudgetTooSmall) as refused:
        run(method, OffloadStrategy(budget=64), Wide, loaders=wide_data())
    monkeypatch.setattr(Arenas, "__init__", noted)
    budget = refused.value.needed
    both(method, Wide, budget, loaders=wide_data())
    weights = sum(p.numel() * p.element_size() for p in Wide().parameters())
    assert 0 < max(sizes) <= budget < weights / 2


def test_poisoned_dead_bytes_are_read_by_no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    from functools import partial

    import trainers.evaluation as evaluation

    monkeypatch.setattr(evaluation, "Runner", partial(evaluation.Runner, poison=True))
    both("validate", Wide, "45%", loaders=wide_data())


# ---- inside of a fit ----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, "60%", "40%"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("inference_mode", [True, False])
def test_validation_within_a_fit_is_plain_lightnings(
    budget: str | None, precision: Any, inference_mode: bool, captures: list[str]
) -> None:
    options: dict[str, Any] = {
        "precision": precision,
        "inference_mode": inference_mode,
        "num_sanity_val_steps": 2,
        "val_check_interval": 3,
        "max_epochs": 3,
    }
    ours = ol.train(OffloadStrategy(budget=budget, check_first_steps=0), **options)
    assert ol.differences(ol.train(**options), ours) == []
    # Batches of 8 before the fit; of 8, and of 4, in it: never again, in six validations.
    assert captures == ["validation_step"] * 3
    assert not any(p.is_inference() for p in ours.module.parameters())
    if budget is not None:
        plan = ours.strategy.plan
        assert plan.device_bytes <= plan.peak_bytes * float(budget[:-1]) / 100


def test_so_it_is_with_the_smallest_budget_and_with_first_steps_checked() -> None:
    budget = ol.smallest()
    for check in (0, 2):
        ours = ol.train(OffloadStrategy(budget=budget, check_first_steps=check))
        assert ol.differences(ol.train(), ours) == []


def test_training_and_validation_share_one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    import offload.executor as executor

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


def test_a_validation_that_does_not_fit_runs_on_the_host_and_says_what_it_needs() -> None:
    budget = ol.smallest()
    options: dict[str, Any] = {"make": Large, "validate": False}
    with pytest.warns(UserWarning, match=f"{HOST}: .*are needed at task") as said:
        ours = ol.train(OffloadStrategy(budget=budget), **options)
    assert len([w for w in said if HOST in str(w.message)]) == 1
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


def test_weights_that_are_swapped_in_place_are_those_that_are_validated(
    captures: list[str],
) -> None:
    options: dict[str, Any] = {"num_sanity_val_steps": 2, "max_epochs": 3}
    ours = ol.train(OffloadStrategy(budget="60%"), callbacks=[Swaps("copied")], **options)
    theirs = ol.train(callbacks=[Swaps("copied")], **options)
    assert ol.differences(theirs, ours) == []
    assert len(captures) == 3


def test_weights_that_are_pointed_elsewhere_are_not_written_over() -> None:
    with pytest.warns(UserWarning, match=f"{HOST}: .*was pointed to other memory") as said:
        ours = ol.train(OffloadStrategy(budget="60%"), callbacks=[Swaps("pointed")], max_epochs=3)
    assert len([w for w in said if HOST in str(w.message)]) == 1
    assert ol.differences(ol.train(callbacks=[Swaps("pointed")], max_epochs=3), ours) == []


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

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *more: Any
    ) -> None:
        self.seen.append((prediction, batch_indices))


class Gathers(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_several_loaders_each_with_graphs_of_its_own(method: str, precision: Any) -> None:
    loaders = [ol.data(20), ol.data(12)]
    both(method, Several, loaders=loaders, precision=precision)


def test_callbacks_get_what_the_steps_return() -> None:
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
        self.log("epoch", float(self.current_epoch))
        self.log("steps", float(self.global_step))


def test_python_values_and_buffers_that_a_step_reads_are_those_of_now() -> None:
    options: dict[str, Any] = {"make": Numbers, "num_sanity_val_steps": 2}
    ours = ol.train(OffloadStrategy(budget="60%"), **options)
    assert ol.differences(ol.train(**options), ours) == []
    assert ours.module.seen == 2 * 20 + 16


class Quiet(ol.Module):
    """A step that computes nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("one", 1.0)


def test_a_step_that_computes_nothing_is_no_trouble() -> None:
    assert run("validate", OffloadStrategy(budget="1KiB"), Quiet)[0] == [{"one": 1.0}]


# ---- honest fallback ----------------------------------------------------------------------------


class Pictures(ol.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.log("first", batch[0].mean())
        super().validation_step(batch, batch_idx)


class Values(ol.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss.item())


class Logger(ol.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.logger is not None:
            raise AssertionError("there is none")


class Thing:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Objects(ol.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return Thing(batch[0] + 1)


HERE = r"test_offload_strategy_evaluation.py:\d+ in validation_step"
REASONS: dict[str, tuple[Any, str]] = {
    "batch_idx": (Pictures, f"{HERE}: validation_step uses batch_idx"),
    "values": (Values, f"{HERE}: the value of a tensor is asked for"),
    "logger": (Logger, "validation_step uses the logger itself.*on_validation_batch_end"),
    "objects": (Objects, "validation_step returns a Thing"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_captured_runs_on_the_host_and_says_why_once(name: str) -> None:
    make, why = REASONS[name]
    with pytest.warns(UserWarning, match=f"validates {HOST}: .*{why}") as said:
        ours = ol.train(OffloadStrategy(budget="60%"), make, num_sanity_val_steps=2)
    assert len([w for w in said if HOST in str(w.message)]) == 1
    theirs = ol.train("auto", make, num_sanity_val_steps=2)
    assert ol.differences(theirs, ours) == []


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


def test_a_fit_goes_on_after_an_evaluation() -> None:
    results = []
    for strategy in (OffloadStrategy(budget="60%"), "auto"):
        torch.manual_seed(3)
        module = ol.Module()
        trainer = L.Trainer(
            strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, accelerator="cpu",
        )  # fmt: skip
        trainer.validate(module, ol.data(20), verbose=False)
        trainer.fit(module, ol.data(), ol.data(20))
        trainer.test(module, ol.data(20), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, ol.data(), ol.data(20))
        results.append((module.state_dict(), trainer.callback_metrics))
    assert ol._unequal("", *results) == []
