"""Bad input and bad luck on several devices: told by name, or the bits of one device."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from support import offload_lightning as ol
from support.accelerators import only_on_gpu
from support.fake_gpu import losable_device, lose_device, only_on_a_fake_gpu

from offload import BudgetTooSmall, DeviceLost, MemoryTooSmall, OffloadError
from offload.memory import arenas, room
from offload.memory.host_memory import HostMemoryLeft
from trainers import OffloadStrategy

pytestmark = [
    pytest.mark.usefixtures("core", "equal_seconds"),
    *(pytest.mark.filterwarnings(line) for line in ol.QUIET),
]
DEVICES = pytest.mark.parametrize("devices", [2, 3])


# ---- memory -------------------------------------------------------------------------------------


@DEVICES
def test_a_host_without_room_is_refused_before_anything_is_taken(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(room, "memory_left", lambda: HostMemoryLeft(1000, "a small host"))
    monkeypatch.setattr(arenas, "_allocate_aligned", lambda *size: taken.append(size))
    module = ol.Module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(MemoryTooSmall, match=r"only 1000 B are left: a small host") as refused:
        ol.train(OffloadStrategy(budget="60%", devices=devices), lambda: module)
    assert not taken
    assert refused.value.left == 1000 < refused.value.needed
    for number in range(devices):
        assert f"the arena of device {number} " in str(refused.value)
    assert "the arena of the host" in str(refused.value)
    assert ol._unequal("", before, module.state_dict()) == []


@DEVICES
def test_a_budget_of_the_host_that_holds_no_copy_says_how_many_bytes_would(devices: int) -> None:
    def strategy(nbytes: int) -> OffloadStrategy:
        return OffloadStrategy(budget="60%", host_budget=nbytes, devices=devices)

    with pytest.raises(BudgetTooSmall, match=r"host.*KiB") as refused:
        ol.train(strategy(1024))
    assert refused.value.needed > 1024
    plain = ol.train("auto")
    assert ol.differences(plain, ol.train(strategy(1 << 20))) == []


# ---- what a step may do -------------------------------------------------------------------------


@DEVICES
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_gradients_scaled_for_float16_have_the_bits_of_one_device(devices: int) -> None:
    def scaled(strategy: Any) -> tuple[ol.Result, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # type: ignore[attr-defined]
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        options: dict[str, Any] = {"plugins": [plugin], "accumulate_grad_batches": 2}
        return ol.train(strategy, gradient_clip_val=0.5, **options), scaler.get_scale()

    strategy = OffloadStrategy(budget="100%", devices=devices)
    (plain, scale), (ours, same_scale) = scaled("auto"), scaled(strategy)
    assert ol.differences(plain, ours) == []
    assert scale == same_scale < 2.0**40, "a step was skipped"
    assert len({task.device for task in strategy.plan.graph.tasks}) > 1


class FewKernels(ol.Module):
    """Going forward is a kernel or two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(12))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.dot(self.weight, batch[0][0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], 0.1, momentum=0.9)


def test_a_step_that_cannot_be_cut_for_all_devices_says_so() -> None:
    strategy = OffloadStrategy(devices=8)
    plain, ours = (ol.train(how, FewKernels, validate=False) for how in ("auto", strategy))
    assert ol.differences(plain, ours) == []
    told = r"placed on \d devices? of 8 asked, because it cannot be cut further"
    assert re.search(told, strategy.explain())


def test_devices_that_take_turns_are_told_with_the_share_that_they_are_idle() -> None:
    strategy = OffloadStrategy(budget="100%", devices=3)
    ol.train(strategy, loader=ol.data(24, 8), validate=False)
    text, run = strategy.explain(), strategy.plan.simulation
    assert "placed on 3 devices; they take turns, because there are fewer micro-batches (1)" in text
    found = re.search(r"^idle +(\d+) % of the time of all devices$", text, re.MULTILINE)
    assert found is not None
    busy = sum(seconds for lane, seconds in run.busy.items() if lane.startswith("compute"))
    assert int(found[1]) == round(100 - 100 * busy / (3 * run.makespan)) >= 60, "two wait for one"


# ---- a process that is killed -------------------------------------------------------------------

RUN = """
import sys
from lightning.pytorch.callbacks import ModelCheckpoint
from support import offload_lightning as ol
from trainers import OffloadStrategy

keep = ModelCheckpoint(sys.argv[1], "{step}", save_top_k=-1, every_n_train_steps=1)
strategy = OffloadStrategy("60%", devices=2)
ol.train(strategy, callbacks=[keep], enable_checkpointing=True, max_epochs=10000)
"""


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_killed_run_goes_on_with_other_devices_to_the_same_bits(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    paths = {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, **paths}) as process:
        try:
            while len([*tmp_path.glob("*.ckpt")]) < 8:
                assert process.poll() is None, "the run has ended"
                time.sleep(0.002)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    # The last file may be half written; all before it are whole.
    *_, last, _ = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    saved = torch.load(last, weights_only=False)
    plain = ol.train("auto", max_steps=saved["global_step"], max_epochs=10000)
    assert ol._unequal("", saved["state_dict"], plain.module.state_dict()) == []

    def go_on(strategy: Any) -> ol.Result:
        keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
        options: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True}
        return ol.train(strategy, ckpt_path=last, max_epochs=saved["epoch"] + 3, **options)

    theirs = go_on("auto")
    for devices in (3, 1):
        ours = go_on(OffloadStrategy("60%", devices=devices))
        assert ol.differences(theirs, ours) == [], devices


# ---- GPUs ---------------------------------------------------------------------------------------


class Loses(L.Callback):
    """The second device is lost after a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            trainer.save_checkpoint(self._folder / "good.ckpt")
        if batch_idx == 4:
            lose_device(device=1)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        with pytest.raises(DeviceLost, match=r"^cuda:1 is lost"):
            trainer.save_checkpoint(self._folder / "bad.ckpt")


def need_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")


@only_on_gpu
@only_on_a_fake_gpu("the test loses a device")
@pytest.mark.parametrize("budget", [None, "60%"])
def test_the_device_that_is_lost_is_named_and_the_last_checkpoint_stays(
    budget: str | None, tmp_path: Path, accelerator: str
) -> None:
    del accelerator
    need_two_gpus()
    with losable_device(), pytest.raises(DeviceLost, match=r"^cuda:1 is lost: a kernel used an"):
        ol.train(OffloadStrategy(budget, devices=2), callbacks=[Loses(tmp_path)])
    assert not (tmp_path / "bad.ckpt").exists()
    good = torch.load(tmp_path / "good.ckpt", weights_only=False, map_location="cpu")
    plain = ol.train("auto", max_steps=good["global_step"])
    state = {name: tensor.cpu() for name, tensor in plain.module.state_dict().items()}
    assert ol._unequal("", good["state_dict"], state) == []


@only_on_gpu
def test_cards_of_two_kinds_are_refused_before_anything_is_taken(
    accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del accelerator
    need_two_gpus()
    real = torch.cuda.get_device_properties

    def told(device: torch.device) -> Any:
        found = real(device)
        name = found.name if torch.device(device).index == 0 else "RTX 4090"
        return SimpleNamespace(name=name, total_memory=found.total_memory)

    monkeypatch.setattr(torch.cuda, "get_device_properties", told)
    before = [torch.cuda.memory_allocated(number) for number in range(2)]
    with pytest.raises(OffloadError, match=r"cuda:1 is a RTX 4090 with .* one kind of device"):
        ol.train(OffloadStrategy(devices=2))
    after = [torch.cuda.memory_allocated(number) for number in range(2)]
    assert all(now <= then for now, then in zip(after, before, strict=True))
