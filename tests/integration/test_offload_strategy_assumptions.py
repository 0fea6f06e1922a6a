"""Steps that ask for the values of tensors: planned, checked in every run, bit for bit plain ones.

training_step: if mask.all() ..., x[mask], torch.equal(a, b), .item()      fit --> plain's bits
"""

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from support.accelerators import only_on_gpu
from torch import nn
from torch.utils.data import DataLoader

import offload
from offload import AssumptionFailed, CaptureError, Runner
from offload.tracing.capture import capture_step, training_step_of
from offload.tracing.questions import AssumedValues
from trainers import OffloadStrategy

SEVERAL = "ignore:.*captured and planned the .* 3 times.*when the step was captured, and gives"
pytestmark = [pytest.mark.filterwarnings(line) for line in (*ol.QUIET, SEVERAL)]

BATCHES = 10
Loss = Callable[["Asking", torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out, y)


def a_branch(module: "Asking", x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(module(x), y)
    return loss * 2 if (y < 2).all() else loss


def a_branch_on_the_loss(module: "Asking", x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """It is asked for after BatchNorm has counted."""
    loss = cross_entropy(module(x), y)
    if torch.isnan(loss):
        raise ValueError("not a number")
    return loss


def a_mask(module: "Asking", x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    known = y < 2
    return cross_entropy(module(x)[known], y[known])


def a_mask_that_is_written(module: "Asking", x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, known = module(x), y < 2
    more = torch.zeros_like(out)
    more[known] = out[known] * 3
    return (more + out).pow(2).mean()


def a_selection(module: "Asking", x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(module(x), (y < 2)[:, None]).pow(2).mean()


def places(module: "Asking", x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    [rows] = torch.where(y < 2)
    return module(x).index_select(0, rows).pow(2).mean() / max(len(rows), 1)


def a_comparison(module: "Asking", x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(module(x), y)
    return loss if torch.equal(y, y.sort().values) else loss * 3


def a_constant(module: "Asking", x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(module(x) / module.temperature.item(), y)


def indices_that_a_wrong_branch_has_no_room_for(
    module: "Asking", x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    rows = module.small if bool(y.max() < 2) else module.large
    return cross_entropy(module(x) + rows.weight[y], y)


LOSSES: list[Loss] = [
    a_branch,
    a_branch_on_the_loss,
    a_mask,
    a_mask_that_is_written,
    a_selection,
    places,
    a_comparison,
    a_constant,
    indices_that_a_wrong_branch_has_no_room_for,
]


class Asking(L.LightningModule):
    temperature: torch.Tensor

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("temperature", torch.tensor(2.0))
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )
        self.small, self.large = nn.Embedding(2, 3), nn.Embedding(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self, *batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self, *batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def batches(count: int = BATCHES) -> Any:
    """Most are alike: the third classes of the others are missing, or are more."""
    noise = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        y = torch.arange(6) % 3
        if number % 5 == 3:
            y = torch.tensor([0, 1, 0, 1, 1, 1])
        if number % 5 == 4:
            y = torch.tensor([0, 1, 2, 2, 2, 2])
        found.append((torch.randn(6, 8, generator=noise), y))
    return DataLoader(found, batch_size=None)  # pyright: ignore[reportArgumentType]


def validated(loss: Loss, strategy: Any = "auto") -> Any:
    torch.manual_seed(3)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer.validate(Asking(loss), batches(), verbose=False)


def trained(loss: Loss, strategy: Any = "auto", loader: Any = None, **options: Any) -> ol.Result:
    loader = batches() if loader is None else loader
    return ol.train(strategy, lambda: Asking(loss), loader=loader, validate=False, **options)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_that_asks_for_values_is_planned_and_has_plain_bits(loss: Loss) -> None:
    strategy = OffloadStrategy(budget="70%")
    assert ol.differences(trained(loss), trained(loss, strategy)) == []
    assert strategy.plan.graph.program.assumed


@only_on_gpu
@pytest.mark.parametrize("engine", ["cuda", "cudagraph"])
@pytest.mark.parametrize("loss", [a_mask, a_branch_on_the_loss])
def test_a_gpus_engines_check_on_the_host(loss: Loss, engine: str, accelerator: str) -> None:
    strategy = OffloadStrategy(budget="70%", engine=engine)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = trained(loss, strategy, max_epochs=4)
    told = [str(one.message) for one in said if "checks values on the host" in str(one.message)]
    assert bool(told) == (engine == "cudagraph")
    assert ol.differences(trained(loss, max_epochs=4), result) == []


def test_each_answer_has_a_graph_of_its_own_and_none_is_made_twice() -> None:
    strategy = OffloadStrategy(budget="70%")
    trained(a_branch, strategy, max_epochs=3)
    assert sorted(plan.plan.graph.program.assumed for plan in strategy.plans) == [(False,), (True,)]


@pytest.mark.parametrize("loss", [a_branch, a_mask])
def test_an_evaluation_that_asks_for_values_is_planned(loss: Loss) -> None:
    strategy = OffloadStrategy(budget="80%")
    assert validated(loss, strategy) == validated(loss)
    assert strategy.plan.graph.program.assumed


def test_micro_batches_that_ask_are_summed_as_plain_ones() -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    strategy = OffloadStrategy(budget="70%")
    assert ol.differences(trained(a_mask, **options), trained(a_mask, strategy, **options)) == []


class Queue(Asking):
    """It writes into the next place of a bank, as MoCo's queue does."""

    pointer: torch.Tensor
    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__(a_branch)
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("bank", torch.zeros(30, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out, at = self(x), int(self.pointer)
        loss = cross_entropy(out + self.bank.mean(0), y)
        self.bank[at : at + len(x)] = out.detach()
        self.pointer[0] = (at + len(x)) % len(self.bank)
        return loss


def test_a_pointer_that_comes_back_has_a_graph_for_each_place() -> None:
    strategy = OffloadStrategy(budget="80%")
    options: dict[str, Any] = {"loader": batches(), "validate": False, "max_epochs": 3}
    ours = ol.train(strategy, Queue, **options)
    assert ol.differences(ol.train("auto", Queue, **options), ours) == []
    assert len(strategy.plans) == 5


def test_a_value_that_is_another_one_in_every_step_is_refused_with_the_line() -> None:
    def changing(module: Asking, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(module(x), y) * int((x * 1e6).sum().long())

    with pytest.raises(CaptureError, match=r"changing.* its value gave .* in 4 steps in a row"):
        trained(changing, OffloadStrategy(budget="70%"))
    with pytest.warns(match="trains eagerly"):
        result = trained(changing, OffloadStrategy())
    assert ol.differences(trained(changing), result) == []


def test_a_float_that_is_trained_is_refused_at_once() -> None:
    def logged(module: Asking, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(module(x), y)
        module.log("value", loss.item())
        return loss

    with pytest.raises(CaptureError, match="asks for the value of a tensor"):
        trained(logged, OffloadStrategy(budget="70%"))


# ---- a check that fails -------------------------------------------------------------------------


def test_a_check_that_fails_leaves_everything_as_it_was_in_any_order() -> None:
    torch.manual_seed(0)
    module = Asking(a_branch_on_the_loss)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)

    def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(out, y)
        return loss * 2 if bool(loss.isnan()) else loss

    x, y = torch.randn(6, 8), torch.arange(6) % 3
    step = training_step_of(module, loss_of, optimizer)
    graph = capture_step(step, x, y, assumed=AssumedValues())
    plan = offload.plan(graph, offload.plan(graph).device_bytes * 7 // 10)
    for seed in range(8):
        with Runner(plan, order="random", seed=seed) as runner:
            runner(x, y)
            state = {name: t.clone() for name, t in module.state_dict().items()}
            kept = [t.clone() for t in _states(optimizer)]
            with pytest.raises(AssumptionFailed, match=r"gave False .* and gives True now") as said:
                runner(x * torch.nan, y)
            assert said.value.found is True and said.value.number == 0
            assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
            assert all(map(torch.equal, _states(optimizer), kept))
            runner(x, y)  # it can be used again


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        t
        for p in optimizer.param_groups[0]["params"]
        for t in optimizer.state[p].values()
        if isinstance(t, torch.Tensor)
    ]


# ---- the epoch ----------------------------------------------------------------------------------


def a_schedule(module: Asking, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(module(x), y) * (1.0 - 0.25 * module.current_epoch)


def a_late_branch(module: Asking, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(module(x), y)
    return loss * 2 if module.current_epoch == 1 else loss


@pytest.mark.filterwarnings("ignore:.*3 times.*current.completed is 2 after 1")
@pytest.mark.parametrize("loss", [a_schedule, a_late_branch])
def test_a_step_that_computes_with_the_epoch_has_a_graph_for_each(loss: Loss) -> None:
    strategy = OffloadStrategy(budget="70%")
    options = {"max_epochs": 3}
    assert ol.differences(trained(loss, **options), trained(loss, strategy, **options)) == []
    assert len(strategy.plans) == (3 if loss is a_schedule else 2)


class Judging(ol.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss * (1 + self.current_epoch))


@pytest.mark.filterwarnings("ignore:.*3 times.*current.completed is 2 after 1")
def test_an_evaluation_may_compute_with_the_epoch() -> None:
    options = {"max_epochs": 3, "limit_train_batches": 2}
    ours = ol.train(OffloadStrategy(budget="80%"), Judging, **options)
    assert ol.differences(ol.train("auto", Judging, **options), ours) == []
