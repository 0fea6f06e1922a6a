"""A checkpoint is whole or the old one; a loss that is no number stops before it is saved."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfect.errors import Interrupted, LossNotFinite
from perfect.runs.checkpoint import FiniteLoss, RunCheckpoint
from trainers.atomic_checkpoint import AtomicCheckpointIO

OLD, NEW = {"step": 1}, {"step": 2, "weights": torch.arange(5)}


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# ---- AtomicCheckpointIO -------------------------------------------------------------------------


def test_a_checkpoint_is_written_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(OLD, path)
    assert load(path) == OLD
    AtomicCheckpointIO().save_checkpoint(NEW, str(path))
    assert torch.equal(load(path)["weights"], torch.arange(5))
    assert files(tmp_path) == ["last.ckpt"]


class Unwritable:
    """Fails in the middle of being written."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("other")])
def test_a_failure_while_writing_leaves_the_old_checkpoint_whole_and_no_part(
    error: BaseException, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(OLD, path)
    with pytest.raises(type(error)):
        AtomicCheckpointIO().save_checkpoint(
            {"big": torch.zeros(9), "bad": Unwritable(error)}, path
        )
    assert load(path) == OLD
    assert files(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_said_and_leaves_the_old_checkpoint_whole(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not raised: under DDP it is rank 0 alone that writes, and the others wait for it."""
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(OLD, path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with caplog.at_level(logging.ERROR):
            AtomicCheckpointIO().save_checkpoint(NEW, path)
    assert "No space left" in caplog.text and "previous one is intact" in caplog.text
    assert load(path) == OLD
    assert files(tmp_path) == ["last.ckpt"]


def test_the_new_checkpoint_is_on_the_disk_before_it_takes_the_olds_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "last.ckpt", []
    AtomicCheckpointIO().save_checkpoint(OLD, path)
    fsync, replace = os.fsync, os.replace

    def watched_fsync(file: int) -> None:
        assert load(path) == OLD
        calls.append("fsync")
        fsync(file)

    def watched_replace(source: Any, target: Any) -> None:
        assert load(Path(source))["step"] == 2, "whole before it is renamed"
        calls.append("replace")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "replace", watched_replace)
        AtomicCheckpointIO().save_checkpoint(NEW, path)
    assert calls[:2] == ["fsync", "replace"]
    assert load(path)["step"] == 2


# ---- FiniteLoss ---------------------------------------------------------------------------------


def batch_end(callback: Any, step: int, loss: Any, accumulating: bool = False) -> None:
    """A batch ended, after `step` optimizer steps in all."""
    loop = SimpleNamespace(_should_accumulate=lambda: accumulating)
    fit_loop = SimpleNamespace(epoch_loop=loop)
    trainer: Any = SimpleNamespace(global_step=step, fit_loop=fit_loop)
    callback.on_train_batch_end(trainer, None, loss, None, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_loss_that_is_no_number_stops_at_once_and_says_at_which_step(
    bad: float, wrapped: bool
) -> None:
    callback = FiniteLoss()
    for step, loss in enumerate([1.0, 0.5, bad], 1):
        value = torch.tensor(loss)
        outputs = {"loss": value} if wrapped else value
        if step < 3:
            batch_end(callback, step, outputs)
            continue
        with pytest.raises(LossNotFinite, match=r"at step 2: lower the learning rate") as error:
            batch_end(callback, step, outputs)
        assert error.value.step == 2, "the third batch is step 2: steps count from 0"


def test_the_step_is_named_right_in_the_middle_of_an_accumulation() -> None:
    with pytest.raises(LossNotFinite) as error:
        batch_end(FiniteLoss(), 0, torch.tensor(float("nan")), accumulating=True)
    assert error.value.step == 0


@pytest.mark.parametrize("outputs", [None, {}])
def test_a_training_step_that_skips_a_batch_is_let_pass(outputs: Any) -> None:
    batch_end(FiniteLoss(), 1, outputs)


def test_a_loss_of_the_last_steps_is_looked_at_when_training_ends() -> None:
    callback: Any = FiniteLoss(every=1000)
    callback._bad = torch.tensor([3.0, float("nan")])  # as on a GPU, which is asked now and then
    with pytest.raises(LossNotFinite):
        callback.on_train_end(None, None)


# ---- RunCheckpoint ------------------------------------------------------------------------------


class Trainer:
    """As much of a trainer as a checkpoint needs to know."""

    def __init__(self, pass_ends: bool = False, validates: bool = False) -> None:
        self.global_step = 0
        self.is_global_zero = True
        self.num_training_batches = 10
        self.saved: list[int] = []
        loop = SimpleNamespace(
            _num_ready_batches_reached=lambda: self.pass_ends,
            _should_check_val_fx=lambda fetcher: self.validates,
            _should_accumulate=lambda: self.accumulates,
        )
        self.pass_ends, self.validates, self.accumulates = pass_ends, validates, False
        self.lightning_module = torch.nn.Linear(2, 2)
        self.fit_loop = SimpleNamespace(epoch_loop=loop, _data_fetcher=object())
        self.strategy = SimpleNamespace(
            reduce_boolean_decision=lambda asked, all: asked,
            lightning_module_state_dict=self.lightning_module.state_dict,
        )

    def save_checkpoint(self, path: Path, weights_only: bool = False) -> None:
        self.saved.append(self.global_step)

    def run(self, callback: RunCheckpoint, steps: int) -> None:
        for _ in range(steps):
            callback.on_train_batch_start(self, None, None, 0)
            self.global_step += 1
            callback.on_train_batch_end(self, None, None, None, 0)


def started(trainer: Trainer, every: int = 5, **options: Any) -> RunCheckpoint:
    callback = RunCheckpoint(Path("last.ckpt"), every, FiniteLoss(), **options)
    callback.on_train_start(trainer, None)
    return callback


def test_a_checkpoint_is_due_every_so_many_steps() -> None:
    trainer = Trainer()
    trainer.run(started(trainer), 17)
    assert trainer.saved == [5, 10, 15]


@pytest.mark.parametrize("unsafe", ["pass_ends", "validates", "accumulates"])
def test_a_checkpoint_that_is_due_at_an_unsafe_batch_waits_for_the_next_safe_one(
    unsafe: str,
) -> None:
    trainer = Trainer()
    callback = started(trainer)
    trainer.run(callback, 4)
    setattr(trainer, unsafe, True)
    trainer.run(callback, 2)
    assert trainer.saved == []
    setattr(trainer, unsafe, False)
    trainer.run(callback, 1)
    assert trainer.saved == [7]


def test_who_is_asked_to_stop_saves_first_and_stops_where_it_is_safe() -> None:
    asked = False
    trainer = Trainer()
    callback = started(trainer, every=100, stop_asked=lambda: asked)
    trainer.run(callback, 3)
    asked = True
    trainer.pass_ends = True
    trainer.run(callback, 1)
    assert trainer.saved == []
    trainer.pass_ends = False
    trainer.run(callback, 1)  # what Lightning logs of this batch comes after the checkpoint
    with pytest.raises(Interrupted, match="stopped after step 5") as error:
        trainer.run(callback, 1)
    assert trainer.saved == [error.value.step] == [5]


def test_who_is_asked_to_stop_and_finds_no_safe_batch_in_a_pass_stops_all_the_same() -> None:
    trainer = Trainer(pass_ends=True)
    callback = started(trainer, stop_asked=lambda: True)
    trainer.run(callback, 3)
    callback.on_train_epoch_end(trainer, None)  # the pass in which it was asked
    with pytest.raises(Interrupted):
        callback.on_train_epoch_end(trainer, None)
    assert trainer.saved == []


def test_who_comes_to_write_in_the_middle_of_a_run_writes_at_the_next_safe_batch() -> None:
    """A swarm's writer may die when a checkpoint is due; the others took it for written."""
    trainer = Trainer()
    trainer.is_global_zero = False
    callback = started(trainer)
    trainer.run(callback, 5)
    trainer.is_global_zero, trainer.pass_ends = True, True
    trainer.run(callback, 1)
    trainer.pass_ends = False
    trainer.run(callback, 6)
    assert trainer.saved == [5, 7, 12]  # Lightning writes none of those before a peer is the writer


def test_weights_that_are_no_numbers_are_never_saved() -> None:
    """A finite loss with a gradient that is not: the update poisons the weights."""
    trainer = Trainer()
    callback = started(trainer)
    torch.nn.init.constant_(trainer.lightning_module.weight, float("nan"))
    with pytest.raises(LossNotFinite):
        trainer.run(callback, 5)
    assert trainer.saved == []


def test_passes_too_short_to_checkpoint_in_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    trainer.num_training_batches = 2
    with caplog.at_level(logging.WARNING):
        started(trainer)
    assert "only 2 batches" in caplog.text
    assert "lower batch_size" in caplog.text
