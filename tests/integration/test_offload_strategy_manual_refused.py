"""What a step by hand may not do: refused by name with a budget, plain Lightning's without one."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from support import offload_lightning as ol
from support import offload_manual as om
from torch.nn import functional

from offload import CaptureError, OffloadError
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]
HERE = r"test_offload_strategy_manual_refused.py:\d+ in"


class One(om.Accumulates):
    """One optimizer and its schedule, which steps in every batch."""

    def loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.steps(optimizer)

    def steps(self, optimizer: Any) -> None:
        optimizer.step()


class Closure(One):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class ScheduleFirst(One):
    def steps(self, optimizer: Any) -> None:
        schedule: Any = self.lr_schedulers()
        schedule.step()
        optimizer.step()


class ReadsSchedule(One):
    def steps(self, optimizer: Any) -> None:
        schedule: Any = self.lr_schedulers()
        optimizer.step()
        schedule.step()
        if schedule.last_epoch > 3:
            self.log("late", 1.0)


class ReadsState(One):
    def steps(self, optimizer: Any) -> None:
        optimizer.step()
        self.log("entries", float(len(optimizer.state)))


class TwiceByItsOwnStep(One):
    def steps(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), 1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class AsksLate(One):
    def steps(self, optimizer: Any) -> None:
        optimizer.step()
        if (self.head.bias > 100).any():
            self.log("large", 1.0)


class HistoryInGradients(One):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), create_graph=True)
        optimizer.step()


class TimesIndex(One):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) * (1 + batch_idx))
        optimizer.step()


class ForeignGradient(One):
    kept = torch.zeros(3)

    def steps(self, optimizer: Any) -> None:
        optimizer.step()
        self.kept.grad = torch.zeros(3)


class OverriddenBackward(One):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Restless(torch.optim.SGD):
    """It works in place on gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
                    p.sub_(p.grad, alpha=group["lr"])


class ChangesGradients(One):
    def configure_optimizers(self) -> Any:
        optimizer = Restless(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class GoesOnEagerly(One):
    """Gradients have been added up when it turns out that it cannot be planned."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        weight = batch_idx if batch_idx > 1 else 1
        self.manual_backward(self.loss(batch) * weight)
        if (batch_idx + 1) % 6 == 0:
            optimizer.step()
            optimizer.zero_grad()


REASONS: dict[str, tuple[Any, str]] = {
    "closure": (Closure, rf"{HERE} training_step: AdamW.step\(\) is given a closure"),
    "schedule first": (ScheduleFirst, rf"{HERE} steps: AdamW steps after its learning rate"),
    "schedule read": (ReadsSchedule, rf"{HERE} steps: the step reads last_epoch of a learning"),
    "state": (ReadsState, rf"{HERE} steps: the step reads the optimizer's state"),
    "twice": (TwiceByItsOwnStep, "RMSprop updates enter.weight twice in one step"),
    "asks late": (AsksLate, rf"{HERE} steps: the step asks .* after one of its optimizers"),
    "create_graph": (HistoryInGradients, rf"{HERE} training_step: backward\(create_graph=True\)"),
    "times the index": (TimesIndex, "batch_idx is 4 after 3: it changes in every step"),
    "late": (GoesOnEagerly, "batch_idx is 4 after 3: it changes in every step"),
    "foreign gradient": (ForeignGradient, rf"{HERE} steps: the step assigns .grad of a tensor"),
    "backward": (OverriddenBackward, "OverriddenBackward overrides backward"),
    "changes gradients": (ChangesGradients, "Restless: its .* changes the gradients in place"),
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.filterwarnings("ignore:.*captured and planned the step 3 times")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_cannot_be_done_exactly_is_refused_by_name(name: str) -> None:
    make, why = REASONS[name]
    with pytest.raises(CaptureError, match=f"budget='1GiB'.*cannot be planned: .*{why}"):
        ol.train(OffloadStrategy(budget="1GiB"), make, validate=False)


@pytest.mark.parametrize("name", ["closure", "twice", "late", "changes gradients"])
@pytest.mark.filterwarnings("ignore:.*captured and planned the step 3 times")
def test_without_a_budget_it_trains_as_plain_lightning_and_says_why(name: str) -> None:
    make, why = REASONS[name]
    with pytest.warns(UserWarning, match=f"trains eagerly, without offloading: .*{why}"):
        ours = ol.train(OffloadStrategy(), make, validate=False)
    assert om.differences(ol.train("auto", make, validate=False), ours) == []


class StepsInHook(om.Gan):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.both()[0].step()


class BackwardInHook(om.Gan):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.manual_backward(self.judged(batch[0], True))


@pytest.mark.parametrize(
    "make, what", [(StepsInHook, "an optimizer's step"), (BackwardInHook, "manual_backward")]
)
@pytest.mark.parametrize("budget", [None, "1MiB"])
def test_steps_outside_of_the_training_step_are_refused(
    make: Any, what: str, budget: str | None
) -> None:
    with pytest.raises(OffloadError, match=rf"{what}\(\) is called outside of training_step"):
        ol.train(OffloadStrategy(budget=budget), make, loader=om.pictures(), validate=False)


def test_a_gradient_scaler_is_refused() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="GradScaler"):
        ol.train(
            OffloadStrategy(budget="1GiB"), om.Gan, loader=om.pictures(), validate=False,
            plugins=[plugin],
        )  # fmt: skip


class Lbfgs(om.Gan):
    def configure_optimizers(self) -> Any:
        _, other = super().configure_optimizers()
        return [torch.optim.LBFGS(self.generator.parameters()), other]


def test_every_one_of_the_optimizers_must_be_one_that_can_be_planned() -> None:
    with pytest.raises(CaptureError, match="optimizer LBFGS: its step calls its closure several"):
        ol.train(OffloadStrategy(budget="1GiB"), Lbfgs, loader=om.pictures(), validate=False)


class Stale(om.ByHand):
    """The generator's loss was made before the critic has stepped: autograd finds that out."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.both()
        loss = self.judged(self.generator(self.noise(batch[0])), True)
        of_critic.zero_grad()
        self.manual_backward(self.judged(batch[0], True))
        of_critic.step()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()


@pytest.mark.filterwarnings("ignore:.*trains eagerly")
def test_what_plain_lightning_refuses_is_refused_here_too() -> None:
    # Without the comparison nobody but the trace can find it.
    alone = OffloadStrategy(budget="1MiB")
    for strategy in ("auto", OffloadStrategy(), OffloadStrategy(budget="1MiB"), alone):
        with pytest.raises((RuntimeError, CaptureError), match="modified by an inplace operation"):
            ol.train(strategy, Stale, loader=om.pictures(), validate=False)
