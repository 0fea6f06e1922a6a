"""Engine `cuda` when something fails: exceptions, a Ctrl-C, a device that is gone."""

import signal
import threading
from typing import Any

import pytest
import torch
from support import stream_graphs as graphs
from support.fake_gpu import LAUNCH_FAILURE, losable_device, lose_device, only_on_a_fake_gpu
from support.products import every_value
from support.stream_runs import CUDA, HELD, driver, faulty, ours, planned, smallest, works

from offload.errors import DeviceLost, StepError
from offload.running.binding import Binding
from offload.running.drivers.cuda import Cuda
from offload.running.runner import Runner

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "held, task", every_value(HELD, ["forward0", "weight2", "update3", "update0"])
)
def test_an_exception_reaches_the_caller_as_it_is_and_the_runner_works_on(
    held: str, task: str
) -> None:
    graph, fault = faulty(task)
    graph = graphs.bound(graph, CUDA)
    tensors = graph.program.tensors
    made = planned(graph, smallest(graph))
    with Runner(made, "cuda", driver=driver(held)) as runner:
        for _ in range(3):
            assert works(runner, graph, tensors)
            fault.error = ValueError("no good")
            with pytest.raises(ValueError, match="no good") as raised:
                runner(graphs.batch())
            assert raised.value is fault.error
            first, second = raised.value.__notes__
            assert first.startswith(f"in task {task}")
            assert second.split(":")[0].endswith("of 4 updates of this step had run")
            fault.error = None


def test_an_exception_of_a_host_task_ends_the_step_and_names_it() -> None:
    graph, fault = faulty("update1", host_updates=True)
    graph = graphs.bound(graph, CUDA)
    tensors = graph.program.tensors
    with Runner(planned(graph), "cuda") as runner:
        for _ in range(3):
            assert works(runner, graph, tensors)
            fault.error = KeyError("far away")
            with pytest.raises(KeyError) as raised:
                runner(graphs.batch())
            assert raised.value is fault.error
            where = "in task update1 (model.py:1), on lane host"
            assert raised.value.__notes__[0] == where
            fault.error = None


@pytest.mark.parametrize("hosted", [False, True])
def test_a_ctrl_c_in_mid_step_ends_it_and_the_next_one_works(hosted: bool) -> None:
    graph, fault = faulty("update2", host_updates=hosted)
    graph = graphs.bound(graph, CUDA)
    tensors = graph.program.tensors
    main = threading.main_thread().ident
    assert main is not None
    with Runner(planned(graph, smallest(graph)), "cuda") as runner:
        for _ in range(5):
            fault.before = lambda: signal.pthread_kill(main, signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                runner(graphs.batch())
            fault.before = lambda: None
            assert works(runner, graph, tensors)


@pytest.mark.parametrize("hosted", [False, True])
def test_a_ctrl_c_at_any_moment_leaves_a_runner_that_works(hosted: bool) -> None:
    graph = graphs.bound(graphs.chain(3, host_updates=hosted), CUDA)
    tensors = graph.program.tensors
    made, struck = planned(graph, smallest(graph)), 0
    with graphs.alarm() as strikes, Runner(made, "cuda") as runner:
        seconds = 1.0
        for _ in range(5):  # the quickest: a machine that was busy once would aim too far
            runner(graphs.batch())
            seconds = max(min(seconds, runner.trace.seconds), 1e-4)
        for attempt in range(100):
            after = max(1e-6, seconds * attempt / 66)
            struck += strikes(after, lambda: runner(graphs.batch()))
            assert torch.is_grad_enabled()
            assert works(runner, graph, tensors), f"after {struck} strikes"
    assert struck > 10
    assert not ours()


@only_on_a_fake_gpu("the test loses the device")
@pytest.mark.parametrize("hosted", [False, True])
def test_a_with_block_whose_device_is_lost_ends_by_that_error(hosted: bool) -> None:
    """Nothing is moved out of the arenas: that would be another error."""
    graph, fault = faulty("backward1", host_updates=hosted)
    graph = graphs.bound(graph, CUDA)
    fault.before = lose_device
    with losable_device():
        with (
            pytest.raises(DeviceLost, match="last checkpoint") as raised,
            Runner(planned(graph, smallest(graph)), "cuda") as runner,
        ):
            try:
                runner(graphs.batch())
            finally:
                with pytest.raises(DeviceLost, match="last checkpoint"):
                    runner(graphs.batch())
        assert "illegal memory access" in str(raised.value.__cause__)
        with pytest.raises(StepError, match="closed"):
            runner(graphs.batch())
    assert ours() == []


@only_on_a_fake_gpu("the test loses the device")
@pytest.mark.parametrize("method", ["begin", "outputs"])
def test_a_loss_before_the_first_node_or_after_the_last_has_its_name(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graphs.bound(graphs.chain(), CUDA)
    call = getattr(Binding, method)

    def loses(bound: Binding, *given: Any) -> Any:
        lose_device()
        return call(bound, *given)

    runner, batch = Runner(planned(graph), "cuda"), graphs.batch().to(CUDA)
    runner(batch)
    monkeypatch.setattr(Binding, method, loses)
    with losable_device():
        with pytest.raises(DeviceLost, match="last checkpoint") as raised:
            runner(batch)
        assert "illegal memory access" in str(raised.value.__cause__)
        runner.abandon()


@only_on_a_fake_gpu("the test loses the device")
def test_a_loss_that_is_told_after_a_second_ctrl_c_is_heard() -> None:
    """It strikes the wait for the step that the first one ended; the next step begins with it."""
    strikes: list[type[BaseException]] = []

    class Struck(Cuda):
        def end(self) -> None:
            if strikes:
                raise strikes.pop()
            super().end()

    graph = graphs.bound(graphs.chain(), CUDA)
    tensors = graph.program.tensors
    runner = Runner(planned(graph), "cuda", driver=Struck(CUDA))
    assert works(runner, graph, tensors)
    strikes += [KeyboardInterrupt] * 2
    with pytest.raises(KeyboardInterrupt):
        runner(graphs.batch())
    assert not strikes
    with losable_device():
        lose_device(LAUNCH_FAILURE)
        for _ in range(2):
            with pytest.raises(DeviceLost, match="last checkpoint"):
                runner(graphs.batch())
        runner.abandon()
