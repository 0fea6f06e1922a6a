"""A tape as a TaskGraph: a task for every call, a buffer for every slot.

weights   where they live from step to step      a home of ours, which a plan moves
inputs    what else the step is given            copied to the plan's place for it
outputs   what somebody holds after the step     given to the shadows that stand for it
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import ALIGNMENT, BACKWARD, FORWARD, UPDATE, Role, TaskGraph
from offload.live.lanes import BEGINS, lanes_of
from offload.live.list_calls import are_apart, cut_call, find_cuts, list_length, works_on_lists
from offload.live.tape_calls import Slots, TapeCall, TapeReader
from offload.program.kernels import Call, Calls, Program, Value, values_in


@dataclass(frozen=True, slots=True)
class Weight:
    """What lives from step to step, and where its bytes are at home."""

    name: str
    role: Role
    home: torch.Tensor


@dataclass(frozen=True, slots=True)
class InputBytes:
    """The part of a storage that a step reads."""

    slot: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TapeEnds:
    """What a pass of a tape gives its graph, and takes from it."""

    inputs: tuple[InputBytes, ...]
    outputs: tuple[int, ...]
    """The slots that it returns."""
    numbers: Any
    """The numbers of the step that runs next."""

    @property
    def input_bytes(self) -> int:
        return sum(part.nbytes for part in self.inputs)


def graph_of(
    reader: TapeReader,
    given: Collection[int],
    weights: Mapping[int, Weight],
    held: Collection[int],
    known: Collection[Weight],
) -> tuple[TaskGraph, TapeEnds]:
    """`given`: the slots that the step is given. `weights`: by slot, what has a home. `held`: the
    slots to return. `known`: all that has a home, also where only other tapes use it."""
    used = {weight.name for weight in weights.values()}
    idle = [weight for weight in known if weight.name not in used]
    inputs = tuple(
        _read_input(slot, reader.touched[slot])
        for slot in sorted(given)
        if slot in reader.touched and slot not in weights
    )
    builder = GraphBuilder()
    _add_buffers(builder, reader, weights, inputs)
    for weight in idle:
        builder.buffer(weight.name, weight.home.nbytes, weight.role)
    _add_tasks(builder, reader.calls, weights, {part.slot: part.start for part in inputs})
    outputs = tuple(slot for slot in sorted(held) if slot in reader.written and slot not in weights)
    for slot in outputs:
        builder.output(slot)
    program = Program(
        tuple(Value(part.slot, torch.uint8, (part.nbytes,), (1,)) for part in inputs),
        tuple(Value(slot, torch.uint8, (reader.nbytes[slot],), (1,)) for slot in outputs),
        {weight.name: weight.home for weight in (*weights.values(), *idle)},
        device=reader.device,
    )
    count = len(builder.buffers)
    graph = replace(builder.graph(program), kept=tuple(range(count - len(idle), count)))
    graph.check()
    return graph, TapeEnds(inputs, outputs, reader.numbers)


def _read_input(slot: int, touched: tuple[int, int]) -> InputBytes:
    start = touched[0] - touched[0] % ALIGNMENT
    return InputBytes(slot, start, touched[1] - start)


def _add_buffers(
    builder: GraphBuilder,
    reader: TapeReader,
    weights: Mapping[int, Weight],
    inputs: Sequence[InputBytes],
) -> None:
    """Every slot's buffer has its number."""
    calls = reader.calls
    given = {part.slot: part.nbytes for part in inputs}
    forward = {slot for call in calls if not call.node.backward for slot in call.writes}
    backward = {slot for call in calls if call.node.backward for slot in call.reads}
    for slot in range(max({*reader.nbytes, *weights}, default=-1) + 1):
        nbytes = reader.nbytes.get(slot, 0)
        if slot in weights:
            builder.buffer(weights[slot].name, nbytes, weights[slot].role)
        elif slot in given:
            builder.buffer(f"input.{slot}", given[slot], Role.INPUT)
        elif slot in forward and slot in backward:
            builder.buffer(f"activation.{slot}", nbytes, Role.ACTIVATION)
        else:
            builder.buffer(f"temporary.{slot}", nbytes)


def _add_tasks(
    builder: GraphBuilder,
    calls: Sequence[TapeCall],
    weights: Mapping[int, Weight],
    starts: Mapping[int, int],
) -> None:
    """`starts`: of each input, where the part that is read begins."""
    there = {*weights, *starts}
    late = {slot: start for slot, start in starts.items() if start}
    trained = {s for s, w in weights.items() if w.role in (Role.PARAMETER, Role.STATE)}
    chains: dict[str, int] = {}
    """The latest draw of each lane, and its beginning."""
    lanes, done = [*lanes_of(calls)], 0
    for run in _find_runs(calls):
        turn = lanes[done]
        done += len(run)
        for group in _cut_run(run):
            node, random = group[0].node, group[0].random
            reads: Slots = {}
            writes: Slots = {}
            for call in group:
                reads |= {slot: None for slot in call.reads if slot not in writes}
                writes |= call.writes
            fresh = {v.buffer for call in group for v in call.call.outputs if v is not None}
            # Nobody has written what is read here: its bytes are whatever they are.
            unborn = dict.fromkeys(slot for slot in reads if slot not in there)
            kernels = tuple(_move_starts(call.call, late) for call in group)
            phase = BACKWARD if node.backward else FORWARD
            chain = [f"draws {turn}"] if random else []
            chain += [BEGINS] if group[0].op == BEGINS else []
            number = builder.task(
                group[-1].op.split("::")[1],
                [slot for slot in reads if slot in there],
                writes | unborn,
                kernel=kernels[0] if len(kernels) == 1 else Calls(kernels),
                phase=phase if trained.isdisjoint(writes) else UPDATE,
                after=tuple(sorted({chains[name] for name in chain if name in chains})),
                traffic=sum(builder.buffers[slot].nbytes for slot in (*reads, *writes)),
                repeatable=not chain
                and fresh.issuperset(writes)
                and weights.keys().isdisjoint(writes),
                random=random,
                turn=turn,
                pointwise=all(call.pointwise for call in group),
                where=node.where,
            )
            there.update(writes, unborn)
            chains |= dict.fromkeys(chain, number)


def _find_runs(calls: Sequence[TapeCall]) -> Iterator[list[TapeCall]]:
    """Calls one by one, and calls on lists of one length together."""
    run: list[TapeCall] = []
    for call in calls:
        on_lists = works_on_lists(call.op, call.call)
        if not (run and on_lists and list_length(call.call) == list_length(run[0].call)):
            if run:
                yield run
            run = []
        if on_lists:
            run.append(call)
        else:
            yield [call]
    if run:
        yield run


def _cut_run(run: list[TapeCall]) -> Iterator[list[TapeCall]]:
    """The calls of each task: those on lists piece by piece, where the pieces are apart."""
    if not works_on_lists(run[0].op, run[0].call):
        yield run
        return
    cuts = find_cuts([call.call for call in run])
    groups = [[_cut_part(call, cut) for call in run] for cut in cuts]
    if are_apart(
        [({*_slots_of_group(g, "reads")}, {*_slots_of_group(g, "writes")}) for g in groups]
    ):
        yield from groups
    else:
        yield from ([call] for call in run)


def _slots_of_group(group: Sequence[TapeCall], which: str) -> Iterator[int]:
    for call in group:
        yield from getattr(call, which)


def _cut_part(whole: TapeCall, cut: slice) -> TapeCall:
    call = cut_call(whole.call, cut)
    touched = {v.buffer for v in values_in((*call.args, *call.kwargs.values(), *call.outputs))}
    reads = {slot: None for slot in whole.reads if slot in touched}
    writes = {slot: None for slot in whole.writes if slot in touched}
    return replace(whole, call=call, reads=reads, writes=writes)


def _move_starts(call: Call, starts: Mapping[int, int]) -> Call:
    """The call over inputs that begin where the step first reads them."""
    values = values_in((*call.args, *call.kwargs.values()))
    if not starts or starts.keys().isdisjoint(value.buffer for value in values):
        return call

    def move(value: Value) -> Value:
        offset = value.offset - starts.get(value.buffer, 0) // value.dtype.itemsize
        return Value(value.buffer, value.dtype, value.size, value.stride, offset)

    args, kwargs = call.arguments(move)
    return Call(call.op, args, kwargs, call.outputs)
