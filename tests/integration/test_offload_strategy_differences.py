"""Where a planned step cannot be plain Lightning's: with a budget the run ends, else it goes on."""

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from torch import nn

from trainers import OffloadStrategy
from trainers.offloading.steps.comparison import DifferenceFound

pytestmark = [pytest.mark.filterwarnings(text) for text in ol.QUIET]


class Liar(ol.Module):
    """Does something else when it is called for real."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fake = type(batch[0]).__name__ == "FakeTensor"
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        return loss if fake else loss * 1.5


class Sly(ol.Module):
    """Another backward pass, the same loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fake = type(batch[0]).__name__ == "FakeTensor"
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        return loss if fake else loss + (self.head.bias.sum() - self.head.bias.sum().detach())


def test_a_step_that_is_not_eagers_stops_a_run_with_a_budget() -> None:
    with pytest.raises(DifferenceFound, match="the loss differs after a planned and an eager step"):
        ol.train(OffloadStrategy(budget="100%"), Liar)
    with pytest.raises(DifferenceFound, match=r"^head\.bias differs|^optimizer.*head\.bias"):
        ol.train(OffloadStrategy(budget="100%"), Sly)
    with pytest.raises(DifferenceFound, match=r"^the gradient of head\.bias differs"):
        ol.train(OffloadStrategy(budget="100%"), Sly, accumulate_grad_batches=2)


@pytest.mark.parametrize("kind", [Liar, Sly])
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_is_not_eagers_is_trained_eagerly_without_a_budget(
    kind: Any, count: int
) -> None:
    with pytest.warns(UserWarning, match=r"trains eagerly, without offloading: .* differs after"):
        ours = ol.train(OffloadStrategy(), kind, accumulate_grad_batches=count)
    assert ol.differences(ol.train("auto", kind, accumulate_grad_batches=count), ours) == []


def test_a_difference_names_where_to_look() -> None:
    said = r"head\.bias is first used by head\.addmm \(.*:\d+ in forward\)\. Numbers that the step"
    with pytest.raises(DifferenceFound, match=rf"{said} read in Python: .*drop\.p = 0\.2"):
        ol.train(OffloadStrategy(budget="100%"), Sly)


class CallsTwice(torch.optim.SGD):
    """Calls its closure twice, as optimizers with a line search do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


@pytest.mark.parametrize("kind", [CallsTwice, torch.optim.LBFGS])
def test_an_optimizer_that_calls_its_closure_itself_is_left_to_lightning(kind: Any) -> None:
    class Module(ol.Module):
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=0.05)

    with pytest.warns(UserWarning, match="trains eagerly, without offloading: optimizer"):
        ours = ol.train(OffloadStrategy(), Module)
    assert ol.differences(ol.train("auto", Module), ours) == []


def test_a_callback_that_holds_mocks_is_looked_into_like_any_other() -> None:
    class Remembers(L.Callback):
        def __init__(self) -> None:
            self.calls = [mock.call(1), mock.call.deeper.still(2), mock.Mock()]

    ours = ol.train(OffloadStrategy(), callbacks=[Remembers()])
    assert ol.differences(ol.train("auto", callbacks=[Remembers()]), ours) == []
