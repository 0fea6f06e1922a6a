"""The value that a number of a tape has now: the ops that lead to it are run, and no others.

    tape   x -> conv -> relu -> mean        mask -> all -> asked        runs: all

Nothing that the step uses is changed: ops that write the user's tensors write copies. What is made
on the way is freed after its last use.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.program.assumptions import Number
from offload.program.generators import default_generator
from offload.program.kernels import Value
from offload.program.trees import leaves, mapped
from offload.torch_seams import disable_current_modes, pytree, storage_key
from offload.tracing.run_time_ops import at_run_time
from offload.tracing.tape import Op, Tape

Bytes = dict[int, torch.Tensor]
"""The bytes of storages, by number."""


def way_to(tape: Tape, value: Value) -> list[Op]:
    """The ops that decide this value, in their order."""
    needed, found = {value.buffer}, []
    for op in reversed(tape.ops):
        if not needed.isdisjoint(op.writes):
            needed.update(op.reads)
            found.append(op)
    return found[::-1]


def is_constant(tape: Tape, value: Value) -> bool:
    """Whether neither the batch, nor what is trained, nor a random number decides this value."""
    ops = way_to(tape, value)
    used = {value.buffer}.union(*(op.reads for op in ops))
    return not any(op.random for op in ops) and not any(
        storage.kind == "input" or (storage.tensor is not None and storage.tensor.requires_grad)
        for storage in map(tape.storages.__getitem__, used)
    )


def value_now(
    tape: Tape,
    inputs: Mapping[int, tuple[Value, torch.Tensor]],
    value: Value,
    device: torch.device,
) -> Number:
    """Compute a single number of the tape. `inputs`: the batch, by the numbers of its storages."""
    ops = way_to(tape, value)
    last: dict[int, int] = {}
    for number, op in enumerate(ops):
        last.update(dict.fromkeys((*op.reads, *op.writes), number))
    last[value.buffer] = len(ops)
    changed = {b for op in ops for b in op.changes}
    held: Bytes = {}

    def view(wanted: Value) -> torch.Tensor:
        if wanted.buffer not in held:
            held[wanted.buffer] = _bytes(tape, inputs, wanted.buffer, device, changed)
        return _view(held[wanted.buffer], wanted)

    generators = _generators(ops, device)
    with disable_current_modes(), torch.no_grad():
        states = [one.get_state() for one in generators]
        try:
            for number, op in enumerate(ops):
                _run(op, device, view)
                for b in {*op.reads, *op.writes}:
                    if last[b] == number:
                        held.pop(b, None)
            return view(value).item()
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _run(op: Op, device: torch.device, view: Any) -> None:
    args, kwargs = pytree.tree_map(
        lambda leaf: view(leaf) if isinstance(leaf, Value) else leaf,
        (op.args, dict(op.kwargs)),
        is_leaf=lambda leaf: isinstance(leaf, Value),
    )
    results = leaves(at_run_time(op.func, device, op.autograd)(*args, **kwargs))
    for wanted, made in zip(op.outputs, results, strict=False):
        if wanted is not None and isinstance(made, torch.Tensor):
            view(wanted).copy_(made)


def _bytes(
    tape: Tape,
    inputs: Mapping[int, tuple[Value, torch.Tensor]],
    number: int,
    device: torch.device,
    changed: set[int],
) -> torch.Tensor:
    """A storage as bytes on the device: a copy where an op writes it."""
    storage = tape.storages[number]
    if storage.tensor is None:
        empty = torch.empty(storage.nbytes, dtype=torch.uint8, device=device)
        if number in inputs:
            value, given = inputs[number]
            _view(empty, value).copy_(given)
        return empty
    given = tape.away.get(storage_key(storage.tensor), storage.tensor).detach()
    own = torch.empty(0, dtype=torch.uint8, device=given.device).set_(
        given.untyped_storage(), 0, (given.untyped_storage().nbytes(),), (1,)
    )
    return own.to(device, copy=number in changed)


def _view(own: torch.Tensor, value: Value) -> torch.Tensor:
    empty = torch.empty(0, dtype=value.dtype, device=own.device)
    return empty.set_(own.untyped_storage(), value.offset, value.size, value.stride)


def _generators(ops: Sequence[Op], device: torch.device) -> list[torch.Generator]:
    given = mapped([[*op.args, *op.kwargs.values()] for op in ops if op.random], lambda _: None)
    own = [leaf for leaf in leaves(given) if isinstance(leaf, torch.Generator)]
    distinct = {id(one): one for one in (default_generator(device), *own)}
    return list(distinct.values())
