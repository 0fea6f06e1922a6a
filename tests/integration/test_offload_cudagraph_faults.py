"""Engine `cudagraph` where a capture fails, is struck by a Ctrl-C, or is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import cudagraph_runs
from support import stream_graphs as graphs
from support.cudagraph_runs import CUDA, CountingDriver, sums, trained
from support.fake_gpu import losable_device, lose_device, only_on_a_fake_gpu

import offload
from offload import Runner
from offload.running.drivers.cuda import Cuda
from offload.running.drivers.cuda_graph import GraphCuda

exact = cudagraph_runs.exact
pytestmark = pytest.mark.gpu


class Struck(CountingDriver):
    """In captures, before they end or as they begin, something happens."""

    def __init__(self) -> None:
        super().__init__()
        self.at_begin: Callable[[], object] = lambda: None
        self.at_end: Callable[[], object] = lambda: None

    def begin_capture(self, origin: Any) -> None:
        self.at_begin()
        super().begin_capture(origin)

    def end_capture(self) -> Callable[[], object]:
        self.at_end()
        return super().end_capture()


def ctrl_c() -> None:
    raise KeyboardInterrupt


def test_no_graph_is_replayed_after_a_capture_that_a_ctrl_c_ended() -> None:
    driver = Struck()
    runner, layer = sums(driver)
    first, other = torch.randn(5, 8, device=CUDA), torch.randn(2, 8, device=CUDA)
    with runner:
        for x in (first, first, other):
            runner(x)
        assert (driver.captures, driver.replays) == (1, 1)
        driver.at_end = ctrl_c
        with pytest.raises(KeyboardInterrupt):
            runner(other)
        driver.at_end = lambda: None
        for x in (first, other, first, other):
            assert torch.equal(runner(x)[0], layer(x).sum())
    assert (driver.captures, driver.replays) == (3, 5)


@only_on_a_fake_gpu("the test loses the device")
def test_a_device_that_is_lost_before_a_capture_is_no_step_that_cannot_be_captured() -> None:
    driver = Struck()
    runner, _ = sums(driver)
    x = torch.ones(5, 8)
    runner(x)
    driver.at_begin = lose_device
    with losable_device():
        for _ in range(2):
            with pytest.raises(offload.DeviceLost, match="last checkpoint"):
                runner(x)
        runner.abandon()


def hand_made(kernel: Callable[..., None], where: str = "model.py:31 in forward") -> offload.Plan:
    """x -> kernel -> y -> +1 -> z"""
    builder = offload.GraphBuilder()
    x = builder.buffer("x", 64, "input")
    y, z = builder.buffer("y", 64), builder.buffer("z", 64)
    builder.task("asks", reads=[x], writes=[y], kernel=kernel, where=where)
    builder.task("adds", [y], [z], kernel=lambda reads, writes: writes[0].copy_(reads[0] + 1))
    builder.output(z)
    return offload.plan(graphs.bound(builder.graph(), CUDA))


def test_a_kernel_that_asks_for_a_value_is_named_once_and_the_step_runs_as_engine_cuda() -> None:
    def asks(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        writes[0].fill_(int(reads[0].sum()) % 7)

    made = hand_made(asks)
    with Runner(made, "cudagraph", driver=GraphCuda(CUDA)) as runner:
        outputs = [runner(torch.full((64,), value, dtype=torch.uint8)) for value in (1,)]
        with pytest.warns(RuntimeWarning, match="cannot be captured in task asks") as told:
            outputs += [runner(torch.full((64,), value, dtype=torch.uint8)) for value in (2, 3)]
    [warning] = told
    assert "model.py:31 in forward" in str(warning.message)
    assert "not permitted when stream is capturing" in str(warning.message)
    assert [int(z[0]) for [z] in outputs] == [64 % 7 + 1, 128 % 7 + 1, 192 % 7 + 1]
    assert "cannot be captured" in made.explain()


def test_a_capture_that_fails_in_mid_step_leaves_a_device_that_works(exact: None) -> None:
    """With draws before and after it."""
    case = trained("asking")
    with pytest.warns(RuntimeWarning, match=r"cannot be captured in .*asks") as told:
        case.run(case.planned(1.0, "auto"), "cudagraph", 0, "priority", CountingDriver())
    assert len(told) == 1
    # And torch's own captures work on.
    case, driver = trained("mlp"), CountingDriver()
    case.run(case.planned(1.0, "auto"), "cudagraph", 0, "priority", driver)
    assert driver.replays


def test_an_exception_in_a_captured_kernel_leaves_streams_that_work() -> None:
    calls: list[int] = []

    def fails(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise ArithmeticError("only now")
        writes[0].copy_(reads[0] * 2)

    with Runner(hand_made(fails), "cudagraph", driver=GraphCuda(CUDA)) as runner:
        ones = torch.ones(64, dtype=torch.uint8)
        assert int(runner(ones)[0][0]) == 3
        with pytest.warns(RuntimeWarning, match="ArithmeticError: only now"):
            assert int(runner(ones * 2)[0][0]) == 5
        assert int(runner(ones * 3)[0][0]) == 7


def test_a_step_whose_host_task_fails_can_be_followed_by_another() -> None:
    failing: list[bool] = []
    builder = offload.GraphBuilder()
    x = builder.buffer("x", 64, "input")
    y, z = builder.buffer("y", 64), builder.buffer("z", 64)

    def host(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        if failing:
            raise ArithmeticError("the host's")
        writes[0].copy_(reads[0] * 2)

    builder.task("host", reads=[x], writes=[y], lane="host", kernel=host)
    builder.task("adds", [y], [z], kernel=lambda reads, writes: writes[0].copy_(reads[0] + 1))
    builder.output(z)
    graph = graphs.bound(builder.graph(), CUDA)
    ones = torch.ones(64, dtype=torch.uint8)
    driver = CountingDriver()
    with Runner(offload.plan(graph), "cudagraph", driver=driver) as runner:
        assert [int(runner(ones * n)[0][0]) for n in (1, 2, 3)] == [3, 5, 7]
        failing.append(True)
        with pytest.raises(ArithmeticError, match="the host's") as caught:
            runner(ones)
        assert any("task host" in note for note in caught.value.__notes__)
        failing.clear()
        assert int(runner(ones * 4)[0][0]) == 9
    assert driver.captures == 1


def test_a_driver_that_cannot_capture_is_refused() -> None:
    made = hand_made(lambda reads, writes: writes[0].copy_(reads[0]))
    with pytest.raises(ValueError, match="captures"):
        Runner(made, "cudagraph", driver=Cuda(CUDA))
