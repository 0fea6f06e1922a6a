"""`PhaseSwitch` in somebody else's Trainer, with somebody else's module and a ReuseLoader."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from support.products import only_first
from torch import nn
from torch.utils.data import DataLoader

from perfect import Phase, PhaseSwitch, PlateauRule, ReuseLoader, Schedule
from perfect.callbacks.phase_records import SAMPLE_LOSSES
from perfect.method.phases import PhaseError
from perfect.runs.checkpoint import FiniteLoss, RunCheckpoint
from trainers.atomic_checkpoint import AtomicCheckpointIO

SAMPLES, BATCH = 30, 4


class Points:
    """A data set of points in the plane, labelled by the sign of their sum."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        point = torch.from_numpy(np.random.default_rng(index).normal(size=2).astype(np.float32))
        return point, int(point.sum() > 0)


class Module(L.LightningModule):
    """Knows nothing of phases. Dropout makes its steps depend on the generator."""

    def __init__(self, per_sample: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
        self.per_sample = per_sample
        self.estimated: float = 0
        self.rates: list[float] = []
        self.curve: Callable[[float], float] = lambda at: at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.per_sample:
            return {"loss": losses.mean(), SAMPLE_LOSSES: losses.detach()}
        return losses.mean()

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Judged(Module):
    """Validation shows whatever `curve` says of the epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        switch = next(c for c in self.trainer.callbacks if isinstance(c, PhaseSwitch))
        self.log("val_accuracy", self.curve(switch.policy.state.at))


def make_loader(**options: Any) -> ReuseLoader:
    return ReuseLoader(Points(), batch_size=BATCH, reuse=1, workers=2, seed=3, **options)


def make_trainer(switch: PhaseSwitch, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": bool(callbacks),
        "num_sanity_val_steps": 0, "max_epochs": -1, "log_every_n_steps": 1,
    }  # fmt: skip
    return L.Trainer(callbacks=[switch, *callbacks], **settings | options)


CONSTANT, TO_ZERO = Schedule("constant", 0.2), Schedule("linear", 0.2)
PHASES = [
    Phase("pretrain", reuse=3, passes=2, lr=CONSTANT, ema=True),
    Phase("middle", reuse=2, steps=9, lr=CONSTANT, batch_size=5, ema=True),
    Phase("finetune", passes=2, lr=TO_ZERO, ema=True),
]
# 30 samples: 23 batches of 4 at reuse 3; 8 of 4 at reuse 1
STEPS = 2 * 23 + 9 + 2 * 8


def test_phases_change_reuse_rate_and_length_and_the_estimate_is_honest() -> None:
    switch, module, loader = PhaseSwitch(PHASES), Module(), make_loader()
    make_trainer(switch).fit(module, loader)

    assert module.estimated == STEPS
    assert len(module.rates) == STEPS
    assert module.rates[:55] == pytest.approx([0.2] * 55)
    assert module.rates[55:] == pytest.approx([0.2 * (1 - (k + 0.5) / 16) for k in range(16)])
    assert [(r.name, r.first_step, r.last_step, r.passes) for r in switch.records] == [
        ("pretrain", 0, 45, 2),
        ("middle", 46, 54, 1),
        ("finetune", 55, 70, 2),
    ]
    assert loader.stats.served == 2 * 90 + 9 * 5 + 2 * 30
    assert [r.decoded for r in switch.records][::2] == [60, 60]


def test_accumulated_batches_count_as_one_step() -> None:
    phases = [Phase("pretrain", reuse=3, passes=1), Phase("finetune", passes=2, lr=TO_ZERO)]
    switch, module = PhaseSwitch(phases), Module()
    trainer = make_trainer(switch, accumulate_grad_batches=3)
    trainer.fit(module, make_loader())
    assert module.estimated == trainer.global_step == 8 + 2 * 3


def test_a_phase_of_so_many_steps_ends_a_pass_after_as_many_windows_of_batches() -> None:
    phases = [Phase("one", reuse=3, steps=7), Phase("two", passes=1)]
    switch, loader = PhaseSwitch(phases), make_loader()
    make_trainer(switch, accumulate_grad_batches=3).fit(Module(), loader)
    assert [(r.first_step, r.last_step, r.passes) for r in switch.records] == [(0, 6, 1), (7, 9, 1)]
    assert loader.stats.served == 7 * 3 * BATCH + SAMPLES


def test_the_average_moves_on_at_steps_and_not_at_batches() -> None:
    switch = PhaseSwitch([Phase("one", passes=2, lr=CONSTANT, ema=True)])
    trainer = make_trainer(switch, accumulate_grad_batches=3)
    trainer.fit(Module(), make_loader())
    assert switch.ema is not None
    assert switch.ema.updates == trainer.global_step == 2 * 3


def test_every_step_draws_anew_and_a_second_run_draws_the_same() -> None:
    class Dice(Module):
        def __init__(self) -> None:
            super().__init__()
            self.drawn: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.drawn.append(torch.rand(()).item())
            return super().training_step(batch, batch_idx)

    runs = [Dice(), Dice()]
    for module in runs:
        make_trainer(PhaseSwitch([Phase("one", passes=2)])).fit(module, make_loader())
    assert len(set(runs[0].drawn)) == 2 * 8
    assert runs[0].drawn == runs[1].drawn


def test_limit_train_batches_shortens_passes_and_the_estimate_follows() -> None:
    phases = [Phase("pretrain", reuse=3, passes=2), Phase("finetune", passes=2)]
    switch, module = PhaseSwitch(phases), Module()
    trainer = make_trainer(switch, limit_train_batches=5)
    trainer.fit(module, make_loader())
    assert module.estimated == trainer.global_step == 4 * 5


def test_the_module_s_own_weights_are_trained_and_the_average_is_validated() -> None:
    switch, module = PhaseSwitch(PHASES, ema_decay=0.9), Judged()
    shown: list[torch.Tensor] = []

    class Spy(L.Callback):
        def on_validation_batch_start(self, *_: Any) -> None:
            shown.append(module.net[0].weight.detach().clone())

    val = DataLoader(Points(), batch_size=SAMPLES)
    make_trainer(switch, Spy(), check_val_every_n_epoch=1, enable_checkpointing=False).fit(
        module, make_loader(), val
    )
    assert switch.ema is not None
    shadow = switch.ema.state_dict()["shadow"]["net.0.weight"]
    assert torch.equal(shown[-1], shadow)
    assert not torch.equal(module.net[0].weight, shadow)


def test_a_flat_curve_moves_the_switch_forward_and_not_the_end() -> None:
    phases = [
        Phase("pretrain", reuse=3, passes=10, lr=CONSTANT),
        Phase("finetune", passes=6, lr=TO_ZERO),
    ]
    module = Judged(per_sample=True)
    module.curve = lambda at: min(at, 8.0) / 100 * 5  # flat from epoch 8 on
    val = DataLoader(Points(), batch_size=SAMPLES)
    rule = PlateauRule(4, loss_slope=10.0, hits=2, cooldown=1, not_before=6)
    switch = PhaseSwitch(phases, plateau=rule, validate_every=1.0)
    # In a buffer that holds all samples, an epoch may have no first serve, and so no loss.
    loader = make_loader(buffer_batches=3)
    make_trainer(switch, check_val_every_n_epoch=None).fit(module, loader, val)

    first = switch.policy.switches[0]
    assert first.reason == "plateau"
    assert 9 <= first.at < 20
    assert switch.policy.state.at == pytest.approx(36)
    assert all(look.seen.loss is not None for look in switch.policy.trace)


def test_a_curve_that_climbs_is_switched_at_the_latest_start() -> None:
    phases = [Phase("pretrain", reuse=3, passes=3, lr=CONSTANT), Phase("finetune", passes=2)]
    rule = PlateauRule(window=3, hits=1, cooldown=0)
    switch = PhaseSwitch(phases, plateau=rule, validate_every=1.0)
    module = Judged(per_sample=True)
    module.curve = lambda at: at / 50
    val = DataLoader(Points(), batch_size=SAMPLES)
    make_trainer(switch, check_val_every_n_epoch=None).fit(module, make_loader(), val)
    assert [s.reason for s in switch.policy.switches] == ["latest start", "planned"]
    assert switch.policy.switches[0].at == pytest.approx(9)


class KeepsEach(AtomicCheckpointIO):
    """A copy of each checkpoint is called after its step."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path)
        shutil.copy(path, Path(path).with_name(f"{checkpoint['global_step']}.ckpt"))


@pytest.mark.parametrize("mode", only_first("rolling", "block", "immediate"))
def test_a_resume_at_any_checkpoint_gives_the_same_tail(tmp_path: Path, mode: Any) -> None:
    def fit(ckpt: Path | None, folder: Path) -> tuple[dict[str, Any], PhaseSwitch, ReuseLoader]:
        switch, module = PhaseSwitch(PHASES), Module()
        loader = make_loader(mode=mode)
        finite = FiniteLoss()
        saver = RunCheckpoint(folder / "last.ckpt", 1, finite)
        trainer = make_trainer(
            switch, finite, saver, plugins=[KeepsEach()], default_root_dir=folder
        )
        trainer.fit(module, loader, ckpt_path=ckpt, weights_only=False)
        state = copy.deepcopy(module.state_dict())
        return state, switch, loader

    whole, told, served = fit(None, tmp_path / "whole")
    checkpoints = sorted((tmp_path / "whole").glob("[0-9]*.ckpt"), key=lambda p: int(p.stem))
    steps = [int(p.stem) for p in checkpoints]
    # Every step but the last ones of passes: none is saved there (see perfect.runs.checkpoint).
    lasts = {23, 46, 55, 63, 71} if mode != "immediate" else {24, 48, 57, 65, 73}
    assert set(range(1, max(lasts))) - set(steps) == lasts - {max(lasts)}
    for path in checkpoints[:: 5 if mode == "rolling" else 13]:
        state, switch, loader = fit(path, tmp_path / f"from_{path.stem}")
        assert all(torch.equal(state[k], whole[k]) for k in whole), path.stem
        assert switch.records == told.records
        assert switch.policy.switches == told.policy.switches
        assert loader.stats.decoded == served.stats.decoded
        assert loader.stats.served == served.stats.served
        assert switch.ema is not None and told.ema is not None
        mine, theirs = switch.ema.state_dict()["shadow"], told.ema.state_dict()["shadow"]
        assert all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_a_phase_that_says_nothing_has_the_module_s_own_rate_and_decay() -> None:
    class Decaying(Module):
        def __init__(self) -> None:
            super().__init__()
            self.decays: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.decays.append(self.trainer.optimizers[0].param_groups[0]["weight_decay"])
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.01)

    phases = [
        Phase("one", passes=1, lr=TO_ZERO, weight_decay=0.5),
        Phase("two", passes=1),
        Phase("three", passes=1, weight_decay=0.0),
    ]
    module = Decaying()
    make_trainer(PhaseSwitch(phases)).fit(module, make_loader())
    assert module.rates[8:] == pytest.approx([0.1] * 16)
    assert module.decays == [0.5] * 8 + [0.01] * 8 + [0.0] * 8


def test_an_average_that_was_not_kept_up_starts_anew() -> None:
    phases = [
        Phase("one", passes=1, lr=CONSTANT, ema=True),
        Phase("two", passes=4, lr=CONSTANT),
        Phase("three", passes=1, lr=TO_ZERO, ema=True),
    ]
    switch = PhaseSwitch(phases, ema_decay=0.999)
    make_trainer(switch).fit(Module(), make_loader())
    assert switch.ema is not None
    assert switch.ema.updates == 8


def test_a_last_phase_that_reuses_is_not_ended_by_a_plateau() -> None:
    phases = [
        Phase("six", reuse=6, passes=4, lr=CONSTANT),
        Phase("three", reuse=3, passes=8, lr=CONSTANT),
    ]
    rule = PlateauRule(3, loss_slope=9.0, hits=1, cooldown=0)
    switch = PhaseSwitch(phases, plateau=rule, validate_every=1.0)
    module = Judged()
    module.curve = lambda at: 0.5
    val = DataLoader(Points(), batch_size=SAMPLES)
    make_trainer(switch, check_val_every_n_epoch=None).fit(module, make_loader(), val)
    assert [s.reason for s in switch.policy.switches] == ["plateau", "planned"]
    assert switch.policy.state.at == pytest.approx(48)


def test_a_plateau_is_refused_under_a_scheduler_of_the_module() -> None:
    phases = [Phase("pretrain", reuse=3, passes=3), Phase("finetune", passes=2)]
    with pytest.raises(PhaseError, match="remove WithScheduler's lr_scheduler"):
        make_trainer(PhaseSwitch(phases, plateau=PlateauRule())).fit(WithScheduler(), make_loader())


def test_reset_optimizer_forgets_the_momentum() -> None:
    seen: list[int] = []

    class Spy(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(len(trainer.optimizers[0].state))

    phases = [Phase("pretrain", reuse=2, passes=1), Phase("finetune", passes=1)]
    make_trainer(PhaseSwitch(phases), Spy(), enable_checkpointing=False).fit(
        Module(), make_loader()
    )
    assert seen[0] == 0 and 0 not in seen[1:]
    seen.clear()
    phases[1] = Phase("finetune", passes=1, reset_optimizer=True)
    make_trainer(PhaseSwitch(phases), Spy(), enable_checkpointing=False).fit(
        Module(), make_loader()
    )
    assert seen.count(0) == 2


class WithScheduler(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "loader", "said"),
    [
        (WithScheduler, make_loader, "remove the module's lr_scheduler"),
        (Manual, make_loader, "optimizes manually"),
        (Module, lambda: DataLoader(Points(), batch_size=4), "needs a ReuseLoader"),
    ],
)
def test_what_phases_cannot_drive_is_refused(
    module: Callable[[], Module], loader: Callable[[], Any], said: str
) -> None:
    with pytest.raises(PhaseError, match=said):
        make_trainer(PhaseSwitch(PHASES)).fit(module(), loader())


def test_a_plateau_rule_without_its_metric_is_refused() -> None:
    phases = [Phase("pretrain", reuse=3, passes=3, lr=CONSTANT), Phase("finetune", passes=2)]
    switch = PhaseSwitch(phases, plateau=PlateauRule(), monitor="val_acc")
    val = DataLoader(Points(), batch_size=SAMPLES)
    with pytest.raises(PhaseError, match="'val_acc', which validation did not log; it logged"):
        make_trainer(switch, check_val_every_n_epoch=1).fit(Judged(), make_loader(), val)


def test_a_loader_made_by_the_module_s_hook_is_made_once() -> None:
    made: list[ReuseLoader] = []

    class Hooked(Module):
        def train_dataloader(self) -> ReuseLoader:
            made.append(make_loader())
            return made[-1]

    module = Hooked()
    make_trainer(PhaseSwitch(PHASES)).fit(module)
    assert len(made) == 1
    assert len(module.rates) == module.estimated == STEPS
