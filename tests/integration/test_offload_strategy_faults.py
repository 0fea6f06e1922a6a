"""What cannot be planned, and what goes wrong under OffloadStrategy."""

import random
from typing import Any

import lightning as L
import own_optimizers as own
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from support import offload_lightning as ol
from torch import nn

from offload import BudgetTooSmall, CaptureError, OffloadError
from trainers import OffloadStrategy
from trainers.offloading.steps.evaluation import Evaluation
from trainers.offloading.steps.step_graphs import StepGraphs

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


# ---- honest fallback ---------------------------------------------------------------------------


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
    """The number gets into the graph by torch itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = torch.tensor(batch_idx) + 1.0
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * weight


class Steps(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = 1.0 + self.global_step
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * weight


class LaterSteps(ol.Module):
    """Neither of two traces would show it."""

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


class Skips(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Other(ol.Module):
    def configure_optimizers(self) -> Any:
        return own.Branching(self.parameters(), 1e-3)


REASONS: dict[str, tuple[Any, str]] = {
    "backward": (Backward, r"Backward overrides backward \(.*test_offload_strategy_faults.py:\d+"),
    "optimizer_step": (Stepped, "Stepped overrides optimizer_step"),
    "values": (
        Values,
        r"test_offload_strategy_faults.py:\d+ in training_step: the step asks for the value of a",
    ),
    "batch_idx": (Indexed, r"test_offload_strategy_faults.py:\d+ in training_step.*uses batch_idx"),
    "batch_idx times": (Scaled, "uses batch_idx"),
    "batch_idx in a tensor": (Tensored, "do different things"),
    "steps": (Steps, "do different things"),
    "later steps": (LaterSteps, r"training_step uses global_step, which differs"),
    "rate": (Rate, "logs different things.*'rate'"),
    "keeps": (Keeps, "last_loss keeps a tensor of the step"),
    "skips": (Skips, "returned NoneType"),
    "optimizer": (Other, "optimizer Branching cannot be planned: it asks for the value"),
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_cannot_be_planned_trains_as_plain_lightning_and_says_why_once(name: str) -> None:
    make, why = REASONS[name]
    with pytest.warns(UserWarning, match=f"trains eagerly, without offloading: .*{why}") as said:
        ours = ol.train(OffloadStrategy(), make)
    assert len([w for w in said if "eagerly" in str(w.message)]) == 1
    assert ol.differences(ol.train("auto", make), ours) == []
    with pytest.raises(OffloadError, match="trains eagerly"):
        ours.strategy.explain()


@pytest.mark.parametrize("name", ["backward", "values", "optimizer"])
def test_where_a_budget_was_asked_it_is_refused(name: str) -> None:
    make, why = REASONS[name]
    with pytest.raises(CaptureError, match=f"budget='1GiB'.*cannot be planned: .*{why}"):
        ol.train(OffloadStrategy(budget="1GiB"), make)


def test_half_precision_with_a_scaler_is_not_planned() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(CaptureError, match="GradScaler"):
        ol.train(OffloadStrategy(budget="1GiB"), plugins=[plugin])


class Later(ol.Module):
    """Cannot be captured from the fourth batch on, in the middle of a window of three."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.late = batch_idx >= 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if self.late:
            float(loss.detach())
        return loss


@pytest.mark.parametrize("check", [0, 1, 5])
def test_a_later_batch_that_cannot_be_captured_ends_the_planning_without_a_trace(
    check: int,
) -> None:
    strategy = OffloadStrategy()
    with pytest.warns(UserWarning, match="eagerly"):
        ours = ol.train(strategy, Later, accumulate_grad_batches=3, gradient_clip_val=0.1)
    theirs = ol.train("auto", Later, accumulate_grad_batches=3, gradient_clip_val=0.1)
    assert ol.differences(theirs, ours) == []


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
        ({"check_first_steps": -1}, "check_first_steps"),
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


def test_a_target_that_is_none_fails_in_the_kernel_with_the_users_line() -> None:
    loader = ol.data()
    loader.dataset.tensors[1][20] = 99  # type: ignore[attr-defined]
    with pytest.raises(IndexError) as failed:
        ol.train(OffloadStrategy(budget="60%"), loader=loader)
    assert any("training_step" in note for note in failed.value.__notes__)


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


def test_a_batch_that_holds_an_object_is_not_planned() -> None:
    class Thing:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class Objects(ol.Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self(batch[0].x), batch[1])

    def put(batch: Any) -> Any:
        x, y = (torch.stack(part) for part in zip(*batch, strict=True))
        return Thing(x), y

    loader = torch.utils.data.DataLoader(ol.data().dataset, ol.BATCH, collate_fn=put)
    with pytest.warns(UserWarning, match="the batch holds a Thing"):
        ol.train(OffloadStrategy(), Objects, loader=loader, validate=False)


def test_python_dice_are_told() -> None:
    class Rolls(ol.Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self(batch[0]), batch[1]) * random.random()

    with pytest.raises(CaptureError, match="python's random"):
        ol.train(OffloadStrategy(budget="1GiB"), Rolls)


def test_weights_come_home_though_what_evaluates_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its error is told, and a second closing finds nothing to do."""
    closed: list[str] = []
    close = StepGraphs.close

    def refuses(self: Evaluation) -> None:
        raise OffloadError("no memory to move a tensor to")

    def noted(self: StepGraphs) -> None:
        closed.append("steps")
        close(self)

    monkeypatch.setattr(Evaluation, "close", refuses)
    monkeypatch.setattr(StepGraphs, "close", noted)
    with pytest.raises(OffloadError, match="no memory to move"):
        ol.train(OffloadStrategy())
    assert closed == ["steps"]
