"""Ops at planned addresses: the bits of the plain op, nothing copied, nothing allocated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import placed_ops
from support.placed_ops import MODES, PLACED, bound, rigged, t

from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import ALIGNMENT, SMALL_WORKSPACE, Access, Node, Place
from offload.measuring.profiling import measured
from offload.memory import cpu_shim as shim
from offload.memory.placement import COPY, SHIM, bind_task, choose_placement
from offload.program.kernels import Call, Calls, Value

without_gradients = placed_ops.without_gradients
aten = torch.ops.aten


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last)


def sdpa_backward() -> tuple[Any, ...]:
    q, k, v = t(2, 3, 16, 8), t(2, 3, 16, 8), t(2, 3, 16, 8)
    out, logs = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return op, t(2, 3, 16, 8), q, k, v, out, logs, 0.0, True


def convolution_backward(mask: list[bool]) -> tuple[Any, ...]:
    op = aten.convolution_backward.default
    rest = [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask
    return op, t(2, 8, 12, 12), t(2, 4, 12, 12), t(8, 4, 3, 3), *rest


def adamw() -> tuple[Any, ...]:
    op = aten._fused_adamw_.default
    return op, [t(7, 5)], [t(7, 5)], [t(7, 5)], [t(7, 5).abs()], [], [torch.tensor(3.0)]


def labels(*size: int) -> torch.Tensor:
    return torch.randint(0, 5, size)


ADAMW = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.01,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "mm": lambda: (aten.mm.default, t(9, 33), t(33, 17)),
    "mm of a transposed view": lambda: (aten.mm.default, t(33, 9).t(), t(33, 17)),
    "mm in bfloat16": lambda: (
        aten.mm.default,
        t(64, 64, dtype=torch.bfloat16),
        t(64, 64, dtype=torch.bfloat16),
    ),
    "addmm": lambda: (aten.addmm.default, t(17), t(9, 33), t(33, 17)),
    "attention": lambda: (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        *(t(2, 3, 16, 8), t(2, 3, 16, 8), t(2, 3, 16, 8), 0.0, True),
    ),
    "attention backward": sdpa_backward,
    "convolution": lambda: (
        aten.convolution.default,
        *(t(2, 4, 12, 12), t(8, 4, 3, 3), t(8), *CONVOLUTION),
    ),
    "convolution, channels last": lambda: (
        aten.convolution.default,
        *(channels_last(t(2, 4, 12, 12)), channels_last(t(8, 4, 3, 3)), None, *CONVOLUTION),
    ),
    "convolution backward": lambda: convolution_backward([True, True, True]),
    "convolution backward of the weight": lambda: convolution_backward([False, True, False]),
    "embedding": lambda: (aten.embedding.default, t(11, 6), labels(2, 7)),
    "embedding backward": lambda: (
        aten.embedding_dense_backward.default,
        *(t(2, 7, 6), labels(2, 7), 11, -1, False),
    ),
    "batch norm": lambda: (
        aten.native_batch_norm.default,
        *(t(4, 3, 5, 5), t(3), t(3), t(3), t(3).abs(), True, 0.1, 1e-5),
    ),
    "batch norm backward": lambda: (
        aten.native_batch_norm_backward.default,
        *(t(4, 3, 5, 5), t(4, 3, 5, 5), t(3), t(3), t(3).abs(), t(3), t(3).abs()),
        *(True, 1e-5, [True, True, True]),
    ),
    "layer norm": lambda: (aten.native_layer_norm.default, t(4, 6), [6], t(6), t(6), 1e-5),
    "layer norm backward": lambda: (
        aten.native_layer_norm_backward.default,
        *(t(4, 6), t(4, 6), [6], t(4, 1), t(4, 1), t(6), t(6), [True, True, True]),
    ),
    "max pool with indices": lambda: (
        aten.max_pool2d_with_indices.default,
        *(t(2, 3, 8, 8), [2, 2], [2, 2]),
    ),
    "cat": lambda: (aten.cat.default, [t(3, 4), t(5, 4)], 0),
    "sum": lambda: (aten.sum.dim_IntList, t(6, 7), [0], True),
    "sum of all": lambda: (aten.sum.default, t(600, 70)),
    "log softmax": lambda: (aten._log_softmax.default, t(6, 11), 1, False),
    "softmax": lambda: (aten._softmax.default, t(6, 11), 1, False),
    "nll loss": lambda: (aten.nll_loss_forward.default, t(6, 5), labels(6), None, 1, -100),
    "nll loss backward": lambda: (
        aten.nll_loss_backward.default,
        *(t(), t(6, 5), labels(6), None, 1, -100, torch.tensor(6.0)),
    ),
    "fused AdamW": lambda: (*adamw(), ADAMW),
    "bernoulli_": lambda: (aten.bernoulli_.float, t(40, 3), 0.4),
    "mul by a number": lambda: (aten.mul.Tensor, t(5, 5), 0.3),
    "add_ with alpha": lambda: (aten.add_.Tensor, t(5, 5), t(5, 5), {"alpha": 0.3}),
    "gelu": lambda: (aten.gelu.default, t(5, 5)),
    "to bfloat16": lambda: (aten._to_copy.default, t(5, 5), {"dtype": torch.bfloat16}),
    "clone": lambda: (aten.clone.default, t(5, 6).t()),
    "topk": lambda: (aten.topk.default, t(5, 60), 3),
    "full": lambda: (aten.full.default, [3, 4], 2.5),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_an_op_gives_the_plain_bits_at_its_planned_address(case: str, mode: str) -> None:
    torch.manual_seed(3)
    op, *args = CASES[case]()
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    torch.manual_seed(4)
    rig, graph = rigged(op, *args, **kwargs)
    there = bound(graph, mode)
    outputs = [value for value in rig.outputs if value is not None]
    for _ in range(3):
        there.fill(rig.begin)
        torch.manual_seed(4)
        there.run()
        for value, found in zip(rig.outputs, rig.results, strict=True):
            assert value is None or torch.equal(there.view(value), found)
        for value, changed in rig.changed.items():
            assert torch.equal(there.view(value), changed)
    assert there.bindings.missed == 0
    expected = (len(outputs), 0) if mode == SHIM else (0, len(outputs))
    assert (there.bindings.placed, there.bindings.copied) == expected


@PLACED
@pytest.mark.parametrize("case", CASES)
def test_an_op_at_its_planned_address_allocates_nothing(case: str) -> None:
    op, *args = CASES[case]()
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    rig, graph = rigged(op, *args, **kwargs)
    there = bound(graph, SHIM)
    there.fill(rig.begin)
    there.run()
    with shim.load().counting() as passed:
        there.run()
        assert (passed.allocations, passed.peak) == (0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_what_lies_around_the_places_of_a_task_stays_as_it_was(mode: str) -> None:
    rig, graph = rigged(*convolution_backward([True, True, True]))
    there = bound(graph, mode)
    there.fill(rig.begin)
    there.run()
    covered = torch.zeros_like(there.arena, dtype=torch.bool)
    for place in there.places:
        covered[place.offset : place.offset + place.nbytes] = True
    end = max(place.offset + place.nbytes for place in there.places)
    assert (there.arena[:end][~covered[:end]] == 255).all()


@PLACED
def test_a_large_workspace_without_a_place_stays_outside() -> None:
    args = t(64, 64, 16, 16), t(64, 64, 3, 3), None, *CONVOLUTION
    rig, graph = rigged(aten.convolution.default, *args)
    assert graph.tasks[0].workspace > SMALL_WORKSPACE
    there = bound(graph, SHIM, workspace=False)
    there.fill(rig.begin)
    there.run()
    with shim.load().counting() as passed:
        there.run()
        assert 0 < passed.peak <= graph.tasks[0].workspace
    [value] = [v for v in rig.outputs if v]
    assert torch.equal(there.view(value), rig.results[0])
    assert (there.bindings.placed, there.bindings.missed) == (1, 0)


@pytest.mark.parametrize("mode", MODES)
def test_several_calls_of_a_task_share_its_workspace(mode: str) -> None:
    builder = GraphBuilder()
    x, y, z = (builder.buffer(name, 4 * 64) for name in "xyz")
    values = [Value(b, torch.float32, (64,), (1,)) for b in (x, y, z)]
    calls = (
        Call(aten.mul.Tensor, (values[0], 0.5), outputs=(values[1],)),
        Call(aten.add.Tensor, (values[1], 3.0), outputs=(values[2],)),
    )
    builder.task("both", (x,), (y, z), kernel=Calls(calls))
    graph = builder.graph()
    graph = measured(graph)
    there = bound(graph, mode)
    there.fill({0: torch.ones(64).view(torch.uint8)})
    there.run()
    assert (there.view(values[2]) == 3.5).all()
    assert graph.tasks[0].workspace == (2 * ALIGNMENT if shim.available() else 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_function_gets_the_bytes_of_what_it_reads_and_writes(mode: str) -> None:
    def double(reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        writes[0].copy_(reads[0] * 2)

    builder = GraphBuilder()
    a, b = builder.buffer("a", 10), builder.buffer("b", 10)
    builder.task("double", [a], [b], kernel=double)
    builder.task("nothing", [a])
    graph = builder.graph()
    graph = measured(graph)
    there = bound(graph.with_tasks(graph.tasks[:1]), mode)
    there.fill({0: torch.arange(10, dtype=torch.uint8)})
    there.run()
    begin = there.places[1].offset
    assert there.arena[begin : begin + 10].tolist() == [*range(0, 20, 2)]
    bound(graph.with_tasks(graph.tasks[1:]), mode).run()


def test_a_task_from_device_to_device_copies_the_buffer() -> None:
    builder = GraphBuilder()
    a, b = builder.buffer("a", 10, device=0), builder.buffer("b", 10, device=1)
    builder.task("move", [a], [b], lane="d2d")
    graph = builder.graph()
    arenas = {n: torch.full((128,), n, dtype=torch.uint8) for n in (0, 1)}
    accesses = (Access(Place(0, 0, 10), a, True, False), Access(Place(1, 64, 10), b, False, True))
    bind_task(graph, Node("task", "d2d0-1", accesses, (), task=0), arenas, COPY)()
    assert arenas[1].tolist() == [1] * 64 + [0] * 10 + [1] * 54


@PLACED
def test_the_shim_may_be_had_by_name_or_by_default() -> None:
    assert [choose_placement(mode) for mode in ("auto", SHIM, COPY)] == [SHIM, SHIM, COPY]
    with pytest.raises(ValueError, match="'out'"):
        choose_placement("out")
