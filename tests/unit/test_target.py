"""Which engine runs on which device, and what a GPU is asked for before it is there."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from offload import Costs, OffloadError
from offload.caching.plan_cache import PlanCache
from offload.graph.topology import Topology
from offload.measuring import calibration
from trainers import OffloadStrategy
from trainers.steps.target import Target, target_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    "accelerator, device, engine, chosen",
    [
        (CPUAccelerator(), CPU, "auto", "threads"),
        (CPUAccelerator(), CPU, "threads", "threads"),
        (CUDAAccelerator(), CUDA, "auto", "cuda"),
        (CUDAAccelerator(), CUDA, "cuda", "cuda"),
        (CUDAAccelerator(), CUDA, "cudagraph", "cudagraph"),
    ],
)
def test_auto_is_the_devices_own_engine(
    accelerator: Any, device: torch.device, engine: str, chosen: str
) -> None:
    found = target_of(engine, accelerator, device)
    assert (found.engine, found.device) == (chosen, device)


@pytest.mark.parametrize(
    "accelerator, device, engine, why",
    [
        (CPUAccelerator(), CPU, "cuda", "engine='cuda' runs on a GPU"),
        (CUDAAccelerator(), CUDA, "threads", "engine='threads' runs on the CPU"),
        (MPSAccelerator.__new__(MPSAccelerator), torch.device("mps"), "auto", "not on mps"),
        (CUDAAccelerator(), CPU, "auto", "not on cpu with CUDAAccelerator"),
    ],
)
def test_an_engine_that_does_not_run_there_is_told_with_what_to_give(
    accelerator: Any, device: torch.device, engine: str, why: str
) -> None:
    with pytest.raises(OffloadError, match=why) as refused:
        target_of(engine, accelerator, device)
    assert "give" in str(refused.value)


@pytest.mark.parametrize(
    ("built", "why"), [(True, "the driver is missing or too old"), (False, "built without CUDA")]
)
@pytest.mark.parametrize("engine", ["cuda", "cudagraph"])
def test_an_engine_of_a_gpu_says_why_there_is_none(
    engine: str, built: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    with pytest.raises(OffloadError, match=rf"^engine='{engine}' needs a CUDA device: .*{why}"):
        OffloadStrategy(engine=engine)


def test_a_gpu_is_calibrated_once_and_a_cpu_never(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def calibrate(device: torch.device, precision: str, *, devices: int) -> Costs:
        asked.append((device, precision, devices))
        return Costs(h2d=1.0, topology=Topology() if devices > 1 else None)

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    found = Target(CUDA, "cuda").measured(MixedPrecision("bf16-mixed", "cuda"))
    assert found.costs == Costs(h2d=1.0)
    assert found.measured(Precision()) is found
    assert Target().measured(Precision()).costs is None
    assert asked == [(CUDA, "bfloat16", 1)]
    monkeypatch.setattr(Target, "check_devices", lambda self, count: None)
    spread = found.measured(Precision(), devices=2)
    assert spread.measured(Precision(), devices=2) is spread
    assert spread.costs == Costs(h2d=1.0, topology=Topology())
    assert asked[1:] == [(CUDA, "float32", 2)]


def test_with_a_cache_a_gpu_is_calibrated_by_the_first_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    device = torch.device("cpu")  # whose name can be asked for here

    def calibrate(device: torch.device, precision: str, *, devices: int) -> Costs:
        asked.append(precision)
        wires = Topology(5.0, 0.5, ((0, 1), (2, 3)), 2.0) if devices > 1 else None
        return Costs(h2d=1.0 + len(asked), topology=wires)

    monkeypatch.setattr(calibration, "calibrate", calibrate)

    def rates(precision: str = "float32", devices: int = 1) -> Costs:
        return calibration.kept_rates(PlanCache(tmp_path), device, precision, devices)

    assert rates() == rates() == Costs(h2d=2.0)
    assert rates("bfloat16") == Costs(h2d=3.0)
    assert asked == ["float32", "bfloat16"]
    spread = rates(devices=4)
    assert spread == rates(devices=4)
    assert spread.topology is not None and spread.h2d == 4.0
    assert rates(devices=2).h2d == 5.0
    wrong = Topology(), {"dram": -1.0}, {"uplinks": 3}, {"uplinks": [["x"]]}, {"speed": 1.0}
    for n, wires in enumerate(wrong[1:]):
        kept = {**asdict(Costs()), "topology": {**asdict(wrong[0]), **wires}}
        monkeypatch.setattr(PlanCache, "read", lambda *_, kept=kept: kept)
        assert rates(devices=2).h2d == 6.0 + n
    monkeypatch.setattr(PlanCache, "read", lambda *_: {**asdict(Costs()), "h2d": -1.0})
    assert rates() == Costs(h2d=10.0)


def test_lightning_tells_the_strategy_its_device() -> None:
    strategy = OffloadStrategy()
    strategy.parallel_devices = [torch.device("cuda", 1)]
    assert strategy.root_device == torch.device("cuda", 1)
    strategy = OffloadStrategy(device="cuda:0")
    strategy.parallel_devices = [torch.device("cuda", 1)]
    assert strategy.root_device == CUDA
    with pytest.raises(OffloadError, match=r"device='cuda:0'\) and Trainer\(devices=2\) differ"):
        strategy.parallel_devices = [CUDA, torch.device("cuda", 1)]
    with pytest.raises(OffloadError, match=r"follow each other, and the trainer's are \[0, 2\]"):
        OffloadStrategy().parallel_devices = [CUDA, torch.device("cuda", 2)]
