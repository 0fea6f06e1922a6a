"""Any graph, planned into little memory, proved, run in any legal order: the bits of a plain run.

The plain run (`expected`) knows no plan: one tensor a buffer, tasks in program order. Graphs have
several devices, host tasks, in-place writes, persistent buffers, empty ones and hidden workspaces.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import examples

import offload
from offload.errors import BudgetTooSmall, RaceFound
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import Role, TaskGraph
from offload.planning.planner import Policy, build_memgraph
from offload.planning.refusal import smallest_budget
from offload.planning.residency import most_resident
from offload.program.kernels import Program, Value
from offload.running.engines.pieces import cut, run_pieces
from offload.running.engines.work import Record

law = settings(max_examples=examples(120), deadline=None)
SIZES = (0, 1, 63, 64, 100, 640, 1000)
HELD_BEFORE = ("parameter", "state", "buffer", "constant", "input")


def mixing(task: int, changed: frozenset[int]) -> Callable[..., None]:
    """A kernel whose bits depend on every byte that it reads. `changed`: the writes that keep
    something of what was there."""

    def run(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        seen = hashlib.blake2b(bytes([task]), digest_size=4)
        for tensor in reads:
            seen.update(tensor.numpy().tobytes())
        salt = int.from_bytes(seen.digest(), "little")
        for number, tensor in enumerate(writes):
            fresh = (torch.arange(tensor.numel()) * (salt % 97 + 1) + salt + number).to(torch.uint8)
            tensor.copy_(tensor + fresh if number in changed else fresh)

    return run


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    builder, devices = GraphBuilder(), draw(st.integers(1, 3))
    alive: list[int] = []
    random_task: int | None = None
    for number in range(draw(st.integers(1, 7))):
        role, device = draw(st.sampled_from(HELD_BEFORE)), draw(st.integers(0, devices - 1))
        alive.append(builder.buffer(f"p{number}", draw(st.sampled_from(SIZES)), role, device))
    for number in range(draw(st.integers(1, 24))):
        device = draw(st.integers(0, devices - 1))
        here = [b for b in alive if builder.buffers[b].device == device]
        kind = draw(st.sampled_from(["compute"] * 8 + ["host", "d2d"]))
        if kind == "d2d" and devices > 1 and here:
            source = draw(st.sampled_from(here))
            to = (device + draw(st.integers(1, devices - 1))) % devices
            made = builder.buffer(f"moved{number}", builder.buffers[source].nbytes, device=to)
            builder.task(
                f"move{number}", [source], [made],
                lane="d2d", device=device, kernel=mixing(number, frozenset()),
            )  # fmt: skip
            alive.append(made)
            continue
        kind = "host" if kind == "host" else "compute"
        reads = draw(st.lists(st.sampled_from(here), unique=True, max_size=3)) if here else []
        writes = [
            builder.buffer(f"b{number}.{n}", draw(st.sampled_from(SIZES)), "activation", device)
            for n in range(draw(st.integers(0, 2)))
        ]
        alive += writes
        writable = [b for b in here if builder.buffers[b].role is not Role.CONSTANT]
        if writable and draw(st.booleans()):
            writes.append(changed := draw(st.sampled_from(writable)))
            if draw(st.integers(0, 3)) and changed not in reads:
                reads.append(changed)
        after = () if random_task is None or draw(st.integers(0, 4)) else (random_task,)
        keeps = frozenset(n for n, b in enumerate(writes) if b in reads)
        made = builder.task(
            f"t{number}", reads, writes, lane=kind, device=device, after=after,
            workspace=draw(st.sampled_from([0, 0, 8, 70_000])) if kind == "compute" else 0,
            kernel=mixing(number, keeps),
        )  # fmt: skip
        random_task = made if after or random_task is None else random_task
    for output in draw(st.lists(st.sampled_from(alive), unique=True, max_size=3)):
        builder.output(output)
    return builder.graph()


@dataclass
class Step:
    """A graph, and what lies in the outside world."""

    graph: TaskGraph
    tensors: dict[str, torch.Tensor]
    batch: list[torch.Tensor]


def bound(graph: TaskGraph) -> Step:
    def whole(b: int) -> Value:
        return Value(b, torch.uint8, (graph.buffers[b].nbytes,), (1,))

    generator = torch.Generator().manual_seed(len(graph.tasks))
    contents = [
        torch.randint(0, 256, (buffer.nbytes,), dtype=torch.uint8, generator=generator)
        for buffer in graph.buffers
    ]
    inputs = [n for n, buffer in enumerate(graph.buffers) if buffer.role is Role.INPUT]
    tensors = {b.name: contents[n] for n, b in enumerate(graph.buffers) if b.persistent}
    outputs = tuple(whole(b) for b in graph.outputs)
    program = Program(tuple(whole(b) for b in inputs), outputs, tensors)
    return Step(replace(graph, program=program), tensors, [contents[n] for n in inputs])


def expected(step: Step, steps: int) -> tuple[dict[str, torch.Tensor], list[list[torch.Tensor]]]:
    graph = step.graph
    memory = [torch.zeros(buffer.nbytes, dtype=torch.uint8) for buffer in graph.buffers]
    for buffer, tensor in zip(graph.buffers, memory, strict=True):
        if buffer.persistent:
            tensor.copy_(step.tensors[buffer.name])
    returned = []
    for _ in range(steps):
        given = iter(step.batch)
        for buffer, tensor in zip(graph.buffers, memory, strict=True):
            if buffer.role is Role.INPUT:
                tensor.copy_(next(given))
        for task in graph.tasks:
            task.kernel([memory[b] for b in task.reads], [memory[b] for b in task.writes])
        returned.append([memory[b].clone() for b in graph.outputs])
    return {b.name: t for b, t in zip(graph.buffers, memory, strict=True) if b.persistent}, returned


@law
@given(
    graph=graphs(),
    spare=st.sampled_from([0, 64, 192, 700, 5000]),
    engine=st.sampled_from(["serial", "threads"]),
    order=st.sampled_from(["priority", "random"]),
    seed=st.integers(0, 99),
)
def test_every_order_of_a_plan_gives_the_bits_of_the_plain_run(
    graph: TaskGraph, spare: int, engine: str, order: str, seed: int
) -> None:
    step = bound(graph)
    graph = step.graph
    final, returned = expected(step, 2)
    budget = {d: max(64, smallest_budget(graph, d)[0] + spare // 64 * 64) for d in graph.devices}
    plan = offload.plan(graph, budget, placement="copy")
    plan.verify()
    assert all(plan.memgraph.arenas[device] <= budget[device] for device in budget)
    with offload.Runner(plan, engine, order, seed, poison=True) as runner:
        for outputs in returned:
            for got, right in zip(runner(*step.batch), outputs, strict=True):
                assert torch.equal(got, right)
    for name, tensor in step.tensors.items():
        assert torch.equal(tensor, final[name])


@law
@given(
    graph=graphs(),
    spare=st.sampled_from([0, 64, 192, 700, 5000]),
    where=st.floats(0.0, 1.0),
    engine=st.sampled_from(["serial", "threads"]),
)
def test_what_is_not_live_at_a_cut_may_be_overwritten_there(
    graph: TaskGraph, spare: int, where: float, engine: str
) -> None:
    """All devices' arenas are filled with 0xFF at the cut. What is live in comes back before the
    step goes on, what is live out when it is over."""
    step = bound(graph)
    graph = step.graph
    final, [outputs] = expected(step, 1)
    budget = {d: max(64, smallest_budget(graph, d)[0] + spare // 64 * 64) for d in graph.devices}
    plan = offload.plan(graph, budget, placement="copy")
    at = round(where * len(plan.memgraph.nodes))
    here, blocks = plan.cuts[at], plan.memgraph.blocks
    with offload.Runner(plan, engine) as runner:
        bind = runner._enter(runner._first)
        bind.begin(step.batch)
        arenas, pieces = runner._arenas, cut(bind.pieces[0].work, [at])
        assert arenas is not None
        done = run_pieces(runner._stage.engine, pieces, Record(), gate=lambda: True)
        # At either end there is nothing to cut, but the arena may be somebody else's all the same.
        done = 0 if at == 0 else done
        live = {n: arenas.bytes(blocks[n].place).clone() for n in here.live_in | here.live_out}
        assert sum(map(len, live.values())) == here.live_bytes
        if 0 < at < len(plan.memgraph.nodes):
            for region in arenas.lent.regions.values():
                region.tensor.fill_(0xFF)
            for number in here.live_in:
                arenas.bytes(blocks[number].place).copy_(live[number])
            run_pieces(runner._stage.engine, pieces, Record(), done)
            for number in here.live_out:
                arenas.bytes(blocks[number].place).copy_(live[number])
        for got, right in zip(bind.outputs(), outputs, strict=True):
            assert torch.equal(got, right)
    for name, tensor in step.tensors.items():
        assert torch.equal(tensor, final[name])


@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(),
    spare=st.sampled_from([0, 64, 192, 700, 5000, 100_000]),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    ahead=st.sampled_from([0, 1, 3, 20]),
    evict_ahead=st.sampled_from([0, 1, 3]),
    drop_ahead=st.sampled_from([0, 2, 20]),
    workers=st.sampled_from([0, 1, 16]),
)
def test_every_policy_gives_a_plan_that_the_oracle_proves(
    graph: TaskGraph,
    spare: int,
    share: float,
    ahead: int,
    evict_ahead: int,
    drop_ahead: int,
    workers: int,
) -> None:
    least = {device: smallest_budget(graph, device)[0] for device in graph.devices}
    budget = {device: (nbytes + spare) // 64 * 64 for device, nbytes in least.items()}
    room = {device: int((budget[device] - least[device]) * share) for device in least}
    policy = Policy(most_resident(graph, room), ahead, evict_ahead, drop_ahead, workers)
    memgraph = build_memgraph(graph, budget, policy)
    offload.verify(memgraph)
    assert all(memgraph.arenas[device] <= budget[device] for device in budget)


@law
@given(graph=graphs(), edge=st.integers(0, 10_000))
def test_every_edge_of_a_plan_is_needed(graph: TaskGraph, edge: int) -> None:
    """A plan's edges are reduced: none is implied by others, so each one's absence is a race."""
    memgraph = offload.plan(graph, dict(least_budgets(graph)), placement="copy").memgraph
    edges = [(n, d) for n, node in enumerate(memgraph.nodes) for d in node.deps]
    if not edges:
        return
    node, dep = edges[edge % len(edges)]
    nodes = list(memgraph.nodes)
    left = tuple(d for d in nodes[node].deps if d != dep)
    nodes[node] = replace(nodes[node], deps=left)
    with pytest.raises(RaceFound) as found:
        offload.verify(replace(memgraph, nodes=tuple(nodes)))
    assert {found.value.task_a, found.value.task_b} & {memgraph.name(node), memgraph.name(dep)}


def least_budgets(graph: TaskGraph) -> list[tuple[int, int]]:
    return [(d, max(64, smallest_budget(graph, d)[0])) for d in graph.devices]


@law
@given(graph=graphs())
def test_a_refused_budget_names_the_smallest_one_that_would_do(graph: TaskGraph) -> None:
    for device in graph.devices:
        others = dict.fromkeys(graph.devices, "1MiB")
        try:
            offload.plan(graph, {**others, device: 1}, placement="copy")
        except BudgetTooSmall as refused:
            assert refused.task in {task.name for task in graph.tasks}
            needed = refused.needed
            offload.plan(graph, {**others, device: needed}, placement="copy").verify()
            with pytest.raises(BudgetTooSmall):
                offload.plan(graph, {**others, device: needed - 1}, placement="copy")
