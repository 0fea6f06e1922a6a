"""On a GPU: outputs are born at their planned addresses, the host's arena is page-locked, a
tensor's storage is its own bytes, and what kernels take outside of the arena is what was reserved.

Skipped without a CUDA device; docs/gpu-status.md says when it last ran on one.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import TASK, Access, Node, Place
from offload.graph.taskgraph import HOST, TaskGraph
from offload.measuring.profiling import measure_tasks
from offload.memory import workspaces
from offload.memory.arenas import Arenas
from offload.memory.cuda_shim import available_on, load_on, why_not_on
from offload.memory.placement import COPY, SHIM, PlacementCounts, bind_task, flatten_results
from offload.memory.workspaces import kept_bytes, warm
from offload.plans.plan import reserve_bytes
from offload.program.kernels import Call, Program, Value

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def randn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE, dtype=dtype)


def convolution() -> Made:
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return aten.convolution.default, (randn(8, 16, 33, 31), randn(24, 16, 3, 3), *rest)


def convolution_backward() -> Made:
    rest = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    tensors = (randn(8, 24, 33, 31), randn(8, 16, 33, 31), randn(24, 16, 3, 3))
    return aten.convolution_backward.default, (*tensors, *rest)


def flash() -> Made:
    query, key, value = (randn(2, 4, 128, 64, dtype=torch.bfloat16) for _ in range(3))
    # With dropout: without it nobody writes the seed that it returns.
    return aten._scaled_dot_product_flash_attention.default, (query, key, value, 0.1, True)


def flash_backward() -> Made:
    op, (query, key, value, p, causal) = flash()
    out, log, cum_q, cum_k, max_q, max_k, seed, offset, _ = op(query, key, value, p, causal)
    tail = (out, log, cum_q, cum_k, max_q, max_k, p, causal, seed, offset)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    return backward, (torch.ones_like(out), query, key, value, *tail)


def embedding_backward() -> Made:
    index = torch.randperm(100, device=DEVICE)[:64]  # each once: its sums have one order
    return aten.embedding_dense_backward.default, (randn(64, 48), index, 100, -1, False)


def product_with_bias() -> Made:
    return aten.addmm.default, (randn(300), randn(64, 512), randn(512, 300))


def batch_norm() -> Made:
    args = (randn(8, 16, 9, 9), randn(16), randn(16), None, None, True, 0.1, 1e-5)
    return aten.native_batch_norm.default, args


OPS = (
    convolution, convolution_backward, flash, flash_backward, embedding_backward,
    product_with_bias, batch_norm,
)  # fmt: skip


UNWRITTEN = {flash: {7}}
"""Outputs that an op allocates and leaves as they are."""


def is_there(found: Any) -> bool:
    return isinstance(found, torch.Tensor) and found.device.type == "cuda" and found.numel() > 0


def graph_of(op: Callable[..., Any], args: Sequence[Any], results: Sequence[Any]) -> TaskGraph:
    """One task that calls the op; every tensor in a buffer of its own."""
    builder = GraphBuilder()

    def value(tensor: torch.Tensor, role: str) -> Value:
        number = builder.buffer(f"b{len(builder.buffers)}", tensor.untyped_storage().nbytes(), role)
        offset = int(tensor.storage_offset())
        return Value(number, tensor.dtype, tuple(tensor.size()), tensor.stride(), offset)

    given = tuple(value(a, "input") if is_there(a) else a for a in args)
    reads = range(len(builder.buffers))
    outputs = tuple(value(r, "activation") if is_there(r) else None for r in results)
    writes = range(len(reads), len(builder.buffers))
    builder.task("op", reads, writes, kernel=Call(op, given, {}, outputs))
    graph = builder.graph(Program((), (), {}, device=DEVICE))
    return measure_tasks(graph)


class Bound:
    """The task at addresses of an arena, one buffer after the other."""

    def __init__(self, graph: TaskGraph, mode: str) -> None:
        task = graph.tasks[0]
        places, end = [], 0
        for nbytes in (*(buffer.nbytes for buffer in graph.buffers), task.workspace):
            places.append(Place(0, end, nbytes))
            end += graph.align(nbytes)
        self.arenas = Arenas.allocate({0: end}, DEVICE)
        self.places = places[:-1]
        accesses = tuple(Access(p, b, True, True) for b, p in enumerate(places[:-1]))
        if task.workspace:
            accesses += (Access(places[-1], None, True, True),)
        node = Node(TASK, "compute", accesses, (), task=0)
        self.bindings = PlacementCounts()
        self.run = bind_task(graph, node, self.arenas.tensors, mode, places[-1], self.bindings)

    def tensor(self, value: Value) -> torch.Tensor:
        return self.arenas.view(self.places[value.buffer], value)


@pytest.mark.parametrize("mode", [SHIM, COPY])
@pytest.mark.parametrize("make", OPS)
def test_outputs_lie_at_their_planned_addresses_with_eagers_bits(
    make: Callable[[], Made], mode: str
) -> None:
    if mode == SHIM and available_on(DEVICE) is None:
        pytest.skip(why_not_on(DEVICE))
    torch.manual_seed(0)
    op, args = make()
    with torch.no_grad():
        torch.manual_seed(1)
        wanted = flatten_results(op(*args))
        graph = graph_of(op, args, wanted)
        task = graph.tasks[0]
        assert not [note for note in graph.notes if "did not run" in note]
        assert task.seconds is not None and 0 < task.seconds < 1
        bound = Bound(graph, mode)
        for given, value in zip(args, task.kernel.args, strict=True):
            if isinstance(value, Value):
                bound.tensor(value).copy_(given)
        for _ in range(3):
            torch.manual_seed(1)
            bound.run()
        torch.cuda.synchronize()
    outputs = [(n, value) for n, value in enumerate(task.kernel.outputs) if value is not None]
    for n, value in outputs:
        if n in UNWRITTEN.get(make, ()):
            continue
        assert torch.equal(bound.tensor(value), wanted[n]), f"output {n}"
    found = bound.bindings
    if mode == SHIM:
        assert (found.placed, found.copied, found.missed) == (len(outputs), 0, 0)


def test_a_served_call_takes_nothing_of_the_device_and_a_copied_one_what_was_reserved() -> None:
    if available_on(DEVICE) is None:
        pytest.skip(why_not_on(DEVICE))
    op, args = convolution_backward()
    with torch.no_grad():
        graph = graph_of(op, args, flatten_results(op(*args)))
        for mode in (SHIM, COPY):
            bound = Bound(graph, mode)
            bound.run()
            with load_on(DEVICE).counting() as passed:
                bound.run()
            torch.cuda.synchronize()
            most = 0 if mode == SHIM else graph.tasks[0].unplaced
            assert passed.peak <= most <= reserve_bytes(graph, mode)


def test_libraries_keep_what_was_measured_and_no_more_at_a_second_product() -> None:
    kept = kept_bytes(DEVICE)
    assert 0 <= kept <= 64 << 20
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        warm(DEVICE)
        stream.synchronize()
        before = torch.cuda.memory_allocated(DEVICE)
        warm(DEVICE)
        stream.synchronize()
        assert torch.cuda.memory_allocated(DEVICE) == before


def test_garbage_on_the_device_does_not_count_as_what_libraries_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = kept_bytes(DEVICE)
    garbage: list[object] = [torch.zeros(1 << 20, device=DEVICE)]
    garbage.append(garbage)
    garbage_left = [garbage]
    thresholds = gc.get_threshold()

    def warm_and_collect(device: torch.device) -> None:
        garbage_left.clear()
        gc.set_threshold(1, 1, 1)
        _ = [[number] for number in range(1000)]  # so many lists begin a collection
        warm(device)

    del garbage
    monkeypatch.setattr(workspaces, "warm", warm_and_collect)
    try:
        assert workspaces._measure_kept.__wrapped__() == kept
    finally:
        gc.set_threshold(*thresholds)


def test_the_host_arena_is_page_locked_and_copies_come_whole() -> None:
    odd = (48 << 20) + 12345
    arenas = Arenas.allocate({0: 1 << 20, HOST: odd}, DEVICE)
    assert not arenas.note, arenas.note
    host = arenas.bytes(Place(HOST, 64, 1 << 20))
    assert arenas.tensors[HOST].numel() == odd
    assert host.is_pinned()
    host.random_(0, 255)
    device = arenas.bytes(Place(0, 0, 1 << 20))
    device.copy_(host, non_blocking=True)
    wanted = host.clone()
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), wanted)
    arenas.forget(keep=[])
    assert not host.is_pinned()
