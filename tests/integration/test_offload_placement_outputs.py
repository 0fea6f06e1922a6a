"""An output that is made elsewhere than planned is put right; one of another shape is refused."""

from dataclasses import replace

import pytest
import torch
from support import placed_ops
from support.placed_ops import MODES, PLACED, bound, rigged, t

from offload.errors import GraphError
from offload.memory.placement import COPY, SHIM, Allocation

without_gradients = placed_ops.without_gradients
aten = torch.ops.aten


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


@PLACED
def test_an_op_whose_allocations_nobody_recorded_is_copied() -> None:
    rig, _ = rigged(aten.mm.default, t(4, 8), t(8, 4))
    there = bound(rig.builder.graph(), SHIM)
    there.fill(rig.begin)
    there.run()
    assert torch.equal(there.view(rig.outputs[0]), rig.results[0])  # type: ignore[arg-type]
    assert (there.bindings.placed, there.bindings.copied) == (0, 1)


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


def test_a_tensor_that_does_not_fit_its_buffer_is_refused() -> None:
    _, graph = rigged(aten.mm.default, t(4, 8), t(8, 4))
    [task] = graph.tasks
    wrong = replace(task.kernel.outputs[0], offset=1)
    other = replace(task, kernel=replace(task.kernel, outputs=(wrong,)))
    with pytest.raises(GraphError, match="does not fit"):
        bound(graph.with_tasks([other]), COPY)
