"""Hooks between the parts of a step: traced with it, Lightning's to the last bit; or refused."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import grad_norm
from products import every_value
from support import offload_lightning as ol
from torch import nn

from offload import CaptureError
from trainers import OffloadStrategy
from trainers.offloading.steps.comparison import DifferenceFound

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


def parameters(module: Any) -> list[Any]:
    return [p for p in module.parameters() if p.grad is not None]


class Scales(L.Callback):
    """In place, by a tensor of its own, and with noise."""

    def __init__(self) -> None:
        self.weight = torch.tensor(0.5)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for p in parameters(pl_module):
            p.grad.mul_(self.weight).add_(torch.randn_like(p.grad), alpha=1e-2)


class Replaces(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        first, second, *_ = parameters(pl_module)
        first.grad = first.grad.sign()
        second.grad = None


class Norms(ol.Module):
    """As Lightning's documentation shows it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.blocks[0], norm_type=2))
        self.log("rate", optimizer.param_groups[0]["lr"])

    def on_after_backward(self) -> None:
        total = torch.stack([p.grad.norm() for p in parameters(self)]).norm()
        self.log("total", total, on_epoch=True, prog_bar=True)


class ClipsByHand(ol.Module):
    def on_after_backward(self) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.log("norm", norm)


class Cleans(ol.Module):
    """Infinite gradients are not used."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in parameters(self):
            torch.nan_to_num_(p.grad, nan=0.0, posinf=0.0, neginf=0.0)


class Clips(ol.Module):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        for p in parameters(self):
            p.grad.mul_(0.9)


class Doubles(ol.Module):
    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.log("before", loss)
        loss.mul_(2.0)


class Averages(L.Callback):
    """Of the weights, kept in a callback, of before the update."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = [p.detach().clone() for p in pl_module.parameters()]

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average, pl_module.parameters(), strict=True):
                mean.lerp_(p, 0.1)


class Decays(ol.Module):
    """Changes the parameters themselves, before the update."""

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.clamp_(-0.2, 0.2)


class Varies(L.Callback):
    """By a python number that another hook changes."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.factor = 1.0 / (1 + trainer.current_epoch)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for p in parameters(pl_module):
            p.grad.mul_(self.factor)


class Tensors(ol.Module):
    """Hooks of autograd, of which one comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda g: g * 2)
        self.mask = torch.arange(ol.WIDTH) % 2
        self.enter.bias.register_hook(lambda g: g * self.mask)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.handle = self.head.bias.register_hook(torch.zeros_like)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.handle.remove()


class Reports(ol.Module):
    """Full hooks of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))


def scaled_by_a_lambda() -> Any:
    def scale(trainer: Any, pl_module: Any) -> None:
        for p in parameters(pl_module):
            p.grad.mul_(0.25)

    return LambdaCallback(on_after_backward=scale)


class Branches(ol.Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not torch.isfinite(self.head.weight.grad).all():  # type: ignore[arg-type]
            optimizer.zero_grad()


class Halves(ol.Module):
    """Half of large gradients: in some steps the branch is taken."""

    def on_after_backward(self) -> None:
        gradient = self.head.weight.grad
        assert gradient is not None
        if gradient.abs().max() > 1.0:
            gradient.mul_(0.5)


HOOKED: dict[str, tuple[Callable[[], Any], list[Callable[[], Any]], dict[str, Any]]] = {
    "scaled": (ol.Module, [Scales], {}),
    "scaled and clipped": (ol.Module, [Scales], {"gradient_clip_val": 0.1}),
    "replaced": (ol.Module, [Replaces], {"gradient_clip_val": 0.1}),
    "norms": (Norms, [], {}),
    "a branch that is not taken": (Branches, [], {}),
    "a branch": (Halves, [], {}),
    "norms, clipped, bf16": (
        Norms,
        [Scales],
        {"gradient_clip_val": 0.1, "precision": "bf16-mixed"},
    ),
    "clipped by hand": (ClipsByHand, [], {}),
    "cleaned": (Cleans, [], {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
    "its own clipping": (Clips, [], {"gradient_clip_val": 0.1}),
    "before the backward pass": (Doubles, [], {}),
    "averages": (ol.Module, [Averages, Averages], {}),
    "parameters": (Decays, [], {}),
    "by a number": (ol.Module, [Varies], {}),
    "hooks of tensors": (Tensors, [], {"max_epochs": 3}),
    "hooks of tensors, accumulated": (Tensors, [], {"accumulate_grad_batches": 2}),
    "hooks of modules": (Reports, [], {}),
    "a lambda": (ol.Module, [scaled_by_a_lambda], {}),
    "all": (Clips, [Scales, Replaces, Averages, Varies], {"gradient_clip_val": 0.1}),
}


def trained(strategy: Any, name: str) -> tuple[ol.Result, list[Any]]:
    make, callbacks, options = HOOKED[name]
    made = [callback() for callback in callbacks]
    result = ol.train(strategy, make, callbacks=made, **options)
    return result, [vars(callback).get("average") for callback in made]


@pytest.mark.parametrize("name, how", every_value(HOOKED, [("60%", 0), (None, 2)]))
def test_hooks_between_the_parts_of_a_step_are_lightnings(
    name: str, how: tuple[str | None, int]
) -> None:
    budget, check = how
    ours, kept = trained(OffloadStrategy(budget=budget), name)
    theirs, also = trained("auto", name)
    assert ol.differences(theirs, ours) == []
    assert ol._unequal("kept", also, kept) == []
    assert ours.strategy.plan
    assert all(p.grad is None for p in ours.module.parameters())


def test_a_norm_that_a_hook_logs_is_there() -> None:
    ours, _ = trained(OffloadStrategy(budget="60%"), "norms")
    names = {"callback total_epoch", "logged grad_2.0_norm_total", "logged rate"}
    assert names <= ours.metrics.keys()


def test_an_unplanned_run_has_the_hooks_that_it_had() -> None:
    """Nothing of ours is left in a callback."""
    ours, _ = trained(OffloadStrategy(), "averages")
    callbacks = ours.trainer.callbacks  # type: ignore[attr-defined]
    assert not any("on_before_zero_grad" in vars(callback) for callback in callbacks)


# ---- refused -----------------------------------------------------------------------------------


class Asks(ol.Module):
    def on_after_backward(self) -> None:
        if self.head.bias.grad.norm().item() > 1e9:  # type: ignore[union-attr]
            raise ValueError("too large")


class Looks(ol.Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.head.weight in optimizer.state:
            self.log("mean", optimizer.state[self.head.weight]["exp_avg"].mean())


class Late(ol.Module):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.head.weight.grad is not None:
            self.log("late", self.head.weight.grad.norm())


class Counts(L.Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.count += 1


class Draws(L.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"norm": pl_module.head.weight.grad.norm()})


class Sometimes(ol.Module):
    def on_after_backward(self) -> None:
        if self.trainer.global_step % 4 == 0:
            self.log("norm", self.head.weight.grad.norm())  # type: ignore[union-attr]


class Outside(ol.Module):
    def __init__(self) -> None:
        super().__init__("sgd")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), 0.1)

    def on_after_backward(self) -> None:
        self.log("norm", self.head.weight.grad.norm())  # type: ignore[union-attr]


def doubled(p: Any) -> None:
    p.grad.mul_(2)


class PostHook(ol.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(doubled)


HERE = r"test_offload_strategy_hooks.py:\d+ in"
REFUSED: dict[str, tuple[Callable[[], Any], list[Callable[[], Any]], dict[str, Any], str]] = {
    "item": (Asks, [], {}, rf"{HERE} on_after_backward: the step asks for the value of a tensor"),
    "state": (Looks, [], {}, rf"{HERE} on_before_optimizer_step: a hook reads the optimizer's"),
    "last gradients": (Late, [], {}, rf"{HERE} on_before_zero_grad: on_before_zero_grad reads"),
    "counter": (ol.Module, [Counts], {}, "count changes from 1 to 2 in a call"),
    "logger": (ol.Module, [Draws], {}, rf"{HERE} on_after_backward: .*uses the logger itself"),
    "now and then": (Sometimes, [], {}, "different things|global_step"),
    "outside": (
        Outside,
        [],
        {},
        r"overrides on_after_backward .*does not have enter.weight, which requires a gradient",
    ),
    "sums": (
        ol.Module,
        [Scales],
        {"accumulate_grad_batches": 2},
        rf"callback Scales has on_after_backward \(.*{HERE[:-3]}\).*accumulate_grad_batches=2",
    ),
    "post": (PostHook, [], {}, r"head.weight has a post-accumulate hook.*Remove the hook"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_that_cannot_be_traced_ends_in_an_eager_run(name: str) -> None:
    make, callbacks, options, why = REFUSED[name]

    def run(strategy: Any) -> ol.Result:
        return ol.train(strategy, make, callbacks=[c() for c in callbacks], **options)

    with pytest.warns(UserWarning, match=f"trains eagerly, without offloading: .*{why}"):
        ours = run(OffloadStrategy())
    assert ol.differences(run("auto"), ours) == []
    with pytest.raises(CaptureError, match=why):
        run(OffloadStrategy(budget="1GiB"))


class Slyly(ol.Module):
    """Another gradient when it is called for real."""

    def on_after_backward(self) -> None:
        gradient: Any = self.head.bias.grad
        if type(gradient).__name__ != "FakeTensor":
            gradient.mul_(2.0)


def test_a_hook_that_does_something_else_for_real_stops_the_run() -> None:
    with pytest.raises(DifferenceFound, match=r"head\.bias"):
        ol.train(OffloadStrategy(budget="100%"), Slyly)
