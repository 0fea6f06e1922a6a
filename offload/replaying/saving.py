"""Makes a `SavedPart` of a tape that is about to run."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from offload.errors import OffloadError
from offload.live.core import load_core
from offload.live.session import LiveSession
from offload.live.weights import LiveWeights
from offload.program.kernels import Value
from offload.replaying.step_file import NamedTensor, NumberTensor, SavedOp, SavedPart


def save_part(session: LiveSession, tape: Any, held: Collection[int]) -> SavedPart:
    """As `SessionHooks.on_part`: no kernel of the tape has run, and the session is suspended."""
    core, weights = load_core(), session.weights
    reader = _OpReader(core, tape)
    ops = list(reader.read(tape))
    origins = tape.origins
    given = [slot for slot in sorted(reader.nbytes) if _is_given(core, origins, slot)]
    homes = weights.homes()

    def bytes_of(slot: int) -> torch.Tensor:
        if origins[slot] == core.GIVEN:
            return tape.given_bytes(slot, 0, reader.nbytes[slot]).to("cpu", copy=True)
        return homes[origins[slot]].to("cpu", copy=True)

    device = weights.device
    return SavedPart(
        session.name,
        str(device),
        ops,
        reader.nbytes,
        given,
        [slot for slot in sorted(held) if slot in reader.nbytes],
        [*_list_named(tape, weights, given)],
        {slot: bytes_of(slot) for slot in given},
        generator_states(device),
    )


def generator_states(device: torch.device) -> list[torch.Tensor]:
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def set_generators(states: Sequence[torch.Tensor]) -> None:
    """Put back what `generator_states` returned."""
    for setter, state in zip((torch.set_rng_state, torch.cuda.set_rng_state), states, strict=False):
        setter(state)


def _is_given(core: Any, origins: list[int], slot: int) -> bool:
    return slot < len(origins) and origins[slot] >= core.GIVEN


def _list_named(tape: Any, weights: LiveWeights, given: Collection[int]) -> Iterator[NamedTensor]:
    for tensor, name, role in weights.list_named():
        for slot in tape.slots_of([tensor]) & {*given}:
            offset = int(tensor.storage_offset())
            size, stride = tuple(tensor.size()), tensor.stride()
            yield NamedTensor(name, role, Value(slot, tensor.dtype, size, stride, offset))


class _OpReader:
    """Reads the operations of a part, with the numbers of this pass."""

    def __init__(self, core: Any, tape: Any) -> None:
        self._core = core
        self._numbers = core.StepNumbers()
        self._numbers.take(tape)
        self.nbytes: dict[int, int] = {}

    def read(self, tape: Any) -> Iterator[SavedOp]:
        for node, ran in list(zip(tape.nodes, tape.ran, strict=True))[tape.begin :]:
            if not node.deferred or ran:
                continue
            args = tuple(self._argument(each) for each in node.arguments)
            made = tuple(None if value is None else self._value(value) for value in node.made)
            yield SavedOp(node.op, args, made, node.grad, node.backward, node.where)

    def _argument(self, given: Any) -> Any:
        if isinstance(given, self._core.Value):
            return self._value(given)
        if isinstance(given, self._core.Number):
            number = self._numbers.at(given.index)
            is_plain = given.dtype is None
            return number if is_plain else NumberTensor(number, given.dtype, given.of_python)
        if isinstance(given, list):
            return [self._argument(each) for each in given]
        return given

    def _value(self, value: Any) -> Value:
        if value.lazy or value.is_zero:
            raise OffloadError(
                "a step with a lazily conjugated or negated tensor, or with one of zeros that has"
                " no memory, cannot be saved"
            )
        self.nbytes[value.slot] = value.nbytes
        return Value(value.slot, value.dtype, value.size, value.stride, value.offset)
