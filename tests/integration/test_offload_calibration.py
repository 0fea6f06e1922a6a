"""The machine's own rates: of this CPU always, of a GPU where there is one."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from support.fake_gpu import not_on_a_fake_gpu

import offload
from offload.graph.rates import costs_of
from offload.measuring import calibration
from offload.measuring.calibration import MIB, Sizes, calibrate, take_samples
from offload.measuring.links import measure_links
from offload.measuring.stopwatch import Gpu

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


def test_arenas_of_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "sizes_on", lambda _: replace(TINY, link=8 * MIB))
    costs = calibrate("cpu", seconds=0.1, devices=3)
    assert costs.topology is not None
    graph = offload.capture(lambda x: (x @ x.T).relu(), torch.ones(8, 8))
    made = offload.plan(graph, costs=costs, devices=3)
    assert made.costs == costs and made.predicted_seconds > 0


@pytest.mark.gpu
def test_the_links_of_several_gpus_are_measured_and_keep_no_memory() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    devices = [torch.device("cuda", number) for number in range(2)]
    for device in devices:
        torch.zeros(1, device=device)
    before = [torch.cuda.memory_reserved(device) for device in devices]
    bench = Gpu(devices[0])
    found = measure_links(bench, 2, MIB, 0.0, lambda run, seconds: [run(), run()])
    bench.close()
    assert [torch.cuda.memory_reserved(device) for device in devices] <= before
    assert len(found.alone) == 4 and len(found.at_once) == 3 and len(found.peers) == 1
    rates = [*found.alone.values(), *found.peers.values()]
    assert min(rates + [rate for each in found.at_once for rate in each.values()]) > 0
    with pytest.raises(ValueError, match=r"devices=99: from cuda:0 on this process sees \d"):
        measure_links(bench, 99, MIB, 0.0, lambda run, seconds: [run()])


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
