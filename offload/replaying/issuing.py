"""Issues the operations of a saved part again: as they are, or in a live session, as a step's code.

eager     issue(part, StepMemory(part))                      the reference
planned   with LiveSession(...).step(): issue(part, ...)     recorded, planned and run as a step
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from offload.errors import OffloadError
from offload.graph.taskgraph import Role
from offload.live.core import load_core
from offload.live.session import LiveSession
from offload.live.tape_calls import find_op
from offload.program.kernels import Value, values_in
from offload.replaying.saving import set_generators
from offload.replaying.step_file import NumberTensor, SavedOp, SavedPart
from offload.torch_seams import set_grad_enabled

REFUSED = frozenset({"from_file"})
"""Operations that touch more than their tensors. A file from somebody else must not run them."""
SMALL = 0.02
"""The deviation of made-up weights and inputs."""


class StepMemory:
    """The storages of a part, on its device, and the module and optimizer that its names make."""

    def __init__(self, part: SavedPart) -> None:
        self.device = torch.device(part.device)
        self._part = part
        self._flat: dict[int, torch.Tensor] = {}
        """By slot: one dimension over the whole storage."""
        data = part.data or _make_up_data(part)
        for slot in part.given:
            self._flat[slot] = data[slot].to(self.device, copy=True)
        set_generators(part.generators)
        self.module, self.optimizer = _make_module(part, self.view)
        self._last = _last_uses(part)
        self.where = ""
        """The user's line that issued the present operation."""

    def view(self, value: Value) -> torch.Tensor:
        if value.buffer not in self._flat:  # memory that is only allocated
            nbytes = self._part.nbytes[value.buffer]
            self._flat[value.buffer] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        flat = self._flat[value.buffer]
        typed = flat if flat.dtype == value.dtype else flat.view(value.dtype)
        return typed.as_strided(value.size, value.stride, value.offset)

    def add(self, value: Value, made: torch.Tensor) -> None:
        """Have an operation's result as the storage of its slot."""
        count = self._part.nbytes[value.buffer] // value.dtype.itemsize
        self._flat[value.buffer] = made.as_strided((count,), (1,), 0)

    def release(self, number: int) -> None:
        """Let go of what no operation after this one touches, and nobody holds."""
        for slot in self._last.get(number, ()):
            self._flat.pop(slot, None)

    def results(self) -> dict[int, torch.Tensor]:
        """By slot: the bytes of what was given, and of what is held after the part."""
        return {slot: flat.view(torch.uint8).cpu() for slot, flat in sorted(self._flat.items())}


def issue(part: SavedPart, memory: StepMemory) -> None:
    """Run the operations in their order, those of the backward pass within one."""
    numbered = list(enumerate(part.ops))
    for backward, group in groupby(numbered, key=lambda each: each[1].backward):
        run = partial(_issue_all, list(group), memory)
        _run_in_backward(run) if backward else run()


def issue_in_session(session: LiveSession, part: SavedPart, memory: StepMemory) -> None:
    with session.step(part.step, keeps=()):
        issue(part, memory)


def _issue_all(ops: Sequence[tuple[int, SavedOp]], memory: StepMemory) -> None:
    for number, op in ops:
        before = torch.is_grad_enabled()
        set_grad_enabled(op.grad)
        memory.where = op.where
        try:
            _issue_one(op, memory)
        finally:
            set_grad_enabled(before)
        memory.release(number)


def _issue_one(op: SavedOp, memory: StepMemory) -> None:
    operation = _operation(op.op)
    given = [_argument(each, memory) for each in op.args]
    first = len(given) - len(operation.keywords)
    keywords = dict(zip(operation.keywords, given[first:], strict=True))
    made = operation.op(*given[:first], **keywords)
    results = made if isinstance(made, tuple | list) else (made,)
    for value, result in zip(op.made, results, strict=False):
        if value is not None:
            memory.add(value, result)


def _operation(full_name: str) -> Any:
    try:
        known = find_op(full_name)
    except (AttributeError, ValueError) as error:
        raise OffloadError(
            f"the step has the operation {full_name}, which is not registered here: import what"
            " registers it, with --import MODULE"
        ) from error
    if known.name in REFUSED:
        raise OffloadError(f"the step has the operation {full_name}, which reads or writes files")
    return known


def _argument(given: Any, memory: StepMemory) -> Any:
    if isinstance(given, Value):
        return memory.view(given)
    if isinstance(given, NumberTensor):
        return load_core().number_tensor(given.number, given.dtype, given.of_python)
    if isinstance(given, list):
        return [_argument(each, memory) for each in given]
    return given


def _run_in_backward(run: Callable[[], None]) -> None:
    begin = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        end = begin.clone()
    end.register_hook(lambda _: run())
    end.backward()


def _last_uses(part: SavedPart) -> dict[int, list[int]]:
    """By operation: the slots that nobody needs after it."""
    last: dict[int, int] = {}
    for number, op in enumerate(part.ops):
        last |= dict.fromkeys(slots_of(op), number)
    ends: dict[int, list[int]] = {}
    for slot in last.keys() - {*part.held} - {*part.given}:
        ends.setdefault(last[slot], []).append(slot)
    return ends


def slots_of(op: SavedOp) -> Iterator[int]:
    """The slots that an operation touches."""
    return (value.buffer for value in values_in((op.args, op.made)))


def result_name(part: SavedPart, slot: int) -> tuple[str, Value]:
    """What a person calls a result, and its tensor."""
    for each in part.named:
        if each.value.buffer == slot:
            return each.name, each.value
    name, first = f"slot {slot}", None
    for number, op in enumerate(part.ops):
        for place, value in enumerate((*op.made, *values_in(op.args))):
            if first is not None or value is None or value.buffer != slot:
                continue
            first = value
            if place < len(op.made):
                name = f"result {place} of {op.op}, operation {number}"
                name += f" ({op.where})" if op.where else ""
    assert first is not None
    return name, first


# ---- the module ---------------------------------------------------------------------------------


def _make_module(
    part: SavedPart, view: Callable[[Value], torch.Tensor]
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module and an optimizer whose tensors have the names that were saved."""
    module, parameters = torch.nn.Module(), {}
    for each in part.named:
        if each.role is Role.STATE:
            continue
        *path, name = each.name.split(".")
        owner = module
        for folder in path:
            if folder not in dict(owner.named_children()):
                owner.add_module(folder, torch.nn.Module())
            owner = owner.get_submodule(folder)
        tensor = view(each.value)
        if each.role is Role.PARAMETER:
            parameters[each.name] = torch.nn.Parameter(tensor, tensor.is_floating_point())
            owner.register_parameter(name, parameters[each.name])
        else:
            owner.register_buffer(name, tensor)
    unnamed = torch.nn.Parameter(torch.empty(0))
    optimizer = torch.optim.SGD([*parameters.values(), unnamed])
    for each in part.named:
        if each.role is Role.STATE:
            owner, _, key = each.name.rpartition(".")
            optimizer.state[parameters.get(owner, unnamed)][key] = view(each.value)
    return module, optimizer


def _make_up_data(part: SavedPart) -> dict[int, torch.Tensor]:
    """Bytes for a file without data: small numbers, and zeros for integers, which may be labels."""
    kinds = {each.value.buffer: each.value.dtype for each in part.named}
    for op in part.ops:
        for value in values_in(op.args):
            kinds.setdefault(value.buffer, value.dtype)
    generator = torch.Generator().manual_seed(0)
    made: dict[int, torch.Tensor] = {}
    for slot in part.given:
        kind, nbytes = kinds[slot], part.nbytes[slot]
        tensor = torch.zeros(nbytes // kind.itemsize, dtype=kind)
        if kind.is_floating_point:
            tensor.normal_(0, SMALL, generator=generator)
        made[slot] = torch.zeros(nbytes, dtype=torch.uint8)
        made[slot][: tensor.nbytes] = tensor.view(torch.uint8)
    return made
