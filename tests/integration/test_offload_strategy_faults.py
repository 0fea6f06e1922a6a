"""What Python does in a step, and what goes wrong under OffloadStrategy."""

import random
import re
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from support import own_optimizers as own
from support.products import every_value
from torch import nn
from torch.utils.data import DataLoader

from offload import BudgetTooSmall, OffloadError
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


# ---- whatever Python does ------------------------------------------------------------------------


class Backward(ol.Module):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward()


class Stepped(ol.Module):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class Values(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if loss.item() > 100:
            loss = loss * 2
        return loss


class Indexed(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        return loss * 2 if batch_idx % 2 else loss


class Scaled(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * (batch_idx * 1.0 or 1.0)


class Tensored(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = torch.tensor(batch_idx) + 1.0
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * weight


class Steps(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = 1.0 + self.global_step
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * weight


class LaterSteps(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        return loss * 2 if self.trainer.global_step == 3 else loss


class Rate(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"] * 2)
        return loss


class Keeps(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.last_loss = loss.detach()
        return loss


class Other(ol.Module):
    def configure_optimizers(self) -> Any:
        return own.Branching(self.parameters(), 1e-3)


class Later(ol.Module):
    """It asks for a value from the fourth batch on, in the middle of a window of three."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.late = batch_idx >= 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if self.late:
            float(loss.detach())
        return loss


class Rolls(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        dice = random.Random(batch_idx)
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * dice.random()


class Thing:
    def __init__(self, samples: Any) -> None:
        self.x, self.y = (torch.stack(part) for part in zip(*samples, strict=True))


class Objects(ol.Module):
    """Its batch holds an object."""

    def train_dataloader(self) -> Any:
        return DataLoader(ol.data().dataset, ol.BATCH, collate_fn=lambda one: [Thing(one)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0].x), batch[0].y)


MAKES = [
    Backward, Stepped, Values, Indexed, Scaled, Tensored, Steps, LaterSteps, Rate, Keeps, Other,
    Later, Rolls, Objects,
]  # fmt: skip


@pytest.mark.parametrize(("make", "budget"), every_value(MAKES, [None, "70%"]))
def test_whatever_python_does_in_a_step_is_trained_as_in_plain_lightning(
    make: Any, budget: str | None
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 3 if make is Later else 1}
    options |= {"loader": make().train_dataloader()} if make is Objects else {}
    ours = ol.train(OffloadStrategy(budget=budget), make, **options)
    assert ol.differences(ol.train("auto", make, **options), ours) == []


# ---- bad input ---------------------------------------------------------------------------------


def test_options_are_checked_at_once() -> None:
    for options, said in (
        ({"budget": "much"}, "budget"),
        ({"budget": "0%"}, "budget"),
        ({"budget": "x%"}, "80%"),
        ({"budget": -1}, "budget"),
        ({"host_budget": "x"}, "host_budget"),
        ({"recompute": "always"}, "recompute='always'"),
        ({"optimizer": "gpu"}, "optimizer='gpu'"),
        ({"engine": "fast"}, "engine='fast'"),
    ):
        with pytest.raises(ValueError, match=said):
            OffloadStrategy(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["cuda", "cudagraph"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without one")
def test_engines_of_cuda_need_a_device(engine: str) -> None:
    with pytest.raises(OffloadError, match=f"engine='{engine}' needs a CUDA device"):
        OffloadStrategy(engine=engine)


def test_a_budget_under_the_minimum_says_the_minimum_and_the_task() -> None:
    with pytest.raises(
        BudgetTooSmall, match=r"are needed at task .*raise the budget to"
    ) as refused:
        ol.train(OffloadStrategy(budget="1KiB"))
    assert refused.value.needed > 1024 and refused.value.task
    with pytest.raises(BudgetTooSmall, match="host"):
        ol.train(OffloadStrategy(budget="60%", host_budget="1KiB"))


class Fails(ol.Module):
    """In the user's own code: at the third batch, and only then."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[0].shape[0] == 4:  # the last, smaller batch
            raise ValueError("a mistake of mine")
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Stopped(L.Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if args[-1] == 2:
            raise self.error


def own_memory(module: torch.nn.Module) -> bool:
    for tensor in module.state_dict().values():
        tensor.resize_(tensor.shape)
        tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + 8)
    return True


@pytest.mark.parametrize("budget", [None, "60%"])
def test_an_exception_of_the_user_arrives_as_it_is(budget: str | None) -> None:
    torch.manual_seed(0)
    module = Fails()
    with pytest.raises(ValueError, match=r"^a mistake of mine$"):
        ol.train(OffloadStrategy(budget=budget), lambda: module)
    assert own_memory(module)
    assert torch.is_grad_enabled()


def test_a_target_that_is_none_fails_in_the_kernel_between_the_lines_that_are_named() -> None:
    loader = ol.data()
    loader.dataset.tensors[1][20] = 99  # type: ignore[attr-defined]
    with pytest.raises(IndexError) as failed:
        ol.train(OffloadStrategy(budget="60%"), loader=loader)
    where = re.compile(r"in task .* \(offload_lightning.py:\d+ in \w+ to .* in backward\)")
    assert any(where.match(note) for note in failed.value.__notes__)


def test_an_exception_of_a_callback_ends_the_fit_with_tensors_in_memory_of_their_own() -> None:
    module = ol.Module()
    with pytest.raises(ZeroDivisionError):
        ol.train(
            OffloadStrategy(budget="60%"), lambda: module, callbacks=[Stopped(ZeroDivisionError())]
        )
    assert own_memory(module)


def test_ctrl_c_ends_the_fit_with_tensors_in_memory_of_their_own() -> None:
    import signal

    module = ol.Module()
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            ol.train(
                OffloadStrategy(budget="60%"),
                lambda: module,
                callbacks=[Stopped(KeyboardInterrupt())],
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert own_memory(module)


def test_a_loss_that_is_nan_goes_through_as_it_does_in_lightning() -> None:
    def broken() -> Any:
        module = ol.Module()
        with torch.no_grad():
            module.head.weight[0, 0] = float("nan")
        return module

    ours = ol.train(OffloadStrategy(budget="60%"), broken, gradient_clip_val=0.1)
    theirs = ol.train("auto", broken, gradient_clip_val=0.1)
    for one, other in zip(
        ours.module.state_dict().values(), theirs.module.state_dict().values(), strict=True
    ):
        assert torch.equal(torch.nan_to_num(one.float()), torch.nan_to_num(other.float()))
    with pytest.raises(ValueError, match="not finite"):
        ol.train(OffloadStrategy(budget="60%"), broken, callbacks=[Finite()])


class Finite(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        if not torch.isfinite(outputs["loss"]):
            raise ValueError("not finite")
