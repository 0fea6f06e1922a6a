"""Engine `cuda` when something fails: exceptions, a Ctrl-C, a device that is gone.

What runs on a device too is marked `gpu`.
"""

import signal
import threading
from typing import Any

import pytest
import torch
from products import every_value
from support import stream_graphs as graphs
from support.stream_runs import HELD, driver, faulty, ours, planned, same, smallest

from benchmarks.twins.twin_streams import Twin
from offload.errors import DeviceLost
from offload.running.runner import Runner

NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ("cpu", pytest.param("cuda", marks=(pytest.mark.gpu, NO_DEVICE)))


def works(runner: Runner, graph: Any, tensors: Any) -> bool:
    """The next step is right, from the values that the tensors have now."""
    plainly = graphs.Plainly(graph, {k: v.cpu().clone() for k, v in tensors.items()})
    return same(runner, plainly, tensors, graphs.batch(seed=7))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "held, task", every_value(HELD, ["forward0", "weight2", "update3", "update0"])
)
def test_an_exception_reaches_the_caller_as_it_is_and_the_runner_works_on(
    device: str, held: str, task: str
) -> None:
    graph, fault = faulty(task)
    graph = graphs.bound(graph, device)
    tensors = graph.program.tensors
    made = planned(graph, smallest(graph))
    with Runner(made, "cuda", driver=driver(device, held)) as runner:
        for _ in range(3):
            assert works(runner, graph, tensors)
            fault.error = ValueError("no good")
            with pytest.raises(ValueError, match="no good") as raised:
                runner(graphs.batch().to(device))
            assert raised.value is fault.error
            first, second = raised.value.__notes__
            if device == "cpu":
                assert first.startswith("the device told of it late; it had in its queues then: ")
                assert task in first
            else:
                assert first.startswith(f"in task {task}")
            assert second.split(":")[0].endswith("of 4 updates of this step had run")
            fault.error = None


def test_an_exception_of_a_host_task_ends_the_step_and_names_it() -> None:
    graph, fault = faulty("update1", host_updates=True)
    graph = graphs.bound(graph)
    tensors = graph.program.tensors
    with Runner(planned(graph), "cuda", driver=Twin()) as runner:
        for _ in range(3):
            assert works(runner, graph, tensors)
            fault.error = KeyError("far away")
            with pytest.raises(KeyError) as raised:
                runner(graphs.batch())
            assert raised.value is fault.error
            where = "in task update1 (model.py:1), on lane host"
            assert raised.value.__notes__[0] == where
            fault.error = None


def test_an_exception_that_comes_while_a_node_is_enqueued_names_it() -> None:
    """As one of Python's does on a device."""

    class Eager(Twin):
        def enqueue(self, stream: Any, run: Any) -> None:
            done = self.event()
            super().enqueue(stream, run)
            done.record(stream)
            if held_up == stream.lane:
                self.synchronize()

    graph, fault = faulty("forward2")
    graph = graphs.bound(graph)
    tensors = graph.program.tensors
    held_up = "compute"
    with Runner(planned(graph), "cuda", driver=Eager()) as runner:
        fault.error = ValueError("no good")
        with pytest.raises(ValueError, match="no good") as raised:
            runner(graphs.batch())
        first, second = raised.value.__notes__
        assert first == "in task forward2, on lane compute"
        assert second.startswith("0 of 4 updates of this step had run")
        fault.error, held_up = None, ""
        assert works(runner, graph, tensors)


@pytest.mark.parametrize("hosted", [False, True])
def test_a_ctrl_c_in_mid_step_ends_it_and_the_next_one_works(hosted: bool) -> None:
    graph, fault = faulty("update2", host_updates=hosted)
    graph = graphs.bound(graph)
    tensors = graph.program.tensors
    main = threading.main_thread().ident
    assert main is not None
    with Runner(planned(graph, smallest(graph)), "cuda", driver=Twin()) as runner:
        for _ in range(5):
            fault.before = lambda: signal.pthread_kill(main, signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                runner(graphs.batch())
            fault.before = lambda: None
            assert works(runner, graph, tensors)


@pytest.mark.parametrize("hosted", [False, True])
def test_a_ctrl_c_at_any_moment_leaves_a_runner_that_works(hosted: bool) -> None:
    graph = graphs.bound(graphs.chain(3, host_updates=hosted))
    tensors = graph.program.tensors
    made, struck = planned(graph, smallest(graph)), 0
    with graphs.alarm() as strikes, Runner(made, "cuda", driver=Twin()) as runner:
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


@pytest.mark.parametrize("hosted", [False, True])
def test_a_lost_device_is_one_clear_error_and_close_does_not_hang(hosted: bool) -> None:
    graph, fault = faulty("backward1", host_updates=hosted)
    graph = graphs.bound(graph)
    twin = Twin()
    fault.before = lambda: twin.lose("an illegal memory access was encountered")
    runner = Runner(planned(graph, smallest(graph)), "cuda", driver=twin)
    with pytest.raises(DeviceLost, match="last checkpoint") as raised:
        runner(graphs.batch())
    assert "illegal memory access" in str(raised.value.__cause__)
    with pytest.raises(DeviceLost, match="last checkpoint"):
        runner(graphs.batch())
    runner.close()
    twin.close()
    assert ours() == []
