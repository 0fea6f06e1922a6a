"""Bad input, bad luck, errors and Ctrl-C under OffloadStrategy: told, or as in plain Lightning."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from torch import nn
from torch.utils.data import DataLoader

from offload import BudgetTooSmall, OffloadError
from offload.running.stage import Stage
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]


NOTHING: Any = []


def planned() -> OffloadStrategy:
    return OffloadStrategy(budget="70%")


# ---- bad input ---------------------------------------------------------------------------------


def test_options_are_checked_at_once() -> None:
    for options, said in (
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


def test_processes_of_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OffloadError, match="in one process, and torchrun has started 2"):
        ol.train(planned())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ol.train(planned(), max_epochs=1).module is not None


def test_a_budget_under_the_minimum_says_the_minimum_and_the_task() -> None:
    with pytest.raises(
        BudgetTooSmall, match=r"are needed at task .*raise the budget to"
    ) as refused:
        ol.train(OffloadStrategy(budget="1KiB"))
    assert refused.value.needed > 1024 and refused.value.task
    with pytest.raises(BudgetTooSmall, match=r"raise host_budget to [\d.]+KiB, or") as refused:
        ol.train(OffloadStrategy(budget="60%", host_budget="1KiB"))
    assert "share" not in str(refused.value)  # of the device, which does not lack it


class Fails(ol.Module):
    """In the user's own code: at the third batch, and only then."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[0].shape[0] == 4:  # the last, smaller batch
            raise ValueError("a mistake of mine")
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Stopped(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if args[-1] == 2:
            raise ZeroDivisionError


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
        ol.train(planned(), loader=loader)
    where = re.compile(r"in task .* \(offload_lightning.py:\d+ in \w+ to .* in backward\)")
    assert any(where.match(note) for note in failed.value.__notes__)


def test_an_exception_of_a_callback_ends_the_fit_with_tensors_in_memory_of_their_own() -> None:
    module = ol.Module()
    with pytest.raises(ZeroDivisionError):
        ol.train(planned(), lambda: module, callbacks=[Stopped()])
    assert own_memory(module)


def test_a_loss_that_is_nan_goes_through_as_it_does_in_lightning() -> None:
    def broken() -> Any:
        module = ol.Module()
        with torch.no_grad():
            module.head.weight[0, 0] = float("nan")
        return module

    found = [
        ol.train(strategy, broken, gradient_clip_val=0.1).module.state_dict()
        for strategy in (planned(), "auto")
    ]
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="not finite"):
        ol.train(planned(), broken, callbacks=[Finite()])


class Finite(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        if not torch.isfinite(outputs["loss"]):
            raise ValueError("not finite")


@pytest.mark.parametrize(
    "budget", [0, -1, True, 1.5, float("nan"), float("inf"), "0", "8", "", "1e9", "0 %", "-5%"]
)
def test_what_is_no_budget_is_told_at_once(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget") as refused:
        OffloadStrategy(budget=budget)
    assert repr(budget) in str(refused.value)
    assert "8GiB" in str(refused.value) or "80%" in str(refused.value)


@pytest.mark.parametrize("budget", ["NaN%", "nan %", "inf%", "x%", "%"])
def test_what_is_no_share_is_told_at_once(budget: str) -> None:
    with pytest.raises(ValueError, match="such as 80%"):
        OffloadStrategy(budget=budget)


def test_a_gigabyte_is_less_than_a_gibibyte_and_more_than_all_is_all() -> None:
    budgets = [
        ol.train(OffloadStrategy(budget=b), max_steps=1).strategy.plan.budget[0]
        for b in ("8GB", "8GiB", "110%", "100%")
    ]
    assert budgets[0] == 8 * 10**9 < budgets[1] == 8 * 2**30
    assert budgets[2:] == [None, None]


def test_a_share_that_is_too_small_says_which_one_is_enough() -> None:
    with pytest.raises(BudgetTooSmall, match=r"1% is a share of .*: give \d+%$") as refused:
        ol.train(OffloadStrategy(budget="1%"))
    (least,) = re.findall(r"give (\d+)%", str(refused.value))
    assert ol.train(OffloadStrategy(budget=f"{least}%"), max_steps=1).strategy.plans
    with pytest.raises(BudgetTooSmall):
        ol.train(OffloadStrategy(budget=f"{int(least) - 1}%"))


class NoOptimizer(ol.Module):
    def configure_optimizers(self) -> Any:
        return None


class Foreign(ol.Module):
    """Trains nothing that the loss depends on."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)


class Empty(ol.Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": []}], 0.1)


@pytest.mark.filterwarnings("ignore:.*will run with no optimizer")
@pytest.mark.parametrize("make", [Foreign, Empty, NoOptimizer])
def test_an_optimizer_without_the_modules_parameters_is_no_trouble(make: Any) -> None:
    found = []
    for strategy in (planned(), "auto"):
        torch.manual_seed(0)
        module = make()
        trainer = L.Trainer(strategy=strategy, **ol.ONE_QUIET_EPOCH)
        trainer.fit(module, ol.data())
        found.append((module.state_dict(), trainer.callback_metrics))
    assert ol._unequal("", *found) == []


@pytest.mark.filterwarnings("ignore:.*Total length of")
@pytest.mark.filterwarnings("ignore:.*No training batches|.*limit_train_batches")
@pytest.mark.parametrize("options", [{"limit_train_batches": 0}, {"loader": DataLoader(NOTHING)}])
def test_a_run_without_batches_ends_as_it_began(options: dict[str, Any]) -> None:
    strategy = planned()
    ours = ol.train(strategy, **options)
    assert ol.differences(ol.train("auto", **options), ours) == []
    with pytest.raises(Exception, match="it is made in the first step"):
        strategy.explain()


# ---- Ctrl-C ------------------------------------------------------------------------------------


class Saves(L.Callback):
    """What is there when the run is stopped."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.file)


@contextmanager
def struck(monkeypatch: pytest.MonkeyPatch, at: int, times: int = 1) -> Iterator[None]:
    """Ctrl-C within the run of a step's nodes."""
    real, count = Stage.run, 0

    def run(stage: Stage, *given: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return real(stage, *given)

    monkeypatch.setattr(Stage, "run", run)
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("at", [3, 6])
def test_ctrl_c_in_mid_step_leaves_a_checkpoint_of_whole_steps(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = OffloadStrategy(budget="70%")
    with struck(monkeypatch, at), pytest.raises(SystemExit):
        ol.train(strategy, callbacks=[Saves(tmp_path / "struck.ckpt")], max_epochs=3)
    found = torch.load(tmp_path / "struck.ckpt", weights_only=False)
    steps = found["global_step"]
    assert 0 < steps <= at
    plain = ol.train("auto", max_steps=steps, max_epochs=3)
    assert ol._unequal("", found["state_dict"], plain.module.state_dict()) == []
    optimizer = plain.trainer.optimizers[0].state_dict()
    assert ol._unequal("", found["optimizer_states"][0], optimizer) == []
    # From there it goes on as plain Lightning does.
    goes_on = {"ckpt_path": tmp_path / "struck.ckpt", "seed": 8}
    assert ol.differences(ol.train("auto", **goes_on), ol.train(planned(), **goes_on)) == []


def test_a_second_ctrl_c_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ol.Module()
    with struck(monkeypatch, 3, times=2), pytest.raises(SystemExit):
        ol.train(planned(), lambda: module)
    assert own_memory(module)
    assert torch.is_grad_enabled()


def test_the_handler_of_the_user_is_there_again_after_every_step() -> None:
    before = signal.getsignal(signal.SIGINT)
    ol.train(planned())
    assert signal.getsignal(signal.SIGINT) is before
