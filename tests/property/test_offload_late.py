"""A rotated step does what the step does: the same bits after every flush, in any legal order.

The plain run (`expected`) knows no plan and no rotation: one tensor a buffer, program order.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import examples

import offload
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import Role, TaskGraph
from offload.lowering.rotation import rotated
from offload.planning.refusal import smallest_budget
from offload.program.kernels import Program, Value
from offload.running.rotated_step import RotatedStep

SIZES = (1, 64, 100, 640)
law = settings(max_examples=examples(150), deadline=None)


def mixing(salt: int, adds: bool = False) -> Callable[..., None]:
    """What it writes depends on every byte that it reads; where it adds, on what was there."""

    def run(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        seen = salt
        for read in reads:
            seen = zlib.crc32(read.numpy().tobytes(), seen)
        for number, written in enumerate(writes):
            fresh = torch.arange(written.numel()) * (seen % 97 + 1) + seen + number
            written.copy_((written if adds else 0) + fresh.to(torch.uint8))

    return run


class Drawn:
    """A training step: layers, of which some share a weight; gradients that share a buffer, are
    cast, summed up, clipped; updates in pieces, on the host; and people who look at weights."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.builder = draw, GraphBuilder()
        self.x = self.builder.buffer("x", 640, Role.INPUT)
        self.layers = draw(st.integers(1, 5))
        self.weights = [self.builder.buffer(f"w{n}", self.size(), "parameter") for n in self.all()]
        self.used = [draw(st.sampled_from(self.weights)) for _ in self.all()]
        if draw(st.booleans()):
            self.used = list(self.weights)
        self.made = [self.x]
        self.gradients: dict[int, int] = {}

    def all(self) -> range:
        return range(self.layers)

    def size(self) -> int:
        return self.draw(st.sampled_from(SIZES))

    def maybe(self, chance: int = 3) -> bool:
        return self.draw(st.integers(1, chance)) == 1

    def task(self, name: str, reads: list[int], writes: list[int], **more: object) -> int:
        salt = zlib.crc32(name.encode())
        return self.builder.task(name, reads, writes, kernel=mixing(salt, "+" in name), **more)

    def forward(self) -> None:
        for n in self.all():
            y = self.builder.buffer(f"y{n}", self.size(), "activation")
            self.task(f"forward{n}", [self.made[-1], self.used[n]], [y])
            self.made.append(y)
            if self.maybe(5):
                seen = self.builder.buffer(f"statistics{n}", 64, "buffer")
                self.task(f"statistics+{n}", [y, seen], [seen])
        if self.maybe():
            self.builder.output(self.made[-1])

    def backward(self) -> None:
        down = self.builder.buffer("down", 64, "gradient")
        self.task("start", [self.made[-1]], [down], phase="backward")
        for n in reversed(self.all()):
            w = self.used[n]
            if w in self.gradients:
                own = self.gradients[w]
                self.task(f"weight+{n}", [down, self.made[n], own], [own], phase="backward")
            else:
                g = self.builder.buffer(f"g{n}", self.builder.buffers[w].nbytes, "gradient")
                if self.gradients and self.maybe(6):
                    g = self.draw(st.sampled_from(sorted(self.gradients.values())))
                    self.task(f"shared+{n}", [down, g], [g], phase="backward")
                else:
                    self.task(f"weight{n}", [down, self.made[n]], [g], phase="backward")
                self.gradients[w] = g
            self.task(f"down+{n}", [down, w], [down], phase="backward")

    def clip(self) -> None:
        norms = []
        for w, g in self.gradients.items():
            norms.append(self.builder.buffer(f"norm{w}", 4))
            self.task(f"norm{w}", [g], [norms[-1]], phase="update")
        factor = self.builder.buffer("factor", 4)
        self.task("factor", norms, [factor], phase="update")
        for g in dict.fromkeys(self.gradients.values()):
            self.task(f"scale+{g}", [g, factor], [g], phase="update", lane=self.lane())

    def lane(self) -> str:
        return "host" if self.maybe(2) else "compute"

    def update(self) -> None:
        for w, g in self.gradients.items():
            lane = self.lane()
            if self.maybe(4):
                cast = self.builder.buffer(f"cast{w}", self.builder.buffers[w].nbytes, "gradient")
                self.task(f"cast{w}", [g], [cast], phase="backward", lane=lane)
                g = cast
            for piece in range(1 if self.maybe(2) else 2):
                state = self.builder.buffer(f"m{w}.{piece}", self.size(), "state")
                self.task(
                    f"update+{w}.{piece}", [w, g, state], [w, state], phase="update",
                    lane=lane, seconds=float(self.draw(st.integers(1, 3))),
                )  # fmt: skip
            if self.maybe(8):
                seen = self.builder.buffer(f"seen{w}", 4)
                self.task(f"look{w}", [w], [seen])
                self.builder.output(seen)
            if self.maybe(12):
                self.builder.output(self.draw(st.sampled_from([w, g])))


@st.composite
def steps(draw: st.DrawFn) -> TaskGraph:
    drawn = Drawn(draw)
    drawn.forward()
    drawn.backward()
    if drawn.maybe(2):
        drawn.clip()
    drawn.update()
    graph = drawn.builder.graph()
    graph = replace(graph, outputs=tuple(dict.fromkeys(graph.outputs)))
    held = {
        b.tensor: ((torch.arange(b.nbytes) * 7 + n) % 251).to(torch.uint8)
        for n, b in enumerate(graph.buffers)
        if b.persistent
    }
    given_ = (Value(0, torch.uint8, (640,), (1,)),)
    outputs = tuple(Value(b, torch.uint8, (graph.buffers[b].nbytes,), (1,)) for b in graph.outputs)
    return replace(graph, program=Program(given_, outputs, held))


def batch(step: int) -> torch.Tensor:
    return ((torch.arange(640) * 3 + step * 11) % 256).to(torch.uint8)


def some_of(graph: TaskGraph, wanted: set[int]) -> set[int]:
    """Updates, not all of them in most cases."""
    updates = [n for n, task in enumerate(graph.tasks) if task.name.startswith("update")]
    return {updates[n] for n in wanted if n < len(updates)}


class Plainly:
    """The step, run again and again in program order."""

    def __init__(self, graph: TaskGraph) -> None:
        self.builder = graph
        self.memory = [torch.zeros(b.nbytes, dtype=torch.uint8) for b in graph.buffers]
        for buffer, tensor in zip(graph.buffers, self.memory, strict=True):
            if buffer.persistent:
                tensor.copy_(graph.program.tensors[buffer.tensor])

    def run(self, given_: torch.Tensor) -> list[torch.Tensor]:
        self.memory[0].copy_(given_)
        for task in self.builder.tasks:
            task.kernel([self.memory[b] for b in task.reads], [self.memory[b] for b in task.writes])
        return [self.memory[b].clone() for b in self.builder.outputs]

    def same(self) -> bool:
        return all(
            torch.equal(self.builder.program.tensors[buffer.tensor], tensor)
            for buffer, tensor in zip(self.builder.buffers, self.memory, strict=True)
            if buffer.persistent
        )


@law
@given(
    graph=steps(),
    wanted=st.sets(st.integers(0, 9)),
    spare=st.sampled_from([0, 64, 700, 100_000]),
    engine=st.sampled_from(["serial", "threads"]),
    seed=st.integers(0, 99),
    flushes=st.sets(st.integers(0, 5)),
)
def test_a_rotated_step_leaves_the_bits_of_the_step_whenever_it_is_flushed(
    graph: TaskGraph, wanted: set[int], spare: int, engine: str, seed: int, flushes: set[int]
) -> None:
    graph.check()
    plain = Plainly(graph)
    rotation = rotated(graph, some_of(graph, wanted))
    if rotation is None:
        return
    for one in (rotation.first, rotation.steady, rotation.flush):
        one.check()
    least = max(smallest_budget(g, 0)[0] for g in (rotation.first, rotation.steady, rotation.flush))
    budget = max(64, least + spare) // 64 * 64
    plan = offload.plan(rotation.steady, budget, placement="copy", recompute=False)
    with offload.Runner(plan, engine, "random", seed, poison=True, key="step") as runner:
        late = RotatedStep(runner, rotation, "step")
        for step in range(6):
            right = plain.run(batch(step))
            for got, plainly in zip(late.run(batch(step)), right, strict=True):
                assert torch.equal(got, plainly)
            assert late.pending
            if step in flushes:
                late.flush()
                assert plain.same(), f"after step {step}"
        late.flush()
    assert plain.same()


@law
@given(graph=steps(), wanted=st.sets(st.integers(0, 9)))
def test_first_and_flush_are_the_tasks_of_a_step_and_so_are_those_of_steady(
    graph: TaskGraph, wanted: set[int]
) -> None:
    rotation = rotated(graph, some_of(graph, wanted))
    if rotation is None:
        return
    names = [task.name for task in graph.tasks]
    first, steady, flush = (
        [task.name for task in one.tasks]
        for one in (rotation.first, rotation.steady, rotation.flush)
    )
    assert sorted(first + flush) == sorted(names)
    assert steady == flush + first
    assert [name for name in names if name in set(first)] == first
    late = [name for name in flush if "update" in name]
    assert {*late} <= {names[number] for number in some_of(graph, wanted)}
    assert rotation.late == len(late)
    assert rotation.updates == sum("update" in name for name in names)


def test_an_update_may_be_late_where_nobody_looks_at_the_weights() -> None:
    builder = GraphBuilder()
    x = builder.buffer("x", 64, "input")
    weights = [builder.buffer(f"w{n}", 64, "parameter") for n in range(3)]
    for n, w in enumerate(weights):
        y = builder.buffer(f"y{n}", 64, "activation")
        builder.task(f"f{n}", [x, w], [y])
        x = y
    for n in reversed(range(3)):
        g = builder.buffer(f"g{n}", 64, "gradient")
        builder.task(f"b{n}", [x, weights[n]], [g], phase="backward")
        builder.task(f"u{n}", [weights[n], g], [weights[n]], phase="update", seconds=1.0)
    graph = builder.graph(Program((), (), {}))

    def late(*wanted: int) -> list[str]:
        rotation = rotated(graph, wanted)
        return [] if rotation is None else [task.name for task in rotation.flush.tasks]

    u2, u1, u0 = 4, 6, 8
    assert late(u0, u1, u2) == ["u0", "u1", "u2"], "first those that the forward pass needs first"
    assert late(u1) == ["u1"]
    assert late() == late(0) == []
    graph = replace(graph, outputs=(weights[2],))
    assert late(u0, u1, u2) == ["u0", "u1"], "the caller looks at w2"
    look = replace(graph.tasks[0], name="look", reads=(weights[1],), writes=())
    graph = replace(graph, outputs=(), tasks=(*graph.tasks, look))
    assert late(u0, u1, u2) == ["u0", "u2"], "a task of the step looks at w1"
    graph = replace(graph, program=None)
    assert late(u0, u1, u2) == [], "nobody would hold the gradients"
