"""What one trace of a step recorded, in a form that is cheap to keep and to compare.

    ops in their order    which tensors they use    what the step returns

Two traces with equal sketches are built into the same graph over the same tensors.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from offload.program.assumptions import Assumption
from offload.torch_seams import storage_key
from offload.tracing.cpu_values import FOLDED
from offload.tracing.recorder import Recorder
from offload.tracing.surroundings import Surroundings
from offload.tracing.tape import Storage


@dataclass(frozen=True, slots=True, eq=False)
class TraceSketch:
    """The ops of a trace, as text, and the identities of what they use."""

    ops: tuple[tuple[str, str, str], ...]
    """The code, the name and the user's line of every op."""
    storages: tuple[Any, ...]
    """For the user's tensors their identity, for numbers made into tensors their bytes."""
    result: str
    assumptions: tuple[Assumption, ...] = ()
    steps: tuple[str, ...] = ()
    """The calls of optimizers in the middle of the trace."""

    @classmethod
    def of(cls, recorder: Recorder, result: Any, around: Surroundings) -> "TraceSketch":
        described = recorder.described(result)
        return cls(
            tuple((op.code, op.name, op.where) for op in recorder.tape.ops),
            tuple(_identity(storage, around) for storage in recorder.tape.storages),
            described,
            tuple(assumption for *_, assumption in recorder.tape.assumptions),
            tuple(mark.code for mark in recorder.tape.steps),
        )

    def difference(self, other: "TraceSketch") -> str:
        """Say in what another trace differs first; empty if in nothing."""
        where, what = self.first_difference(other)
        return f"{where}: {what}" if where else what

    def first_difference(self, other: "TraceSketch") -> tuple[str, str]:
        """Return the user's line and what differs there; both may be empty."""
        for (mine, name, where), (code, *_) in zip(self.ops, other.ops, strict=False):
            if mine != code:
                return where, f"{name}: {_difference(mine, code)}"
        if len(self.ops) != len(other.ops):
            longer = max(self.ops, other.ops, key=len)
            _, name, where = longer[min(len(self.ops), len(other.ops))]
            return where, f"{name} is called only once in two calls"
        if self.steps != other.steps:
            return "", "the steps of its optimizers, or the gradients that they find"
        if len(self.storages) != len(other.storages) or not all(
            map(_same, self.storages, other.storages)
        ):
            return "", (
                "a tensor made from other python numbers, or a tensor that no op of torch makes, as"
                " from_numpy and get_state do"
            )
        for mine, theirs in zip(self.assumptions, other.assumptions, strict=False):
            if mine != theirs:
                return mine.where, f"{mine.what} is {mine.value!r} against {theirs.value!r}"
        if self.result != other.result:
            return "", f"what it returns: {_difference(self.result, other.result)}"
        return "", ""


def _difference(one: str, other: str) -> str:
    """A little of both texts from where they begin to differ."""
    start = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(start - 12, 0)
    return f"...{one[start : start + 40]} against ...{other[start : start + 40]}"


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor that nothing leads to: one that no op of torch has made, or one that the user holds
    somewhere."""

    number: int
    """The id of the tensor object."""
    digest: str
    """Of its bytes when it was traced."""


def _same(one: Any, other: Any) -> bool:
    """Whether two storages are one. A step makes the same tensor anew, or changes one that it
    keeps."""
    if isinstance(one, FoundTensor) and isinstance(other, FoundTensor):
        return one.number == other.number or one.digest == other.digest
    return bool(one == other)


def _identity(storage: Storage, around: Surroundings) -> Any:
    """The identity of the user's tensor; what was made of Python numbers is told by its bytes."""
    tensor = storage.tensor
    if tensor is None:
        return storage.kind
    key = storage_key(tensor)
    if key in around.tensors:
        return id(around.tensors[key][1])
    if key in around.sharing:
        return id(around.sharing[key][0])
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    digest = hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return digest if storage.kind in ("literal", FOLDED) else FoundTensor(id(tensor), digest)
