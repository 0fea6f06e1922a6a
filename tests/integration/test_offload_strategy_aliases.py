"""Tensors that lie in the memory of a weight stay there, whichever graph knows of them."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from torch import nn
from torch.utils.data import DataLoader

from offload import StepError
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]
ROWS = (8, 4, 8, 4, 8, 8, 4)
"""Two shapes in turns, so that there are two graphs."""


class Aliased(L.LightningModule):
    """`change` may do something to the module after each step."""

    def __init__(self, change: Callable[["Aliased", int], None], alias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 5)
        self.alias: Any = self.inner.weight.data if alias else None
        self.seen: list[torch.Tensor] = []
        self.change = change

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.inner(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.change(self, batch_idx)
        self.seen.append(self.inner.weight.detach().clone())


def trained(
    strategy: Any, change: Callable[[Aliased, int], None], alias: bool = True
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = Aliased(change, alias)
    batches: Any = [torch.randn(rows, 12) for rows in ROWS]
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.seen


def forgotten(module: Aliased, batch_idx: int) -> None:
    """The first graph knows the alias, the second one does not."""
    module.alias = None


def found_late(module: Aliased, batch_idx: int) -> None:
    """The second graph knows the alias, the first one does not; somebody writes into it."""
    if batch_idx == 0:
        module.alias = module.inner.weight.data[:2]
    elif batch_idx >= 2:
        module.alias.mul_(0.5)


def handed_on(module: Aliased, batch_idx: int) -> None:
    """Somebody else writes into the alias, after no module has it any more."""
    if batch_idx == 0:
        others.append(module.alias)
        module.alias = None
    others[-1].mul_(0.9)


others: list[torch.Tensor] = []


@pytest.mark.parametrize("budget", ["70%", None])
@pytest.mark.parametrize("change", [forgotten, found_late, handed_on])
def test_graphs_that_know_other_aliases_train_the_same_weights(
    change: Any, budget: str | None
) -> None:
    ours = trained(OffloadStrategy(budget=budget), change)
    assert all(map(torch.equal, trained("auto", change), ours))
    assert not torch.equal(ours[0], ours[-1])


@pytest.mark.parametrize("which", ["weight", "alias"])
def test_whoever_is_pointed_elsewhere_takes_the_other_one_along_and_says_so(which: str) -> None:
    def part(module: Aliased, batch_idx: int) -> None:
        if batch_idx == 1:
            one = module.alias if which == "alias" else module.inner.weight
            one.data = torch.ones(5, 12)
        elif batch_idx == 2:
            assert torch.equal(module.alias, module.inner.weight)

    with pytest.warns(RuntimeWarning, match=r"inner\.weight was pointed .* stay with it"):
        trained(OffloadStrategy(budget="70%"), part)


def test_a_weight_and_its_alias_that_both_were_pointed_elsewhere_are_refused() -> None:
    def part(module: Aliased, batch_idx: int) -> None:
        if batch_idx == 1:
            module.inner.weight.data = torch.ones(5, 12)
            module.alias.data = torch.zeros(5, 12)

    with (
        pytest.warns(RuntimeWarning, match=r"was pointed"),
        pytest.raises(StepError, match=r"inner\.weight.*are apart now.*in place"),
    ):
        trained(OffloadStrategy(budget="70%"), part)


def test_an_alias_that_no_graph_needs_may_be_pointed_elsewhere() -> None:
    def part(module: Aliased, batch_idx: int) -> None:
        if batch_idx == 1:  # the second graph has it, the first one learns of it
            module.alias = module.inner.weight.data
        elif batch_idx == 2:
            others.append(module.alias)
            module.alias = None
        elif batch_idx == 5:
            others[-1].data = torch.ones(5, 12)

    ours = trained(OffloadStrategy(budget="70%"), part, alias=False)
    assert all(map(torch.equal, trained("auto", part, alias=False), ours))


def test_a_weight_that_is_pointed_to_what_somebody_else_holds_is_told() -> None:
    def point(module: Aliased, batch_idx: int) -> None:
        if batch_idx == 2:
            others.append(torch.ones(5, 12))
            module.inner.weight.data = others[-1].data
        elif batch_idx == 4:
            module.inner.weight.data = torch.zeros(5, 12)  # nobody else has it

    with pytest.warns(RuntimeWarning, match=r"inner\.weight was pointed .* are apart") as told:
        ours = trained(OffloadStrategy(budget="70%"), point, alias=False)
    assert len([each for each in told if "are apart" in str(each.message)]) == 1
    assert torch.equal(others[-1], torch.ones(5, 12))
    assert not torch.equal(ours[3], torch.ones(5, 12))
