"""A runner whose device is lost: on the CPU's twin, where that can be had."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from graph_edits import with_task
from support import stream_graphs as graphs

import offload
from benchmarks.twins.twin_streams import Twin
from offload.errors import DeviceLost, StepError
from offload.memory.homes import Homes
from offload.running.runner import Runner

Bytes = Sequence[torch.Tensor]


def planned(graph: Any) -> Any:
    return offload.plan(graph, placement="copy", recompute=False)


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("perfect-offload")]


def test_a_with_block_whose_device_is_lost_ends_by_that_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is moved out of the arenas: on a device that would be another error."""
    graph = graphs.chain()
    twin = Twin()

    def lost(reads: Bytes, writes: Bytes) -> None:
        twin.lose("an illegal memory access was encountered")

    graph = graphs.bound(with_task(graph, "backward1", kernel=lost))
    monkeypatch.setattr(Homes, "release", lambda homes: twin._state.check())
    with (
        pytest.raises(DeviceLost, match="last checkpoint"),
        Runner(planned(graph), "cuda", driver=twin) as runner,
    ):
        runner(graphs.batch())
    with pytest.raises(StepError, match="closed"):
        runner(graphs.batch())
    twin.close()
    assert ours() == []


def test_a_loss_that_is_told_after_a_second_ctrl_c_is_heard() -> None:
    """It strikes the wait for the step that the first one ended; the next step begins with it."""
    strikes: list[type[BaseException]] = []

    class Struck(Twin):
        def end(self) -> None:
            if strikes:
                raise strikes.pop()
            super().end()

    graph = graphs.bound(graphs.chain())
    tensors = graph.program.tensors
    plainly = graphs.Plainly(graph, {k: v.clone() for k, v in tensors.items()})
    twin = Struck()
    runner = Runner(planned(graph), "cuda", driver=twin)
    assert torch.equal(runner(graphs.batch())[0], plainly.step(graphs.batch())[0])
    strikes += [KeyboardInterrupt] * 2
    with pytest.raises(KeyboardInterrupt):
        runner(graphs.batch())
    assert not strikes
    twin._state.error = RuntimeError("CUDA error: unspecified launch failure")  # it is told once
    for _ in range(2):
        with pytest.raises(DeviceLost, match="last checkpoint"):
            runner(graphs.batch())
    runner.abandon()
    twin.close()
