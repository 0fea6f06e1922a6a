"""OffloadStrategy against plain Lightning: the same bits, though Python runs in every step."""

import copy
import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from support import offload_lightning as ol
from support.accelerators import GPU, here, kept_of_each, on_each_accelerator, only_on_gpu
from support.products import every_pair, every_value

from offload import CaptureError, OffloadError
from trainers.offloading.strategy import OffloadStrategy

pytestmark = [
    pytest.mark.usefixtures("core"),
    *(pytest.mark.filterwarnings(line) for line in ol.QUIET),
]


def live(budget: str | None = None, **options: Any) -> OffloadStrategy:
    """The last bits of updates on the host are not those of a GPU."""
    on_gpu = here()["accelerator"] == GPU
    return OffloadStrategy(budget, **({"optimizer": "device"} if on_gpu else {}), **options)


# ---- the same bits ------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd, rates by epoch": {"make": functools.partial(ol.Module, "sgd", "epoch")},
    "adam": {"make": functools.partial(ol.Module, "adam")},
    "clipped by norm": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
    "accumulated, the last window is not full": {"accumulate_grad_batches": 4},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16-mixed, accumulated and clipped": {
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
    },
    "validated first": {"num_sanity_val_steps": 2},
}


@kept_of_each
def plain(name: str) -> ol.Result:
    return ol.train(**RUNS[name])


@on_each_accelerator
@pytest.mark.parametrize("name, budget", every_value(RUNS, [None, "60%", "100%", "40%"]))
def test_a_run_is_plain_lightnings_to_the_last_bit(
    name: str, budget: str | None, accelerator: str
) -> None:
    ours = ol.train(live(budget), **RUNS[name])
    assert ol.differences(plain(name), ours) == []
    assert ours.strategy.spent.runs > 0
    if budget in ("60%", "40%"):
        assert ol.keeps_share(ours.strategy, budget)


def test_updates_on_the_host_have_the_same_bits_on_a_cpu() -> None:
    ours = ol.train(live("70%", optimizer="host"))
    assert ol.differences(plain("plain"), ours) == []
    plan = ours.strategy.plan
    assert any(task.lane == "host" for task in plan.graph.tasks)
    assert "of state stay there" in plan.explain()


@only_on_gpu
def test_updates_on_the_host_are_nearly_those_of_a_gpu(accelerator: str) -> None:
    ours = ol.train(OffloadStrategy("70%", optimizer="host"))
    assert any(task.lane == "host" for task in ours.strategy.plan.graph.tasks)
    pairs = zip(ours.module.parameters(), plain("plain").module.parameters(), strict=True)
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in pairs)


def chosen(budget: str | None) -> Any:
    return "auto" if budget == "auto" else live(budget)


@on_each_accelerator
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(
    "before, after", [("60%", "60%"), ("60%", "auto"), ("auto", "80%"), ("60%", None)]
)
def test_a_run_goes_on_from_its_checkpoint_under_another_budget_or_without_us(
    before: str, after: str | None, tmp_path: Path, accelerator: str
) -> None:
    def run(before: Any, after: Any, where: Path) -> ol.Result:
        keep = ModelCheckpoint(where, save_last=True)
        ol.train(before, callbacks=[keep], enable_checkpointing=True, max_epochs=1)
        goes_on = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": 3}
        return ol.train(after, ckpt_path=keep.last_model_path, **goes_on)

    theirs = run("auto", "auto", tmp_path / "theirs")
    ours = run(chosen(before), chosen(after), tmp_path / "ours")
    assert ol.differences(theirs, ours) == []
    loaded = ol.Module.load_from_checkpoint(tmp_path / "ours" / "last.ckpt", map_location="cpu")
    assert ol._unequal("", loaded.state_dict(), ours.module.cpu().state_dict()) == []
    with pytest.raises(RuntimeError, match="Missing key"):
        ol.train(live(), BoringModel, ckpt_path=tmp_path / "ours" / "last.ckpt")


class Fails(L.Callback):
    """An error between two batches, in the middle of a window of them."""

    def __init__(self, hook: str) -> None:
        self.seen: dict[str, Any] = {}
        setattr(self, hook, self.fail)

    def fail(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 8:
            raise RuntimeError("in the middle")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        state = trainer.optimizers[0].state_dict()["state"]
        self.seen = {"state": copy.deepcopy(state), **copy.deepcopy(pl_module.state_dict())}


@pytest.mark.parametrize(
    "hook, accumulated, devices",
    every_pair(["on_train_batch_end", "on_train_batch_start"], [1, 4], [1, 2]),
)
def test_an_exception_between_two_batches_leaves_whole_tensors(
    hook: str, accumulated: int, devices: int
) -> None:
    seen = []
    for strategy in (live("60%", devices=devices), "auto"):
        fails = Fails(hook)
        with pytest.raises(RuntimeError, match="in the middle"):
            ol.train(strategy, callbacks=[fails], accumulate_grad_batches=accumulated)
        seen.append(fails.seen)
    assert ol._unequal("", *seen) == []


class AddsUp(ol.Module):
    """Nothing clears its gradients, so those of all steps add up."""

    def optimizer_zero_grad(self, *_: Any) -> None: ...


def test_gradients_that_nothing_clears_outlive_a_step() -> None:
    ours = ol.train(live("60%"), AddsUp)
    assert ol.differences(ol.train("auto", AddsUp), ours) == []
    assert ol.differences(plain("plain"), ours) != []


class CountsRuns(L.Callback):
    """The planned runs that have ended at the end of each batch."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.runs.append(trainer.strategy.spent.runs)


def test_a_micro_batch_has_run_when_it_ends() -> None:
    counts = CountsRuns()
    ol.train(live("60%"), callbacks=[counts], accumulate_grad_batches=4, max_epochs=1)
    assert counts.runs == list(range(counts.runs[0], counts.runs[0] + len(counts.runs)))


class ReadsNorms(ol.Module):
    """It makes a tensor of a list of tensors, and reads a value, between two parts of a step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.tensor(norms).norm())
        if norms[0].item() > 1e6:
            raise RuntimeError("the run diverges")


@only_on_gpu
@pytest.mark.filterwarnings("ignore:.*takes numbers of each step")
@pytest.mark.parametrize("engine", ["cuda", "cudagraph"])
def test_so_it_may_with_each_engine_of_a_gpu(engine: str, accelerator: str) -> None:
    ours = ol.train(live("70%", engine=engine), ReadsNorms, max_epochs=4)
    assert ol.differences(ol.train("auto", ReadsNorms, max_epochs=4), ours) == []


# ---- gradients after a step ---------------------------------------------------------------------


class ReadsGradients(L.Callback):
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.seen.append(pl_module.head.weight.grad.sum())


def test_gradients_can_be_read_after_a_step_without_a_budget_and_are_refused_with_one() -> None:
    theirs, ours = ReadsGradients(), ReadsGradients()
    plain_run = ol.train("auto", callbacks=[theirs])
    assert ol.differences(plain_run, ol.train(live(), callbacks=[ours])) == []
    assert torch.stack(theirs.seen).equal(torch.stack(ours.seen))
    with pytest.raises(RuntimeError, match="Read a gradient within its step"):
        ol.train(live("100%"), callbacks=[ReadsGradients()])
    after = ol.train(live("100%"), validate=False).module
    assert {p.grad for p in copy.deepcopy(after).cpu().parameters()} == {None}


class TrainsAnother(L.Callback):
    """A second trainer runs between two steps of the first, and the first goes on."""

    def __init__(self, strategy: Callable[[], Any]) -> None:
        self.strategy, self.others = strategy, list[ol.Result]()

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step in (2, 5):
            state = torch.get_rng_state()
            self.others.append(ol.train(self.strategy(), max_epochs=1))
            torch.set_rng_state(state)


@pytest.mark.parametrize("budget", [None, "70%"])
def test_a_trainer_may_run_between_two_steps_of_another_one(budget: str | None) -> None:
    theirs, ours = TrainsAnother(lambda: "auto"), TrainsAnother(lambda: live(budget))
    plain_run = ol.train("auto", callbacks=[theirs])
    assert ol.differences(plain_run, ol.train(live(budget), callbacks=[ours])) == []
    for one, other in zip(theirs.others, ours.others, strict=True):
        assert ol.differences(one, other) == []


class TrainsWithin(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ol.train(live())
        return super().training_step(batch, batch_idx)


def test_a_trainer_within_a_step_of_another_one_is_refused() -> None:
    with pytest.raises(OffloadError, match="within a step of another one"):
        ol.train(live(), TrainsWithin)
    assert ol.differences(plain("plain"), ol.train(live())) == []


# ---- what is told, and refused ------------------------------------------------------------------


def test_a_run_tells_its_plans() -> None:
    with pytest.raises(OffloadError, match="it is made in the first step"):
        _ = live().plan
    strategy = ol.train(live("60%")).strategy
    assert "budget" in strategy.explain()
    whole = max(each.plan.peak_bytes + each.plan.reserve for each in strategy.plans)
    assert strategy.plan.device_bytes <= 0.62 * whole
    assert {plan.part for plan in strategy.plans} == {"training_step"}
    assert sum(plan.spent.runs for plan in strategy.plans) == strategy.spent.runs
    assert strategy.spent.planning_seconds > 0


def test_without_a_compiler_a_run_is_plain_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trainers.offloading.planned_strategy.why_no_core", lambda: "no C++ compiler"
    )
    with pytest.warns(UserWarning, match="trains eagerly, without offloading: no C"):
        ours = ol.train(live())
    assert ol.differences(plain("plain"), ours) == []
    with pytest.raises(CaptureError, match="give budget=None"):
        ol.train(live("1GiB"))


# ---- Ctrl-C -----------------------------------------------------------------------------------


class Interrupts(ol.Module):
    """Ctrl-C in the middle of the Python of the fourth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 3:
            signal.raise_signal(signal.SIGINT)
        return loss


class InterruptsAnUpdate(ol.Module):
    """Ctrl-C before the update of the fourth step, whose backward pass is over."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 3:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("make", [Interrupts, InterruptsAnUpdate])
def test_ctrl_c_in_mid_step_waits_for_its_end(make: type[ol.Module]) -> None:
    kept: list[ol.Module] = []

    def made() -> ol.Module:
        kept.append(module := make())
        return module

    with pytest.raises(SystemExit):
        ol.train(live("60%"), made)
    four = ol.train("auto", max_steps=4, validate=False)
    assert kept[0].trainer.global_step == 4
    pairs = zip(kept[0].state_dict().values(), four.module.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
