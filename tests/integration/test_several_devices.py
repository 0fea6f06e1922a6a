"""`OffloadStrategy(devices=k)`: one process, several devices, the bits of one."""

from pathlib import Path
from threading import Thread
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support import offload_lightning as ol
from support.accelerators import GPU, pairs_on_each
from support.products import every_pair

from offload import CaptureError, OffloadError
from trainers import OffloadStrategy
from trainers.offloading.micro_batches import split_batch

pytestmark = [
    pytest.mark.usefixtures("core", "equal_seconds"),
    *(pytest.mark.filterwarnings(line) for line in ol.QUIET),
]
CLIPPED = {"max_epochs": 3, "gradient_clip_val": 0.5}
"""Gradients are clipped by norm. Epochs end in a window of micro-batches."""


class Quiet(ol.Module):
    """It logs nothing that a progress bar would read after each batch."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs


def count_devices(strategy: OffloadStrategy) -> int:
    return len({task.device for task in strategy.plan.graph.tasks})


@pytest.mark.parametrize(
    "devices, budget, accumulated, accelerator",
    pairs_on_each([2, 3, 4], [None, "80%", "100%"], [1, 2, 4]),
    indirect=["accelerator"],
)
def test_a_run_has_the_bits_of_one_device(
    devices: int, budget: Any, accumulated: int, accelerator: str
) -> None:
    on_gpu = accelerator == GPU
    if on_gpu and torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    plain = ol.train("auto", accumulate_grad_batches=accumulated, **CLIPPED)
    # The last bits of updates on the host are not those of a GPU.
    strategy = OffloadStrategy(budget, devices=devices, optimizer="device" if on_gpu else "auto")
    ours = ol.train(strategy, accumulate_grad_batches=accumulated, **CLIPPED)
    assert ol.differences(plain, ours) == []
    assert count_devices(strategy) > 1
    assert f"device {devices - 1}" in strategy.explain()


def test_the_micro_batches_of_an_update_are_one_step_that_devices_share() -> None:
    def run(strategy: Any) -> ol.Result:
        options = {"loader": ol.data(32, 8), "accumulate_grad_batches": 4, "max_epochs": 4}
        return ol.train(strategy, Quiet, validate=False, **options)

    strategy = OffloadStrategy(budget="100%", devices=2)
    assert ol.differences(run("auto"), run(strategy)) == []
    assert strategy.planned_steps == 4, "one for each update"


@pytest.mark.parametrize("devices, budget", every_pair([1, 2, 3], [None, "100%"]))
def test_a_split_batch_is_an_accumulated_one(devices: int, budget: Any) -> None:
    accumulated = ol.train("auto", loader=ol.data(40, 2), accumulate_grad_batches=4, **CLIPPED)
    strategy = OffloadStrategy(budget=budget, devices=devices, micro_batches=4)
    ours = ol.train(strategy, loader=ol.data(40, 8), **CLIPPED)
    assert min(devices, 2) <= count_devices(strategy) <= devices
    for one, other in zip(
        accumulated.module.state_dict().values(), ours.module.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


def test_batches_are_split_as_evenly_as_they_can() -> None:
    x = torch.arange(10)
    parts = split_batch({"x": x, "y": [x.view(10, 1)]}, 4)
    assert [part.batch["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert [part.ratio for part in parts] == [10 / 3, 10 / 3, 5, 5]
    assert len(split_batch(x[:3], 4)) == 3


@pytest.mark.parametrize(
    "batch, why",
    [
        ((torch.ones(4), "a name"), "the batch has a str, which cannot be split"),
        ((torch.ones(4), torch.tensor(1)), "the batch has a number, which cannot be split"),
        ((torch.ones(4), torch.ones(3)), r"have \[3, 4\] samples, so they cannot be split alike"),
        (torch.ones(0), r"have \[0\] samples"),
    ],
)
def test_what_cannot_be_split_is_refused(batch: Any, why: str) -> None:
    with pytest.raises(OffloadError, match=f"micro_batches=2: .*{why}"):
        split_batch(batch, 2)


def test_a_trainer_with_several_devices_is_one_process() -> None:
    strategy = OffloadStrategy(budget="100%")
    plain, ours = ol.train("auto"), ol.train(strategy, devices=2)
    assert ol.differences(plain, ours) == []
    assert count_devices(strategy) == 2
    with pytest.raises(OffloadError, match=r"devices=3\) and Trainer\(devices=2\) differ"):
        ol.train(OffloadStrategy(devices=3), devices=2)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("before, after", [(1, 3), (3, 2), (2, None)])
def test_a_run_goes_on_from_its_checkpoint_on_other_devices(
    before: int, after: int | None, tmp_path: Path
) -> None:
    def run(before: Any, after: Any, where: Path) -> ol.Result:
        keep = ModelCheckpoint(where, save_last=True)
        options: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True}
        ol.train(before, max_epochs=1, **options)
        return ol.train(after, ckpt_path=keep.last_model_path, max_epochs=3, **options)

    def chosen(devices: int | None) -> Any:
        return "auto" if devices is None else OffloadStrategy(budget="60%", devices=devices)

    theirs = run("auto", "auto", tmp_path / "theirs")
    ours = run(chosen(before), chosen(after), tmp_path / "ours")
    assert ol.differences(theirs, ours) == []


class Moves(L.Callback):
    """Asks for another number of devices in each epoch, from a thread of its own."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = [*numbers]
        self.asks: list[Thread] = []
        self.done: list[Any] = []

    def on_train_batch_start(self, trainer: Any, _module: Any, _batch: Any, batch_idx: int) -> None:
        def ask(devices: int) -> None:
            self.done.append(trainer.strategy.move_to(devices=devices))

        if batch_idx == 2 and self.numbers:
            self.asks.append(Thread(target=ask, args=[self.numbers.pop(0)]))
            self.asks[-1].start()
            self.asks[-1].join()


@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_run_moves_onto_more_and_fewer_devices(accumulated: int) -> None:
    options: dict[str, Any] = {"max_epochs": 5, "accumulate_grad_batches": accumulated}
    plain = ol.train("auto", **options)
    moves, strategy = Moves(2, 3, 2), OffloadStrategy(budget="100%")
    ours = ol.train(strategy, callbacks=[moves], **options)
    assert ol.differences(plain, ours) == []
    assert [move.result().nbytes > 0 for move in moves.done] == [True] * 3
    assert count_devices(strategy) == 2


def test_a_move_to_no_devices_or_to_as_many_is_refused() -> None:
    class Asks(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            for devices, why in ((0, "give 1 or more"), (2, "no other place")):
                with pytest.raises(OffloadError, match=why):
                    trainer.strategy.move_to(devices=devices)

    ol.train(OffloadStrategy(devices=2), callbacks=[Asks()])


def test_a_run_without_a_plan_is_refused_on_several_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "trainers.offloading.planned_strategy.why_no_core", lambda: "no C++ compiler"
    )
    with pytest.raises(CaptureError, match=r"devices=2.*cannot be planned: no C\+\+ compiler"):
        ol.train(OffloadStrategy(devices=2))


@pytest.mark.parametrize(
    "option, why", [({"devices": 0}, "devices=0"), ({"micro_batches": 0}, "micro_batches=0")]
)
def test_a_number_below_one_is_refused(option: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=f"{why}: give 1 or more"):
        OffloadStrategy(**option)


def test_micro_batches_of_a_module_that_optimizes_by_hand_are_refused() -> None:
    class ByHand(ol.Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(OffloadError, match="micro_batches=2: this module optimizes by hand"):
        ol.train(OffloadStrategy(micro_batches=2), ByHand)


@pytest.mark.parametrize("accumulated, told", [(1, True), (4, False)])
def test_a_run_with_too_few_micro_batches_is_told(accumulated: int, told: bool) -> None:
    strategy = OffloadStrategy(budget="100%", devices=2)
    loader = ol.data(32, 8)
    ol.train(strategy, Quiet, loader=loader, accumulate_grad_batches=accumulated, validate=False)
    notes = " ".join(strategy.plan.graph.notes)
    assert "placed on 2 devices" in notes
    assert ("they take turns, because there are fewer micro-batches (1)" in notes) is told


def test_plans_are_kept_for_each_number_of_devices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="offload.plans.kept_plans")
    plain = ol.train("auto")
    kept: list[int] = []
    for devices in (2, 2, 3):
        caplog.clear()
        strategy = OffloadStrategy(budget="90%", devices=devices, plan_cache=tmp_path)
        assert ol.differences(plain, ol.train(strategy)) == []
        kept.append(sum("comes from" in record.message for record in caplog.records))
    assert kept[0] == kept[2] == 0 < kept[1]


def test_what_parts_log_is_weighed_by_their_samples() -> None:
    class Logs(ol.Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("samples", float(len(batch[0])), on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_before_backward(self, loss: torch.Tensor) -> None:
            self.log("seen", 1.0, on_epoch=True)

    ours = ol.train(OffloadStrategy(micro_batches=4), Logs, loader=ol.data(20, 10))
    assert ours.metrics["callback samples"].item() == pytest.approx((9 + 9 + 4 + 4) / 10)
