"""A runner that moves to other plans and other stages comes to the bits of one that stays.

plan 100 % --step-- plan 60 % --step-- another stage --step-- ...      any moves, any order
"""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_graphs import bound, expected, graphs
from support.products import examples

import offload
from offload.memory.shifts import ASIDE, BACK, CREEPING, STRAIGHT, Shift, in_order
from offload.planning.refusal import smallest_budget
from offload.running.runner import Runner
from offload.running.stage import Stage

PARTS = (0.0, 0.1, 0.3, 0.6, 1.0)
"""Of the way from the smallest budget to the one without offloading."""


@st.composite
def shifts(draw: st.DrawFn) -> list[Shift]:
    """Lengths, laid out twice in the same memory: in two orders, with gaps of two kinds."""
    lengths = draw(st.lists(st.integers(1, 6), max_size=7))
    creeps = draw(st.booleans())
    starts: list[list[int]] = []
    for _ in range(2):
        at, found = draw(st.integers(0, 8)), [0] * len(lengths)
        for number in draw(st.permutations(range(len(lengths)))):
            found[number] = at
            at += lengths[number] + draw(st.integers(0, 4))
        starts.append(found)
    return [Shift(a, b, n, creeps) for a, b, n in zip(*starts, lengths, strict=True)]


@settings(max_examples=examples(400), deadline=None)
@given(found=shifts())
def test_shifts_in_order_lose_no_byte(found: list[Shift]) -> None:
    memory = [("free", 0)] * 100
    for number, shift in enumerate(found):
        memory[shift.source : shift.source + shift.nbytes] = [
            (str(number), n) for n in range(shift.nbytes)
        ]
    kept: dict[int, list[tuple[str, int]]] = {}
    copied = 0
    for step in in_order(found):
        shift = found[step.number]
        bytes_ = memory[shift.source : shift.source + shift.nbytes]
        if step.how == ASIDE:
            kept[step.number] = bytes_
            copied += shift.nbytes
            continue
        if step.how == STRAIGHT:
            assert not shift.overlaps_itself
        elif step.how == CREEPING:
            assert shift.creeps
        taken = kept.pop(step.number) if step.how == BACK else bytes_
        memory[shift.target : shift.target + shift.nbytes] = taken
    assert kept == {}
    for number, shift in enumerate(found):
        assert memory[shift.target : shift.target + shift.nbytes] == [
            (str(number), n) for n in range(shift.nbytes)
        ]
    assert copied <= sum(shift.nbytes for shift in found)


@settings(max_examples=examples(60), deadline=None)
@given(
    graph=graphs(),
    moves=st.lists(st.tuples(st.sampled_from(PARTS), st.integers(0, 2), st.booleans()), max_size=6),
    engine=st.sampled_from(["serial", "threads"]),
)
def test_any_moves_between_plans_and_stages_keep_the_bits(
    graph: Any, moves: list[tuple[float, int, bool]], engine: str
) -> None:
    """Stage 0 is the runner's first one; the others are those of other devices."""
    step = bound(graph)
    graph = step.graph
    final, returned = expected(step, 1 + len(moves))
    with (
        Stage(engine=engine) as first,
        Stage(engine=engine) as second,
        Stage(engine=engine) as third,
        Runner(planned(graph, 0.3), stage=first, poison=True) as runner,
    ):
        check(runner, step, returned[0])
        for (part, stage, parks), outputs in zip(moves, returned[1:], strict=True):
            if parks:
                runner.park()
            runner.move_to(planned(graph, part), stage=(first, second, third)[stage])
            assert runner.stage is (first, second, third)[stage]
            check(runner, step, outputs)
    for name, tensor in step.tensors.items():
        assert torch.equal(tensor, final[name])


def planned(graph: Any, part: float) -> offload.Plan:
    least = {device: max(64, smallest_budget(graph, device)[0]) for device in graph.devices}
    whole = offload.plan(graph, placement="copy").memgraph.arenas
    more = {d: max(0, whole.get(d, 0) - nbytes) for d, nbytes in least.items()}
    budget = {d: nbytes + int(part * more[d]) // 64 * 64 for d, nbytes in least.items()}
    return offload.plan(graph, budget, placement="copy")


def check(runner: Runner, step: Any, outputs: list[torch.Tensor]) -> None:
    for got, right in zip(runner(*step.batch), outputs, strict=True):
        assert torch.equal(got, right)
