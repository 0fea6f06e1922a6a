"""What every pass does to a small graph, and which activations may be made once more.

That no pass changes a bit: tests/property.
"""

from dataclasses import replace

import pytest
import torch
from support.graph_edits import grown

from offload.errors import GraphError
from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.taskgraph import Buffer, Role, TaskGraph
from offload.lowering.buckets import bucket_updates
from offload.lowering.chunks import chunk_tasks
from offload.lowering.counters import fold_counters
from offload.lowering.dead_tasks import drop_dead_tasks
from offload.lowering.early_updates import move_updates_early
from offload.lowering.pointwise_groups import group_tasks
from offload.lowering.sums import add_in_place
from offload.lowering.whole_updates import merge_whole_updates
from offload.planning.recompute import find_candidates, recompute_buffers, variants
from offload.program.kernels import Call, Value

aten = torch.ops.aten
MIB = 1 << 20


def names(graph: TaskGraph) -> list[str]:
    graph.check()
    return [task.name for task in graph.tasks]


def training(layers: int, nbytes: int = 100) -> TaskGraph:
    """Forward, all gradients, then all updates, as an eager step does it."""
    builder = GraphBuilder()
    weights = [builder.buffer(f"w{n}", nbytes, Role.PARAMETER) for n in range(layers)]
    states = [builder.buffer(f"s{n}", nbytes, Role.STATE) for n in range(layers)]
    x = [builder.buffer("x", nbytes, Role.INPUT)]
    for n in range(layers):
        x.append(builder.buffer(f"a{n}", nbytes, Role.ACTIVATION))
        builder.task(f"f{n}", (x[n], weights[n]), (x[n + 1],))
    back, gradients = x[-1], []
    for n in reversed(range(layers)):
        gradients.append(builder.buffer(f"g{n}", nbytes, Role.GRADIENT))
        before, back = back, builder.buffer(f"d{n}", nbytes)
        builder.task(f"b{n}", (before, x[n], weights[n]), (gradients[-1], back), phase="backward")
    for n, g in zip(reversed(range(layers)), gradients, strict=True):
        w, s = weights[n], states[n]
        builder.task(f"u{n}", (w, g, s), (w, s), phase="update")
    return builder.graph()


def residual(layers: int, workspace: int = 0) -> TaskGraph:
    """Each layer makes 9 and 8 times what goes on to the next one, and one thing that stays."""
    builder = GraphBuilder()
    x = builder.buffer("x", MIB, Role.INPUT)
    for n in range(layers):
        wide, kept = builder.buffer(f"wide{n}", 9 * MIB), builder.buffer(f"kept{n}", MIB)
        half, y = builder.buffer(f"half{n}", 8 * MIB), builder.buffer(f"y{n}", MIB)
        builder.task(f"a{n}", (x,), (wide,), seconds=1.0)
        builder.task(f"b{n}", (wide,), (half, kept), seconds=2.0, workspace=workspace)
        builder.task(f"c{n}", (half, x), (y,), seconds=3.0)
        builder.output(kept)
        x = y
    builder.output(x)
    return builder.graph()


def test_a_chunk_ends_where_the_least_goes_on_and_what_it_alone_touches_is_workspace() -> None:
    graph = residual(8, workspace=2 * MIB)
    chunked = chunk_tasks(graph, room=64 * MIB, most=8)
    assert names(chunked) == [f"a{n}+2" for n in range(8)]
    for n, task in enumerate(chunked.tasks):
        assert [chunked.buffers[b].name for b in task.writes] == [f"kept{n}", f"y{n}"]
        assert (task.seconds, task.workspace) == (6.0, 19 * MIB), "wide, half, and b's own"
    assert chunk_tasks(graph, room=64 * MIB, most=24) is graph


def test_a_chunk_has_the_room_of_the_largest_task_or_what_it_is_given() -> None:
    graph = residual(8)
    assert len(chunk_tasks(graph, room=0, most=4).tasks) == 24, "b needs 18 MiB, a and b 19"
    assert len(chunk_tasks(graph, room=19 * MIB, most=4).tasks) == 16
    assert len(chunk_tasks(graph, room=64 * MIB, most=4).tasks) == 4


def test_a_task_that_writes_nothing_or_nothing_that_is_read_is_left_out() -> None:
    builder = GraphBuilder()
    x, w = builder.buffer("x", 8, Role.INPUT), builder.buffer("w", 8, Role.PARAMETER)
    y, z = builder.buffer("y", 8), builder.buffer("z", 8)
    builder.task("view", (x,))
    builder.task("dead", (x,), (y,))
    builder.task("made anew later", (x,), (z,))
    builder.task("result", (x,), (z,))
    builder.task("update", (x, w), (w,))
    builder.output(z)
    graph = builder.graph()
    assert names(drop_dead_tasks(graph)) == ["result", "update"]


def test_counters_that_nobody_reads_are_one_task() -> None:
    builder = GraphBuilder()
    count = [builder.buffer(f"n{n}", 8, Role.BUFFER) for n in range(4)]
    y = builder.buffer("y", 8)
    for n, b in enumerate(count):
        up = Call(aten.add_.Tensor, (Value(b, torch.int64, (), ()), 1))
        builder.task(f"count {n}", (b,), (b,), kernel=up)
        if n == 1:
            builder.task("reads a count", (count[0],), (y,))
    builder.output(y)
    graph = builder.graph()
    lowered = fold_counters(graph)
    assert names(lowered) == ["count 0", "reads a count", "count 1+2"]
    assert len(lowered.tasks[2].kernel.calls) == 3
    assert lowered.tasks[2].reads == lowered.tasks[2].writes == tuple(count[1:])


def test_an_update_runs_as_soon_as_its_gradient_is_there() -> None:
    graph = training(3)
    lowered = move_updates_early(graph)
    assert names(lowered) == ["f0", "f1", "f2", "b2", "u2", "b1", "u1", "b0", "u0"]
    assert lowered.live_bytes()[-2:] < graph.live_bytes()[5:7]


def test_small_updates_wait_for_each_other_while_large_ones_pass() -> None:
    builder = GraphBuilder()
    sizes = {f"{kind}{n}": nbytes for n in range(4) for kind, nbytes in (("w", 1600), ("b", 16))}
    parameters = {name: builder.buffer(name, size, "parameter") for name, size in sizes.items()}
    states = {name: builder.buffer(f"m {name}", size, "state") for name, size in sizes.items()}
    activation, only_forward = builder.buffer("x", 2000), builder.buffer("y", 9000)
    builder.task("forward", (), (activation, only_forward))
    builder.task("more", (only_forward,), (activation,))
    for name, size in sizes.items():
        gradient = builder.buffer(f"g {name}", size, "gradient")
        builder.task(f"backward {name}", (activation,), (gradient,), phase="backward")
        both = parameters[name], states[name]
        builder.task(f"u {name}", (*both, gradient), both, phase="update")
    graph = builder.graph()
    lowered = bucket_updates(graph)
    updates = [task.name for task in lowered.tasks if task.phase == "update"]
    assert updates == ["u w0+1", "u w2+1", "u b0+3"]
    assert max(lowered.live_bytes()) <= max(graph.live_bytes())


def summed(a_role: Role = Role.GRADIENT, **more: float) -> TaskGraph:
    """c = a + b, then d = 2 c."""
    builder = GraphBuilder()
    x = builder.buffer("x", 2 * MIB, Role.INPUT)
    a, b = builder.buffer("a", 2 * MIB, a_role), builder.buffer("b", 2 * MIB)
    c, d = builder.buffer("c", 2 * MIB), builder.buffer("d", 2 * MIB)
    value = {n: Value(n, torch.float32, (512, 1024), (1024, 1)) for n in (x, a, b, c, d)}
    for into in (a, b):
        copied = Call(aten.mul.Scalar, (value[x], 3.0), {}, (value[into],))
        builder.task(f"make {into}", (x,), (into,), kernel=copied)
    add = Call(aten.add.Tensor, (value[a], value[b]), more, (value[c],))
    builder.task("add", (a, b), (c,), kernel=add, pointwise=True, repeatable=True)
    use = Call(aten.mul.Scalar, (value[c], 2.0), {}, (value[d],))
    builder.task("use", (c,), (d,), kernel=use)
    builder.output(d)
    return builder.graph()


def test_a_sum_goes_into_the_summand_that_dies_and_takes_over_its_name() -> None:
    lowered = add_in_place(summed())
    lowered.check()
    add, use = lowered.tasks[2:]
    assert (add.reads, add.writes, use.reads) == ((1, 2), (1,), (1,))
    assert add.kernel.op is aten.add_.Tensor and add.kernel.outputs == ()
    assert not add.repeatable
    assert use.kernel.args[0].buffer == 1


def test_a_sum_goes_into_the_second_summand_if_only_that_one_dies() -> None:
    lowered = add_in_place(summed(Role.PARAMETER))
    assert lowered.tasks[2].writes == (2,)
    assert [value.buffer for value in lowered.tasks[2].kernel.args] == [2, 1]


def test_a_sum_into_half_of_a_buffer_stays_as_it_is() -> None:
    builder = grown(summed())
    builder.buffers[1] = Buffer("a", 4 * MIB)
    builder.output(2)
    assert add_in_place(builder.graph()).tasks[2].writes == (3,)


def test_small_pointwise_neighbours_are_one_task_that_reads_only_from_outside() -> None:
    builder = GraphBuilder()
    x, y, z, out = (
        builder.buffer(n, 64, Role.INPUT if n == "x" else Role.TEMPORARY) for n in "xyzo"
    )
    big = builder.buffer("big", MIB)
    more = {"pointwise": True, "repeatable": True, "seconds": 1.0}
    builder.task("to_copy", (x,), (y,), **more)
    builder.task("mul", (y, x), (z,), **more)
    builder.task("gelu", (z,), (out,), **more)
    builder.task("large", (out,), (big,), **more)
    builder.output(big)
    graph = builder.graph()
    lowered = group_tasks(graph)
    assert names(lowered) == ["to_copy+2", "large"]
    group = lowered.tasks[0]
    assert (group.reads, group.writes) == ((x,), (y, z, out))
    assert group.repeatable and group.seconds == 3.0


def test_a_group_that_changes_what_it_reads_is_not_repeatable() -> None:
    builder = GraphBuilder()
    x, y = builder.buffer("x", 64, Role.INPUT), builder.buffer("y", 64)
    builder.task("one", (x,), (y,), pointwise=True, repeatable=True)
    builder.task("two", (y,), (x,), pointwise=True, repeatable=True)
    builder.output(x)
    graph = builder.graph()
    assert not group_tasks(graph).tasks[0].repeatable


def test_groups_keep_devices_phases_and_draws_apart() -> None:
    builder = GraphBuilder()
    a, b = builder.buffer("a", 8), builder.buffer("b", 8)
    builder.task("one", (), (a,), pointwise=True)
    builder.task("other device", (), (b,), pointwise=True, device=1)
    builder.task("phase", (a,), (a,), pointwise=True, phase="backward")
    draw = builder.task("draw", (), (a,), pointwise=True, phase="backward")
    builder.task("next draw", (a,), (a,), pointwise=True, phase="backward", after=(draw,))
    builder.output(a)
    graph = builder.graph()
    assert names(group_tasks(graph)) == names(graph)


# ---- whole updates ------------------------------------------------------------------------------


class Elementwise:
    elementwise = True


def updating(*between: str) -> TaskGraph:
    """w, its state, and what updates both. `between`: what reads w in the middle of that."""
    builder = GraphBuilder()
    w, state = builder.buffer("w", 1024, Role.PARAMETER), builder.buffer("m", 1024, Role.STATE)
    g, made = builder.buffer("g", 1024), builder.buffer("t", 1024)
    call = Call(Elementwise())  # type: ignore[arg-type]
    builder.task("decay m", (state,), (state,), phase="update", kernel=call)
    builder.task("decay w", (w,), (w,), phase="update", kernel=call)
    builder.task("backward", (), (g,), phase="backward", kernel=Call(torch.relu))
    for name in between:
        builder.task(name, (w,), (g,), kernel=Call(torch.relu))
    builder.task("add m", (g, state), (state,), phase="update", kernel=call)
    builder.task("root", (state,), (made,), kernel=call)
    builder.task("add w", (made, w), (w,), phase="update", kernel=call)
    return builder.graph()


def test_what_updates_a_parameter_is_one_task_after_its_gradient() -> None:
    graph = merge_whole_updates(updating())
    assert names(graph) == ["backward", "w.update"]
    update = graph.tasks[1]
    assert (update.reads, update.writes, update.phase) == ((1, 0, 2), (1, 0, 3), "update")
    assert graph.notes == ("5 tasks make 1 updates",)


def test_what_reads_a_weight_between_its_update_and_the_states_comes_after_both() -> None:
    builder = grown(updating())
    w, state, last = 0, 1, builder.buffer("z", 1024)
    builder.task("reader", (w,), (last,), kernel=Call(torch.relu))
    call = Call(Elementwise())  # type: ignore[arg-type]
    builder.task("late m", (state,), (state,), phase="update", kernel=call)
    builder.output(last)
    assert names(merge_whole_updates(builder.graph())) == ["backward", "w.update", "reader"]


def test_an_update_that_others_read_in_its_middle_falls_apart() -> None:
    graph = updating("norm")
    assert names(merge_whole_updates(graph)) == names(graph)


COSTS = Costs(launch=0, copy=0, memory=1e10, h2d=1e10, d2h=1e10)


def network(**second: object) -> TaskGraph:
    """x -norm-> a -cast-> c -mm-> y; the backward pass reads y, c and x, in that order."""
    builder = GraphBuilder()
    x = builder.buffer("x", MIB, Role.INPUT)
    w = builder.buffer("w", MIB, Role.PARAMETER)
    a, c, y, g, h = (builder.buffer(n, MIB, Role.ACTIVATION) for n in "acygh")
    builder.task("norm", (x, w), (a,), repeatable=True, traffic=3 * MIB)
    builder.task("cast", (a,), (c,), **{"repeatable": True, "traffic": 2 * MIB, **second})
    builder.task("mm", (c, w), (y,), repeatable=True, seconds=1.0)
    builder.task("loss", (y,), (g,), phase="backward")
    builder.task("mm backward", (g, c), (h,), phase="backward")
    builder.task("norm backward", (h, x, w), (w,), phase="backward")
    return builder.graph()


def test_what_dies_in_the_forward_pass_is_recomputed_with_what_is_made_of_it() -> None:
    found = {one.buffer: one for one in find_candidates(network(), COSTS)}
    assert found[3].chain == (2, 3)
    assert found[3].ratio == pytest.approx(5 / 2)


def test_the_clones_run_right_before_the_first_backward_reader_into_new_buffers() -> None:
    graph = recompute_buffers(network(), {2, 3})
    graph.check()
    assert [task.name for task in graph.tasks] == [
        "norm", "cast", "mm", "loss", "norm again", "cast again", "mm backward", "norm backward",
    ]  # fmt: skip
    norm, cast, backward = graph.tasks[4:7]
    assert (norm.writes, cast.reads, cast.writes) == ((7,), (7,), (8,))
    assert backward.reads == (5, 8)
    assert (cast.recomputes, cast.phase) == ("cast", "backward")
    assert graph.spans()[1][3] == 2, "the first one is dead after the forward pass"


def test_what_may_not_run_again_is_no_candidate() -> None:
    assert 3 not in {one.buffer for one in find_candidates(network(repeatable=False), COSTS)}
    with pytest.raises(GraphError, match="c cannot be recomputed"):
        recompute_buffers(network(repeatable=False), {3})


def test_what_reads_a_parameter_that_was_updated_since_is_no_candidate() -> None:
    builder = grown(network())
    late = builder.tasks.pop(4)
    builder.task("update", (1,), (1,), phase="update")
    builder.tasks.append(late)
    graph = builder.graph()
    assert 3 not in {one.buffer for one in find_candidates(graph, COSTS)}
    with pytest.raises(GraphError, match="w changes"):
        recompute_buffers(graph, {2, 3})


def test_an_output_and_what_no_backward_task_reads_are_refused() -> None:
    graph = replace(network(), outputs=(3,))
    assert 3 not in {one.buffer for one in find_candidates(graph, COSTS)}
    with pytest.raises(GraphError, match="a is not needed again"):
        recompute_buffers(network(), {2})


def test_shares_of_what_can_be_are_recomputed_the_cheapest_first_and_none_twice() -> None:
    graph = network()
    cheapest, *_ = find_candidates(graph, COSTS)
    found = dict(variants(graph, COSTS))
    assert [*found] == ["none", "100% of what can be", "50% of what can be"]
    again = {
        name: [t.recomputes for t in made.tasks if t.recomputes] for name, made in found.items()
    }
    assert again["none"] == [] and len(again["100% of what can be"]) == 3
    makers = [
        graph.tasks[n].name for n in range(4) if set(graph.tasks[n].writes) & {*cheapest.chain}
    ]
    assert again["50% of what can be"] == makers
