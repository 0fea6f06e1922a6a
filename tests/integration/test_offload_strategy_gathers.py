"""A training step that gathers tensors in lists of its module is planned, and the lists are plain
Lightning's after every batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import offload_lightning as ol
from torch import nn

from offload import CaptureError
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


class Gathers(ol.Module):
    """Looks at its lists after every batch, and clears them at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Any] = []
        self.more: list[Any] = [[], []]
        self.named: dict[str, list[Any]] = {"loss": [], "out": []}
        self.sizes = [4, 5]
        self.seen: list[list[Any]] = []
        """What was in the lists after each batch, and what became of them in each epoch."""

    def gather(self, batch: Any, out: torch.Tensor, loss: torch.Tensor) -> None:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = nn.functional.cross_entropy(out, batch[1])
        self.gather(batch, out, loss)
        return loss

    def lists(self) -> list[Any]:
        return [*self.outs, *self.more[0], *self.more[1], *self.named["loss"], *self.named["out"]]

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append([torch.as_tensor(one).detach().clone() for one in self.lists()])

    def on_train_epoch_end(self) -> None:
        self.seen.append([sum(torch.as_tensor(one).detach().sum() for one in self.lists())])
        self.outs = []
        for inner in (*self.more, *self.named.values()):
            inner.clear()


class Appends(Gathers):
    def gather(self, batch: Any, out: torch.Tensor, loss: torch.Tensor) -> None:
        self.outs.append(loss)


class AppendsMuch(Gathers):
    def gather(self, batch: Any, out: torch.Tensor, loss: torch.Tensor) -> None:
        self.outs += [out.detach(), batch[1]]
        self.outs.extend([loss.detach(), 3])


class AppendsToInner(Gathers):
    def gather(self, batch: Any, out: torch.Tensor, loss: torch.Tensor) -> None:
        self.more[1].append(out.argmax(-1))
        self.named["loss"] += [loss.detach()]
        self.named["out"].append(out.detach() * self.sizes[1])


class AppendsInAHook(Appends):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.outs.append(self.head.weight.grad.norm())


class OptimizesByHand(Gathers):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.named["loss"].append(loss.detach())


MODULES: list[Callable[[], Gathers]] = [
    Appends, AppendsMuch, AppendsToInner, AppendsInAHook, OptimizesByHand
]  # fmt: skip


@pytest.mark.parametrize("budget", [None, "90%"])
@pytest.mark.parametrize("make", MODULES)
def test_the_lists_are_plain_lightnings_after_every_batch(
    make: Callable[[], Gathers], budget: str | None
) -> None:
    plain, ours = ol.train("auto", make), ol.train(OffloadStrategy(budget), make)
    assert ours.strategy.plan is not None
    assert ol.differences(plain, ours) == []
    assert len(ours.module.seen) == len(plain.module.seen) > 10
    for one, other in zip(plain.module.seen, ours.module.seen, strict=True):
        assert len(one) == len(other) > 0
        assert all(map(torch.equal, one, other))


def test_the_lists_of_micro_batches_are_plain_lightnings() -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    plain = ol.train("auto", AppendsMuch, **options)
    ours = ol.train(OffloadStrategy(), AppendsMuch, **options)
    assert ours.strategy.plan is not None and ol.differences(plain, ours) == []
    assert [*map(len, ours.module.seen)] == [*map(len, plain.module.seen)]


class Reads(Gathers):
    def gather(self, batch: Any, out: torch.Tensor, loss: torch.Tensor) -> None:
        self.outs.append(loss.detach())
        if len(self.outs) > 3:
            self.outs.append(loss.detach())


class LooksThrough(Gathers):
    def gather(self, batch: Any, out: torch.Tensor, loss: torch.Tensor) -> None:
        for values in self.named.values():
            values.append(loss.detach())


class Replaces(Gathers):
    def gather(self, batch: Any, out: torch.Tensor, loss: torch.Tensor) -> None:
        self.more[0] = [loss.detach()]


class ReadsInAHook(Appends):
    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.log("last", self.outs[-1].detach())


class Keeps(Gathers):
    def gather(self, batch: Any, out: torch.Tensor, loss: torch.Tensor) -> None:
        self.outs.append(loss.detach())
        self.last = loss.detach()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Reads, "test_offload_strategy_gathers.py:.*appends to self.outs and also reads"),
        (LooksThrough, r"looks through self.named or changes it.*self.named\[0\].append"),
        (Replaces, r"looks through self.more or changes it"),
        (ReadsInAHook, "appends to self.outs and also reads"),
        (Keeps, "keeps a tensor of the step"),
    ],
)
def test_what_reads_the_list_or_keeps_more_is_refused(
    make: Callable[[], Gathers], why: str
) -> None:
    with pytest.raises(CaptureError, match=why):
        ol.train(OffloadStrategy("90%"), make)


class Prepares(Gathers):
    """Fills a list at its first call and reads it in all others."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[Any] = []

    def gather(self, batch: Any, out: torch.Tensor, loss: torch.Tensor) -> None:
        if not self.scales:
            self.scales.append(2.0)
        self.log("scaled", loss * self.scales[0])


def test_a_list_that_is_prepared_once_is_planned_as_before() -> None:
    plain, ours = ol.train("auto", Prepares), ol.train(OffloadStrategy("90%"), Prepares)
    assert ours.strategy.plan is not None and ol.differences(plain, ours) == []
    assert ours.module.scales == [2.0]
