"""What the CUDA drivers ask of torch.cuda, seen by a stand-in that writes it down.

It proves that the calls are those that are meant, in their order; not what a device does with them.
"""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from support import stream_graphs as graphs

import offload
from offload.errors import OffloadError
from offload.planning.refusal import smallest_budget
from offload.running.drivers.cuda import Cuda, CudaEvent, CudaStream
from offload.running.runner import Runner

sys.path.insert(0, str(Path(__file__).parent))
import fake_cuda
from fake_cuda import FakeCuda

fake = fake_cuda.fake


def test_a_step_is_fenced_both_ways_and_leaves_the_callers_stream_and_device(
    fake: FakeCuda,
) -> None:
    driver = Cuda(torch.device("cuda"), {"h2d": 500})
    compute, h2d = driver.stream("compute"), driver.stream("h2d")
    assert driver.stream("h2d") is h2d
    assert (compute.priority, h2d.priority) == (0, -1)
    driver.begin()
    driver.enqueue(compute, lambda: fake.log.append("F1"))
    driver.enqueue(compute, lambda: fake.log.append("F2"))
    event = driver.event()
    event.record(compute)
    driver.wait(h2d, event)
    driver.enqueue(h2d, lambda: fake.log.append("W2"))
    driver.stream("d2h")  # asked for in mid-step: it comes after the caller's work as well
    assert fake.log == [
        "record caller", "compute waits for caller", "h2d waits for caller",
        "on compute", "F1", "F2", "record compute", "h2d waits for compute",
        "on h2d", "sleep 500", "W2", "d2h waits for caller",
    ]  # fmt: skip
    fake.log.clear()
    driver.end()
    assert fake.log == [
        "on caller",
        "record compute", "caller waits for compute",
        "record h2d", "caller waits for h2d",
        "record d2h", "caller waits for d2h",
    ]  # fmt: skip
    assert fake.current is fake.caller and fake.device == 1
    fake.log.clear()
    driver.end()
    assert fake.log == []
    driver.begin()
    driver.enqueue(compute, lambda: fake.log.append("F1"))
    assert fake.log[-2:] == ["on compute", "F1"]
    driver.close()
    driver.close()
    assert fake.current is fake.caller


def test_an_end_that_was_struck_half_way_may_be_called_again(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Cuda(torch.device("cuda"))
    compute = driver.stream("compute")
    driver.begin()
    driver.enqueue(compute, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(fake.Event, "record", lambda self, stream: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.end()
    assert fake.current is fake.caller
    fake.log.clear()
    driver.end()
    assert fake.log == ["on caller", "record compute", "caller waits for compute"]


def test_a_whole_step_goes_through_it(fake: FakeCuda) -> None:
    graph = graphs.bound(graphs.chain(host_updates=True))
    tensors = graph.program.tensors
    plainly = graphs.Plainly(graph, {k: v.clone() for k, v in tensors.items()})
    made = offload.plan(graph, smallest_budget(graph, 0)[0], placement="copy", recompute=False)
    with Runner(made, "cuda", driver=Cuda(torch.device("cuda"))) as runner:
        for step in range(3):
            if step == 2:
                runner.measure()
            x = graphs.batch(seed=step)
            assert torch.equal(runner(x)[0], plainly.step(x)[0])
            assert fake.current is fake.caller
        assert runner.trace.timed
    assert all(torch.equal(tensors[k], plainly.held[k]) for k in tensors)


def test_a_graph_of_several_devices_is_refused(fake: FakeCuda) -> None:
    with pytest.raises(OffloadError, match="lane compute1 has no stream on cuda:0"):
        Cuda(torch.device("cuda")).stream("compute1")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OffloadError, match="driver is missing or too old"):
        Cuda(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OffloadError, match="no cuda:2: this process sees 2 devices"):
        Cuda(torch.device("cuda", 2))


def test_torch_has_what_the_stand_in_has() -> None:
    assert issubclass(CudaStream, torch.cuda.Stream) and issubclass(CudaEvent, torch.cuda.Event)
    assert {"device", "priority"} <= inspect.signature(torch.cuda.Stream.__new__).parameters.keys()
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters
    for name in ("wait_event", "synchronize"):
        assert callable(getattr(torch.cuda.Stream, name))
    for name in ("record", "wait", "query", "elapsed_time", "synchronize"):
        assert callable(getattr(torch.cuda.Event, name))
    names = ("set_stream", "set_device", "current_device", "current_stream", "_sleep")
    assert all(callable(getattr(torch.cuda, name)) for name in names)
    begin = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= begin.keys()
    assert all(
        callable(getattr(torch.cuda.CUDAGraph, n)) for n in ("capture_end", "replay", "reset")
    )
    assert all(
        callable(getattr(torch.Generator, n)) for n in ("clone_state", "graphsafe_set_state")
    )
    assert callable(torch.cuda.graph_pool_handle)
