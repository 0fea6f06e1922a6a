"""Exceptions of nodes, Ctrl-C, a device that is lost, and the end of a runner."""

import gc
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import stream_graphs as graphs
from support.fake_gpu import losable_device, lose_device, only_on_a_fake_gpu
from support.stage_jobs import DEVICES, ENGINES
from support.stream_runs import CUDA, Bytes, driver, faulty, ours, planned, smallest, works

import offload
from offload.errors import DeviceLost, StepError
from offload.graph.builder import GraphBuilder
from offload.running.runner import Runner

WAIT = 20.0
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


@pytest.mark.parametrize("engine", ENGINES[:-1])  # a captured kernel cannot raise any more
@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("task", ["forward0", "weight2", "update3", "update0"])
def test_an_exception_reaches_the_caller_as_it_is_and_the_runner_works_on(
    engine: str, hosted: bool, task: str
) -> None:
    graph, fault = faulty(task, host_updates=hosted)
    graph = graphs.bound(graph, DEVICES[engine])
    tensors = graph.program.tensors
    with Runner(planned(graph, smallest(graph)), engine) as runner:
        for _ in range(3):
            assert works(runner, graph, tensors)
            fault.error = ValueError("no good")
            with pytest.raises(ValueError, match="no good") as raised:
                runner(graphs.batch())
            assert raised.value is fault.error
            first, second = raised.value.__notes__
            lane = "host" if hosted and task.startswith("update") else "compute"
            where = f" (model.py:{task[-1]})" if task.startswith("update") else ""
            assert first == f"in task {task}{where}, on lane {lane}"
            assert second.split(":")[0].endswith("of 4 updates of this step had run")
            fault.error = None


def failing(kernels: dict[str, Any]) -> Runner:
    """Of tasks that nothing orders, but that `next` reads what `compute` has made."""
    builder = GraphBuilder()
    made: list[int] = []
    for name, kernel in kernels.items():
        made.append(builder.buffer(name, 64))
        reads = made[:1] if name == "next" else []
        lane = "host" if name == "host" else "compute"
        builder.task(name, reads, made[-1:], lane=lane, kernel=kernel)
    builder.output(made[0])
    return Runner(planned(graphs.bound(builder.graph())), "threads")


def test_nothing_new_begins_after_a_failure_and_what_runs_comes_to_its_end() -> None:
    failed, seen = threading.Event(), []

    def slow(reads: Bytes, writes: Bytes) -> None:
        assert failed.wait(WAIT)
        time.sleep(0.2)
        seen.append("compute")

    def fail(reads: Bytes, writes: Bytes) -> None:
        failed.set()
        raise ValueError("at once")

    with failing({"compute": slow, "next": lambda *_: seen.append("next"), "host": fail}) as runner:
        with pytest.raises(ValueError, match="at once"):
            runner()
        assert seen == ["compute"]
        assert runner.trace.busy().keys() == {"compute"}


def test_of_two_failures_the_callers_own_is_told() -> None:
    together = threading.Barrier(2)

    def fail(reads: Bytes, writes: Bytes) -> None:
        together.wait(WAIT)
        raise ValueError(threading.current_thread().name)

    with failing({"compute": fail, "host": fail}) as runner:
        for _ in range(3):
            with pytest.raises(ValueError, match=threading.current_thread().name):
                runner()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hosted", [False, True])
def test_a_ctrl_c_at_any_moment_leaves_a_runner_that_works(engine: str, hosted: bool) -> None:
    graph = graphs.bound(graphs.chain(3, host_updates=hosted), DEVICES[engine])
    tensors = graph.program.tensors
    made, struck = planned(graph, smallest(graph)), 0
    with graphs.alarm() as strikes, Runner(made, engine) as runner, torch.autocast("cpu"):
        seconds = 1.0
        for _ in range(5):  # the quickest: a machine that was busy once would aim too far
            runner(graphs.batch())
            seconds = max(min(seconds, runner.trace.seconds), 1e-4)
        for attempt in range(100):
            after = max(1e-6, seconds * attempt / 66)
            struck += strikes(after, lambda: runner(graphs.batch()))
            assert torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
            assert works(runner, graph, tensors), f"after {struck} strikes"
    assert struck > 10
    assert not ours()


@pytest.mark.gpu
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
            Runner(planned(graph, smallest(graph)), "cuda", driver=driver()) as runner,
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


def test_the_threads_are_parked_between_steps_and_gone_after_close() -> None:
    graph = graphs.bound(graphs.chain())
    runner = Runner(planned(graph, smallest(graph)), "threads")
    runner(graphs.batch())
    first = ours()
    runner(graphs.batch())
    assert sorted(first) == sorted(ours()) == ["perfect-offload-d2h", "perfect-offload-h2d"]
    assert all(t.daemon for t in threading.enumerate() if t.name in first)
    runner.close()
    assert ours() == []
    runner.close()
    with pytest.raises(StepError, match="closed"):
        runner(graphs.batch())


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_runner_that_is_dropped_ends_its_threads(engine: str) -> None:
    graph = graphs.bound(graphs.chain(host_updates=True), DEVICES[engine])
    runner = Runner(planned(graph, smallest(graph)), engine)
    runner(graphs.batch())
    mine = [t for t in threading.enumerate() if t.name.startswith("perfect-offload")]
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None
    for thread in mine:
        thread.join(WAIT)
    assert mine and ours() == []


def test_a_runner_may_be_called_from_any_thread() -> None:
    graph = graphs.bound(graphs.chain())
    tensors = graph.program.tensors
    right: list[bool] = []
    with Runner(planned(graph, smallest(graph)), "threads") as runner:
        for _ in range(2):
            thread = threading.Thread(target=lambda: right.append(works(runner, graph, tensors)))
            thread.start()
            thread.join(WAIT)
        right.append(works(runner, graph, tensors))
    assert right == [True] * 3


@pytest.fixture(params=ENGINES[1:])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """With threads for copies and for the host; it replays graphs, where that is what it does."""
    graph = graphs.bound(graphs.chain(host_updates=True), DEVICES[request.param])
    made = offload.plan(graph, placement="copy", recompute=False)
    with Runner(made, request.param, host_workers=2) as found:
        for _ in range(3):
            found(graphs.batch())
        yield found


def in_a_child(call: Callable[[], str]) -> str:
    """What it says in a process forked from this one; nothing, if it hangs."""
    out, back = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(back, call().encode())
        finally:
            os._exit(0)
    os.close(back)
    try:
        said, _, _ = select.select([out], [], [], WAIT)
        return os.read(out, 10_000).decode() if said else ""
    finally:
        os.close(out)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_process_is_told_to_make_a_runner_of_its_own(runner: Runner) -> None:
    def told() -> str:
        said = []
        for use in (lambda: runner(graphs.batch()), runner.close):
            with pytest.raises(StepError) as raised:
                use()
            said.append(str(raised.value))
        return "\n".join(said)

    said = in_a_child(told).split("\n")
    assert len(said) == 2
    for line in said:
        assert f"belongs to process {os.getpid()}. " in line
        assert "make a Runner in the child" in line
    assert len(runner(graphs.batch())) == 1
