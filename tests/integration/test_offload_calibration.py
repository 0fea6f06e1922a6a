"""The machine's own rates: of this CPU always, of a GPU where there is one."""

import pytest
import torch

import offload
from offload.calibration import MIB, Sizes, calibrate, rates

TINY = Sizes(link=MIB, memory=MIB, gemm={"float32": 64, "bfloat16": 64}, update=MIB)


def test_a_cpu_is_calibrated_as_if_its_memory_were_two() -> None:
    found = rates("cpu", 0.1, TINY, workers=2)
    costs = found.costs("bfloat16")
    positive = (costs.flops, costs.memory, costs.launch, costs.h2d, costs.d2h, costs.d2d)
    assert all(rate > 0 for rate in (*positive, costs.host_memory, *found.host.values()))
    assert 0 < costs.shared <= 1
    assert sorted(found.host) == [1, 2]
    assert "memmove" in found.notes[0]


def test_a_plan_takes_what_was_calibrated() -> None:
    costs = rates("cpu", 0.05, TINY, workers=1).costs()
    graph = offload.capture(lambda x: (x @ x.T).relu(), torch.ones(8, 8))
    assert offload.plan(graph, costs=costs).costs == costs


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="device='meta': cuda or cpu is needed"):
        calibrate("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no CUDA here"):
        calibrate("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_calibrated_in_a_few_seconds_and_keeps_no_memory() -> None:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_reserved()
    found = rates("cuda")
    assert torch.cuda.memory_reserved() <= before
    assert not found.notes, "the host's memory cannot be pinned here"
    # What no machine that has such a GPU is slower than.
    assert found.gemm["bfloat16"] > found.gemm["float32"] > 1e12
    assert found.memory > 1e11
    assert found.h2d.rate > 1e9 and found.d2h.rate > 1e9
    assert 0.3 < found.shared <= 1
