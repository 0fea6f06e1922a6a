"""Exceptions of nodes, Ctrl-C, and the end of a runner."""

import gc
import signal
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import offload_hand_made as hand
from support.graph_edits import grown, with_task
from support.stream_runs import Fault

import offload
from offload.errors import OffloadError, StepError
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import HOST, UPDATE, TaskGraph
from offload.program.kernels import Call, Value
from offload.running import binding, torch_modes
from offload.running.engines import crew
from offload.running.runner import Runner

ENGINES = ("serial", "threads")
Bytes = Sequence[torch.Tensor]
LEAST = 4 * 640 + 64
WAIT = 20.0


def some(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.manual_seed(seed))


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("perfect-offload")]


def works(runner: Runner, graph: TaskGraph, tensors: dict[str, torch.Tensor]) -> bool:
    """The next step is right, from the values that the tensors have now."""
    held = {key: tensor.clone() for key, tensor in tensors.items()}
    x = some(640, 5)
    [loss] = runner(x)
    [expected] = hand.plainly(graph, [x], held)
    return torch.equal(loss, expected) and all(torch.equal(tensors[k], held[k]) for k in held)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["priority", "random"])
@pytest.mark.parametrize("task", ["forward0", "weight2", "update3", "update0"])
def test_an_exception_reaches_the_caller_as_it_is_and_the_runner_works_on(
    engine: str, order: str, task: str
) -> None:
    graph = hand.layers()
    [found] = [t for t in graph.tasks if t.name == task]
    fault = Fault(found.kernel)
    graph = hand.bind(with_task(graph, task, kernel=fault, where="model.py:31 in forward"), [0])
    tensors = graph.program.tensors
    with Runner(hand.planned(graph, LEAST), engine, order) as runner:
        for _ in range(3):
            assert works(runner, graph, tensors)
            fault.error = ValueError("no good")
            with pytest.raises(ValueError, match="no good") as raised:
                runner(some(640))
            assert raised.value is fault.error
            first, second = raised.value.__notes__
            assert first == f"in task {task} (model.py:31 in forward), on lane compute"
            assert second.split(":")[0].endswith("of 4 updates of this step had run")
            fault.error = None


def test_making_a_state_is_no_update_that_had_run() -> None:
    builder = grown(hand.layers())
    state = builder.buffer("state", 64, "state")
    zeros = Call(
        torch.zeros, (64,), {"dtype": torch.uint8}, (Value(state, torch.uint8, (64,), (1,)),)
    )
    builder.task("makes", [], [state], kernel=zeros, phase=UPDATE)
    fault = Fault(hand.mix(9))
    fault.error = ValueError("no good")
    builder.task("updates", [state], [state], kernel=fault, phase=UPDATE)
    graph = hand.bind(builder.graph(), [0])
    made = hand.planned(graph)
    with Runner(made, "serial") as runner, pytest.raises(ValueError, match="no good") as raised:
        runner(some(640))
    names = [made.memgraph.name(span.node) for span in runner.trace.spans]
    done = sum(name.startswith("update") and name != "updates" for name in names)
    assert "makes" in names
    assert raised.value.__notes__[1].startswith(f"{done} of 5 updates of this step had run")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", ["host", "compute1"])
def test_an_exception_of_another_lane_is_the_same(engine: str, where: str) -> None:
    builder = grown(hand.layers(2))
    device = HOST if where == "host" else 1
    state = builder.buffer("elsewhere", 64, "state", device=device)
    fault = Fault(hand.mix(9))
    kind = "host" if where == "host" else "compute"
    builder.task("far", [state], [state], lane=kind, device=device, kernel=fault)
    graph = hand.bind(builder.graph(), [0])
    tensors = graph.program.tensors
    with Runner(hand.planned(graph), engine) as runner:
        for _ in range(3):
            assert works(runner, graph, tensors)
            fault.error = KeyError("far away")
            with pytest.raises(KeyError) as raised:
                runner(some(640))
            assert raised.value is fault.error
            assert raised.value.__notes__[0] == f"in task far, on lane {where}"
            fault.error = None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["reload", "offload"])
def test_a_fault_in_a_copy_names_what_was_copied(
    engine: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: set[int] = set()
    copy = binding.memmove

    def memmove(target: int, source: int, nbytes: int) -> int:
        if {target, source} & broken:
            raise OSError("the link is down")
        return copy(target, source, nbytes)

    monkeypatch.setattr(binding, "memmove", memmove)
    graph = hand.bind(hand.layers(), [0])
    tensors = graph.program.tensors
    made = hand.planned(graph, LEAST)
    with Runner(made, engine) as runner:
        assert works(runner, graph, tensors)
        node = next(node for node in made.memgraph.nodes if node.kind == kind)
        name = graph.buffers[node.buffer].name
        there = next(a.place for a in node.accesses if a.place.arena == HOST)
        broken.add(runner._memory.arenas.address(there))
        with pytest.raises(OSError, match="link is down") as raised:
            runner(some(640))
        on = "h2d" if kind == "reload" else "d2h"
        assert raised.value.__notes__[0].startswith(f"in {kind} {name} for task ")
        assert raised.value.__notes__[0].endswith(f", on lane {on}")
        broken.clear()
        assert works(runner, graph, tensors)


def test_nothing_new_begins_after_a_failure_and_what_runs_comes_to_its_end() -> None:
    """The host task fails while a compute task runs: the one after that is not begun."""
    failed, seen = threading.Event(), []
    builder = GraphBuilder()
    a, b, h = builder.buffer("a", 64), builder.buffer("b", 64), builder.buffer("h", 64, device=HOST)

    def slow(reads: Bytes, writes: Bytes) -> None:
        assert failed.wait(WAIT)
        while runner.stage.engine._crew.step.error is None:  # type: ignore[union-attr]
            pass
        seen.append("slow")

    def fail(reads: Bytes, writes: Bytes) -> None:
        failed.set()
        raise ValueError("at once")

    builder.task("slow", [], [a], kernel=slow)
    builder.task("next", [a], [b], kernel=lambda reads, writes: seen.append("next"))
    builder.task("fail", [], [h], lane="host", device=HOST, kernel=fail)
    builder.output(b)
    graph = hand.bind(builder.graph())
    with Runner(hand.planned(graph), "threads") as runner:
        with pytest.raises(ValueError, match="at once"):
            runner()
        assert seen == ["slow"]
        assert runner.trace.busy().keys() == {"compute"}


def test_of_two_failures_the_callers_own_is_told() -> None:
    together = threading.Barrier(2)
    builder = GraphBuilder()

    def fail(reads: Bytes, writes: Bytes) -> None:
        together.wait(WAIT)
        raise ValueError(threading.current_thread().name)

    builder.task("here", [], [builder.buffer("a", 64)], kernel=fail)
    there = builder.buffer("h", 64, device=HOST)
    builder.task("there", [], [there], lane="host", device=HOST, kernel=fail)
    graph = hand.bind(builder.graph())
    with Runner(hand.planned(graph), "threads") as runner:
        for _ in range(3):
            with pytest.raises(ValueError, match=threading.current_thread().name):
                runner()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_ctrl_c_inside_a_kernel_ends_the_step_and_the_next_one_works(engine: str) -> None:
    graph = hand.layers()
    [found] = [t for t in graph.tasks if t.name == "update2"]
    fault = Fault(found.kernel)
    graph = hand.bind(with_task(graph, "update2", kernel=fault), [0])
    tensors = graph.program.tensors
    with Runner(hand.planned(graph, LEAST), engine) as runner:
        fault.before = lambda: signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as raised:
            runner(some(640))
        assert raised.value.__notes__[0].startswith("in task update2")
        assert "1 of 4 updates" in raised.value.__notes__[1]
        fault.before = lambda: None
        assert works(runner, graph, tensors)


def test_a_ctrl_c_while_the_caller_waits_for_a_thread_ends_the_step() -> None:
    builder = grown(hand.layers(1))
    main = threading.main_thread().ident
    assert main is not None
    state = builder.buffer("far", 64, "state", device=HOST)
    fault = Fault(hand.mix(9))
    builder.task("far", [state], [state], lane="host", device=HOST, kernel=fault)
    graph = hand.bind(builder.graph(), [0])
    tensors = graph.program.tensors
    with Runner(hand.planned(graph), "threads") as runner:
        for _ in range(5):
            fault.before = lambda: signal.pthread_kill(main, signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                runner(some(640))
            fault.before = lambda: None
            assert works(runner, graph, tensors)


class Struck(BaseException):
    """What the alarm clock raises, at any line of the caller."""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_ctrl_c_at_any_moment_leaves_a_runner_that_works(engine: str) -> None:
    graph = hand.bind(hand.layers(3), [0])
    tensors = graph.program.tensors
    armed, struck = False, 0

    def strike(number: int, frame: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with Runner(hand.planned(graph, LEAST), engine) as runner, torch.autocast("cpu"):
            seconds = 1.0
            for _ in range(5):  # the quickest: a machine that was busy once would aim too far
                runner(some(640))
                seconds = max(min(seconds, runner.trace.seconds), 1e-4)
            for attempt in range(150):
                gc.disable()  # `Struck` would be lost in a collection: it calls code of the tests
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, max(1e-6, seconds * attempt / 100))
                    runner(some(640))
                    armed = False
                except Struck:
                    struck += 1
                finally:
                    armed = False
                    gc.enable()
                assert torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
                assert works(runner, graph, tensors), f"after {struck} strikes"
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert struck > 10
    assert not ours()


def test_the_threads_are_parked_between_steps_and_gone_after_close() -> None:
    graph = hand.bind(hand.layers(), [0])
    runner = Runner(hand.planned(graph, LEAST), "threads")
    runner(some(640))
    first = ours()
    runner(some(640))
    assert sorted(first) == sorted(ours()) == ["perfect-offload-d2h", "perfect-offload-h2d"]
    assert all(t.daemon for t in threading.enumerate() if t.name in first)
    runner.close()
    assert ours() == []
    runner.close()
    with pytest.raises(StepError, match="closed"):
        runner(some(640))


def test_a_runner_that_is_dropped_ends_its_threads() -> None:
    graph = hand.bind(hand.layers(), [0])
    runner = Runner(hand.planned(graph, LEAST), "threads")
    runner(some(640))
    mine = [t for t in threading.enumerate() if t.name.startswith("perfect-offload")]
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None
    for thread in mine:
        thread.join(WAIT)
    assert mine and ours() == []


def test_parked_threads_keep_no_arena_alive() -> None:
    graph = hand.bind(hand.layers(), [0])
    with Runner(hand.planned(graph, LEAST), "threads") as runner:
        runner(some(640))
        arenas = weakref.ref(runner._memory.arenas)
        engine = runner.stage.engine
    del runner
    gc.collect()
    assert arenas() is None
    engine.close()


def test_a_thread_that_hangs_is_said_when_the_runner_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was left running by a Ctrl-C while the runner waited for it."""
    monkeypatch.setattr(crew, "JOIN_SECONDS", 0.05)
    free, main = threading.Event(), threading.main_thread().ident
    assert main is not None
    builder = grown(hand.layers(1))
    far = builder.buffer("far", 64, "state", device=HOST)

    def hang(reads: Bytes, writes: Bytes) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        while not signal_seen.wait(0.01):
            pass
        signal.pthread_kill(main, signal.SIGINT)  # while the caller waits for this thread's end
        free.wait(WAIT)

    signal_seen = threading.Event()
    builder.task("far", [far], [far], lane="host", device=HOST, kernel=hang)
    graph = hand.bind(builder.graph(), [0])
    tensors = graph.program.tensors
    runner = Runner(hand.planned(graph), "threads")
    arena = tensors["w0"].data_ptr()
    rest = runner.stage.engine._rest  # type: ignore[union-attr]

    def told() -> None:
        if runner.stage.engine._crew.step is not None:  # type: ignore[union-attr]
            signal_seen.set()
        rest()

    monkeypatch.setattr(runner.stage.engine, "_rest", told)
    with pytest.raises(KeyboardInterrupt):
        runner(some(640))
    with pytest.raises(OffloadError, match="perfect-offload-host did not end within"):
        runner.close()
    assert tensors["w0"].data_ptr() != arena
    free.set()
    runner.close()
    assert ours() == []


def test_a_runner_may_be_called_from_any_thread() -> None:
    graph = hand.bind(hand.layers(), [0])
    tensors = graph.program.tensors
    right: list[bool] = []
    with Runner(hand.planned(graph, LEAST), "threads") as runner:
        for _ in range(2):
            thread = threading.Thread(target=lambda: right.append(works(runner, graph, tensors)))
            thread.start()
            thread.join(WAIT)
        right.append(works(runner, graph, tensors))
    assert right == [True] * 3


def test_a_ctrl_c_as_a_step_ends_leaves_autograd_and_cudnn_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It strikes between the two that are put back."""
    put_back = torch_modes.set_grad_enabled

    def struck(on: bool) -> None:
        put_back(on)
        if on:
            raise KeyboardInterrupt

    x = torch.ones(4)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with Runner(offload.plan(offload.capture(lambda x: (x * 2,), x)), "serial") as runner:
        with monkeypatch.context() as patched:
            patched.setattr(torch_modes, "set_grad_enabled", struck)
            with pytest.raises(KeyboardInterrupt):
                runner(x)
        assert torch.is_grad_enabled()
        assert torch.backends.cudnn.benchmark
        assert torch.equal(runner(x)[0], 2 * x)
