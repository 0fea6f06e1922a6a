"""The machine's own rates: of this CPU always, of a GPU where there is one."""

import subprocess
import sys

import pytest
import torch
from support.fake_gpu import not_on_a_fake_gpu

import offload
from offload.graph.rates import costs_of
from offload.measuring.calibration import MIB, Sizes, calibrate, take_samples

TINY = Sizes(link=MIB, memory=MIB, gemm={"float32": 64, "bfloat16": 64}, update=MIB)


def test_a_cpu_is_calibrated_as_if_its_memory_were_two() -> None:
    samples = take_samples("cpu", 0.1, TINY, workers=2)
    costs = costs_of(samples, "bfloat16")
    positive = (costs.flops, costs.memory, costs.launch, costs.h2d, costs.d2h, costs.d2d)
    assert all(rate > 0 for rate in (*positive, costs.host_memory))
    assert 0 < costs.shared <= 1
    assert sorted(samples.host) == [1, 2]


def test_a_plan_takes_what_was_calibrated() -> None:
    costs = costs_of(take_samples("cpu", 0.05, TINY, workers=1))
    graph = offload.capture(lambda x: (x @ x.T).relu(), torch.ones(8, 8))
    assert offload.plan(graph, costs=costs).costs == costs


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="device='meta' cannot be measured: give cuda or cpu"):
        calibrate("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no CUDA here"):
        calibrate("cuda")


PRECISION = """
import warnings
import torch
from offload.measuring.calibration import _tf32

def read(call):
    try:
        return call()
    except RuntimeError:
        return "mixed"

def state():
    backends = torch.backends
    return [
        backends.fp32_precision,
        backends.cuda.matmul.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        read(lambda: backends.cuda.matmul.allow_tf32),
        read(torch.get_float32_matmul_precision),
    ]

warnings.simplefilter("ignore")
{user}
before = state()
for allowed, named in (False, "ieee"), (True, "tf32"):
    with _tf32(allowed):
        assert torch.backends.cuda.matmul.fp32_precision == named
    assert state() == before, (before, state())
print(before)
"""


@pytest.mark.parametrize(
    ("user", "reads"),
    [
        ("", "['none', 'none', 'none', False, 'highest']"),
        (
            "torch.backends.cuda.matmul.allow_tf32 = True",
            "['none', 'tf32', 'none', True, 'high']",
        ),
        (
            "torch.set_float32_matmul_precision('medium')",
            "['none', 'tf32', 'bf16', True, 'medium']",
        ),
        (
            "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
            "['none', 'tf32', 'none', 'mixed', 'mixed']",
        ),
    ],
)
def test_the_users_precision_is_after_a_calibration_what_it_was(user: str, reads: str) -> None:
    """In a process of its own: torch does not forget by which of its ways it was set."""
    ran = subprocess.run(
        [sys.executable, "-c", PRECISION.replace("{user}", user)],
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, reads), ran.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@not_on_a_fake_gpu("its rates are a CPU's")
def test_a_gpu_is_calibrated_in_a_few_seconds_and_keeps_no_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_reserved()
    samples = take_samples("cuda")
    assert torch.cuda.memory_reserved() <= before
    assert not caplog.records, "the host's memory cannot be pinned here"
    # What no machine that has such a GPU is slower than.
    assert samples.gemm["bfloat16"].rate > samples.gemm["float32"].rate > 1e12
    costs = costs_of(samples)
    assert costs.memory > 1e11 and costs.h2d > 1e9 and costs.d2h > 1e9
    assert 0.3 < costs.shared <= 1
