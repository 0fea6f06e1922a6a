"""Runs that end badly through no fault of the YAML: they say what happened and how to go on."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.strategies import Strategy

from offload import Runner
from offload.measuring import profiling
from offload.memory import device_memory, room
from offload.memory.device_memory import DeviceLeft, ProcessShare
from offload.memory.host_memory import HostMemoryLeft
from offload.running.stage import Stage
from perfect.runs.checkpoint import SIGNALS
from trainers.offloading.planned_strategy import PlannedStrategy

Train = Callable[..., tuple[int, Path]]
Recipe = dict[str, Any]
SAYS = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call"
LOST = SAYS.format("an illegal memory access was encountered")


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A Trainer that could not be torn down leaves its handlers, which hold it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Fault:
    """The device is lost at the `at`th call of `owner.name`, and so it is when the run is torn
    down, which moves the module from there."""

    def __init__(
        self, patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, says: str = LOST
    ) -> None:
        self.calls = 0
        real, teardown = getattr(owner, name), Strategy.teardown

        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise RuntimeError(says)
            return real(*args, **kwargs)

        def torn_down(strategy: Strategy) -> None:
            if self.calls >= at:
                raise RuntimeError(says)
            teardown(strategy)

        patch.setattr(owner, name, called)
        patch.setattr(Strategy, "teardown", torn_down)


@pytest.mark.parametrize(
    ("offloaded", "owner", "name", "at", "step"),
    [
        pytest.param(
            True, Strategy, "batch_to_device", 12, 5, id="offloaded-batch", marks=pytest.mark.full
        ),
        pytest.param(
            True,
            PlannedStrategy,
            "optimizer_step",
            12,
            10,
            id="offloaded-update",
            marks=pytest.mark.full,
        ),
        pytest.param(True, torch, "save", 3, 10, id="offloaded-checkpoint"),
        pytest.param(True, Stage, "run", 12, 5, id="offloaded-kernel"),
        pytest.param(
            False, Strategy, "batch_to_device", 12, 5, id="plain-batch", marks=pytest.mark.full
        ),
        pytest.param(False, torch.optim.SGD, "step", 12, 10, id="plain-update"),
        pytest.param(False, torch, "save", 3, 10, id="plain-checkpoint", marks=pytest.mark.full),
    ],
)
def test_a_device_that_is_lost_anywhere_ends_the_run_and_the_last_checkpoint_goes_on(
    offloaded: bool,
    owner: Any,
    name: str,
    at: int,
    step: int,
    train: Train,
    recipe: Recipe,
    outcome: Callable[[Path], Recipe],
    read_run: Callable[[Path], Recipe],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if offloaded:
        recipe["offload"] = {"budget": "70%"}
    closed: list[str] = []
    with monkeypatch.context() as patch:
        real = Runner.abandon, Runner.close
        patch.setattr(Runner, "abandon", lambda self: (closed.append("abandon"), real[0](self)))
        patch.setattr(Runner, "close", lambda self: (closed.append("close"), real[1](self)))
        Fault(patch, owner, name, at)
        code, folder = train(recipe)
    said = capfd.readouterr().err
    assert code == 1
    assert "is lost: a kernel used an address that is not its own (CUDA error 700)" in said
    assert f"resumes from the last checkpoint: {folder / 'last.ckpt'}, step {step}\n" in said
    assert "Traceback" not in said
    assert set(closed) == ({"abandon"} if offloaded else set()), "nothing can be moved from there"
    run = read_run(folder)
    assert run["status"] == "failed" and "is lost" in run["error"]
    assert torch.load(folder / "last.ckpt", weights_only=False)["global_step"] == step
    assert train(recipe)[0] == 0
    assert f"after step {step}" in capfd.readouterr().err
    train(recipe, out="whole")
    assert outcome(folder) == outcome(folder.with_name("whole"))
    ends = [torch.load(folder.with_name(run) / "final.ckpt") for run in ("run", "whole")]
    weights, wanted = (end["state_dict"] for end in ends)
    assert [name for name in wanted if not torch.equal(weights[name], wanted[name])] == []


def test_a_device_that_is_lost_before_the_first_checkpoint_says_so(
    train: Train,
    recipe: Recipe,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Fault(monkeypatch, torch.optim.SGD, "step", 2)
    code, folder = train(recipe)
    assert code == 1
    assert "there is no checkpoint yet: the same command begins anew" in capfd.readouterr().err
    assert not (folder / "last.ckpt").exists()


@pytest.mark.parametrize("offloaded", [True, False])
def test_an_error_after_which_the_device_goes_on_stays_what_it_is(
    offloaded: bool,
    train: Train,
    recipe: Recipe,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if offloaded:
        recipe["offload"] = {"budget": "70%"}
    says = SAYS.format("invalid argument")
    Fault(monkeypatch, Strategy, "batch_to_device", 12, says)
    with pytest.raises(RuntimeError, match="CUDA error: invalid argument"):
        train(recipe)
    assert "resumes from the last checkpoint" not in capfd.readouterr().err


# ---- memory that others have --------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_a_plan_that_the_machine_has_no_memory_for_now_ends_the_run_and_a_check_alike(
    options: list[str],
    train: Train,
    recipe: Recipe,
    read_run: Callable[[Path], Recipe],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe["offload"] = {"budget": "70%"}
    with monkeypatch.context() as patch:
        patch.setattr(room, "memory_left", lambda: HostMemoryLeft(1 << 10, "[others] have it"))
        code, folder = train(recipe, *options)
    said = capfd.readouterr().err
    assert code == 1
    assert "of memory are needed, but only 1.0 KiB are left: [others] have it" in said
    assert "\nplan  " in said and "Traceback" not in said
    assert folder.exists() == (not options)
    if not options:
        run = read_run(folder)
        assert run["status"] == "failed" and "only 1.0 KiB are left" in run["error"]
    assert train(recipe, *options)[0] == 0


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_a_device_without_the_memory_to_measure_kernels_says_who_has_it(
    options: list[str],
    train: Train,
    recipe: Recipe,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def warm(device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    gib = 1 << 30
    left = DeviceLeft(torch.device("cpu"), gib, 80 * gib, 0, (ProcessShare(77, 70 * gib),))
    monkeypatch.setattr(profiling, "warm", warm)
    monkeypatch.setattr(device_memory, "device_left", lambda device: left)
    recipe["offload"] = {"budget": "70%"}
    assert train(recipe, *options)[0] == 1
    said = capfd.readouterr().err
    assert "there is too little memory on cpu to measure every kernel once: 1.0 GiB of" in said
    assert "process 77 has 70.0 GiB. End other programs on the device, or make the batch" in said
    assert "Traceback" not in said


def test_a_device_that_is_lost_during_a_check_says_so(
    train: Train,
    recipe: Recipe,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe["offload"] = {"budget": "70%"}
    Fault(monkeypatch, Strategy, "batch_to_device", 1)
    assert train(recipe, "--check")[0] == 1
    said = capfd.readouterr().err
    assert "is lost: a kernel used an address that is not its own" in said
    assert "Traceback" not in said


# ---- a GPU that is not there --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "why"),
    [
        (True, r"PyTorch .*, built for CUDA .*, finds no device: the driver is missing or too old"),
        (False, r"this PyTorch \(.*\) is built without CUDA"),
    ],
)
@pytest.mark.parametrize("offloaded", [True, False])
def test_a_gpu_that_cannot_be_used_is_refused_with_its_line_and_why(
    offloaded: bool,
    built: bool,
    why: str,
    train: Train,
    recipe: Recipe,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: False)
    recipe["trainer"]["accelerator"] = "gpu"
    if offloaded:
        recipe["offload"] = {"budget": "70%"}
    for options in ((), ("--check",)):
        code, folder = train(recipe, *options)
        said = capfd.readouterr().err
        assert code == 2
        assert re.search(rf"recipe.yaml:\d+: trainer.accelerator: {why}", said)
        assert "Traceback" not in said
        assert not folder.exists()
