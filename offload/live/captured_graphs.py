"""A tape that was recorded and did not run, as a graph over the tensors of its user.

input      given anew in every run                  made by the caller, without bytes
literal    torch.tensor(0.5), within the step       filled by a task in every run
anything else that is given                         the user's: every tensor of Python's over it
"""

import gc
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.errors import CaptureError
from offload.graph.taskgraph import Role, TaskGraph
from offload.live.graphs import Weight, graph_of
from offload.live.tape_calls import TapeCall, TapeReader
from offload.memory.home import Home
from offload.program.kernels import Call, Source, Value, values_in
from offload.torch_seams import pytree

LITERAL = "aten::lift_fresh.default"
"""`torch.tensor` calls it with what it has made of numbers."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Fills memory with numbers that the step's code writes down. It is a kernel."""

    numbers: torch.Tensor

    def __call__(self, target: torch.Tensor) -> None:
        target.copy_(self.numbers)


@dataclass(frozen=True, slots=True)
class UsersTensors:
    """All that may be over the memory that a step is given, and the names of some."""

    alive: Sequence[torch.Tensor]
    names: Mapping[torch.Tensor, str]


def find_users_tensors(
    core: Any,
    tape: Any,
    inputs: Sequence[torch.Tensor],
    names: Mapping[torch.Tensor, str],
    ours: Collection[int],
) -> UsersTensors:
    """The named tensors, or all tensors where others hold the same memory. `ours`: the ids of
    tensors that are not the user's."""
    named = Counter(slot for tensor in names for slot in tape.slots_of([tensor]))
    input_slots = tape.slots_of([*inputs])
    given = [s for s, o in enumerate(tape.origins) if o >= core.GIVEN and s not in input_slots]
    alone = all(tape.holders(slot) == named[slot] + 1 for slot in given)  # the tape is one
    alive = [*names] if alone else list_alive_tensors()
    return UsersTensors([each for each in alive if id(each) not in ours], names)


def build_graph(
    core: Any,
    tape: Any,
    device: torch.device,
    inputs: Sequence[torch.Tensor],
    result: Any,
    users: UsersTensors,
) -> TaskGraph:
    """`result`: what the step returns."""
    reader = TapeReader(core, tape, (), device)
    given = [_take_input(reader, tape, tensor) for tensor in inputs]
    results = result if isinstance(result, tuple) else (result,)
    outputs = pytree.tree_map_only(
        torch.Tensor, lambda tensor: _take_result(core, reader, tape, tensor), results
    )
    returned = {value.buffer for value in _leaves(outputs)}
    literals = _add_literals(reader, tape, returned)
    others = ({*reader.touched} | returned) - literals - {value.buffer for value in given}
    origins = tape.origins
    theirs = {s for s in others if s < len(origins) and origins[s] >= core.GIVEN}
    sources = _find_sources(tape, theirs, users.alive)
    weights = {s: _make_weight(reader, s, group, users.names) for s, group in sources.items()}
    graph, _ = graph_of(reader, [value.buffer for value in given], weights, returned, ())
    tensors = {weights[slot].name: _source(group) for slot, group in sources.items()}
    program = replace(graph.program, inputs=tuple(given), outputs=outputs, tensors=tensors)
    return replace(graph, program=program)


def _leaves(outputs: Any) -> list[Value]:
    leaves = pytree.tree_leaves(outputs, is_leaf=lambda leaf: isinstance(leaf, Value))
    return [*values_in(leaves)]


def _take_input(reader: TapeReader, tape: Any, given: torch.Tensor) -> Value:
    """All of it is given, whatever the step reads."""
    slots = tape.slots_of([given]) or {max({*reader.nbytes, len(tape.origins)}) + 1}
    [slot] = slots
    reader.nbytes[slot] = given.nbytes
    reader.touched[slot] = 0, given.nbytes
    return Value(slot, given.dtype, tuple(given.size()), given.stride())


def _take_result(core: Any, reader: TapeReader, tape: Any, made: torch.Tensor) -> Any:
    """What is returned; a tensor that the step has nothing to do with is returned as it is."""
    if made.layout is not torch.strided or made.is_conj() or made.is_neg():
        raise CaptureError(
            "the step returns a tensor that is sparse, or lazily conjugated or negated: return a"
            " dense one, as of to_dense() or resolve_conj()"
        )
    slots = tape.slots_of([made])
    if not slots and core.is_lost(made):
        raise CaptureError(
            "the step returns an input as it is, and a graph returns what its tasks make: leave it"
            " out, or return a copy, as of clone()"
        )
    if not slots:
        return made
    [slot] = slots
    reader.nbytes[slot] = tape.nbytes(slot)
    at = int(made.storage_offset())
    return Value(slot, made.dtype, tuple(made.size()), made.stride(), at)


def _add_literals(reader: TapeReader, tape: Any, returned: Collection[int]) -> set[int]:
    """Begin with the tasks that write what was made at once. Returns the slots."""
    made: dict[int, tuple[Any, Any]] = {}
    for node, at_once in zip(tape.nodes, tape.ran, strict=True):
        of_numbers = node.arguments if node.op == LITERAL else node.made if at_once else ()
        made |= {value.slot: (value, node) for value in of_numbers if value is not None}
    calls: list[TapeCall] = []
    for slot, (value, node) in made.items():
        if slot not in reader.touched and slot not in returned:
            continue
        reader.nbytes[slot] = value.nbytes
        numbers = tape.given_bytes(slot, 0, value.nbytes).clone()
        target = Value(slot, torch.uint8, (value.nbytes,), (1,))
        call = Call(Literal(numbers), (target,))
        calls.append(TapeCall("offload::literal", call, {}, {slot: None}, False, False, node))
    reader.calls[:0] = calls
    reader.written |= {*made} & {*reader.nbytes}
    return {*made}


def _find_sources(
    tape: Any, slots: Collection[int], alive: Sequence[torch.Tensor]
) -> dict[int, list[torch.Tensor]]:
    """By slot: the user's tensors."""
    sources: dict[int, list[torch.Tensor]] = {slot: [] for slot in sorted(slots)}
    for tensor in alive:
        for slot in tape.slots_of([tensor]) & sources.keys():
            sources[slot].append(tensor)
    if not all(sources.values()):
        raise CaptureError(
            "the step reads or writes memory that no tensor has after it, such as numpy's: make the"
            " tensor before the capture"
        )
    return sources


def _make_weight(
    reader: TapeReader, slot: int, group: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]
) -> Weight:
    named = [names[tensor] for tensor in group if tensor in names]
    changes = slot in reader.written or any("." in name for name in named)
    role = Role.BUFFER if changes else Role.CONSTANT
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in group):
        role = Role.PARAMETER
    return Weight(min(named, default=f"constant.{slot}"), role, group[0])


def _source(tensors: Sequence[torch.Tensor]) -> Source:
    return tuple(tensors) if len(tensors) > 1 else tensors[0]


def list_alive_tensors() -> list[torch.Tensor]:
    """All tensors that Python knows, except those of runners."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # or the collector would not name them
    every = gc.get_objects()
    if is_frozen:
        gc.freeze()
    kinds = {kind for kind in set(map(type, every)) if issubclass(kind, torch.Tensor | Home)}
    relevant = [each for each in every if type(each) in kinds]
    homes = [each for each in relevant if type(each) is Home]
    ours = {id(tensor) for home in homes for tensor in (home, home.memory, *home.views)}
    return [each for each in relevant if id(each) not in ours]


def list_reached(step: Callable[..., Any]) -> dict[str, Any]:
    """What a function closes over, or whose method it is, by name."""
    step = inspect.unwrap(step)
    if not (inspect.isfunction(step) or inspect.ismethod(step)):
        return {"": step}
    around = inspect.getclosurevars(step)
    return {"": getattr(step, "__self__", None), **around.globals, **around.nonlocals}


def modules_among(reached: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    return {name: each for name, each in reached.items() if isinstance(each, torch.nn.Module)}


def names_of(reached: Mapping[str, Any]) -> dict[torch.Tensor, str]:
    """The names of tensors, of modules' tensors and of their gradients."""
    names = {each: name for name, each in reached.items() if isinstance(each, torch.Tensor)}
    modules = modules_among(reached)
    for prefix, module in modules.items():
        start = f"{prefix}." if prefix and len(modules) > 1 else ""
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            names.setdefault(tensor, start + name)
            if tensor.is_leaf and tensor.grad is not None:
                names.setdefault(tensor.grad, f"{start}{name}.grad")
    return names
