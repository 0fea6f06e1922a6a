"""Updates that wait for the next forward pass in a Lightning run: nobody can tell.

`forced` has every plan turned, with every update late, be it faster or not.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from support import offload_lightning as ol
from torch.utils.data import DataLoader, Dataset

import offload
from offload import Costs, Plan, TaskGraph
from offload.lowering.passes import host_updates
from offload.lowering.rotation import rotated, updates_of
from offload.running.rotated_step import RotatedStep
from perfect.callbacks.phase_switch import PhaseSwitch
from perfect.method.phases import Phase
from perfect.runs.checkpoint import FiniteLoss
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields what ran: of every step whether its updates were left pending, and every flush."""

    def plan(graph: TaskGraph, *args: Any, late: bool = False, **more: Any) -> Plan:
        if late:
            on_host = host_updates(graph, Costs(), "host")
            rotation = rotated(on_host, updates_of(on_host))
            assert rotation is not None
            made = offload.plan(rotation.steady, *args, **{**more, "recompute": False})
            return replace(made, source=graph, rotation=rotation)
        return offload.plan(graph, *args, **more)

    ran: list[str] = []
    step, flush = RotatedStep.run, RotatedStep.flush

    def run(self: RotatedStep, *batch: torch.Tensor) -> Any:
        ran.append("steady" if self.pending else "first")
        return step(self, *batch)

    def flushed(self: RotatedStep) -> None:
        if self.pending:
            ran.append("flush")
        flush(self)

    monkeypatch.setattr("trainers.offloading.plan_request.offload", SimpleNamespace(plan=plan))
    monkeypatch.setattr(RotatedStep, "run", run)
    monkeypatch.setattr(RotatedStep, "flush", flushed)
    yield ran


def both(**options: Any) -> tuple[ol.Result, ol.Result]:
    ours = ol.train(OffloadStrategy(budget="60%"), **options)
    return ours, ol.train(**options)


# 6 batches an epoch, the last one smaller: it has a graph of its own, which is not turned.
EPOCH = ["first", *["steady"] * 4, "flush"]
RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, EPOCH * 2),
    "sgd": ({"make": functools.partial(ol.Module, "sgd", "epoch")}, EPOCH * 2),
    "clipped by norm": ({"gradient_clip_val": 0.1}, EPOCH * 2),
    "clipped by value": (
        {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
        EPOCH * 2,
    ),
    "bf16-mixed": ({"precision": "bf16-mixed", "gradient_clip_val": 0.1}, EPOCH * 2),
    "validation every two batches": (
        {"val_check_interval": 2},
        ["first", "steady", "flush", "first", "steady", "flush", "first", "flush"] * 2,
    ),
    "a last step in mid-epoch": (
        {"max_epochs": -1, "max_steps": 8},
        [*EPOCH, "first", "steady", "flush"],
    ),
    "as many batches as asked for": (
        {"limit_train_batches": 3},
        ["first", "steady", "steady", "flush"] * 2,
    ),
    "two batches": ({"fast_dev_run": 2}, ["first", "steady", "flush"]),
    "accumulated": ({"accumulate_grad_batches": 2}, []),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_late_updates_is_plain_lightnings_to_the_last_bit(
    name: str, forced: list[str]
) -> None:
    options, steps = RUNS[name]
    ours, theirs = both(**options)
    assert ol.differences(theirs, ours) == []
    assert forced == steps
    assert not any("Whole" in type(c).__name__ for c in vars(ours.trainer)["callbacks"])


def test_the_first_steps_are_checked_without_late_updates(forced: list[str]) -> None:
    ours = ol.train(OffloadStrategy(budget="60%"))
    assert ol.differences(ol.train(), ours) == []
    assert forced == ["first", "steady", "steady", "flush", *EPOCH]


def test_a_checkpoint_of_weights_alone_has_those_of_its_step(
    forced: list[str], tmp_path: Path
) -> None:
    """Nobody asks for the optimizer's state then."""
    saved = []
    for who, strategy in (("ours", OffloadStrategy()), ("theirs", "auto")):
        every = ModelCheckpoint(
            tmp_path / who, every_n_train_steps=3, save_top_k=-1, save_weights_only=True
        )
        ol.train(strategy, callbacks=[every], enable_checkpointing=True, max_epochs=1)
        path = tmp_path / who / "epoch=0-step=3.ckpt"
        saved.append(torch.load(path, weights_only=False)["state_dict"])
    assert ol._unequal("", *saved) == []
    assert forced == ["first", "steady", "steady", "flush", "first", "steady", "flush"]


class SavesOptimizer(L.Callback):
    """Saves the optimizer's state of the third step, and asks for no weights."""

    reads_weights_between_steps = False

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            torch.save(trainer.strategy.optimizer_state(trainer.optimizers[0]), self.file)


def test_who_asks_for_the_optimizers_state_alone_gets_that_of_its_step(
    forced: list[str], tmp_path: Path
) -> None:
    """In a checkpoint the weights come first, and with them everything is brought up to date."""
    saved = []
    for strategy in (OffloadStrategy(), "auto"):
        ol.train(strategy, callbacks=[SavesOptimizer(tmp_path / "state.pt")], max_epochs=1)
        saved.append(torch.load(tmp_path / "state.pt", weights_only=False))
    assert ol._unequal("", *saved) == []
    assert forced == ["first", "steady", "steady", "flush", "first", "steady", "flush"]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_checkpoints_in_mid_epoch_are_plain_lightnings_and_a_run_goes_on_from_them(
    forced: list[str], tmp_path: Path
) -> None:
    saved: dict[str, dict[str, Any]] = {}
    for who, strategy in (("ours", OffloadStrategy()), ("theirs", "auto")):
        every = ModelCheckpoint(tmp_path / who, every_n_train_steps=2, save_top_k=-1)
        ol.train(strategy, callbacks=[every], enable_checkpointing=True)
        for path in sorted((tmp_path / who).glob("*.ckpt")):
            checkpoint = torch.load(path, weights_only=False)
            checkpoint.pop("callbacks")  # its own folder
            saved.setdefault(who, {})[path.name] = checkpoint
    assert len(saved["ours"]) == 6
    assert ol._unequal("", saved["ours"], saved["theirs"]) == []
    assert forced == ["first", "steady", "flush", "first", "steady", "flush", "first", "flush"] * 2
    path = str(tmp_path / "ours" / "epoch=0-step=4.ckpt")
    resumed = [ol.train(s, ckpt_path=path) for s in (OffloadStrategy(), "auto")]
    assert ol.differences(*resumed) == []


class Fails(L.Callback):
    reads_weights_between_steps = False

    def __init__(self, hook: str) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        setattr(self, hook, self.fail)

    def fail(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("in the middle")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.seen = {name: t.clone() for name, t in pl_module.state_dict().items()}


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_start"])
def test_an_exception_between_two_steps_leaves_whole_tensors(hook: str, forced: list[str]) -> None:
    seen = []
    for strategy in (OffloadStrategy(), "auto"):
        fails = Fails(hook)
        with pytest.raises(RuntimeError, match="in the middle"):
            ol.train(strategy, callbacks=[fails])
        seen.append(fails.seen)
    assert ol._unequal("", *seen) == []
    assert forced[-1] == "flush" and "steady" in forced


class Looks(L.Callback):
    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.weights.append(pl_module.head.weight.detach().clone())


class Sometimes(Looks):
    """In the second epoch."""

    now = False

    @property
    def reads_weights_between_steps(self) -> bool:
        return self.now

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.now:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, None, None, 0)
        self.now = True


@pytest.mark.parametrize("kind", [Looks, Sometimes])
def test_who_looks_between_two_steps_sees_what_plain_lightning_shows(
    kind: type[Looks], forced: list[str]
) -> None:
    ours, theirs = kind(), kind()
    result = ol.train(OffloadStrategy(budget="60%"), callbacks=[ours])
    assert ol.differences(ol.train(callbacks=[theirs]), result) == []
    assert ol._unequal("", ours.weights, theirs.weights) == []
    assert forced == (EPOCH if kind is Sometimes else [])


class Player(Dataset[Any]):
    """Its samples depend on the weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.inner = SimpleNamespace(policy=module)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        x = torch.arange(12.0) + index
        return x, int(self.inner.policy.head.weight.sum() > 0)


class Overridden(ol.Module):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Harmless(Overridden):
    reads_weights_between_steps = False


class Playing(ol.Module):
    def train_dataloader(self) -> Any:
        return DataLoader(Player(self), 8)


def test_where_somebody_may_look_no_update_waits_and_the_plan_says_who() -> None:
    def told(**options: Any) -> str:
        strategy = OffloadStrategy(budget="60%", optimizer="host")
        ol.train(strategy, max_epochs=1, **options)
        remarks = strategy.plan.remarks
        return "".join(remark for remark in remarks if "no update waits" in remark)

    assert "callback Looks has on_train_batch_end" in told(callbacks=[Looks()])
    assert "callback LambdaCallback has on_train_batch_start" in told(
        callbacks=[LambdaCallback(on_train_batch_start=lambda *_: None)]
    )
    assert "EMAWeightAveraging" in told(callbacks=[EMAWeightAveraging()])
    assert "Overridden overrides on_after_batch_transfer" in told(make=Overridden)
    assert told(make=Harmless) == ""
    assert "accumulate_grad_batches=2" in told(accumulate_grad_batches=2)
    assert told() == ""


def test_data_that_have_the_weights_at_hand_let_no_update_wait(forced: list[str]) -> None:
    def run(strategy: Any) -> ol.Result:
        torch.manual_seed(0)
        module = Playing()
        trainer = L.Trainer(
            strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        )  # fmt: skip
        trainer.fit(module)
        return ol.Result(module, trainer, strategy, {}, [])

    ours, theirs = run(OffloadStrategy()), run("auto")
    assert ol.differences(theirs, ours) == [] and forced == []


def test_a_run_in_phases_reads_weights_between_steps_where_it_averages_them() -> None:
    averaging, plain = (Phase("pretrain", 2, passes=1, ema=average) for average in (True, False))
    assert PhaseSwitch([averaging]).reads_weights_between_steps
    assert not PhaseSwitch([plain]).reads_weights_between_steps
    assert not FiniteLoss.reads_weights_between_steps
