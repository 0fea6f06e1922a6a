"""Batches of many lengths: without a budget a run goes on eagerly where captures cost too much."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from torch import nn
from torch.utils.data import DataLoader

from trainers import OffloadStrategy

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in ol.QUIET),
    pytest.mark.filterwarnings("ignore:.*captured and planned the step 3 times"),
]
LENGTHS = 12


class Tagger(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, tags = batch
        loss = nn.functional.cross_entropy(self.net(ids).flatten(0, 1), tags.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def trained(strategy: Any, lengths: int = LENGTHS, epochs: int = 2, **more: Any) -> L.Trainer:
    torch.manual_seed(0)
    module = Tagger()
    draw = torch.Generator().manual_seed(1)
    batches = [
        tuple(torch.randint(n, (2, 4 + length), generator=draw) for n in (20, 3))
        for length in range(lengths)
    ]
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=epochs, logger=False, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return trainer


def state(trainer: L.Trainer) -> list[torch.Tensor]:
    states = trainer.optimizers[0].state_dict()["state"].values()
    module = trainer.lightning_module
    return [*module.state_dict().values(), *(value for held in states for value in held.values())]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_that_captures_in_every_step_goes_on_eagerly_and_says_so(accumulate: int) -> None:
    more = {"accumulate_grad_batches": accumulate}
    strategy = OffloadStrategy()
    with pytest.warns(UserWarning, match="trains eagerly.*captured 8 times, which took"):
        ours = trained(strategy, **more)
    assert strategy.spent.runs >= 8 and strategy._eager
    plain = trained("auto", **more)
    assert all(map(torch.equal, state(ours), state(plain)))
    assert ours.callback_metrics == plain.callback_metrics


def test_under_a_budget_it_never_does() -> None:
    strategy = OffloadStrategy("100%")
    ours = trained(strategy)
    assert not strategy._eager and strategy.spent.plans == LENGTHS
    assert all(map(torch.equal, state(ours), state(trained("auto"))))


def test_a_run_of_few_lengths_keeps_its_plans() -> None:
    strategy = OffloadStrategy()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*trains eagerly")
        trained(strategy, lengths=4, epochs=10)
    assert not strategy._eager and strategy.spent.plans == 4
