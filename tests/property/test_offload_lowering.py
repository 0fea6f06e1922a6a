"""Whatever a graph looks like, a pass changes no bit of what its step leaves behind.

The interpreter is an oracle of its own: it knows no dependencies and no liveness. A task sees the
bytes that it names and no others; what it is to make anew is poisoned before.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.taskgraph import Role, TaskGraph
from offload.lowering.buckets import bucket_updates
from offload.lowering.chunks import chunk_tasks
from offload.lowering.counters import fold_counters
from offload.lowering.dead_tasks import drop_dead_tasks
from offload.lowering.early_updates import move_updates_early
from offload.lowering.pointwise_groups import group_tasks
from offload.lowering.sums import add_in_place
from offload.planning.recompute import find_candidates, recompute_buffers, variants
from offload.planning.refusal import smallest_budget
from offload.program.kernels import Call, Value

SIZES = (2, 16, 64)
KINDS = ("new", "new", "new", "sum", "sum", "in place", "again", "draw", "update", "update")
PASSES: tuple[Callable[[TaskGraph], TaskGraph], ...] = (
    drop_dead_tasks,
    fold_counters,
    lambda graph: add_in_place(graph, nbytes=1),
    move_updates_early,
    bucket_updates,
    lambda graph: bucket_updates(graph, nbytes=300),
    group_tasks,
    lambda graph: group_tasks(graph, at_most=3, nbytes=500),
    lambda graph: chunk_tasks(graph, room=0, most=6),
    lambda graph: chunk_tasks(graph, room=1 << 20, most=3),
)


@dataclass
class Dice:
    """What a task that draws takes its numbers from."""

    drawn: int = 0


@dataclass
class Mixing:
    """A kernel over bytes: what it writes depends on all that it reads, and on who it is."""

    name: str
    dice: Dice | None = None
    adds: tuple[bool, ...] = field(default=())

    def __call__(self, reads: list[bytearray], writes: list[bytearray]) -> None:
        digest = hashlib.blake2b(self.name.encode())
        for read in reads:
            digest.update(bytes(read))
        if self.dice is not None:
            self.dice.drawn += 1
            digest.update(bytes([self.dice.drawn]))
        for number, (written, adds) in enumerate(zip(writes, self.adds, strict=True)):
            more = hashlib.shake_128(digest.digest() + bytes([number])).digest(len(written))
            if adds:  # One half stays as it was.
                more = bytes(written[: len(written) // 2]) + more[len(written) // 2 :]
            written[:] = more


def run(graph: TaskGraph, dice: Dice) -> list[bytes]:
    """What is left behind by a run in program order: persistent buffers, by the user's tensor,
    and the outputs."""
    dice.drawn = 0
    memory = [bytearray(buffer.nbytes) for buffer in graph.buffers]
    for number, buffer in enumerate(graph.buffers):
        if buffer.persistent or buffer.role is Role.INPUT:
            start = torch.arange(buffer.nbytes // 4, dtype=torch.float32) * 0.37 + number
            memory[number][:] = start.numpy().tobytes()
    for task in graph.tasks:
        for b in task.writes:
            if b not in task.reads:
                memory[b][:] = b"\xab" * len(memory[b])
        if hasattr(task.kernel, "calls"):
            seen: dict[int, Any] = {b: memory[b] for b in task.touches}
            workspace = memoryview(bytearray(b"\xab" * task.workspace))
            inner = getattr(task.kernel, "inner", {})
            seen |= {b: workspace[part.start : part.stop] for b, part in inner.items()}
            for call in task.kernel.calls:
                perform(call, seen)
        else:
            task.kernel([memory[b] for b in task.reads], [memory[b] for b in task.writes])
    kept = [b for b, buffer in enumerate(graph.buffers) if buffer.persistent]
    return [bytes(memory[b]) for b in (*kept, *graph.outputs)]


def perform(call: Call, memory: dict[int, Any]) -> None:
    def view(value: Value) -> torch.Tensor:
        whole = torch.frombuffer(memory[value.buffer], dtype=value.dtype)
        return whole.as_strided(value.size, value.stride, value.offset)

    args, kwargs = call.arguments(view)
    result = call.op(*args, **kwargs)
    for value in call.outputs:
        assert value is not None
        view(value).copy_(result)


@st.composite
def graphs(draw: st.DrawFn, calls: bool) -> tuple[TaskGraph, Dice]:
    """A step: forward, backward, and updates wherever they like. Some results are never read,
    some buffers are made anew."""
    builder, dice = GraphBuilder(), Dice()
    same = draw(st.sampled_from(SIZES))

    def nbytes() -> int:
        return 4 * (same if calls else draw(st.sampled_from(SIZES)))

    persistent = [
        builder.buffer(f"p{n}", nbytes(), Role.PARAMETER) for n in range(draw(st.integers(1, 4)))
    ]
    known = [*persistent, builder.buffer("x", nbytes(), Role.INPUT)]
    made: list[int] = []
    last_draw: tuple[int, ...] = ()
    count = draw(st.integers(1, 24))
    for number in range(count):
        phase = ("forward", "backward")[2 * number // count]
        kind = draw(st.sampled_from(KINDS))
        one, other = (draw(st.sampled_from(draw(st.sampled_from((known, known[-4:])))))
                      for _ in range(2))  # fmt: skip
        if kind == "update":
            phase, one = "update", draw(st.sampled_from(persistent))
        target = one
        if kind in ("new", "sum", "draw"):
            role = draw(st.sampled_from(("temporary", "activation", "gradient")))
            target = builder.buffer(f"t{number}", nbytes(), role)
            made.append(target)
        elif kind == "again" and made:
            target = draw(st.sampled_from(made))
        two = kind == "update" or (kind in ("sum", "in place") and draw(st.booleans()))
        reads = (one, other) if two and one != other else (one,)
        drawing = kind == "draw" and not calls
        builder.task(
            f"{kind} {number}",
            reads,
            (target,),
            phase=phase,
            pointwise=draw(st.booleans()),
            repeatable=target not in reads and kind != "draw",
            after=last_draw if drawing else (),
            kernel=torch_call(reads, target, same, number)
            if calls
            else Mixing(f"{number}", dice if drawing else None, (target in reads,)),
        )
        if drawing:
            last_draw = (number,)
        known = list(dict.fromkeys((*known, target)))
    for n in range(draw(st.integers(0, 3))):
        counter = builder.buffer(f"n{n}", 8, Role.BUFFER)
        up = Call(torch.ops.aten.add_.Tensor, (Value(counter, torch.int64, (), ()), 1))
        kernel = up if calls else Mixing("n", None, (True,))
        builder.task(f"count {n}", (counter,), (counter,), kernel=kernel)
    for b in draw(st.lists(st.sampled_from([*made, *persistent]), max_size=2, unique=True)):
        builder.output(b)
    graph = builder.graph()
    graph.check()
    return graph, dice


def torch_call(reads: tuple[int, ...], target: int, floats: int, number: int) -> Call:
    aten = torch.ops.aten
    values = [Value(b, torch.float32, (floats,), (1,)) for b in reads]
    out = Value(target, torch.float32, (floats,), (1,))
    if target in reads:
        others = [v for v in values if v.buffer != target]
        if others:
            return Call(aten.add_.Tensor, (out, others[0]))
        return Call(aten.mul_.Scalar, (out, 1.1 + number))
    if len(values) == 2:
        return Call(aten.add.Tensor, tuple(values), {"alpha": 1 + number % 2}, (out,))
    return Call(aten.mul.Scalar, (values[0], 0.9 + number), {}, (out,))


@pytest.mark.parametrize("change", PASSES)
@pytest.mark.parametrize("calls", [False, True], ids=["bytes", "torch"])
def test_a_pass_changes_no_bit(change: Callable[[TaskGraph], TaskGraph], calls: bool) -> None:
    @given(graphs(calls))
    def prove(made: tuple[TaskGraph, Dice]) -> None:
        graph, dice = made
        changed = change(graph)
        changed.check()
        assert [(b.name, b.nbytes) for b in changed.buffers] == [
            (b.name, b.nbytes) for b in graph.buffers
        ]
        assert run(changed, dice) == run(graph, dice)

    prove()


@pytest.mark.parametrize("calls", [False, True], ids=["bytes", "torch"])
def test_all_passes_after_each_other_change_no_bit(calls: bool) -> None:
    @given(graphs(calls))
    def prove(made: tuple[TaskGraph, Dice]) -> None:
        graph, dice = made
        changed = graph
        for change in PASSES:
            changed = change(changed)
        changed.check()
        assert run(changed, dice) == run(graph, dice)

    prove()


@given(graphs(calls=True))
def test_sums_in_place_never_need_more_room(made: tuple[TaskGraph, Dice]) -> None:
    graph, _ = made
    before, after = graph.live_bytes(), add_in_place(graph, nbytes=1).live_bytes()
    assert all(now <= then for now, then in zip(after, before, strict=True))


@given(graphs(calls=True), st.sampled_from([0, 300, 5000]), st.integers(1, 6))
def test_a_budget_that_holds_every_task_and_the_room_of_a_chunk_holds_all_chunks(
    made: tuple[TaskGraph, Dice], room: int, most: int
) -> None:
    graph, _ = made
    least = smallest_budget(graph, 0)[0]
    assert smallest_budget(chunk_tasks(graph, room, most), 0)[0] <= max(least, room)


@given(graphs(calls=False))
def test_buckets_never_lift_the_peak(made: tuple[TaskGraph, Dice]) -> None:
    graph, _ = made
    assert max(bucket_updates(graph).live_bytes()) <= max(graph.live_bytes())


@given(graphs(calls=False))
def test_early_updates_that_make_nothing_never_lift_the_peak(made: tuple[TaskGraph, Dice]) -> None:
    graph, _ = made
    makes = any(
        task.phase == "update" and not graph.buffers[b].persistent
        for task in graph.tasks
        for b in task.writes
    )
    if not makes:
        assert max(move_updates_early(graph).live_bytes()) <= max(graph.live_bytes())


@given(graphs(calls=False), st.data())
def test_recomputing_whatever_can_be_changes_no_bit(
    made: tuple[TaskGraph, Dice], data: st.DataObject
) -> None:
    graph, dice = made
    found = find_candidates(graph, Costs(), smallest=1)
    chosen = data.draw(st.lists(st.sampled_from(found), unique=True)) if found else []
    changed = recompute_buffers(graph, {b for one in chosen for b in one.chain})
    changed.check()
    clones = [task for task in changed.tasks if task.recomputes]
    assert len(clones) == len({b for one in chosen for b in one.chain})
    assert all(task.phase == "backward" for task in clones)
    assert run(changed, dice) == run(graph, dice)


@given(graphs(calls=True))
def test_every_variant_is_the_same_step(made: tuple[TaskGraph, Dice]) -> None:
    graph, dice = made
    for _, variant in variants(graph, Costs()):
        variant.check()
        assert run(variant, dice) == run(graph, dice)
