"""Ops at planned addresses: the bits of the plain op, nothing copied, nothing allocated."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import placed_ops
from support.placed_ops import MODES, PLACED, bound, rigged, t

from offload.errors import GraphError
from offload.memory import cpu_shim as shim
from offload.memory.placement import SHIM, Allocation

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


@PLACED
def test_an_op_that_allocates_unlike_its_record_is_copied_to_its_place() -> None:
    rig, graph = rigged(aten.mm.default, t(4, 8), t(8, 4))
    [task] = graph.tasks
    for wrong in ((Allocation(65, output=0),), (), (Allocation(64, output=0), Allocation(64))):
        broken = replace(task, kernel=replace(task.kernel, allocations=wrong))
        there = bound(graph.with_tasks([broken]), SHIM)
        for _ in range(2):
            there.fill(rig.begin)
            there.run()
            assert torch.equal(there.view(rig.outputs[0]), rig.results[0])  # type: ignore[arg-type]
        placed = len(wrong) == 2
        assert (there.bindings.placed, there.bindings.copied) == (placed, not placed)
        assert there.bindings.missed == placed


@PLACED
def test_outputs_that_were_born_at_each_others_places_are_put_right() -> None:
    rig, graph = rigged(aten.var_mean.correction, t(6, 7), [1], correction=1)
    [task] = graph.tasks
    first, second = (v for v in rig.outputs if v)
    swapped = replace(task.kernel, allocations=None)
    places = {0: 1, 1: 0}
    crossed = tuple(
        replace(a, output=places[a.output]) if a.output is not None else a
        for a in task.kernel.allocations
    )
    swapped = replace(task.kernel, allocations=crossed)
    there = bound(graph.with_tasks([replace(task, kernel=swapped)]), SHIM)
    for _ in range(2):
        there.fill(rig.begin)
        there.run()
        assert torch.equal(there.view(first), rig.results[0])
        assert torch.equal(there.view(second), rig.results[1])
    assert there.bindings.copied == 2


@pytest.mark.parametrize("mode", MODES)
def test_an_output_of_another_shape_or_type_is_an_error(mode: str) -> None:
    _, graph = rigged(aten.mm.default, t(4, 8), t(8, 4))
    [task] = graph.tasks
    value = task.kernel.outputs[0]
    for wrong in (replace(value, size=(4, 2)), replace(value, dtype=torch.int32)):
        other = replace(task, kernel=replace(task.kernel, outputs=(wrong,)))
        there = bound(graph.with_tasks([other]), mode)
        with pytest.raises(GraphError, match=r"aten\.mm\.default: output 0 is torch\.float32"):
            there.run()
